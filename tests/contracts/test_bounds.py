"""What a bound lets through, says and proposes."""

from __future__ import annotations

import math

import pytest

from distflow.contracts.signature import in_words, nearest_within, readable, within


@pytest.mark.parametrize(("bounds", "inside", "outside"), [
    (">= 0", (0, 0.5, 9), (-1, -1e-9)),
    ("> 0, <= 1", (1, 1e-9), (0, 1.1, -1)),
    (">-1e3,<.5", (-999, 0.4), (-1000, 0.5)),
    (">= 1", (1,), (True, "2", None, math.inf, math.nan)),
])
def test_what_is_within(bounds: str, inside: tuple, outside: tuple) -> None:
    assert readable(bounds)
    assert all(within(value, bounds) for value in inside)
    assert not any(within(value, bounds) for value in outside)
    assert within(nearest_within(bounds), bounds)


@pytest.mark.parametrize("bounds", ["", "0", "=> 0", ">= zero", "> 1, < 0", "> 0,", 0, None])
def test_what_is_not_readable(bounds) -> None:
    assert not readable(bounds)


def test_what_is_said_and_proposed() -> None:
    assert in_words("> 0, <= 1") == "above 0 and at most 1"
    assert in_words("") == ""
    assert [nearest_within(bounds) for bounds in (">= 1", "> 1", "< 0", "> 0, < 1", "> 0, <= 1")] == [1, 2, -1, 0.5, 1]
