"""Lookup of facts by name."""

from __future__ import annotations

import json
from pathlib import Path

from distflow.contracts.decorators import Turn, environment
from workers.isolation.rewards import behind_thoughts


@environment(safe=True, stateless=True)
class Lookup:
    """Answers `lookup: KEY`, the last line of a turn, with the fact of that key; a turn without it is the last one.

    The facts are a JSON object of texts: the row's own in the column `facts`, or with `FactFile` a file's. The last
    turn earns 1 if it holds the row's answer, else 0.
    """

    def __init__(self, facts: str, answer: str):
        self.facts = json.loads(facts)
        if not isinstance(self.facts, dict) or not all(isinstance(value, str) for value in self.facts.values()):
            raise ValueError('the facts must be a JSON object of texts, as {"capital of Peru": "Lima"}')
        self.answer = answer.rpartition("####")[2].strip()

    def step(self, text: str) -> Turn:
        _, found, key = text.strip().rpartition("\n")[2].partition("lookup:")
        if not found:
            said = behind_thoughts(text) or ""
            return Turn(done=True, reward=float(bool(self.answer) and self.answer.lower() in said.lower()))
        known = {name.lower(): value for name, value in self.facts.items()}
        return Turn(known.get(key.strip().lower(), f"nothing is known of {key.strip()!r}"))


@environment(safe=True, stateless=True)
class FactFile(Lookup):
    """`Lookup` in the facts of one `file` for all rows."""

    def __init__(self, answer: str, *, file: str):
        super().__init__(Path(file).read_text(encoding="utf-8"), answer)
