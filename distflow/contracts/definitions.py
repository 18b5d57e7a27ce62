"""Functions and classes under distflow's decorators: shown by a module's source, or live once it is imported.

A source is not run. Each decorated definition in it becomes a stub, with its own signature and marks and without its
body, so that one reader reads both.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distflow.contracts.annotations import Names, Unknown, evaluated, is_plain, names_of
from distflow.contracts.decorators import NodeMarks, RewardMarks
from distflow.contracts.modules import body_of, hidden_by, is_users, module_file, readable
from distflow.errors import InvalidInput, Location, shown

KINDS = ("node", "reward", "loss", "environment", "detector")
_SEARCHED = 100  # modules of a folder that are read for a name that was not found
_Decorated = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Definition:
    """Function or class with one of distflow's decorators above it, or its stub."""

    name: str
    module: str
    where: Location
    thing: Any
    names: Names  # by which its annotations are evaluated
    parameters: dict[str, Location] = field(default_factory=dict)  # where each stands, if its source is read


def live(thing: Any) -> Definition:
    """Return the definition of a function or class that is imported."""
    code = inspect.unwrap(thing) if inspect.isfunction(thing) else thing.__init__
    where = Location(thing.__module__)
    if inspect.isfunction(thing):
        lines, first = inspect.getsourcelines(thing)
        begins = next((number for number, line in enumerate(lines) if f"def {thing.__name__}" in line), 0)
        where = Location(inspect.getsourcefile(thing) or thing.__module__, first + begins,
                         text=f"def {thing.__name__}(…)")
    return Definition(thing.__name__, thing.__module__, where, thing, Names(getattr(code, "__globals__", {})))


def definitions(module: str, kind: str) -> tuple[Definition, ...]:
    """Return what a module's source shows under `@kind`; nothing if it cannot be read (reported elsewhere)."""
    try:
        return shown_in(module, kind)
    except InvalidInput:
        return ()


def shown_in(module: str, kind: str) -> tuple[Definition, ...]:
    """Return what a module's source shows under `@kind`. Raises InvalidInput if it cannot be read."""
    return tuple(each for other, each in _shown(module, module_file(module)) if other == kind)


@functools.cache
def _shown(module: str, path: Path | None) -> tuple[tuple[str, Definition], ...]:
    if path is None:
        return ()
    body = body_of(module, path)
    imported = _imported_names(body)
    names, found = names_of(body, imported), []
    for item in (item for item in body if isinstance(item, _Decorated)):
        for decorator in item.decorator_list:
            if (kind := _kind_of(decorator, imported)) and (stub := stub_of(item, module, path, names)):
                text = f"class {item.name}" if isinstance(item, ast.ClassDef) else f"def {item.name}(…)"
                where = Location(shown(path), item.lineno, text=text)
                if _mark(stub, kind, decorator, names):
                    names[item.name] = stub
                    found.append((kind, Definition(item.name, module, where, stub, names, _parameters(item, where))))
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
    return kind if kind in KINDS and package.split(".")[0] in ("", "distflow") else None


def stub_of(item: _Decorated, module: str, path: Path, names: Names) -> Any:
    """Return a function or class with the signature of one in a source; None where what it inherits is not known."""
    if not isinstance(item, ast.ClassDef):
        return stub_of_function(item, module, path, names)
    bases = tuple(evaluated(base, names) for base in item.bases)
    if any(isinstance(base, Unknown) or not isinstance(base, type) for base in bases):
        return None
    methods = {each.name: stub_of_function(each, module, path, names) for each in item.body
               if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    return type(item.name, bases, {"__doc__": ast.get_docstring(item), "__module__": module, **methods})


def stub_of_function(item: ast.FunctionDef | ast.AsyncFunctionDef, module: str, path: Path, names: Names) -> Any:
    given, bare = item.args, copy.copy(item)
    bare.args, bare.body, bare.decorator_list, bare.returns = copy.deepcopy(given), [ast.Pass()], [], None
    bare.args.defaults, bare.args.kw_defaults = [], [None for _ in given.kwonlyargs]
    for argument in _arguments(bare.args):
        argument.annotation = None
    scope: dict[str, Any] = {"__name__": module}
    exec(compile(ast.fix_missing_locations(ast.Module([bare], [])), str(path), "exec"), scope)
    stub = scope[item.name]
    stub.__doc__ = ast.get_docstring(item)
    stub.__annotations__ = {each.arg: ast.unparse(each.annotation) for each in _arguments(given) if each.annotation}
    if item.returns:
        stub.__annotations__["return"] = ast.unparse(item.returns)
    stub.__defaults__ = tuple(evaluated(each, names) for each in given.defaults)
    stub.__kwdefaults__ = {each.arg: evaluated(default, names)
                           for each, default in zip(given.kwonlyargs, given.kw_defaults) if default}
    return stub


def _arguments(given: ast.arguments) -> list[ast.arg]:
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]


def _parameters(item: _Decorated, where: Location) -> dict[str, Location]:
    functions = [item] if not isinstance(item, ast.ClassDef) else \
        [each for each in item.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return {each.arg: Location(where.file, each.lineno, text=ast.unparse(each))
            for function in functions for each in _arguments(function.args)}


def _mark(stub: Any, kind: str, decorator: ast.expr, names: Names) -> bool:
    """Mark a stub with the arguments of its decorator. Return False where only an import shows them."""
    called = isinstance(decorator, ast.Call)
    given = {word.arg or "*": evaluated(word.value, names) for word in decorator.keywords} if called else {}
    if kind == "environment":
        stub.__distflow_safe__ = given.get("safe") is True
    if kind not in ("node", "reward"):
        return True
    try:
        marks = (NodeMarks if kind == "node" else RewardMarks)(**given)
    except TypeError:
        return kind == "reward"
    setattr(stub, f"__distflow_{kind}__", marks)
    return kind == "reward" or (called and not decorator.args and is_plain([*given.values()]))


def where_defined(name: str, decorator: str, imports: Iterable[str], instead: str, plain: bool = True) -> str:
    """Return a hint on a function that is not found under its name: which module of the DAG's `imports`, or of the
    searched folders, defines it; "" if none does. `instead`: what to write then, with MODULE and NAME in it. `plain`:
    whether functions without the decorator count."""
    *above, own = name.replace(":", ".").split(".")
    files = [(module, path) for module in imports if (path := module_file(module))]
    for folder in (Path(folder or ".") for folder in sys.path if is_users(folder)):
        files += [(path.stem, path) for path in sorted(folder.glob("*.py"))[:_SEARCHED]]
    for module, path in dict.fromkeys(files):
        item = next((item for item in readable(module, path) if getattr(item, "name", None) == own
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
