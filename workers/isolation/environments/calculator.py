"""Calculator for whole numbers, one operation per turn."""

from __future__ import annotations

import re

from distflow.contracts.decorators import Turn, environment
from workers.isolation.environments import final_answer

_SUM = re.compile(r"\s*(-?\d+)\s*([-+*/])\s*(-?\d+)\s*=?\s*$")
_MAX_LENGTH = 100  # characters of an expression: products of long numbers take long


@environment(safe=True, stateless=True)
class Calculator:
    """Answers a turn that ends in `3 + 4` or `3 + 4 =` with the result; a turn that does not is the last one, and earns
    1 if what follows its `####` is the number that follows the answer's `####`, else 0."""

    def __init__(self, answer: str):
        self.expected = _number(final_answer(answer) or answer)

    def step(self, text: str) -> Turn:
        last, given = text.rpartition(",")[2], final_answer(text)
        found = _SUM.fullmatch(last)
        if found is None or given is not None or len(last) > _MAX_LENGTH:
            return Turn(done=True, reward=float(given is not None and _number(given) == self.expected))
        left, sign, right = int(found[1]), found[2], int(found[3])
        if sign == "/":
            return Turn(f"{left // right}" if right and left % right == 0 else "not a whole number")
        return Turn(f"{left + right if sign == '+' else left - right if sign == '-' else left * right}")


def _number(text: str) -> str:
    return text.strip().removesuffix(".")
