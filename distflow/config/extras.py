"""The command that installs an optional dependency, for all messages that propose it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from distflow.errors import did_you_mean

DISTRIBUTION = "distflow-rl"
"""Name on PyPI; `distflow` is another project's there. Imports say `distflow` all the same."""
_ROOT = Path(__file__).resolve().parents[2]


class SecretShown(ValueError):
    """A value has a secret: messages do not show its line."""


def pip_line(extra: str, root: Path = _ROOT) -> str:
    """Return the shell command that installs an extra of setup.cfg, for a checkout at `root` or a package."""
    if not (root / "setup.cfg").is_file():
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    return f"pip install -e '{'.' if root == Path.cwd() else root}[{extra}]'"


def require_file_system(url: str) -> None:
    """Raise ValueError if fsspec knows no file system of an address, or it has a password, with what to write."""
    from fsspec.registry import known_implementations

    protocol, slashes, place = url.partition("://")
    if ":" in (place or url).partition("/")[0].rpartition("@")[0]:
        raise SecretShown("an address with a password would be seen in files, events and messages. Instead:  "
                          f"export FSSPEC_{protocol.upper() if slashes else 'SFTP'}_PASSWORD=…")
    if not slashes or not place.strip("/"):
        raise ValueError(f"`{url}` is no address of an object store. Instead:  s3://BUCKET/FOLDER")
    if protocol not in known_implementations:
        raise ValueError(f"fsspec knows no file system `{protocol}`. {did_you_mean(protocol, known_implementations)}")
    if protocol == "memory":
        raise ValueError(f"`{url}` ends with the process that writes it. Instead:  s3://BUCKET/FOLDER")


def file_system_line(url: str) -> str:
    """Return the command that installs what this machine lacks to use an address that `require_file_system` takes."""
    from fsspec.registry import known_implementations

    module = known_implementations[url.partition("://")[0]]["class"].partition(".")[0]
    if importlib.util.find_spec(module):
        return ""
    return pip_line("s3") if module == "s3fs" else f"pip install {module}"
