"""Reads users' modules without importing them: where they are, what they import, which definitions are decorated."""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.errors import Diagnostic, InvalidInput, Location, nearest, shown

_PARSING = threading.Lock()

_OURS = ("distflow", "planners", "workers")
_SEARCHED = 100  # modules of a folder that are read for a name that was not found
_DECORATORS = ("node", "reward", "loss", "environment", "detector")


@dataclass(frozen=True)
class Definition:
    """Function or class at the top of a module, with one of distflow's decorators above it."""

    module: str
    item: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    decorator: ast.expr
    where: Location
    aliases: dict[str, ast.expr]  # expressions that the module gives names to at its top: annotations may use them

    @property
    def name(self) -> str:
        return self.item.name

    @property
    def arguments(self) -> dict[str, ast.expr]:
        """Arguments of the decorator by name; `*` stands for those without one."""
        if not isinstance(self.decorator, ast.Call):
            return {}
        named = {word.arg or "*": word.value for word in self.decorator.keywords}
        return named | ({"*": self.decorator.args[0]} if self.decorator.args else {})


def parsed(source: str, mode: str = "exec") -> Any:
    """Return `ast.parse` of a source. Threads take turns: two that parse at once make that of Python 3.11 raise
    SystemError, since they share its count of depth."""
    with _PARSING:
        return ast.parse(source, mode=mode)


def _renew() -> None:
    global _PARSING
    _PARSING = threading.Lock()  # another thread may have held it when this process was forked


os.register_at_fork(after_in_child=_renew)


def definitions(module: str, decorator: str) -> tuple[Definition, ...]:
    """Return what a module's source has under `@decorator`; nothing if it cannot be read (reported elsewhere)."""
    try:
        return tuple(each for kind, each in _decorated(module, module_file(module)) if kind == decorator)
    except InvalidInput:
        return ()


def check_syntax(module: str) -> None:
    _decorated(module, module_file(module))


@functools.cache
def _body(module: str, path: Path) -> list[ast.stmt]:
    try:
        return parsed(path.read_text(encoding="utf-8")).body
    except SyntaxError as error:
        location = Location(shown(path), error.lineno or 0, error.offset or 0, 1, (error.text or "").rstrip("\n"))
        raise InvalidInput(Diagnostic(f"module `{module}` is not valid Python: {error.msg}", location)) from None


@functools.cache
def _decorated(module: str, path: Path | None) -> tuple[tuple[str, Definition], ...]:
    if path is None:
        return ()
    body = _body(module, path)
    names = _imported_names(body)
    aliases = {target.id: item.value for item in body if isinstance(item, ast.Assign) for target in item.targets
               if isinstance(target, ast.Name)}
    found = []
    for item in body:
        if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for decorator in item.decorator_list:
            if kind := _kind_of(decorator, names):
                text = f"class {item.name}" if isinstance(item, ast.ClassDef) else f"def {item.name}(…)"
                where = Location(shown(path), item.lineno, text=text)
                found.append((kind, Definition(module, item, decorator, where, aliases)))
    return tuple(found)


def _imported_names(body: list[ast.stmt]) -> dict[str, str]:
    names = {}
    for item in body:
        if isinstance(item, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{item.module}.{alias.name}" for alias in item.names}
        elif isinstance(item, ast.Import):
            names |= {alias.asname: alias.name for alias in item.names if alias.asname}
    return names


def _kind_of(decorator: ast.expr, names: dict[str, str]) -> str | None:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    first, _, rest = ast.unparse(called).partition(".")
    whole = ".".join(part for part in (names.get(first, first), rest) if part)
    package, _, kind = whole.rpartition(".")
    return kind if kind in _DECORATORS and package.split(".")[0] in ("", "distflow") else None


def module_file(module: str) -> Path | None:
    """Return the path of a module's source; unlike importlib.util.find_spec, without running parent packages."""
    spec = _spec_of(module)
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def where_looked_for(module: str) -> str:
    """Return a hint for a missing module: the folders that were searched, and its probable name."""
    first, folders = module.split(".")[0], [shown(folder or ".") for folder in sys.path if _is_users(folder)]
    hint = f"It was looked for in {', '.join(dict.fromkeys(folders))} and among the installed packages."
    if module.endswith(".py") or "/" in module:
        name = ".".join(part for part in Path(module).with_suffix("").parts if part not in (".", "/"))
        return f"Write a module as Python imports it:  {name}\n{hint}"
    if first in _OURS:
        return f"`{first}` is a package of distflow itself: give yours another name.\n{hint}"
    meant = nearest(module, sorted({path.stem for folder in sys.path if _is_users(folder)
                                    for path in Path(folder or ".").glob("*.py")}))
    return f"Did you mean `{meant}`?\n{hint}" if meant else \
        f"{hint} Install it, or name the folder that has it:  PYTHONPATH=FOLDER distflow …"


def where_defined(name: str, decorator: str, imports: Iterable[str], instead: str, plain: bool = True) -> str:
    """Return a hint on a function that is not found under its name: which module of the DAG's `imports`, or of the
    searched folders, defines it; "" if none does. `instead`: what to write then, with MODULE and NAME in it. `plain`:
    whether functions without the decorator count."""
    *above, own = name.replace(":", ".").split(".")
    files = [(module, path) for module in imports if (path := module_file(module))]
    for folder in (Path(folder or ".") for folder in sys.path if _is_users(folder)):
        files += [(path.stem, path) for path in sorted(folder.glob("*.py"))[:_SEARCHED]]
    for module, path in dict.fromkeys(files):
        item = next((item for item in _readable(module, path) if getattr(item, "name", None) == own
                     and isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)), None)
        if item is None or (above and module != ".".join(above)):
            continue
        if hidden := hidden_by(module, path):
            return hidden
        if any(each.name == own for each in definitions(module, decorator)):
            instead = instead.replace(f"{module}, MODULE", module).replace("MODULE", module).replace("NAME", own)
            return f"{shown(path)} has it. {instead}"
        if plain:
            return f"{shown(path)}:{item.lineno} has `{own}`, without  @{decorator}  above it."
    return ""


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


def where_imported(module: str, name: str, decorator: str) -> str:
    """Return `MODULE:NAME` of the decorated definition that a module imports under a name, be it through others; ""
    if there is none."""
    left, known = [(module, name)], set()
    while left:
        known.add(wanted := left.pop())
        for source, own in _imports_of_name(*wanted):
            if any(each.name == own for each in definitions(source, decorator)):
                return f"{source}:{own}"
            if (source, own) not in known:
                left.append((source, own))
    return ""


def _imports_of_name(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield from where a module may import a name: a module, and what it calls it there."""
    if (path := module_file(module)) is None:
        return
    for item in (item for item in _readable(module, path) if isinstance(item, ast.ImportFrom)):
        for alias in item.names:
            if alias.name == "*":
                yield _source_of(item, module, path), name
            elif (alias.asname or alias.name) == name:
                yield _source_of(item, module, path), alias.name


def _source_of(item: ast.ImportFrom, module: str, path: Path) -> str:
    """Return the module from which a `from … import` of a module imports, also a relative one; "" if above all."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    above = package.rsplit(".", item.level - 1)[0] if item.level else ""
    return ".".join(part for part in (above, item.module) if part)


def _readable(module: str, path: Path) -> list[ast.stmt]:
    try:
        return _body(module, path)
    except (InvalidInput, OSError, ValueError):
        return []


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
        body, lines = _body(module, path), path.read_text(encoding="utf-8").splitlines()
    except InvalidInput:
        return
    for item in body:
        if isinstance(item, ast.Import):
            yield from ((alias.name, item.lineno, lines[item.lineno - 1]) for alias in item.names)
        elif isinstance(item, ast.ImportFrom) and (name := _source_of(item, module, path)):
            yield name, item.lineno, lines[item.lineno - 1]


def _is_users(folder: str) -> bool:
    """Return whether a folder of the path holds users' modules: not Python's, installed packages', or distflow's."""
    path = Path(folder or ".").resolve()
    others = (Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[2])
    return path.is_dir() and path.name not in ("site-packages", "dist-packages") and not any(
        path == other or (other != others[-1] and path.is_relative_to(other)) for other in others)
