"""Which rewards make up a sample's reward, as a DAG or a run says it.

    reward: math                                        one
    reward: [math, format]                              their sum
    reward: {math: 1.0, length: 0.2}                    a weighted sum
    reward: {format: {weight: 0.5, tags: [answer]}}     with settings of the reward, or its `timeout` and `retries`
    reward: {by: source, rewards: {gsm8k: math, mbpp: code}}    by what stands in a column; each as above
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distflow.schema.errors import did_you_mean

Path = tuple[str | int, ...]
_FORMS = "Write a name, a list of names, or weights:  reward: {math: 1.0, length: 0.2}"
_BY = "As in  reward: {by: source, rewards: {gsm8k: math, mbpp: code}}"


@dataclass(frozen=True)
class Term:
    """One reward of a sum. `path` is where it stands below the setting."""

    name: str
    weight: float = 1.0
    timeout: float | None = None
    retries: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    path: Path = ()
    named_by_key: bool = False


@dataclass(frozen=True)
class Recipe:
    """The terms of each branch. `by` is the column whose value chooses one; "" if there is one for all, called ""."""

    by: str
    branches: dict[str, tuple[Term, ...]]

    @property
    def terms(self) -> list[Term]:
        return [term for terms in self.branches.values() for term in terms]

    def of(self, source: str) -> tuple[Term, ...] | None:
        """The terms for a row with this value of the column `by`; None if it says nothing of it."""
        return self.branches.get(source if self.by else "")


@dataclass(frozen=True)
class Flaw:
    """What is wrong at `path` below the setting."""

    path: Path
    what: str
    hint: str = ""
    key: bool = False
    """Whether it is about the key that stands there, not its value."""


def read_recipe(value: Any) -> tuple[Recipe, list[Flaw]]:
    """A recipe as far as it can be read, and all that is wrong with it."""
    flaws: list[Flaw] = []
    if isinstance(value, dict) and ("by" in value or isinstance(value.get("rewards"), dict)):
        return _read_branches(value, flaws), flaws
    return Recipe("", {"": _read_terms(value, (), flaws)}), flaws


def _read_branches(value: dict[str, Any], flaws: list[Flaw]) -> Recipe:
    for key in value:
        if key not in ("by", "rewards"):
            flaws.append(Flaw((key,), f"unknown key `{key}` beside `by` and `rewards`",
                              did_you_mean(key, ("by", "rewards")), key=True))
    column, rewards = value.get("by"), value.get("rewards")
    if not isinstance(column, str) or not column:
        flaws.append(Flaw(("by",) if "by" in value else (), "`by` must name a column of text", _BY))
    if not isinstance(rewards, dict) or not rewards:
        flaws.append(Flaw(("rewards",) if "rewards" in value else (), "`rewards` must say the reward for each value of "
                          f"`{column}`", _BY))
        rewards = {}
    branches = {name: _read_terms(item, ("rewards", name), flaws) for name, item in rewards.items()}
    return Recipe(column if isinstance(column, str) else "", branches)


def _read_terms(value: Any, path: Path, flaws: list[Flaw]) -> tuple[Term, ...]:
    if isinstance(value, str):
        return (Term(value, path=path),)
    if isinstance(value, dict) and "by" in value:
        flaws.append(Flaw(path, "`by` cannot stand inside another `by`", _BY))
    elif isinstance(value, dict) and value:
        return tuple(_read_term(name, item, (*path, name), flaws) for name, item in value.items())
    elif isinstance(value, list) and value:
        return tuple(_read_listed(value, path, flaws))
    else:
        flaws.append(Flaw(path, f"a reward cannot be {value!r}", _FORMS))
    return ()


def _read_listed(names: list[Any], path: Path, flaws: list[Flaw]) -> Iterator[Term]:
    for index, name in enumerate(names):
        place = (*path, index)
        if not isinstance(name, str):
            flaws.append(Flaw(place, f"a list of rewards holds names, not {name!r}", _FORMS))
        elif name in names[:index]:
            flaws.append(Flaw(place, f"reward `{name}` stands twice", f"To count it more:  reward: {{{name}: 2.0}}"))
        else:
            yield Term(name, path=place)


def _read_term(name: str, value: Any, path: Path, flaws: list[Flaw]) -> Term:
    given = dict(value) if isinstance(value, dict) else {"weight": value}
    own = {key: given.pop(key) for key in ("weight", "timeout", "retries") if key in given}
    right = {"weight": _is_number, "timeout": lambda it: _is_number(it) and it > 0,
             "retries": lambda it: type(it) is int and it >= 0}
    must = {"weight": "a number", "timeout": "a number of seconds above 0", "retries": "a whole number of at least 0"}
    for key in [key for key, item in own.items() if not right[key](item)]:
        place = (*path, key) if isinstance(value, dict) else path
        hint = "" if isinstance(value, dict) else f"Or a mapping of its settings:  {name}: {{weight: 1.0, …}}"
        flaws.append(Flaw(place, f"the {key} of reward `{name}` must be {must[key]}, not {own.pop(key)!r}", hint))
    return Term(name, **own, settings=given, path=path, named_by_key=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
