"""Finding files: as a path, beside the file that names them, then among the shipped ones."""

from __future__ import annotations

from pathlib import Path

from distflow.schema.errors import InvalidInput, Mistake, did_you_mean

_ROOT = Path(__file__).resolve().parents[2]
SHIPPED = _ROOT / "dags" if (_ROOT / "dags" / "grpo.yaml").is_file() else _ROOT / "distflow" / "dags"
"""The folder `dags/` of a clone; the same files inside the package when it is installed."""


def find(name: str, folder: str = "", beside: Path | None = None) -> Path | None:
    """The file or folder `name`, or None. `folder` is where shipped ones of its kind lie below `dags/`."""
    given = Path(name).expanduser()
    places = [given, *([beside / given] if beside else []), SHIPPED / folder / given]
    return next((place for place in places if place.exists()), None)


def find_yaml(name: str, folder: str, what: str) -> Path:
    """A DAG, run or cluster file; the ending .yaml may be left out.

    Raises:
        InvalidInput: there is none; lists the shipped ones.
    """
    for candidate in (name, f"{name}.yaml"):
        path = find(candidate, folder)
        if path and path.is_file():
            return path
    known = sorted(path.name for path in (SHIPPED / folder).glob("*.yaml"))
    hint = did_you_mean(name, known, "Shipped") or "None are shipped; give the path of a file."
    raise InvalidInput(Mistake(f"{what} `{name}` is neither a file nor a shipped {what}", None, hint))
