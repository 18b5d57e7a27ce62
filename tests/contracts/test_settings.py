"""Settings of users' functions: what annotations say in source, which values fit, what is said about the others."""

from __future__ import annotations

import ast
import inspect
import math
from pathlib import Path

import pytest

from distflow.contracts.annotations import names_of
from distflow.contracts.definitions import stub_of_function
from distflow.contracts.settings import Setting, Unreadable, read_setting


def setting(parameter: str, aliases: str = "") -> Setting:
    """`setting("clip: float = 0.2")`, in a module that begins with `aliases`."""
    *body, function = ast.parse(f"{aliases}\ndef f(*, {parameter}): ...").body
    names = names_of(body, {})
    (own,) = inspect.signature(stub_of_function(function, "module", Path("module.py"), names)).parameters.values()
    return read_setting(own, names)


def said(parameter: str, value: object, aliases: str = "") -> str:
    return "\n".join(setting(parameter, aliases).wrong(value, "with: {SETTING}") or ())


@pytest.mark.parametrize(("annotation", "inside", "outside"), [
    ("Annotated[float, Field(ge=0)]", (0, 0.5, 9), (-1, -1e-9, None)),
    ("Annotated[float, Field(gt=0, le=1)]", (1, 1e-9), (0, 1.1, -1)),
    ("Annotated[float, Field(gt=-1e3, lt=.5)]", (-999, 0.4), (-1000, 0.5)),
    ("Annotated[float, Field(ge=1)]", (1,), (True, "2", None, math.inf, math.nan)),
    ("Annotated[float, Field(ge=1)] | None", (1, None), (0,)),
    ("Annotated[float | None, Field(ge=1)]", (1, None), (0,)),
    ("Optional[Annotated[int, Field(ge=1)]]", (1, None), (0, 1.5)),
    ("typing.Annotated[float, pydantic.Field(ge=1)]", (1,), (0,)),
    ("'Annotated[float, Field(ge=1)]'", (1,), (0,)),
    ("Annotated[Annotated[int, Field(ge=1)], Field(le=3)]", (1, 3), (0, 4)),
    ("Annotated[int, 'how many', Field(ge=1, description='how many')]", (1,), (0,)),
    ("PositiveInt", (1,), (0, 1.5)), ("NonNegativeFloat | None", (0, None), (-1,)), ("Share", (0.5,), (2,)),
    ("Annotated[str, Field(pattern='^https?://')]", ("http://x",), ("x", 3)),
    ("Annotated[str, Field(min_length=1, max_length=2)]", ("ab",), ("", "abc")),
    ("Annotated[list[Share], Field(min_length=1)]", ([0.5],), ([], [2.0], ["x"])),
    ("Level", ("token",), ("word",)), ("Literal[2]", (2,), (3,)), ("Regex", ("a+",), ("(", 3)),
    ("dict[str, int]", ({"a": 1},), ({"a": "b"}, 3)), ("int | str", (1, "a"), (1.5,)),
    ("numpy.ndarray", (1, "anything"), ()), ("Mine | None", (1, "anything"), ()),
    ("Annotated[Mine, Field(ge=1)]", (1,), (0, "x")),
])
def test_values_that_fit_and_those_that_do_not(annotation, inside, outside):
    read = setting(f"x: {annotation}", "Share = Annotated[float, Field(ge=0, le=1)]\nLevel = Literal['token', 'row']")
    assert [value for value in inside if read.errors(value)] == []
    assert [value for value in outside if not read.errors(value)] == []


@pytest.mark.parametrize(("annotation", "why"), [
    ("Annotated[float, Field(ge=LIMIT)]", "has `Field(ge=LIMIT)` in its annotation, and only plain values can be"),
    ("Annotated[float, Gt(0)]", "has `Gt(0)` in its annotation, which cannot be read without importing the module"),
    ("Annotated[float, Field(min=0)]", "Arguments that are read: ge, gt, le, lt, min_length, max_length, pattern,"),
    ("Annotated[float, Field(**LIMITS)]",
     "has the annotation Annotated[float, Field(**LIMITS)], which cannot be read without importing"),
    ("Annotated[float, Field(0.5, ge=0)]", "has `Field(default=0.5)` in its annotation"),
    ("Literal[Color.RED]", "has the annotation Literal[Color.RED], and only plain values can be read"),
    ("Annotated[float, Field(gt=1, lt=0)]", "must be above 1 and below 0, which no number is"),
    ("Annotated[float, Field(gt=0)] = 0.0", "has a default that must be above 0, not 0.0"),
    ("Annotated[str, Field(pattern='(')] = 'x'", "has bounds that do not fit its type"),
    ("Annotated[str, Field(pattern='(')]", "has bounds that do not fit its type"),
    ("Annotated[int, Field(pattern='x')] = 3", "has a default that must be a whole number, not 3"),
    ("list[Annotated[str, Field(pattern='(')]]", "has bounds that do not fit its type"),
    ("Annotated[int, Field(ge=0)] = 0.5", "has a default that must be a whole number, not 0.5"),
    ("Annotated[float, Field(ge='0')]", "has bounds that do not fit its type"),
])
def test_what_cannot_be_read_says_why(annotation, why):
    with pytest.raises(Unreadable) as caught:
        setting(f"x: {annotation}")
    assert why in str(caught.value)


@pytest.mark.parametrize(("parameter", "value", "text"), [
    ("x: Annotated[float, Field(gt=0, le=1)]", 0, "must be above 0 and at most 1, not 0\nInstead:  with: {x: 1}"),
    ("x: Annotated[float, Field(gt=0, lt=1)]", 1, "must be above 0 and below 1, not 1\nInstead:  with: {x: 0.5}"),
    ("x: Annotated[float, Field(gt=1)]", 1, "must be above 1, not 1\nInstead:  with: {x: 2}"),
    ("x: Annotated[float, Field(lt=0)]", 1, "must be below 0, not 1\nInstead:  with: {x: -1}"),
    ("x: Annotated[int, Field(ge=1)] = 8", 0, "must be at least 1, not 0\nInstead:  with: {x: 8}"),
    ("x: PositiveFloat | None = None", 0, "must be above 0, not 0\nTake `x` out, or give a number above 0."),
    ("x: PositiveFloat | None = None", "wide", "must be a number or null, not 'wide'\nIts default is None."),
    ("x: Literal['a', 'b'] = 'a'", "c", "must be one of ['a', 'b'], not 'c'\nIts default is 'a'."),
    ("x: Literal['token', 'row'] = 'row'", "tokn",
     "must be one of ['token', 'row'], not 'tokn'\nDid you mean `token`?"),
    ("x: list[PositiveInt]", [3, 0], "must be above 0 in 1, not 0\n"),
    ("x: Annotated[str, Field(pattern='^http')]", "ftp", "must be text that matches ^http, not 'ftp'\n"),
    ("x: Regex", "(", "is not a regular expression: missing ), unterminated subpattern at position 0\nIn YAML, put"),
])
def test_what_is_said_and_proposed(parameter, value, text):
    assert said(parameter, value).startswith(text)
