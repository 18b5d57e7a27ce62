"""Finds files: as a path, beside the file that names them, among the shipped ones, then on the Hugging Face hub."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from distflow.config.command_line import given_as
from distflow.config.hub import HubName, fetched, hub_name
from distflow.errors import Diagnostic, InvalidInput, listing, nearest

_ROOT = Path(__file__).resolve().parents[2]
SHIPPED = _ROOT / "dags" if (_ROOT / "dags" / "grpo.yaml").is_file() else _ROOT / "distflow" / "dags"
"""The folder `dags/` of a clone; the same files inside the package when it is installed."""

MODELINE = "# yaml-language-server: $schema="
"""Beginning of the line by which a YAML file names its schema to editors."""
START_MODEL = "arithmetic_sft"
"""The model in `dags/models/` that the default runs start from."""

FOLDERS = {"DAG": "", "run file": "runs", "cluster": "clusters"}
"""Folder of a kind of shipped files below `dags/`."""
_SUFFIXES = {**dict.fromkeys(FOLDERS, (".yaml", ".yml")), "data": (".jsonl", ".json", ".csv", ".parquet")}
_TOP_LEVEL = re.compile(r"^(\w+)[ \t]*:", re.MULTILINE)


def find(name: str, folder: str = "", beside: Path | None = None) -> Path | None:
    """Return the file or folder `name`, or None. Shipped ones of its kind are in `folder` below `dags/`. Models and
    data may be the hub's; such a model's folder may lack the weights."""
    hub = on_hub(name, folder, beside)
    found = fetched(hub) if hub else _find_here(name, folder, beside)
    return None if isinstance(found, str) else found


def on_hub(name: str, folder: str, beside: Path | None = None) -> HubName | None:
    """Return what `name` says on the hub; None if it is no name there, or a path here, or would be one in a folder."""
    found, first = hub_name(name, folder), Path(name).parts[:1]
    here = _find_here(name, folder, beside) or (first and _find_here(first[0], folder, beside))
    return None if here else found


def _find_here(name: str, folder: str, beside: Path | None) -> Path | None:
    given = Path(name).expanduser()
    near = [beside / given, Path(glob.escape(str(beside))) / given] if beside else []
    candidates = [given, *near, SHIPPED / folder / _below(given, "dags", folder)]
    return next((path for path in candidates if path.exists() or (folder == "data" and matching(path))), None)


def matching(pattern: Path) -> list[Path]:
    """Return the files that a path with `*`, `?`, `[…]` or `**` stands for, by their names."""
    return [file for name in sorted(glob.glob(str(pattern), recursive=True)) if (file := Path(name)).is_file()]


def _below(given: Path, *folders: str) -> Path:
    """Return a path without the folders that it begins with, as `dags/clusters/h200.yaml` names a shipped cluster."""
    for folder in folders:
        given = given.relative_to(folder) if given.parts[:1] == (folder,) and len(given.parts) > 1 else given
    return given


def nearest_file(name: str, kind: str, beside: Path | None = None) -> str | None:
    """Return the file that `name` probably meant, by its name without suffix: one of `kind` in the folder that it
    names, here or below `beside`, or a shipped one."""
    given, suffixes = Path(name).expanduser(), _SUFFIXES[kind]
    meant: dict[str, str] = {}
    for folder in (given.parent, *([beside / given.parent] if beside else [])):
        for path in sorted(folder.glob("*"), key=lambda path: (path.suffix != given.suffix, path.name)):
            if _may_be(path, kind):
                stem = path.stem if path.suffix in suffixes else path.name
                meant.setdefault(stem, str(given.parent / path.name))
    if kind in FOLDERS:
        for path in sorted((SHIPPED / FOLDERS[kind]).glob("*.yaml")):
            meant.setdefault(path.stem, path.name if given.suffix in suffixes else path.stem)
    near = nearest(given.stem if given.suffix in suffixes else given.name, meant)
    return meant[near] if near else None


def _may_be(path: Path, kind: str) -> bool:
    """Return whether a file may be of `kind`: by its suffix, and YAML by its top-level keys. Data may be a folder."""
    if kind == "data":
        return path.suffix in _SUFFIXES[kind] or path.is_dir()
    if path.suffix not in _SUFFIXES[kind] or not path.is_file():
        return False
    try:
        keys = set(_TOP_LEVEL.findall(path.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return False
    return kind == ("DAG" if "nodes" in keys else "cluster" if keys & {"devices", "machines"} else "run file")


def find_yaml(name: str, folder: str, what: str) -> Path:
    """Return the path of a DAG, run or cluster file, with or without .yaml; InvalidInput lists the shipped ones."""
    for candidate in (name, f"{name}.yaml"):
        path = find(candidate, folder)
        if path and path.is_file():
            return path
    for kind, below in FOLDERS.items():
        if kind != what and any((SHIPPED / below / file).is_file() for file in (name, f"{name}.yaml")):
            raise InvalidInput(Diagnostic(f"`{name}` is a shipped {kind}, given as the {what}", None,
                                          f"Instead:  {given_as(kind, name, what)}"))
    shipped = sorted((SHIPPED / folder).glob("*.yaml"))
    known = [path.name if name.endswith(".yaml") else path.stem for path in shipped]
    meant = nearest_file(name, what)
    hint = " ".join(part for part in (f"Did you mean `{meant}`?" if meant else "", listing(known, "Shipped")) if part)
    raise InvalidInput(Diagnostic(f"{what} `{name}` is neither a file nor a shipped {what}", None,
                                  hint or "None are shipped; give the path of a file."))
