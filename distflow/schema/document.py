"""From a parsed file to a typed object, with every mistake collected and placed."""

from __future__ import annotations

import copy
import types
import typing
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from distflow.schema.errors import Mistake, did_you_mean
from distflow.schema.source import Source

_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text",
          "dict": "a mapping", "list": "a list", "model": "a mapping"}


class Document(BaseModel):
    """Base of all that users write: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


D = TypeVar("D", bound=Document)


def check(kind: type[D], source: Source) -> tuple[D | None, list[Mistake]]:
    """The object and all that is wrong with its source.

    What is wrong is left out and the rest tried again, so that later checks can find their mistakes in the same
    run; the object is None if the rest alone cannot stand.
    """
    try:
        return kind.model_validate(source.data), []
    except ValidationError as error:
        mistakes = [_mistake(kind, source, item) for item in error.errors()]
        data = copy.deepcopy(source.data)
        for item in error.errors():
            _remove(data, item["loc"])
    try:
        return kind.model_validate(data), mistakes
    except ValidationError:
        return None, mistakes


def _remove(data: Any, path: tuple) -> None:
    for part in path[:-1]:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return
    if path and isinstance(data, dict):
        data.pop(path[-1], None)


def _mistake(kind: type[Document], source: Source, item: Any) -> Mistake:
    path = tuple(item["loc"])
    name = ".".join(str(part) for part in path)
    if item["type"] == "extra_forbidden":
        known = _fields_at(kind, path[:-1])
        return Mistake(f"unknown key `{path[-1]}`", source.spot(path, key=True), did_you_mean(path[-1], known))
    if item["type"] == "missing":
        return Mistake(f"`{name}` is missing", source.spot(path[:-1], key=True), f"Add `{path[-1]}:` here.")
    if item["type"] in ("value_error", "assertion_error"):
        return Mistake(f"`{name}`: {item['ctx']['error']}" if name else str(item["ctx"]["error"]), source.spot(path))
    return Mistake(f"`{name}` must be {_expected(item)}, not {_shown(item['input'])}", source.spot(path))


def _shown(value: Any) -> str:
    return {None: "empty", True: "true", False: "false"}.get(value, repr(value)) if not isinstance(
        value, dict | list) else ("a mapping" if isinstance(value, dict) else "a list")


def _expected(item: Any) -> str:
    context = item.get("ctx", {})
    if item["type"] == "literal_error":
        return f"one of {context['expected']}"
    if item["type"].startswith(("greater_than", "less_than")):
        return item["msg"].removeprefix("Input should be ")
    stem = item["type"].split("_")[0]
    return _KINDS.get(stem, item["msg"].removeprefix("Input should be "))


def _fields_at(kind: Any, path: tuple) -> list[str]:
    """The keys allowed at `path` below `kind`."""
    for part in path:
        kind = _inner(kind, part)
    return [field.alias or name for name, field in kind.model_fields.items()] if _is_document(kind) else []


def _inner(kind: Any, part: Any) -> Any:
    if _is_document(kind):
        for name, field in kind.model_fields.items():
            if part in (name, field.alias):
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
