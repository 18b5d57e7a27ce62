"""Settings of users' functions: keyword-only parameters, whose annotations pydantic checks.

    def f(…, *, share: Annotated[float, Field(gt=0, le=1)], clip: NonNegativeFloat | None = None)

Where a module's source is read, the arguments of `Field` must be plain values. An annotation that is not known, as a
class of the user's own, takes any value.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, Field, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, SchemaError

from distflow.contracts.annotations import EVALUATION_FAILS, Names, Unknown, is_plain, text_of, type_of
from distflow.contracts.decorators import Word
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


class Unreadable(ValueError):
    """An annotation or default cannot be what a setting has; the message says why."""


@dataclass(frozen=True)
class Setting:
    """Keyword-only parameter. `annotation`, without bounds, and `default` are text."""

    name: str
    annotation: str = ""
    default: str = REQUIRED  # REQUIRED if it has none
    limits: dict[str, Any] = field(default_factory=dict)  # arguments of `Field` that bound its value
    description: str = ""
    kind: Any = field(default=Any, compare=False, repr=False)  # type that pydantic checks
    value: Any = field(default=None, compare=False)  # the default, if it is a plain value; else None

    @property
    def bounds(self) -> str:
        """Bounds in words, as `above 0 and at most 1`; "" if it has none."""
        return " and ".join(_WORDS[name].format(limit) for name, limit in self.limits.items())

    @property
    def _is_number(self) -> bool:
        return any(name in self.limits for name in _ORDER)

    def at_least(self, least: int) -> Setting:
        if self.limits.get("gt") == least - 1:
            return self
        return replace(self, limits={**self.limits, "ge": least}, kind=Annotated[self.kind, Field(ge=least)])

    def errors(self, value: Any) -> list[Any]:
        if self.kind is Any:
            return []
        try:
            _adapter(self.kind).validate_python(value)
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


def read_setting(parameter: inspect.Parameter, names: Names) -> Setting:
    """Return the setting that a parameter is. Raises Unreadable: its annotation is not known without an import, or no
    value or default fits."""
    kind, annotated = Any, parameter.annotation is not parameter.empty
    if annotated:
        try:
            kind = type_of(parameter.annotation, names)
        except EVALUATION_FAILS as error:
            raise Unreadable(f"has the annotation {parameter.annotation}, which cannot be read without importing the "
                             f"module: {error}") from None
    limits, description = _limits(kind)
    default = parameter.default
    text = REQUIRED if default is parameter.empty else repr(default) if is_plain(default) or \
        isinstance(default, Unknown) else "..."
    setting = Setting(parameter.name, text_of(kind) if annotated else "", text, limits, description,
                      _checked(kind, bool(limits)), default if text != REQUIRED and is_plain(default) else None)
    if limits and setting.value is not None and (wrong := setting.wrong(setting.value, "")):
        raise Unreadable(f"has a default that {wrong[0]}")
    if setting.value is None and setting._is_number and setting._within() is None:
        raise Unreadable(f"must be {setting.bounds}, which no number is")
    return setting


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=_STRICT)


def _checked(kind: Any, bounded: bool) -> Any:
    """Return the type if pydantic can check it; Any for a class of the user's own."""
    try:
        _adapter(kind)
    except (SchemaError, PydanticSchemaGenerationError) as error:
        if bounded or isinstance(error, SchemaError):
            raise Unreadable(f"has bounds that do not fit its type: {error}") from None
        return Any
    return kind


def _limits(kind: Any) -> tuple[dict[str, Any], str]:
    """Return the bounds of the value itself, not of what it contains, and its description."""
    limits: dict[str, Any] = {}
    description = ""
    for added, inside in _added(kind):
        if isinstance(added, Unknown):
            raise Unreadable(f"has `{added}` in its annotation, which cannot be read without importing the module")
        found = {name: getattr(added, name) for name in BOUNDS if getattr(added, name, None) is not None}
        if odd := next((name for name, limit in found.items() if not is_plain(limit)), None):
            raise Unreadable(f"has `Field({odd}={found[odd]})` in its annotation, and only plain values can be read "
                             "without importing the module")
        if not inside:
            limits |= found
            description = getattr(added, "description", None) or description
    return {name: limits[name] for name in BOUNDS if name in limits}, description


def _added(kind: Any, inside: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield what `Annotated` adds to a type, and whether to what the value contains."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        if not is_plain(list(arguments)):
            raise Unreadable(f"has the annotation {text_of(kind)}, and only plain values can be read")
    elif origin is Annotated and not any(isinstance(each, Word) for each in arguments):
        yield from _added(arguments[0], inside)
        for added in (each for each in arguments[1:] if not isinstance(each, str)):
            yield from ((each, inside) for each in (_of_field(added) if isinstance(added, FieldInfo) else [added]))
    elif origin is not Annotated:
        for argument in arguments:
            yield from _added(argument, inside or origin not in (Union, UnionType))


def _of_field(given: FieldInfo) -> list[Any]:
    others = dict(given.json_schema_extra) if isinstance(given.json_schema_extra, dict) else {}
    if given.default is not PydanticUndefined:
        others["default"] = given.default
    for name, value in others.items():
        raise Unreadable(f"has `Field({name}={value!r})` in its annotation. "
                         f"{did_you_mean(name, _FIELD, 'Arguments that are read')}")
    return [given, *given.metadata]


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
