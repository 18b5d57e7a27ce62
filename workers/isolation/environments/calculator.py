"""A calculator: whole numbers, one operation a turn."""

from __future__ import annotations

import re

from distflow import Turn, environment

_SUM = re.compile(r"\s*(-?\d+)\s*([-+*/])\s*(-?\d+)\s*=?\s*$")
_LONGEST = 100
"""Characters of a number. Products of long ones take long."""


@environment(safe=True)
class Calculator:
    """Answers a turn that ends in `3 + 4` or `3 + 4 =` with the result; a turn that does not is the last one.

    The last turn earns 1 if what follows its `####` is the number that follows the answer's `####`, else 0.
    """

    def __init__(self, answer: str):
        self.wanted = _number(answer)

    def step(self, text: str) -> Turn:
        last = text.rpartition(",")[2]
        found = _SUM.fullmatch(last)
        if found is None or "####" in text or len(last) > _LONGEST:
            return Turn(done=True, reward=float("####" in text and _number(text) == self.wanted))
        left, sign, right = int(found[1]), found[2], int(found[3])
        if sign == "/":
            return Turn(f"{left // right}" if right and left % right == 0 else "not a whole number")
        return Turn(f"{left + right if sign == '+' else left - right if sign == '-' else left * right}")


def _number(text: str) -> str:
    return text.rpartition("####")[2].strip().removesuffix(".")
