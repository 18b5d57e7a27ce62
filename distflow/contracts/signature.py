"""Contracts of node functions: what each reads, writes and accepts, read from its source without importing it.

    find_functions           contracts of all functions that a DAG may name: shipped, imported, or `module:function`
    of_module, build         contract from source (ast): instant, and runs no user code
    imported, live_contract  contract of a function that only an import shows, since it is registered dynamically
    fits                     whether a YAML value fits the annotation of a parameter
    within, readable         bounds of a setting, as `@node(bounds=…)` writes them: ">= 1", or "> 0, <= 1"
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import operator
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from distflow.config.dag import Dag, Head
from distflow.config.yaml_source import YamlSource
from distflow.contracts import decorators
from distflow.contracts.modules import check_imports, module_file, where_looked_for
from distflow.errors import Diagnostic, InvalidInput, Location, did_you_mean, listing, shown
from distflow.plan import KEEP

_PART = re.compile(r"\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
_SIGNS = {">=": (operator.ge, "at least"), ">": (operator.gt, "above"), "<=": (operator.le, "at most"),
          "<": (operator.lt, "below")}


def readable(bounds: Any) -> bool:
    """Return whether bounds are comparisons with numbers, separated by commas, which some number meets."""
    parts = bounds.split(",") if isinstance(bounds, str) else [""]
    return all(_PART.fullmatch(part) for part in parts) and within(nearest_within(bounds), bounds)


def within(value: Any, bounds: str) -> bool:
    """Return whether `value` is a finite number within the bounds."""
    if type(value) not in (int, float) or not math.isfinite(value):
        return False
    return all(_SIGNS[sign][0](value, limit) for sign, limit in _parts(bounds))


def in_words(bounds: str) -> str:
    """Return bounds as words, as `above 0 and at most 1`."""
    return " and ".join(f"{_SIGNS[sign][1]} {limit:g}" for sign, limit in _parts(bounds))


def nearest_within(bounds: str) -> float:
    """Return a number within the bounds, or one beside them if there is none: a limit that is included if possible."""
    limits = [limit for _, limit in _parts(bounds)]
    middle = (min(limits) + max(limits)) / 2
    candidates = [*limits, min(limits) - 1, max(limits) + 1, middle]
    found = next((value for value in candidates if within(value, bounds)), math.nan)
    return int(found) if found == found // 1 else found


def _parts(bounds: str) -> list[tuple[str, float]]:
    found = [_PART.fullmatch(part) for part in bounds.split(",")]
    return [(match[1], float(match[2])) for match in found if match]


_NAMES: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict,
                          "None": type(None), "Loss": Annotated[str, Field(pattern=r"^\w+(\.\w+)*:\w+$")]}


def fits(value: Any, annotation: str) -> bool:
    """Return whether a value of YAML fits an annotation. Annotations that these rules do not cover take any value."""
    kind = _kind(ast.parse(annotation, mode="eval").body)
    if kind is Any:
        return True
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError:
        return False
    return True


def _kind(node: ast.expr) -> Any:
    """Return the type of an annotation; Any for what these rules do not cover."""
    if isinstance(node, ast.Name):
        return _NAMES.get(node.id, Any)
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Union[_kind(node.left), _kind(node.right)]  # noqa: UP007 - built at run time
    if not isinstance(node, ast.Subscript):
        return Any
    name = ast.unparse(node.value).rpartition(".")[2]
    if name == "Literal":
        values = ast.literal_eval(node.slice)
        return Literal[values if isinstance(values, tuple) else (values,)]
    items = [_kind(item) for item in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
    if name == "Optional":
        items.append(type(None))
    if name in ("Optional", "Union"):
        return Union[tuple(items)]  # noqa: UP007 - built at run time
    return _NAMES[name][tuple(items)] if name in ("list", "dict") else Any


BUILT_IN = "workers.functions"
ENGINE_TYPES = ("MODEL_INFERENCE", "MODEL_TRAIN")
TYPES = (*ENGINE_TYPES, "COMPUTE")
HEADS = get_args(Head)
REQUIRED = "<required>"
GROUP = "group"
"""Column with the prompt that a row stems from. A step's rows are always moved by it."""


@dataclass(frozen=True)
class Read:
    """Positional parameter: the column of its name, in the form of its annotation ("" if it has none)."""

    name: str
    form: str = ""
    optional: bool = False
    reader: str = ""
    """Description of the reader, where that is not the function itself."""


@dataclass(frozen=True)
class Setting:
    """Keyword-only parameter. `annotation` and `default` are source text; `default` is REQUIRED if it has none."""

    name: str
    annotation: str = ""
    default: str = REQUIRED
    bounds: str = ""
    """Comparisons that its number must meet; "" if it has none."""

    @property
    def value(self) -> Any:
        """Default, if it is a plain value; else None."""
        try:
            value = None if self.default == REQUIRED else ast.literal_eval(self.default)
        except ValueError:
            return None
        return None if value is ... else value


@dataclass(frozen=True)
class Contract:
    """What a node function reads, writes and accepts. `name` is its name in YAML."""

    name: str
    module: str
    where: Location
    marks: decorators.NodeMarks
    reads: tuple[Read, ...] = ()
    settings: dict[str, Setting] = field(default_factory=dict)
    returns: tuple[str, ...] = ()
    """Form of each column that it writes; empty if it has no annotation."""
    summary: str = ""

    @property
    def key(self) -> str:
        """Name by which a worker loads it: `module:function`."""
        return f"{self.module}:{self.name.rpartition(':')[2]}"

    @property
    def samples(self) -> bool:
        """Whether the engine of the node's role must be ready to sample."""
        repeats = self.marks.repeats is not None if self.marks.samples is None else self.marks.samples
        return repeats and self.marks.type in ENGINE_TYPES


def built_in() -> dict[str, Contract]:
    """Return the contracts of all shipped functions, by name."""
    folder = module_file(BUILT_IN).parent  # type: ignore[union-attr]
    modules = [f"{BUILT_IN}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    return {contract.name: contract for module in modules for contract in of_module(module)}


def of_module(module: str) -> tuple[Contract, ...]:
    """Return the contracts of the functions that a module's source marks with `@node`.

    Raises:
        InvalidInput: the module cannot be found, is not Python, or marks a function in a way that cannot work.
    """
    path = module_file(module)
    if path is None:
        raise InvalidInput(Diagnostic(f"module `{module}` cannot be found", None, where_looked_for(module)))
    return _of_file(module, path)


def load_function(key: str) -> Any:
    """Return the function that a contract's `key` names; importing its module may register more.

    Raises:
        InvalidInput: its module fails when it is imported.
    """
    module, _, name = key.partition(":")
    return getattr(decorators.load_module(module), name, None) or decorators.NODES[name]


@functools.cache
def _of_file(module: str, path: Path) -> tuple[Contract, ...]:
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        location = Location(shown(path), error.lineno or 0, error.offset or 0, 1, (error.text or "").rstrip("\n"))
        raise InvalidInput(Diagnostic(f"module `{module}` is not valid Python: {error.msg}", location)) from None
    found = (_of_function(module, path, item) for item in tree.body if isinstance(item, ast.FunctionDef))
    return tuple(contract for contract in found if contract)


def _of_function(module: str, path: Path, function: ast.FunctionDef) -> Contract | None:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("node", "distflow.node"):
            marks = _marks(decorator)
            if marks is None:
                return None
            where = Location(shown(path), function.lineno, text=f"def {function.name}(…)")
            doc = ast.get_docstring(function)
            return build(function.name, module, where, marks, function.args, function.returns, doc)
    return None


def _marks(decorator: ast.Call) -> decorators.NodeMarks | None:
    """Return the decorator's arguments; None if they are not plain values (then the module is imported instead)."""
    try:
        given = {str(item.arg): ast.literal_eval(item.value) for item in decorator.keywords}
        known = {item.name for item in fields(decorators.NodeMarks)}
        return decorators.NodeMarks(**given) if not decorator.args and set(given) <= known else None
    except (ValueError, TypeError):
        return None


def build(name: str, module: str, where: Location, marks: decorators.NodeMarks, arguments: ast.arguments,
          returns: ast.expr | None, doc: str | None) -> Contract:
    """Return the contract of a function from its parsed signature.

    Raises:
        InvalidInput: the arguments of `@node` do not fit the signature.
    """
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    reads = [Read(item.arg, _annotation(item.annotation), index >= required) for index, item in enumerate(positional)]
    if marks.type in ENGINE_TYPES:
        reads = reads[1:]
    bounds = {**{name: ">= 1" for name in (marks.repeats, marks.refills) if name}, **marks.bounds}
    settings = {item.arg: Setting(item.arg, _annotation(item.annotation), _text(default) if default else REQUIRED,
                                  bounds.get(item.arg, ""))
                for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults)}
    summary = (doc or "").strip().partition("\n\n")[0].replace("\n", " ")
    forms = _forms(returns, len(marks.writes))
    result = Contract(name, module, where, marks, tuple(reads), settings, forms, summary)
    _check_marks(result, bool(positional))
    return result


def _check_marks(contract: Contract, positional: bool) -> None:
    """Raise InvalidInput with all arguments of `@node` that do not fit the function's signature."""
    marks, what = contract.marks, f"@node of `{contract.name}`: "
    reads = [read.name for read in contract.reads]
    wrong = []
    if marks.type not in TYPES:
        wrong.append(Diagnostic(f"{what}`type` is {marks.type!r}", contract.where, listing(TYPES, "It is one of")))
    elif marks.type in ENGINE_TYPES and not positional:
        wrong.append(Diagnostic(f"{what}a {marks.type} function gets its role's engine as its first parameter, and "
                                "this one has none", contract.where))
    named = [("repeats", marks.repeats), ("refills", marks.refills), *(("requires", name) for name in marks.requires),
             *(("bounds", name) for name in marks.bounds), *(("belongs_to", name) for name in marks.belongs_to),
             *(("belongs_to", pair[0]) for pair in marks.belongs_to.values() if _is_pair(pair)),
             *(("only_with", name) for name in marks.only_with), *(("refuses", name) for name in marks.refuses),
             *(("only_with", pair[0]) for pair in marks.only_with.values() if _is_pair(pair))]
    for mark, setting in named:
        if setting is not None and setting not in contract.settings:
            hint = listing(contract.settings, "Keyword-only parameters")
            wrong.append(Diagnostic(f"{what}`{mark}` names `{setting}`, which is not a keyword-only parameter of it",
                                    contract.where, hint))
    if marks.refills and KEEP not in marks.writes:
        wrong.append(Diagnostic(f"{what}`refills` is for a function that says which rows stay, and it does not write "
                                f"`{KEEP}`", contract.where, f'Instead:  writes="{KEEP}", or take `refills` away'))
    for column in marks.requires.values():
        if column not in reads:
            wrong.append(Diagnostic(f"{what}`requires` names column `{column}`, which is not a parameter of it",
                                    contract.where, listing(reads, "Parameters")))
    if marks.head not in (None, *HEADS):
        wrong.append(Diagnostic(f"{what}`head` is {marks.head!r}", contract.where, listing(HEADS, "It is one of")))
    if marks.keep_together not in (None, GROUP):
        wrong.append(Diagnostic(f"{what}`keep_together` is {marks.keep_together!r}", contract.where,
                                f"Rows are kept together by prompt:  keep_together={GROUP!r}"))
    others = contract.samples or marks.repeats or marks.keep_together or KEEP in marks.writes
    if marks.row_wise and (others or marks.type != "MODEL_INFERENCE"):
        wrong.append(Diagnostic(f"{what}`row_wise` is for a MODEL_INFERENCE function that looks at each row by itself; "
                                "this one has another type, or samples, repeats, drops or keeps together rows",
                                contract.where, "Take `row_wise` away"))
    wrong += [Diagnostic(f"{what}{text}", contract.where, hint) for text, hint in _wrong_limits(contract)]
    if wrong:
        raise InvalidInput(wrong)


def _wrong_limits(contract: Contract) -> Iterator[tuple[str, str]]:
    """Yield (mistake, hint) for `bounds`, `belongs_to`, `only_with` and `refuses`."""
    for name, setting in contract.settings.items():
        if setting.bounds and not readable(setting.bounds):
            yield (f"`bounds` of `{name}` are {setting.bounds!r}, which no number meets or which cannot be read",
                   'Write comparisons with numbers:  bounds={"clip": ">= 0", "top_p": "> 0, <= 1"}')
        elif setting.bounds and setting.value is not None and not within(setting.value, setting.bounds):
            yield f"the default of `{name}`, {setting.default}, is not {in_words(setting.bounds)}", ""
    for name, pair in contract.marks.belongs_to.items():
        if not _is_pair(pair):
            yield (f"`belongs_to` of `{name}` is {pair!r}, not another setting and its value",
                   'As in  belongs_to={"fixed_length": ("aggregate", "fixed_length_sum")}')
    for name, pair in contract.marks.only_with.items():
        if not _is_pair(pair) or not isinstance(pair[1], tuple):
            yield (f"`only_with` of `{name}` is {pair!r}, not another setting and a tuple of its values",
                   'As in  only_with={"clip": ("loss", ("ppo", "gspo"))}')
    for name, reasons in contract.marks.refuses.items():
        if not isinstance(reasons, dict):
            yield (f"`refuses` of `{name}` is {reasons!r}, not a reason for each value",
                   'As in  refuses={"kl_kind": {"k1": "its gradient is zero on average"}}')


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _forms(returns: ast.expr | None, count: int) -> tuple[str, ...]:
    returns = _unquoted(returns)
    if returns is None or count == 0:
        return ()
    if isinstance(returns, ast.Subscript) and ast.unparse(returns.value) in ("tuple", "Tuple", "typing.Tuple"):
        items = returns.slice.elts if isinstance(returns.slice, ast.Tuple) else [returns.slice]
        return tuple(_annotation(item) for item in items) if len(items) == count else ()
    return (_annotation(returns),) if count == 1 else ()


def _annotation(node: ast.expr | None) -> str:
    return _text(_unquoted(node))


def _unquoted(node: ast.expr | None) -> ast.expr | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return expression(node.value)
    return node


def expression(text: str) -> ast.expr | None:
    """Return a parsed expression; None if the text is none."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def imported(module: str, name: str) -> Contract | None:
    """Return the contract of a function that the source does not show, by importing the module; None if it has none.

    Raises:
        InvalidInput: the import fails.
    """
    loaded = decorators.load_module(module, f"It is imported because its source shows no `{name}` with @node above it.")
    function = getattr(loaded, name, None) or decorators.NODES.get(name)
    if function is None or not hasattr(function, "__distflow_node__"):
        return None
    return live_contract(name, module, function, function.__distflow_node__)


def live_contract(name: str, module: str, function: Any, marks: decorators.NodeMarks) -> Contract:
    """Return the contract of an imported function."""
    line = inspect.getsourcelines(function)[1] if inspect.isfunction(function) else 0
    where = Location(inspect.getsourcefile(function) or module, line) if line else Location(module)
    signature = inspect.signature(function)
    returns = _parsed(signature.return_annotation)
    return build(name, module, where, marks, _arguments(signature), returns, inspect.getdoc(function))


def _arguments(signature: inspect.Signature) -> ast.arguments:
    """Return a live signature as ast would parse it; a default that is no plain value becomes `...`."""
    result = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    for parameter in signature.parameters.values():
        argument = ast.arg(parameter.name, _parsed(parameter.annotation))
        missing = parameter.default is inspect.Parameter.empty
        default = None if missing else _parsed(repr(parameter.default)) or ast.Constant(...)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            result.kwonlyargs.append(argument)
            result.kw_defaults.append(default)
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            result.args.append(argument)
            result.defaults += [default] if default else []
    return result


def _parsed(value: Any) -> ast.expr | None:
    if value is inspect.Parameter.empty:
        return None
    return expression(value if isinstance(value, str) else inspect.formatannotation(value))


def find_functions(dag: Dag, source: YamlSource, mistakes: list[Diagnostic]) -> dict[str, Contract]:
    """Return the contracts of all functions that the DAG may name, by name; add to `mistakes`.

    The folder of the DAG file and the current one are added to `sys.path`.
    """
    for folder in (str(Path(source.file).resolve().parent), str(Path.cwd())):
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
        self.broken: set[str] = set()
        """Modules that could not be read: functions are not reported as missing from them."""
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
            hint = did_you_mean(name, known, "Functions")
            if not separator and not self.dag.imports:
                hint += "\nYour own are found by  imports: [MODULE]  or  function: MODULE:NAME"
            self.mistakes.append(Diagnostic(what, where, hint))

    def _read(self, module: str, where: Location) -> tuple[Contract, ...]:
        try:
            if module in self.broken:
                return ()
            if module not in self.read and (path := module_file(module)):
                self.read.add(module)
                if missing := check_imports(module, path):
                    raise InvalidInput(missing)
            return of_module(module)
        except InvalidInput as error:
            self._note(module, error, where)
            return ()

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
