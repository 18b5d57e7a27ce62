"""What a node function reads, writes and accepts, read from its source without importing it.

Validation is thereby instant and runs no user code. Only a function that the source does not show (registered
dynamically) is imported and inspected.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from distflow.schema import registry
from distflow.schema.errors import InvalidInput, Mistake, Spot

BUILT_IN = "workers.functions"
ENGINE_TYPES = ("MODEL_INFERENCE", "MODEL_TRAIN")
REQUIRED = "<required>"


@dataclass(frozen=True)
class Read:
    """A positional parameter: the column of its name, in the form of its annotation ("" if it has none)."""

    name: str
    form: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Setting:
    """A keyword-only parameter. `annotation` and `default` are source text; `default` is REQUIRED if it has none."""

    name: str
    annotation: str = ""
    default: str = REQUIRED


@dataclass(frozen=True)
class Contract:
    """All that the planner knows of a function. `name` is what YAML calls it."""

    name: str
    module: str
    where: Spot
    marks: registry.Marks
    reads: tuple[Read, ...] = ()
    settings: dict[str, Setting] = field(default_factory=dict)
    returns: tuple[str, ...] = ()
    """The form of each column that it writes; empty if it has no annotation."""
    summary: str = ""

    @property
    def key(self) -> str:
        """`module:function`, from which a worker loads it."""
        return f"{self.module}:{self.name.rpartition(':')[2]}"


def built_in() -> dict[str, Contract]:
    """The contracts of all shipped functions, by name."""
    folder = _module_file(BUILT_IN).parent  # type: ignore[union-attr]
    modules = [f"{BUILT_IN}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    return {contract.name: contract for module in modules for contract in of_module(module)}


def of_module(module: str) -> tuple[Contract, ...]:
    """The contracts of the functions that a module's source marks with `@node`.

    Raises:
        InvalidInput: the module cannot be found or is not Python.
    """
    path = _module_file(module)
    if path is None:
        raise InvalidInput(f"module `{module}` cannot be found. It is looked for on PYTHONPATH, in the current "
                           "folder and beside the DAG file.")
    return _of_file(module, path)


def load_function(key: str) -> Any:
    """The function that a contract's `key` names; importing its module may register more."""
    module, _, name = key.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name, None) or registry.NODES[name]


def imported(module: str, name: str) -> Contract | None:
    """The contract of a function that the source does not show, found by importing the module."""
    function = getattr(importlib.import_module(module), name, None) or registry.NODES.get(name)
    if function is None or not hasattr(function, "__distflow_node__"):
        return None
    signature = inspect.signature(function)
    arguments = ast.parse(f"def f{_plain(signature)}: ...").body[0].args  # type: ignore[attr-defined]
    line = inspect.getsourcelines(function)[1] if inspect.isfunction(function) else 0
    where = Spot(inspect.getsourcefile(function) or module, line)
    return _contract(name, module, where, function.__distflow_node__, arguments, None, inspect.getdoc(function))


def _plain(signature: inspect.Signature) -> str:
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


@functools.cache
def _of_file(module: str, path: Path) -> tuple[Contract, ...]:
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        spot = Spot(str(path), error.lineno or 0, error.offset or 0, 1, (error.text or "").rstrip("\n"))
        raise InvalidInput(Mistake(f"not valid Python: {error.msg}", spot)) from None
    found = (_of_function(module, path, item) for item in tree.body if isinstance(item, ast.FunctionDef))
    return tuple(contract for contract in found if contract)


def _of_function(module: str, path: Path, function: ast.FunctionDef) -> Contract | None:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("node", "distflow.node"):
            marks = _marks(decorator)
            if marks is None:
                return None
            where = Spot(str(path), function.lineno)
            doc = ast.get_docstring(function)
            return _contract(function.name, module, where, marks, function.args, function.returns, doc)
    return None


def _marks(decorator: ast.Call) -> registry.Marks | None:
    """The decorator's arguments, or None if they are not plain values (then the module is imported instead)."""
    try:
        given = {str(item.arg): ast.literal_eval(item.value) for item in decorator.keywords}
    except ValueError:
        return None
    if not set(given) <= {item.name for item in fields(registry.Marks)}:
        return None
    return registry.node(**given)(lambda: None).__distflow_node__  # type: ignore[attr-defined]


def _contract(name: str, module: str, where: Spot, marks: registry.Marks, arguments: ast.arguments,
              returns: ast.expr | None, doc: str | None) -> Contract:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    reads = [Read(item.arg, _text(item.annotation), index >= required) for index, item in enumerate(positional)]
    if marks.type in ENGINE_TYPES:
        reads = reads[1:]
    settings = {item.arg: Setting(item.arg, _text(item.annotation), _text(default) if default else REQUIRED)
                for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults)}
    summary = (doc or "").strip().partition("\n\n")[0].replace("\n", " ")
    return Contract(name, module, where, marks, tuple(reads), settings, _forms(returns, len(marks.writes)), summary)


def _forms(returns: ast.expr | None, count: int) -> tuple[str, ...]:
    if returns is None or count == 0:
        return ()
    if isinstance(returns, ast.Subscript) and ast.unparse(returns.value) == "tuple":
        items = returns.slice.elts if isinstance(returns.slice, ast.Tuple) else [returns.slice]
        return tuple(_text(item) for item in items) if len(items) == count else ()
    return (_text(returns),) if count == 1 else ()


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _module_file(module: str) -> Path | None:
    """Where a module's source lies; unlike importlib.util.find_spec this runs no parent package."""
    places: Iterable[str] | None = sys.path
    for part in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, list(places or ()))
        if spec is None:
            return None
        places = spec.submodule_search_locations
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None
