"""Settings of users' functions: keyword-only parameters, read from source and checked by pydantic.

    def f(…, *, share: Annotated[float, Field(gt=0, le=1)], clip: NonNegativeFloat | None = None)

The arguments of `Field` must be plain values, for the module is not imported. Its names for such annotations are known
(`Share = Annotated[…]`); an annotation that is not, as a class of the user's own, takes any value.
"""

from __future__ import annotations

import ast
import copy
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, ConfigDict, Field, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from distflow.contracts.modules import parsed
from distflow.errors import did_you_mean, nearest

REQUIRED = "<required>"
_WORDS = {"ge": "at least {:g}", "gt": "above {:g}", "le": "at most {:g}", "lt": "below {:g}",
          "min_length": "at least {} long", "max_length": "at most {} long", "pattern": "text that matches {}"}
"""Arguments of `Field` that bound a value, in words."""
_SAID = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "list": "a list",
         "dict": "a mapping", "None": "null", "Loss": "MODULE:FUNCTION", "Environment": "a name", "Template": "text",
         "Agent": "a command", "Regex": "text"}
_ORDER = ("ge", "gt", "le", "lt")
BOUNDS = tuple(_WORDS)
_FIELD = (*_WORDS, "description")
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_ALIASES = {name: parsed(f"Annotated[{text}]", "eval").body for name, text in {
    "PositiveInt": "int, Field(ge=1)", "NonNegativeInt": "int, Field(ge=0)", "PositiveFloat": "float, Field(gt=0)",
    "NonNegativeFloat": "float, Field(ge=0)"}.items()}


def _compiles(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}\nIn YAML, put it in single quotes.") from None
    return text


LOSS = r"^\w+(\.\w+)*:\w+$"
"""Form of the name of a user's loss."""
_TYPES: dict[str, Any] = {
    "int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "None": type(None),
    "Environment": str, "Template": str, "Agent": str, "Loss": Annotated[str, Field(pattern=LOSS)],
    "Regex": Annotated[str, AfterValidator(_compiles)]}


class Unreadable(ValueError):
    """An annotation or default cannot be what a setting has; the message says why."""


@dataclass(frozen=True)
class Setting:
    """Keyword-only parameter. `annotation`, without bounds, and `default` are source text."""

    name: str
    annotation: str = ""
    default: str = REQUIRED  # REQUIRED if it has none
    limits: dict[str, Any] = field(default_factory=dict)  # arguments of `Field` that bound its value
    description: str = ""
    kind: Any = field(default=Any, compare=False, repr=False)  # type that pydantic checks

    @property
    def value(self) -> Any:
        """Default, if it is a plain value; else None."""
        try:
            value = None if self.default == REQUIRED else ast.literal_eval(parsed(self.default.strip(), "eval"))
        except ValueError:
            return None
        return None if value is ... else value

    @property
    def bounds(self) -> str:
        """Bounds in words, as `above 0 and at most 1`; "" if it has none."""
        return " and ".join(_WORDS[name].format(limit) for name, limit in self.limits.items())

    @property
    def _is_number(self) -> bool:
        return any(name in self.limits for name in _ORDER)

    def at_least(self, least: int) -> Setting:
        return replace(self, limits={**self.limits, "ge": least}, kind=Annotated[self.kind, Field(ge=least)])

    def errors(self, value: Any) -> list[Any]:
        if self.kind is Any:
            return []
        try:
            TypeAdapter(self.kind, config=_STRICT).validate_python(value)
        except ValidationError as error:
            return error.errors(include_url=False)
        except TypeError:  # a bound on something that has no order or length
            return [{"type": "bound", "loc": (), "input": value}]
        return []

    def wrong(self, value: Any, example: str) -> tuple[str, str] | None:
        """Return what is wrong with a value (`must be …, not …`) and a hint made of `example`; None: nothing."""
        errors = self.errors(value)
        if not errors:
            return None
        if errors[0]["type"] == "value_error":
            what, _, hint = str(errors[0]["ctx"]["error"]).partition("\n")
            return what, hint
        limits = [name for each in errors for name in BOUNDS if name in each.get("ctx", {})]
        if len(limits) < len(errors) and self.annotation:
            kinds = " or ".join(_SAID.get(kind, kind.replace("Literal[", "one of ["))
                                for kind in self.annotation.split(" | "))
            words = re.findall(r"'([^']*)'", "".join(each.get("ctx", {}).get("expected", "") for each in errors))
            meant, default = nearest(str(value), words), "" if self.default == REQUIRED else self.default
            hint = f"Did you mean `{meant}`?" if meant else f"Its default is {default}." if default else ""
            return f"must be {kinds}, not {str(value).lower() if isinstance(value, bool) else repr(value)}", hint
        inside = ".".join(map(str, errors[0]["loc"]))
        bounds = f"{_WORDS[limits[0]].format(errors[0]['ctx'][limits[0]])} in {inside}" if inside else self.bounds
        return f"must be {bounds}, not {errors[0]['input']!r}", self._instead(example)

    def _instead(self, example: str) -> str:
        if self.default == "None":
            return f"Take `{self.name}` out, or give {'a number ' * self._is_number}{self.bounds}."
        value = self._within() if self.value is None else self.value
        return "" if value is None else "Instead:  " + example.replace("SETTING", f"{self.name}: {value}")

    def _within(self) -> float | None:
        """Return a number within the bounds, a limit that is included if possible; None if there is none."""
        limits = [limit for name, limit in self.limits.items() if name in _ORDER]
        candidates = [*limits, *(limit + 1 for limit in limits), *(limit - 1 for limit in limits),
                      sum(limits) / max(len(limits), 1)]
        return next((value for value in candidates if not self.errors(value)), None)


def read_setting(argument: ast.arg, default: ast.expr | None, aliases: dict[str, ast.expr]) -> Setting:
    """Return the setting of a parameter. Raises Unreadable: it needs an import, or no value or default fits."""
    text = ast.unparse(argument.annotation) if argument.annotation else ""
    if not aliases.keys().isdisjoint(re.findall(r"\w+", text)):
        text = ast.unparse(_Expansion(aliases).visit(parsed(text, "eval").body))
    bare, kind, found = _annotation(text)
    bounds = {name: limit for name, limit in found.items() if name in BOUNDS}
    setting = Setting(argument.arg, bare, ast.unparse(default) if default else REQUIRED, bounds,
                      found.get("description", ""), kind)
    if bounds and setting.value is not None and (wrong := setting.wrong(setting.value, "")):
        raise Unreadable(f"has a default that {wrong[0]}")
    if setting.value is None and setting._is_number and setting._within() is None:
        raise Unreadable(f"must be {setting.bounds}, which no number is")
    return setting


@functools.cache
def _annotation(text: str) -> tuple[str, Any, dict[str, Any]]:
    """Return an annotation without quotes and bounds, its type, and the arguments of its `Field`."""
    node = _Expansion(_ALIASES).visit(parsed(text, "eval").body) if text else None
    bare, kind = annotation_text(node), _kind(node)
    if "Field(" in text:
        try:
            TypeAdapter(kind, config=_STRICT)
        except (SchemaError, PydanticSchemaGenerationError) as error:
            raise Unreadable(f"has bounds that do not fit its type: {error}") from None
    return bare, kind, _limits(node)


def _name(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _items(node: ast.Subscript) -> list[ast.expr]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


class _Expansion(ast.NodeTransformer):
    def __init__(self, aliases: dict[str, ast.expr]):
        self.aliases = aliases

    def visit_Name(self, node: ast.Name) -> ast.expr:
        own = self.aliases.get(node.id)
        if not isinstance(own, ast.Subscript | ast.BinOp | ast.Name):
            return node
        return _Expansion({name: each for name, each in self.aliases.items() if name != node.id}).visit(
            copy.deepcopy(own))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        inner = expression(node.value) if isinstance(node.value, str) else None
        return self.visit(inner) if inner else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        kind = _name(node.value)
        if kind == "Annotated" and isinstance(node.slice, ast.Tuple):
            node.slice.elts[0] = self.visit(node.slice.elts[0])
        elif kind != "Literal":
            node.slice = self.visit(node.slice)
        return node


class _Bare(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if _name(node.value) == "Annotated":
            return self.visit(_items(node)[0])
        return self.generic_visit(node)  # type: ignore[return-value]


def annotation_text(node: ast.expr | None) -> str:
    """Return the source of an annotation without quotes and bounds; "" for None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = expression(node.value)
    text = "" if node is None else ast.unparse(node)
    return ast.unparse(_Bare().visit(parsed(text, "eval").body)) if "Annotated" in text else text


def expression(text: str) -> ast.expr | None:
    """Return a parsed expression; None if the text is none."""
    try:
        return parsed(text, "eval").body
    except SyntaxError:
        return None


def _kind(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Union[_kind(node.left), _kind(node.right)]  # noqa: UP007 - built at run time
    if not isinstance(node, ast.Subscript):
        return _TYPES.get(_name(node), Any)
    name, items = _name(node.value), _items(node)
    if name == "Literal":
        try:
            return Literal[tuple(ast.literal_eval(item) for item in items)]
        except ValueError:
            raise Unreadable(f"has the annotation {ast.unparse(node)}, and only plain values can be read") from None
    if name == "Annotated":
        return Annotated[_kind(items[0]), *(Field(**each) for each in _fields(node))]  # type: ignore[return-value]
    kinds = [_kind(item) for item in items] + [type(None)] * (name == "Optional")
    if name in ("Optional", "Union"):
        return Union[tuple(kinds)]  # noqa: UP007 - built at run time
    return _TYPES[name][tuple(kinds)] if name in ("list", "dict") else Any


def _fields(node: ast.Subscript) -> Iterator[dict[str, Any]]:
    for item in _items(node)[1:]:
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            continue
        if not isinstance(item, ast.Call) or _name(item.func) != "Field" or item.args:
            raise Unreadable(f"has `{ast.unparse(item)}` in its annotation, which cannot be read without importing "
                             "the module")
        for word in item.keywords:
            if word.arg not in _FIELD:
                raise Unreadable(f"has `{ast.unparse(item)}` in its annotation. "
                                 f"{did_you_mean(word.arg or '**', _FIELD, 'Arguments that are read')}")
        try:
            yield {str(word.arg): ast.literal_eval(word.value) for word in item.keywords}
        except ValueError:
            raise Unreadable(f"has `{ast.unparse(item)}` in its annotation, and only plain values can be read without "
                             "importing the module") from None


def _limits(node: ast.expr | None) -> dict[str, Any]:
    """Return the arguments of `Field` that are about the value itself, not about what it contains."""
    if isinstance(node, ast.BinOp):
        return {**_limits(node.left), **_limits(node.right)}
    if isinstance(node, ast.Subscript) and _name(node.value) in ("Optional", "Union"):
        return {name: limit for item in _items(node) for name, limit in _limits(item).items()}
    if isinstance(node, ast.Subscript) and _name(node.value) == "Annotated":
        own = {name: limit for each in _fields(node) for name, limit in each.items()}
        return {**_limits(_items(node)[0]), **own}
    return {}


@dataclass(frozen=True)
class Invalid:
    """Mistake at `path` below a key of a file. `key`: the key is wrong, not its value; `missing`: there is none."""

    path: tuple[str | int, ...]
    what: str
    hint: str = ""
    key: bool = False
    missing: bool = False


def check_given(given: dict[str, Any], known: dict[str, Setting], whose: str, example: str,
                others: Iterable[str] = ()) -> Iterator[Invalid]:
    """Yield what is wrong with the values given for settings. `whose` is as "reward `math`"; `example` the YAML to
    write, where SETTING stands for name and value; `others` are further keys that may stand beside them."""
    for name, value in given.items():
        if name not in known:
            hint = did_you_mean(name, [*known, *others], "Settings") or "It has no settings at all."
            yield Invalid((name,), f"{whose} has no setting `{name}`", hint, key=True)
        elif wrong := known[name].wrong(value, example):
            yield Invalid((name,), f"setting `{name}` of {whose.removeprefix('function ')} {wrong[0]}", wrong[1])
    for name, setting in known.items():
        if setting.default == REQUIRED and name not in given:
            kind = f"   ({setting.annotation})" if setting.annotation else ""
            hint = f"Add it:  {example.replace('SETTING', f'{name}: …')}{kind}"
            yield Invalid((name,), f"{whose} needs the setting `{name}`", hint, missing=True)
