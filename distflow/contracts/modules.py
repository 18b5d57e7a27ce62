"""Users' modules, without importing them: where they are, what they import, and what is wrong with that."""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from distflow.errors import Diagnostic, InvalidInput, Location, nearest, shown

_OURS = ("distflow", "planners", "workers")


@functools.cache
def body_of(module: str, path: Path) -> list[ast.stmt]:
    try:
        return ast.parse(path.read_text(encoding="utf-8")).body
    except SyntaxError as error:
        location = Location(shown(path), error.lineno or 0, error.offset or 0, 1, (error.text or "").rstrip("\n"))
        raise InvalidInput(Diagnostic(f"module `{module}` is not valid Python: {error.msg}", location)) from None


def module_file(module: str) -> Path | None:
    """Return the path of a module's source; unlike importlib.util.find_spec, without running parent packages."""
    spec = _spec_of(module)
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def where_looked_for(module: str) -> str:
    """Return a hint for a missing module: the folders that were searched, and its probable name."""
    first, folders = module.split(".")[0], [shown(folder or ".") for folder in sys.path if is_users(folder)]
    hint = f"It was looked for in {', '.join(dict.fromkeys(folders))} and among the installed packages."
    if module.endswith(".py") or "/" in module:
        name = ".".join(part for part in Path(module).with_suffix("").parts if part not in (".", "/"))
        return f"Write a module as Python imports it:  {name}\n{hint}"
    if first in _OURS:
        return f"`{first}` is a package of distflow itself: give yours another name.\n{hint}"
    meant = nearest(module, sorted({path.stem for folder in sys.path if is_users(folder)
                                    for path in Path(folder or ".").glob("*.py")}))
    return f"Did you mean `{meant}`?\n{hint}" if meant else \
        f"{hint} Install it, or name the folder that has it:  PYTHONPATH=FOLDER distflow …"


def hidden_by(module: str, path: Path) -> str:
    """Return what to do where Python finds another module under the name of a user's file; "" if it finds the file, or
    a copy."""
    spec = _spec_of(module)
    found = Path(spec.origin) if spec and spec.origin else None
    if spec is None or (found and found.is_file() and found.read_bytes() == path.read_bytes()):
        return ""
    other = f"Python's own module `{module}`" if module in sys.stdlib_module_names else \
        f"an installed package `{module}`" if "site-packages" in str(spec.origin) else f"{shown(spec.origin or module)}"
    return f"{shown(path)} is never imported, since {other} is found first. Rename the file, such as my_{module}.py"


def source_of(item: ast.ImportFrom, module: str, path: Path) -> str:
    """Return the module from which a `from … import` of a module imports, also a relative one; "" if above all."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    above = package.rsplit(".", item.level - 1)[0] if item.level else ""
    return ".".join(part for part in (above, item.module) if part)


def readable(module: str, path: Path) -> list[ast.stmt]:
    try:
        return body_of(module, path)
    except (InvalidInput, OSError, ValueError):
        return []


def check_module(module: str, label: str, where: Location) -> list[Diagnostic]:
    """Return what keeps a module from being read or imported. `label` and `where`: who names it, as "node `a`: "."""
    path = module_file(module)
    if path is None:
        return [Diagnostic(f"{label}module `{module}` cannot be found", where, where_looked_for(module))]
    try:
        body_of(module, path)
    except InvalidInput as error:
        return [*error.mistakes]
    return check_imports(module, path)


def check_imports(module: str, path: Path) -> list[Diagnostic]:
    """Return a mistake for each missing module that a user's module, or its package, always imports when loaded."""
    mistakes, known, left = [], {module}, [(module, path)]
    while left:
        name, file = left.pop()
        for imported, line, text in _imports(name, file):
            if imported in known:
                continue
            known.add(imported)
            spec = _spec_of(imported if imported.split(".")[0] == module.split(".")[0] else imported.split(".")[0])
            if spec is None:
                mistakes.append(Diagnostic(f"module `{name}` imports `{imported}`, which cannot be found",
                                           Location(shown(file), line, text=text), where_looked_for(imported)))
            elif imported.split(".")[0] == module.split(".")[0] and (found := module_file(imported)):
                left.append((imported, found))
    return mistakes


def _spec_of(module: str) -> importlib.machinery.ModuleSpec | None:
    first, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(first)  # as an import would: an editable installation adds a finder of its own
    except ValueError:
        return None  # a module such as __main__, which was not found but made
    for part in rest:
        if spec is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    return spec


def _imports(module: str, path: Path) -> Iterator[tuple[str, int, str]]:
    try:
        body, lines = body_of(module, path), path.read_text(encoding="utf-8").splitlines()
    except InvalidInput:
        return
    for item in body:
        if isinstance(item, ast.Import):
            yield from ((alias.name, item.lineno, lines[item.lineno - 1]) for alias in item.names)
        elif isinstance(item, ast.ImportFrom) and (name := source_of(item, module, path)):
            yield name, item.lineno, lines[item.lineno - 1]


def is_users(folder: str) -> bool:
    """Return whether a folder of the path holds users' modules: not Python's, installed packages', or distflow's."""
    path = Path(folder or ".").resolve()
    others = (Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[2])
    return path.is_dir() and path.name not in ("site-packages", "dist-packages") and not any(
        path == other or (other != others[-1] and path.is_relative_to(other)) for other in others)
