"""From a parsed file to a typed object, with every mistake collected and placed."""

from __future__ import annotations

import copy
import re
import types
import typing
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from distflow.schema.errors import Mistake, did_you_mean, nearest
from distflow.schema.source import Source

_KINDS = {"int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false",
          "string": "text", "dict": "a mapping", "list": "a list", "model": "a mapping"}
_STAND_INS: dict[Any, Any] = {int: 1, float: 1.0, str: ""}
"""What stands for a required value that is wrong or missing while other mistakes are looked for."""
_ROUNDS = 4
"""Repairs: what was wrong, what is then missing, what is missing below that; then it is given up."""


class Document(BaseModel):
    """Base of all that users write: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


D = TypeVar("D", bound=Document)


def check(kind: type[D], source: Source) -> tuple[D | None, list[Mistake]]:
    """The object and all that is wrong with its source.

    What is wrong is replaced by the best guess, so that later checks can find their mistakes in the same run; the
    source's `doubtful` says where. The object is None if no guess makes it stand.
    """
    data, mistakes = copy.deepcopy(source.data), list(source.mistakes)
    for round_ in range(_ROUNDS):
        try:
            return kind.model_validate(data), mistakes
        except ValidationError as error:
            problems = error.errors()
        if round_ == 0:
            mistakes += [_mistake(kind, source, item) for item in problems
                         if item["loc"] not in source.doubtful and not _is_misspelt(kind, problems, item)]
        source.doubtful.update(item["loc"] for item in problems)
        for item in reversed(problems):  # from the end, so that indices of list items still to be dropped stay right
            _repair(kind, data, item)
    return None, mistakes


def _is_misspelt(kind: type[Document], problems: list[Any], item: Any) -> bool:
    """Whether a missing key stands there after all, but misspelt: then its misspelling is the mistake to report."""
    return item["type"] == "missing" and any(
        other["type"] == "extra_forbidden" and other["loc"][:-1] == item["loc"][:-1]
        and nearest(other["loc"][-1], _fields_at(kind, other["loc"][:-1])) == item["loc"][-1] for other in problems)


def _repair(kind: type[Document], data: Any, item: Any) -> None:
    path = item["loc"]
    place = _at(data, path[:-1])
    if not path or not isinstance(place, dict | list):
        return
    if item["type"] == "missing":
        _fill(kind, place, path)
    elif item["type"] == "literal_error":
        meant = nearest(str(item["input"]), _choices(item))
        place[path[-1]] = meant
        if meant is None:
            del place[path[-1]]
    elif item["type"] == "list_type" and isinstance(item["input"], str):
        place[path[-1]] = [item["input"]]
    elif isinstance(place, list):
        del place[path[-1]]
    else:
        value = place.pop(path[-1], None)
        meant = nearest(path[-1], _fields_at(kind, path[:-1])) if item["type"] == "extra_forbidden" else None
        if meant:
            place.setdefault(meant, value)


def _fill(kind: type[Document], place: Any, path: tuple) -> None:
    expected = _kind_at(kind, path)
    if _is_document(expected):
        place.setdefault(path[-1], {})
    elif typing.get_origin(expected) is typing.Literal:
        place.setdefault(path[-1], typing.get_args(expected)[0])
    elif expected in _STAND_INS:
        place.setdefault(path[-1], _STAND_INS[expected])


def _at(data: Any, path: tuple) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _mistake(kind: type[Document], source: Source, item: Any) -> Mistake:
    path = tuple(item["loc"])
    name = ".".join(str(part) for part in path)
    where = source.spot(path)
    if item["type"] == "extra_forbidden":
        hint = did_you_mean(path[-1], _fields_at(kind, path[:-1]))
        return Mistake(f"unknown key `{path[-1]}`", source.spot(path, key=True), hint)
    if item["type"] == "missing":
        return Mistake(f"`{name}` is missing", source.spot(path[:-1], key=True), f"Add `{path[-1]}:` here.")
    if item["type"] in ("value_error", "assertion_error"):
        return Mistake(f"`{name}`: {item['ctx']['error']}" if name else str(item["ctx"]["error"]), where)
    if item["type"] in ("too_short", "too_long"):
        bound = item["ctx"].get("min_length", item["ctx"].get("max_length"))
        side = "at least" if item["type"] == "too_short" else "at most"
        return Mistake(f"`{name}` must have {side} {bound} item{'s' * (bound != 1)}", where)
    meant = nearest(str(item["input"]), _choices(item)) if item["type"] == "literal_error" else None
    hint = f"Did you mean `{meant}`?" if meant else _default_hint(kind, path)
    if item["type"] == "list_type" and isinstance(item["input"], str):
        hint = f"Instead:  {path[-1]}: [{item['input']}]"
    return Mistake(f"`{name}` must be {_expected(item)}, not {_shown(item['input'])}", where, hint)


def _default_hint(kind: type[Document], path: tuple) -> str:
    """What stands for a value that is left out, if that is one number or word."""
    above = _kind_at(kind, path[:-1])
    fields = above.model_fields.items() if _is_document(above) else ()
    default = next((field.default for name, field in fields if (field.alias or name) == path[-1]), None)
    return f"Its default is {_shown(default)}." if isinstance(default, bool | int | float | str) else ""


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return "empty" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _choices(item: Any) -> list[str]:
    return re.findall(r"'([^']*)'", item["ctx"]["expected"])


def _expected(item: Any) -> str:
    if item["type"] == "literal_error":
        return f"one of {item['ctx']['expected']}"
    if item["type"].startswith(("greater_than", "less_than")):
        bound = item["msg"].removeprefix("Input should be ")
        return bound.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    stem = item["type"].split("_")[0]
    return _KINDS.get(stem, item["msg"].removeprefix("Input should be "))


def _fields_at(kind: Any, path: tuple) -> list[str]:
    """The keys allowed at `path` below `kind`."""
    kind = _kind_at(kind, path)
    return [field.alias or name for name, field in kind.model_fields.items()] if _is_document(kind) else []


def _kind_at(kind: Any, path: tuple) -> Any:
    for part in path:
        kind = _inner(kind, part)
    return kind


def _inner(kind: Any, part: Any) -> Any:
    if _is_document(kind):
        for name, field in kind.model_fields.items():
            if part == (field.alias or name):
                return _strip_optional(field.annotation)
        return None
    arguments = typing.get_args(kind)
    return _strip_optional(arguments[-1]) if arguments else None


def _strip_optional(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next((arg for arg in typing.get_args(kind) if arg is not type(None)), None)
    return kind


def _is_document(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Document)
