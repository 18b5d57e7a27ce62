"""Signatures of users' functions, read from source without importing it, and the contracts of node functions.

    read_signature, live_signature   what a function or class takes: from its source, or once it is imported
    of_module, imported              contracts of a module's `@node` functions: from its source, or from an import if
                                     they are registered dynamically
    find_functions                   contracts of all functions that a DAG may name: shipped, imported, `module:name`
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from distflow.config.dag import Dag, Head
from distflow.config.yaml_source import YamlSource
from distflow.contracts import decorators
from distflow.contracts.forms import ENGINE_TYPES, GROUP, Contract, Read, Signature
from distflow.contracts.modules import (
    Definition,
    check_imports,
    check_syntax,
    definitions,
    hidden_by,
    module_file,
    where_defined,
    where_looked_for,
)
from distflow.contracts.settings import (
    BOUNDS,
    Setting,
    Unreadable,
    annotation_text,
    expression,
    read_setting,
)
from distflow.errors import Diagnostic, InvalidInput, Location, did_you_mean, listing, shown
from distflow.plan import KEEP

BUILT_IN = "workers.functions"
TYPES = (*ENGINE_TYPES, "COMPUTE")
HEADS = get_args(Head)


def built_in() -> dict[str, Contract]:
    """Return the contracts of all shipped functions, by name."""
    folder = module_file(BUILT_IN).parent  # type: ignore[union-attr]
    modules = [f"{BUILT_IN}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    return {contract.name: contract for module in modules for contract in of_module(module)}


def of_module(module: str) -> tuple[Contract, ...]:
    """Return the contracts of the functions that a module's source marks with `@node`. Raises InvalidInput."""
    path = module_file(module)
    if path is None:
        raise InvalidInput(Diagnostic(f"module `{module}` cannot be found", None, where_looked_for(module)))
    return _of_file(module, path)


def load_function(key: str) -> Any:
    """Return the function that a contract's `key` names. Raises InvalidInput if its module cannot be imported."""
    module, _, name = key.partition(":")
    return getattr(decorators.load_module(module), name, None) or decorators.NODES[name]


@functools.cache
def _of_file(module: str, _path: Path) -> tuple[Contract, ...]:
    check_syntax(module)
    found = ((each, _marks(each)) for each in definitions(module, "node") if isinstance(each.item, ast.FunctionDef))
    return tuple(_contract(*_of_definition(each), marks) for each, marks in found if marks)


def _marks(definition: Definition) -> decorators.NodeMarks | None:
    """Return the decorator's arguments; None if they are not plain values (then the module is imported instead)."""
    given, known = definition.arguments, {item.name for item in fields(decorators.NodeMarks)}
    if "bounds" in given:
        raise InvalidInput(Diagnostic(f"@node of `{definition.name}` has no argument `bounds`", definition.where,
                                      "Bounds stand in annotations:  clip: Annotated[float, Field(ge=0)] = 0.2\n"
                                      "Field is pydantic's:  from pydantic import Field"))
    try:
        values = {name: ast.literal_eval(value) for name, value in given.items()}
        return decorators.NodeMarks(**values) if isinstance(definition.decorator, ast.Call) and set(given) <= known \
            else None
    except (ValueError, TypeError):
        return None


def read_signature(definition: Definition) -> Signature:
    """Return the signature of a function, or of a class's `__init__`. Raises InvalidInput if it needs an import."""
    return _flawless(*_of_definition(definition))


def live_signature(function: Any) -> Signature:
    return _flawless(*_of_live(function))


def _flawless(signature: Signature, wrong: list[Diagnostic]) -> Signature:
    if wrong:
        raise InvalidInput(wrong)
    return signature


def _of_definition(definition: Definition) -> tuple[Signature, list[Diagnostic]]:
    item, where = definition.item, (definition.name, definition.module, definition.where)
    if not isinstance(item, ast.ClassDef):
        return _signature(*where, item.args, item.returns, ast.get_docstring(item), definition.aliases)
    own = next((each for each in item.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    arguments = own.args if own else ast.arguments([], [], None, [], [], None, [])
    signature, wrong = _signature(*where, arguments, None, ast.get_docstring(item), definition.aliases)
    return dataclasses.replace(signature, reads=signature.reads[1:]), wrong  # without `self`


def _signature(name: str, module: str, where: Location, arguments: ast.arguments, returns: ast.expr | None,
               doc: str | None, aliases: dict[str, ast.expr]) -> tuple[Signature, list[Diagnostic]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    reads = tuple(Read(item.arg, annotation_text(item.annotation), index >= required)
                  for index, item in enumerate(positional))
    settings, wrong = {}, []
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        try:
            settings[argument.arg] = read_setting(argument, default, aliases)
        except Unreadable as error:
            settings[argument.arg] = Setting(argument.arg)
            line = getattr(argument, "lineno", where.line)
            wrong.append(Diagnostic(f"setting `{argument.arg}` of `{name}` {error}",
                                    dataclasses.replace(where, line=line, text=ast.unparse(argument)),
                                    "As in  share: Annotated[float, Field(gt=0, le=1)] = 0.5"))
    summary = (doc or "").strip().partition("\n\n")[0].replace("\n", " ")
    return Signature(name, module, where, reads, settings, annotation_text(returns), summary), wrong


def _contract(signature: Signature, wrong: list[Diagnostic], marks: decorators.NodeMarks) -> Contract:
    settings = {name: setting.at_least(1) if name in (marks.repeats, marks.refills) else setting
                for name, setting in signature.settings.items()}
    reads = signature.reads[1:] if marks.type in ENGINE_TYPES else signature.reads
    contract = Contract(**vars(signature) | {"reads": reads, "settings": settings}, marks=marks,
                        returns=_forms(signature.result, len(marks.writes)))
    wrong = wrong + [Diagnostic(f"@node of `{contract.name}`: {what}", contract.where, hint)
                     for what, hint in _wrong_marks(contract, bool(signature.reads))]
    if wrong:
        raise InvalidInput(wrong)
    return contract


def _wrong_marks(contract: Contract, positional: bool) -> Iterator[tuple[str, str]]:
    """Yield (mistake, hint) for each argument of `@node` that does not fit the function's signature."""
    marks, reads = contract.marks, [read.name for read in contract.reads]
    if marks.type not in TYPES:
        yield f"`type` is {marks.type!r}", listing(TYPES, "It is one of")
    elif marks.type in ENGINE_TYPES and not positional:
        yield f"a {marks.type} function gets its role's engine as its first parameter, and this one has none", ""
    for mark, setting in _named_settings(marks):
        if setting not in contract.settings:
            yield (f"`{mark}` names `{setting}`, which is not a keyword-only parameter of it",
                   listing(contract.settings, "Keyword-only parameters"))
    if marks.refills and KEEP not in marks.writes:
        yield (f"`refills` is for a function that says which rows stay, and it does not write `{KEEP}`",
               f'Instead:  writes="{KEEP}", or take `refills` away')
    for column in marks.requires.values():
        if column not in reads:
            yield (f"`requires` names column `{column}`, which is not a parameter of it", listing(reads, "Parameters"))
    if marks.head not in (None, *HEADS):
        yield f"`head` is {marks.head!r}", listing(HEADS, "It is one of")
    if marks.keep_together not in (None, GROUP):
        yield (f"`keep_together` is {marks.keep_together!r}",
               f"Rows are kept together by prompt:  keep_together={GROUP!r}")
    others = contract.samples or marks.repeats or marks.keep_together or KEEP in marks.writes
    if marks.row_wise and (others or marks.type != "MODEL_INFERENCE"):
        yield ("`row_wise` is for a MODEL_INFERENCE function that looks at each row by itself; this one has another "
               "type, or samples, repeats, drops or keeps together rows", "Take `row_wise` away")
    yield from _wrong_forms(marks)


def _named_settings(marks: decorators.NodeMarks) -> Iterator[tuple[str, str]]:
    yield from ((name, setting) for name in ("repeats", "refills") if (setting := getattr(marks, name)) is not None)
    for name in ("requires", "belongs_to", "only_with", "refuses"):
        for setting, value in getattr(marks, name).items():
            yield name, setting
            if name in ("belongs_to", "only_with") and _is_pair(value):
                yield name, value[0]


def _wrong_forms(marks: decorators.NodeMarks) -> Iterator[tuple[str, str]]:
    for name, pair in marks.belongs_to.items():
        if not _is_pair(pair):
            yield (f"`belongs_to` of `{name}` is {pair!r}, not another setting and its value",
                   'As in  belongs_to={"fixed_length": ("aggregate", "fixed_length_sum")}')
    for name, pair in marks.only_with.items():
        if not _is_pair(pair) or not isinstance(pair[1], tuple):
            yield (f"`only_with` of `{name}` is {pair!r}, not another setting and a tuple of its values",
                   'As in  only_with={"clip": ("loss", ("ppo", "gspo"))}')
    for name, reasons in marks.refuses.items():
        if not isinstance(reasons, dict):
            yield (f"`refuses` of `{name}` is {reasons!r}, not a reason for each value",
                   'As in  refuses={"kl_kind": {"k1": "its gradient is zero on average"}}')


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _forms(result: str, count: int) -> tuple[str, ...]:
    """Return the form of each of `count` columns that a function with this annotation returns."""
    returns = expression(result)
    if returns is None or count == 0:
        return ()
    if isinstance(returns, ast.Subscript) and ast.unparse(returns.value) in ("tuple", "Tuple", "typing.Tuple"):
        items = returns.slice.elts if isinstance(returns.slice, ast.Tuple) else [returns.slice]
        return tuple(map(annotation_text, items)) if len(items) == count else ()
    return (result,) if count == 1 else ()


def imported(module: str, name: str) -> Contract | None:
    """Return the contract of a function that the source does not show, by importing the module; None if it has none."""
    loaded = decorators.load_module(module, f"It is imported because its source shows no `{name}` with @node above it.")
    function = getattr(loaded, name, None) or decorators.NODES.get(name)
    if function is None or not hasattr(function, "__distflow_node__"):
        return None
    return live_contract(name, module, function, function.__distflow_node__)


def live_contract(name: str, module: str, function: Any, marks: decorators.NodeMarks) -> Contract:
    signature, wrong = _of_live(function)
    return _contract(dataclasses.replace(signature, name=name, module=module), wrong, marks)


def _of_live(function: Any) -> tuple[Signature, list[Diagnostic]]:
    line = inspect.getsourcelines(function)[1] if inspect.isfunction(function) else 0
    where = Location(inspect.getsourcefile(function) or function.__module__, line) if line \
        else Location(function.__module__)
    signature = inspect.signature(function)
    return _signature(function.__name__, function.__module__, where, _arguments(signature),
                      _parsed(signature.return_annotation), inspect.getdoc(function), {})


def _arguments(signature: inspect.Signature) -> ast.arguments:
    """Return a live signature as ast would parse it; a default that is no plain value becomes `...`."""
    result = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    for parameter in signature.parameters.values():
        argument = ast.arg(parameter.name, _parsed(parameter.annotation))
        missing = parameter.default is inspect.Parameter.empty
        default = None if missing else expression(repr(parameter.default)) or ast.Constant(...)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            result.kwonlyargs.append(argument)
            result.kw_defaults.append(default)
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            result.args.append(argument)
            result.defaults += [default] if default else []
    return result


def _parsed(annotation: Any) -> ast.expr | None:
    return None if annotation is inspect.Parameter.empty else expression(_source(annotation))


def _source(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    if get_origin(annotation) is Annotated:
        kind, *added = get_args(annotation)
        items = [item for each in added for item in (each.metadata if isinstance(each, FieldInfo) else [each])]
        limits = [f"{name}={limit!r}" for item in items for name in BOUNDS
                  if (limit := getattr(item, name, None)) is not None]
        return f"Annotated[{_source(kind)}, Field({', '.join(limits)})]"
    if get_origin(annotation) in (types.UnionType, Union):
        return " | ".join(map(_source, get_args(annotation)))
    return "None" if annotation is type(None) else inspect.formatannotation(annotation)


def named_settings(dag: Dag, functions: dict[str, Contract], annotation: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (node, setting, its value in force) for settings whose annotation is, or may be, this word."""
    for node, item in dag.nodes.items():
        contract = functions.get(item.function or "")
        for name, setting in contract.settings.items() if contract else ():
            if annotation in setting.annotation.split(" | "):
                yield node, name, item.settings.get(name, setting.value)


def find_functions(dag: Dag, source: YamlSource, run_file: str, mistakes: list[Diagnostic]) -> dict[str, Contract]:
    """Return the contracts of all functions that the DAG may name; add to `mistakes`, and to `sys.path`."""
    for folder in (str(Path(source.file).resolve().parent), str(Path(run_file).resolve().parent), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.append(folder)
    finder = _Finder(dag, source, mistakes)
    finder.read_imports()
    for node, item in dag.nodes.items():
        if item.function and item.function not in finder.found:
            finder.find(node, item.function)
    return finder.found


class _Finder:
    def __init__(self, dag: Dag, source: YamlSource, mistakes: list[Diagnostic]):
        self.dag, self.source, self.mistakes = dag, source, mistakes
        self.found = built_in()
        self.broken: set[str] = set()  # modules that could not be read: functions are not reported as missing from them
        self.read: set[str] = set()

    def read_imports(self) -> None:
        for index, module in enumerate(self.dag.imports):
            shown = self._read(module, self.source.location(("imports", index)))
            self.found.update({contract.name: contract for contract in shown})

    def find(self, node: str, function: str) -> None:
        """Find a function that no source read so far shows; add a mistake if there is none."""
        where = self.source.location(("nodes", node, "function"))
        module, separator, name = function.rpartition(":")
        modules = [module] if separator else self.dag.imports
        shown = {contract.name: contract for contract in (self._read(module, where) if separator else ())}
        contract = shown.get(name) or self._import(modules, name, where)
        if contract:
            self.found[function] = contract
        elif not self.broken.intersection(modules):
            known = shown or self.found
            what = f"node `{node}`: module `{module}` has no function `{name}` with @node above it" if separator else \
                f"node `{node}`: there is no function `{function}`"
            hint = where_defined(function, "node", self.dag.imports, "Instead:  function: MODULE:NAME")
            hint = hint or did_you_mean(name, known, "Functions")
            if not separator and not self.dag.imports:
                hint += "\nYour own are found by  imports: [MODULE]  or  function: MODULE:NAME"
            self.mistakes.append(Diagnostic(what, where, hint))

    def _read(self, module: str, where: Location) -> tuple[Contract, ...]:
        try:
            if module in self.broken:
                return ()
            if module not in self.read and (path := module_file(module)):
                self.read.add(module)
                self._refuse_hidden(module)
                if missing := check_imports(module, path):
                    raise InvalidInput(missing)
            return of_module(module)
        except InvalidInput as error:
            self._note(module, error, where)
            return ()

    def _refuse_hidden(self, module: str) -> None:
        """Raise InvalidInput: a file beside the DAG or in this folder has the name of a module that is found first."""
        for folder in (Path(self.source.file).parent, Path()):
            file = folder / f"{module}.py"
            if file.is_file() and (hidden := hidden_by(module, file)):
                raise InvalidInput(Diagnostic(f"`{module}` is another module than {shown(file)}", None, hidden))

    def _import(self, modules: list[str], name: str, where: Location) -> Contract | None:
        """Return the contract of a function by importing modules: the last resort, since that runs the user's code."""
        for module in modules:
            try:
                contract = None if module in self.broken else imported(module, name)
            except InvalidInput as error:
                self._note(module, error, where)
                continue
            if contract:
                return contract
        return None

    def _note(self, module: str, error: InvalidInput, where: Location) -> None:
        self.broken.add(module)
        for mistake in error.mistakes:
            if mistake.where is None:
                self.mistakes.append(dataclasses.replace(mistake, where=where))
            else:
                hint = "\n".join(part for part in (mistake.hint, f"{where} names the module.") if part)
                self.mistakes.append(dataclasses.replace(mistake, hint=hint))
