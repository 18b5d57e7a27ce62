"""The command that installs an optional dependency, for all messages that propose it."""

from __future__ import annotations

from pathlib import Path

DISTRIBUTION = "distflow-rl"
"""Name on PyPI; `distflow` is another project's there. Imports say `distflow` all the same."""
_ROOT = Path(__file__).resolve().parents[2]


def pip_line(extra: str, root: Path = _ROOT) -> str:
    """Return the shell command that installs an extra of setup.cfg, for a checkout at `root` or a package."""
    if not (root / "setup.cfg").is_file():
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    return f"pip install -e '{'.' if root == Path.cwd() else root}[{extra}]'"
