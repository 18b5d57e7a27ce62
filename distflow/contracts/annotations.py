"""Types that annotations are, in a module that is imported or in the source of one that is not.

A name that its source does not resolve, such as a class of an imported package, stands for itself: a type that takes
any value. So no code of the module runs.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import importlib
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pydantic
from pydantic_core import core_schema

from distflow.contracts import decorators
from distflow.contracts.decorators import Word

EVALUATION_FAILS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, NameError, SyntaxError,
                    RuntimeError)
"""Exceptions by which evaluating an expression fails."""
_LIGHT = ("typing", "typing_extensions", "collections.abc", "pydantic", "annotated_types", "math")
"""Modules from which a name in a source is resolved: importing them runs no code of the user's."""
_WORDS = {name: kind for name, kind in vars(decorators).items()
          if any(isinstance(each, Word) for each in get_args(kind)[1:])}
_TYPES = {name: getattr(builtins, name) for name in
          ("int", "float", "str", "bool", "bytes", "list", "dict", "tuple", "set", "frozenset", "object", "type")}
_NUMBERS = {name: getattr(pydantic, name) for name in
            ("Field", "PositiveInt", "NonNegativeInt", "PositiveFloat", "NonNegativeFloat")}
_KNOWN: dict[str, Any] = {**_TYPES, **{name: getattr(typing, name) for name in typing.__all__}, **_NUMBERS, **_WORDS,
                          "typing": typing, "pydantic": pydantic}


class Unknown(type):
    """Stand-in for a name that the source of a module does not resolve, and for what is made of it."""

    __iter__ = None  # else `[]` would make it a sequence without end

    def __new__(cls, text: str) -> Unknown:
        schema = classmethod(lambda *_: core_schema.any_schema())
        return super().__new__(cls, text, (), {"__get_pydantic_core_schema__": schema})

    def __init__(cls, text: str):
        super().__init__(text, (), {})

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _KNOWN.get(name) or Unknown(f"{cls.__name__}.{name}")

    def __getitem__(cls, items: Any) -> Unknown:
        return Unknown(f"{cls.__name__}[{items}]")

    def __call__(cls, *arguments: Any, **named: Any) -> Unknown:
        given = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in named.items())]
        return Unknown(f"{cls.__name__}({', '.join(given)})")

    def __repr__(cls) -> str:
        return cls.__name__


class Names(dict[str, Any]):
    """Names of a module, as its annotations and defaults use them. `written`: expressions that its source gives names
    to, which are evaluated when they are used."""

    def __init__(self, found: Mapping[str, Any], written: Mapping[str, ast.expr] | None = None):
        super().__init__(found)
        self.written = written or {}

    def __missing__(self, name: str) -> Any:
        self[name] = Unknown(name)  # also for its own expression, if that uses it
        if name in self.written:
            self[name] = evaluated(self.written[name], self)
        elif name in _KNOWN:
            self[name] = _KNOWN[name]
        return self[name]


def names_of(body: list[ast.stmt], imported: Mapping[str, str]) -> Names:
    """Return the names of a module's source. `imported`: what its imports name, as `{"Field": "pydantic.Field"}`."""
    written = {target.id: item.value for item in body if isinstance(item, ast.Assign | ast.AnnAssign) and item.value
               for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
               if isinstance(target, ast.Name)}
    resolved = ((name, _resolved(origin)) for name, origin in imported.items() if name not in written)
    classes = {item.name: Unknown(item.name) for item in body if isinstance(item, ast.ClassDef)}
    return Names({**classes, **{name: found for name, found in resolved if found is not None}}, written)


def _resolved(origin: str) -> Any:
    module, _, name = origin.rpartition(".")
    if module.split(".")[0] == "distflow":
        return _WORDS.get(name)
    if origin in _LIGHT:
        return importlib.import_module(origin)
    return getattr(importlib.import_module(module), name, None) if module in _LIGHT else None


def evaluated(node: ast.expr, names: Names) -> Any:
    """Return the value of an expression in a module's source; one that cannot be evaluated stands for itself."""
    try:
        return eval(compile(ast.Expression(node), "<source>", "eval"), {"__builtins__": {}}, names)
    except EVALUATION_FAILS:
        return Unknown(ast.unparse(node))


def type_of(annotation: Any, names: Names) -> Any:
    """Return the type that an annotation is, be it text or evaluated already. Raises one of EVALUATION_FAILS."""
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    return get_type_hints(holder, {}, names, include_extras=True)["it"]  # type: ignore[arg-type]


def text_of(kind: Any) -> str:
    """Return a type as one writes it: without bounds and modules, with ` | ` in unions; a word of ours by its name."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return next((each.name for each in arguments[1:] if isinstance(each, Word)), "") or text_of(arguments[0])
    if origin in (Union, types.UnionType):
        return " | ".join(map(text_of, arguments))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is not None:
        name = "list" if origin is collections.abc.Sequence else text_of(origin)
        return f"{name}[{', '.join(map(text_of, arguments))}]" if arguments else name
    if kind is type(None) or kind is ...:
        return "..." if kind is ... else "None"
    return re.sub(r"^[\w.]*\.", "", kind.__name__ if isinstance(kind, type) else str(kind))


def is_plain(value: Any) -> bool:
    """Return whether a value is one that YAML may have: text, numbers, null, and lists and mappings of these."""
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else \
        value is None or isinstance(value, str | int | float)
