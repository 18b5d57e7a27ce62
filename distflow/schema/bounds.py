"""What values a setting may have, as `@node(bounds=…)` writes it: ">= 1", or "> 0, <= 1"."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

_PART = re.compile(r"\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
_SIGNS = {">=": (operator.ge, "at least"), ">": (operator.gt, "above"), "<=": (operator.le, "at most"),
          "<": (operator.lt, "below")}


def readable(bounds: Any) -> bool:
    """Whether it is text: comparisons with numbers, separated by commas, which some number meets."""
    parts = bounds.split(",") if isinstance(bounds, str) else [""]
    return all(_PART.fullmatch(part) for part in parts) and within(nearest_within(bounds), bounds)


def within(value: Any, bounds: str) -> bool:
    """Whether `value` is a finite number that meets them."""
    if type(value) not in (int, float) or not math.isfinite(value):
        return False
    return all(_SIGNS[sign][0](value, limit) for sign, limit in _parts(bounds))


def in_words(bounds: str) -> str:
    """`above 0 and at most 1`."""
    return " and ".join(f"{_SIGNS[sign][1]} {limit:g}" for sign, limit in _parts(bounds))


def nearest_within(bounds: str) -> float:
    """A number that meets them if one does: a bound that belongs to what it bounds, or one beside it."""
    limits = [limit for _, limit in _parts(bounds)]
    middle = (min(limits) + max(limits)) / 2
    candidates = [*limits, min(limits) - 1, max(limits) + 1, middle]
    found = next((value for value in candidates if within(value, bounds)), math.nan)
    return int(found) if found == found // 1 else found


def _parts(bounds: str) -> list[tuple[str, float]]:
    found = [_PART.fullmatch(part) for part in bounds.split(",")]
    return [(match[1], float(match[2])) for match in found if match]
