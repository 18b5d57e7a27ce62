"""What a node function reads, writes and accepts, read from its source without importing it.

Validation is thereby instant and runs no user code. Only a function that the source does not show (registered
dynamically) is imported and inspected.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from distflow.schema import registry
from distflow.schema.bounds import in_words, readable, within
from distflow.schema.dag import Head
from distflow.schema.errors import InvalidInput, Mistake, Spot, listing, shown
from distflow.schema.modules import module_file, where_looked_for
from distflow.schema.plan import KEEP

BUILT_IN = "workers.functions"
ENGINE_TYPES = ("MODEL_INFERENCE", "MODEL_TRAIN")
TYPES = (*ENGINE_TYPES, "COMPUTE")
HEADS = get_args(Head)
REQUIRED = "<required>"
GROUP = "group"
"""The column that says which prompt a row stems from. A step's rows are always moved by it."""


@dataclass(frozen=True)
class Read:
    """A positional parameter: the column of its name, in the form of its annotation ("" if it has none)."""

    name: str
    form: str = ""
    optional: bool = False
    reader: str = ""
    """Who reads it, where that is not the function itself."""


@dataclass(frozen=True)
class Setting:
    """A keyword-only parameter. `annotation` and `default` are source text; `default` is REQUIRED if it has none."""

    name: str
    annotation: str = ""
    default: str = REQUIRED
    bounds: str = ""
    """What its number must meet: see `distflow.schema.bounds`."""

    @property
    def value(self) -> Any:
        """The default, if it is a plain value; else None."""
        try:
            value = None if self.default == REQUIRED else ast.literal_eval(self.default)
        except ValueError:
            return None
        return None if value is ... else value


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

    @property
    def samples(self) -> bool:
        """Whether the node's role must be ready to sample."""
        repeats = self.marks.repeats is not None if self.marks.samples is None else self.marks.samples
        return repeats and self.marks.type in ENGINE_TYPES


def built_in() -> dict[str, Contract]:
    """The contracts of all shipped functions, by name."""
    folder = module_file(BUILT_IN).parent  # type: ignore[union-attr]
    modules = [f"{BUILT_IN}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    return {contract.name: contract for module in modules for contract in of_module(module)}


def of_module(module: str) -> tuple[Contract, ...]:
    """The contracts of the functions that a module's source marks with `@node`.

    Raises:
        InvalidInput: the module cannot be found, is not Python, or marks a function in a way that cannot work.
    """
    path = module_file(module)
    if path is None:
        raise InvalidInput(Mistake(f"module `{module}` cannot be found", None, where_looked_for(module)))
    return _of_file(module, path)


def load_function(key: str) -> Any:
    """The function that a contract's `key` names; importing its module may register more.

    Raises:
        InvalidInput: its module fails when it is imported.
    """
    module, _, name = key.partition(":")
    return getattr(registry.load_module(module), name, None) or registry.NODES[name]


@functools.cache
def _of_file(module: str, path: Path) -> tuple[Contract, ...]:
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        spot = Spot(shown(path), error.lineno or 0, error.offset or 0, 1, (error.text or "").rstrip("\n"))
        raise InvalidInput(Mistake(f"module `{module}` is not valid Python: {error.msg}", spot)) from None
    found = (_of_function(module, path, item) for item in tree.body if isinstance(item, ast.FunctionDef))
    return tuple(contract for contract in found if contract)


def _of_function(module: str, path: Path, function: ast.FunctionDef) -> Contract | None:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("node", "distflow.node"):
            marks = _marks(decorator)
            if marks is None:
                return None
            where = Spot(shown(path), function.lineno, text=f"def {function.name}(…)")
            doc = ast.get_docstring(function)
            return build(function.name, module, where, marks, function.args, function.returns, doc)
    return None


def _marks(decorator: ast.Call) -> registry.Marks | None:
    """The decorator's arguments, or None if they are not plain values (then the module is imported instead)."""
    try:
        given = {str(item.arg): ast.literal_eval(item.value) for item in decorator.keywords}
        known = {item.name for item in fields(registry.Marks)}
        return registry.Marks(**given) if not decorator.args and set(given) <= known else None
    except (ValueError, TypeError):
        return None


def build(name: str, module: str, where: Spot, marks: registry.Marks, arguments: ast.arguments,
          returns: ast.expr | None, doc: str | None) -> Contract:
    """The contract of a function from its parsed signature.

    Raises:
        InvalidInput: its marks do not fit it.
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
    _refuse_nonsense(result, bool(positional))
    return result


def _refuse_nonsense(contract: Contract, positional: bool) -> None:
    """What `@node` says must fit the function that it stands on."""
    marks, what = contract.marks, f"@node of `{contract.name}`: "
    reads = [read.name for read in contract.reads]
    wrong = []
    if marks.type not in TYPES:
        wrong.append(Mistake(f"{what}`type` is {marks.type!r}", contract.where, listing(TYPES, "It is one of")))
    elif marks.type in ENGINE_TYPES and not positional:
        wrong.append(Mistake(f"{what}a {marks.type} function gets its role's engine as its first parameter, and this "
                             "one has none", contract.where))
    named = [("repeats", marks.repeats), ("refills", marks.refills), *(("requires", name) for name in marks.requires),
             *(("bounds", name) for name in marks.bounds), *(("belongs_to", name) for name in marks.belongs_to),
             *(("belongs_to", pair[0]) for pair in marks.belongs_to.values() if _is_pair(pair)),
             *(("only_with", name) for name in marks.only_with), *(("refuses", name) for name in marks.refuses),
             *(("only_with", pair[0]) for pair in marks.only_with.values() if _is_pair(pair))]
    for mark, setting in named:
        if setting is not None and setting not in contract.settings:
            hint = listing(contract.settings, "Keyword-only parameters")
            wrong.append(Mistake(f"{what}`{mark}` names `{setting}`, which is not a keyword-only parameter of it",
                                 contract.where, hint))
    if marks.refills and KEEP not in marks.writes:
        wrong.append(Mistake(f"{what}`refills` is for a function that says which rows stay, and it does not write "
                             f"`{KEEP}`", contract.where, f'Instead:  writes="{KEEP}", or take `refills` away'))
    for column in marks.requires.values():
        if column not in reads:
            wrong.append(Mistake(f"{what}`requires` names column `{column}`, which is not a parameter of it",
                                 contract.where, listing(reads, "Parameters")))
    if marks.head not in (None, *HEADS):
        wrong.append(Mistake(f"{what}`head` is {marks.head!r}", contract.where, listing(HEADS, "It is one of")))
    if marks.keep_together not in (None, GROUP):
        wrong.append(Mistake(f"{what}`keep_together` is {marks.keep_together!r}", contract.where,
                             f"Rows are kept together by prompt:  keep_together={GROUP!r}"))
    others = contract.samples or marks.repeats or marks.keep_together or KEEP in marks.writes
    if marks.row_wise and (others or marks.type != "MODEL_INFERENCE"):
        wrong.append(Mistake(f"{what}`row_wise` is for a MODEL_INFERENCE function that looks at each row by itself; "
                             "this one has another type, or samples, repeats, drops or keeps together rows",
                             contract.where, "Take `row_wise` away"))
    wrong += [Mistake(f"{what}{text}", contract.where, hint) for text, hint in _wrong_limits(contract)]
    if wrong:
        raise InvalidInput(wrong)


def _wrong_limits(contract: Contract) -> Iterator[tuple[str, str]]:
    """What is wrong with `bounds` and `belongs_to`, and what to write."""
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
    """A parsed expression; None for what is none."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)
