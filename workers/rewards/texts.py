"""Rewards for what a text says and how: `math`, `format`, `length`."""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from distflow import reward
from distflow.schema.errors import InvalidInput
from distflow.schema.registry import Regex

_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+|/[1-9]\d*)?")
_DIGITS = 1000
"""A longer number is compared as text: Python turns no more than 4,300 digits into a number."""


def _of_plain_numbers(completion: str, answer: str) -> float | None:
    """What `math` says where both are plain numbers or nothing: no more than a regular expression without choices."""
    expected, given = _compared(completion, answer)
    if given is None:
        return 0.0
    return float(_equal_numbers(expected, given)) if _plain(expected) and _plain(given) else None


@reward(timeout=10.0, shortcut=_of_plain_numbers)
def math(completion: str, answer: str) -> float:
    """1.0 if the completion's final answer equals the reference's, else 0.0.

    The final answer is what follows the last `####` (GSM8K); in a completion without it, what stands in `\\boxed{}`;
    and if the reference has no `####` either, the whole text.
    Plain numbers are compared exactly; anything else by math-verify (LaTeX, sets, equations, units).
    """
    expected, given = _compared(completion, answer)
    return 0.0 if given is None else float(_equal(expected, given))


def _wrong_form(pattern: str | None = None, tags: list[str] | None = None) -> str:
    return "takes a `pattern` or `tags`, not both" if pattern is not None and tags is not None else ""


def _wrong_length(cap: int | None = None, margin: int = 0, target: int | None = None) -> str:
    if (cap is None) == (target is None):
        return "needs a `cap` or a `target`\nreward: {length: {cap: 1024, margin: 256}}"
    if target is not None and (target < 1 or margin):
        return f"needs a `target` of at least 1, without `margin`, not {target} and {margin}"
    return "" if cap is None or 0 <= margin <= cap else f"needs a `margin` from 0 to its cap of {cap}, not {margin}"


@reward(check=_wrong_form)
def format(completion: str, *, pattern: Regex | None = None, tags: list[str] | None = None) -> float:  # noqa: A001
    """1.0 if the completion has the form, else 0.0.

    Args:
        pattern: a regular expression for the whole completion; `.` stands for line ends too.
        tags: names of the elements that the completion consists of, each once and in this order, with nothing but
            space between them; default `[think, answer]`, unless there is a pattern.
    """
    if wrong := _wrong_form(pattern, tags):
        raise InvalidInput(f"reward `format` {wrong}")
    if pattern is not None:
        return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)
    tags = ["think", "answer"] if tags is None else tags
    if any(completion.count(mark) != 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>")):
        return 0.0
    whole = r"\s*".join(f"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags)
    return float(re.fullmatch(rf"\s*{whole}\s*", completion, re.DOTALL) is not None)


@reward(in_rank=True, check=_wrong_length)
def length(response: list[int], *, cap: int | None = None, margin: int = 0, target: int | None = None) -> float:
    """Between 0.0, for a good length in tokens, and -1.0.

    With `cap`, a response is good up to `cap - margin` tokens; from there it falls in a straight line to -1.0 at
    `cap` (the soft overlong punishment of DAPO, Yu et al. 2025, eq. 13). With `target`, it falls by
    |tokens - target| / target.
    """
    if wrong := _wrong_length(cap, margin, target):
        raise InvalidInput(f"reward `length` {wrong}")
    if target is not None:
        return -min(1.0, abs(len(response) - target) / target)
    over = len(response) - (cap - margin)
    return -min(1.0, max(0.0, over / margin)) if margin else -float(over > 0)


def _compared(completion: str, answer: str) -> tuple[str, str | None]:
    """The reference's final answer and the completion's; None if it gives none."""
    if "####" not in completion and "\\boxed" in completion:
        return _final(answer), completion
    if "####" in answer and "####" not in completion:
        return _final(answer), None
    return _final(answer), _final(completion)


def _final(text: str) -> str:
    return text.rpartition("####")[2].strip()


@functools.lru_cache(maxsize=65536)
def _equal(expected: str, given: str) -> bool:
    if _plain(expected) and _plain(given):
        return _equal_numbers(expected, given)
    from math_verify import parse, verify  # loads sympy: only answers that are no plain numbers pay for it

    return bool(verify(parse(f"${expected}$"), parse(given if "\\boxed" in given else f"${given}$")))


def _plain(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def _equal_numbers(expected: str, given: str) -> bool:
    if max(len(expected), len(given)) > _DIGITS:
        return expected == given
    return Fraction(expected.replace(",", "")) == Fraction(given.replace(",", ""))
