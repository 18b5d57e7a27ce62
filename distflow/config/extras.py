"""The command that installs an optional dependency, for all messages that propose it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from distflow.errors import did_you_mean

DISTRIBUTION = "distflow-rl"
"""Name on PyPI; `distflow` is another project's there. Imports say `distflow` all the same."""
_ROOT = Path(__file__).resolve().parents[2]


def pip_line(extra: str, root: Path = _ROOT) -> str:
    """Return the shell command that installs an extra of setup.cfg, for a checkout at `root` or a package."""
    if not (root / "setup.cfg").is_file():
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    return f"pip install -e '{'.' if root == Path.cwd() else root}[{extra}]'"


def require_file_system(url: str) -> None:
    """Raise ValueError if fsspec knows no file system of an address, or its package is missing, with what to write or
    to install."""
    from fsspec.registry import known_implementations

    protocol, slashes, place = url.partition("://")
    if not slashes or not place.strip("/"):
        raise ValueError(f"`{url}` is no address of an object store. Instead:  s3://BUCKET/FOLDER")
    if protocol not in known_implementations:
        raise ValueError(f"fsspec knows no file system `{protocol}`. {did_you_mean(protocol, known_implementations)}")
    if protocol == "memory":
        raise ValueError(f"`{url}` ends with the process that writes it. Instead:  s3://BUCKET/FOLDER")
    module = known_implementations[protocol]["class"].partition(".")[0]
    if importlib.util.find_spec(module) is None:
        line = pip_line("s3") if module == "s3fs" else f"pip install {module}"
        raise ValueError(f"`{protocol}://` needs a package that is not installed:  {line}")
