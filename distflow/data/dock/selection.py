"""Which ready rows a consumer gets next, and how the ranks of its group share them: plain functions in two registries.

A rule takes units (lists of rows that stay together) in the order in which they became ready and yields units in the
order in which they shall go. Rules follow one another, so that `fresh`, `whole_groups` and `by_priority` combine. It
is lazy: rows that nobody asks for are not looked at. Your own:

    @selection
    def shortest_first(units, ask):
        return sorted(units, key=lambda unit: sum(row.tokens for row in unit))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distflow.data.balance import assign
from distflow.data.dock.errors import DockError
from distflow.schema.errors import did_you_mean


@dataclass(slots=True)
class Row:
    """What a controller knows of a row that is not consumed: metadata only."""

    id: int
    columns: set[str]
    tokens: int = 0
    version: int = 0
    """The weights that made it."""
    group: int = -1
    """Of the prompt it stems from; -1: it is a group of its own."""
    priority: int = 0
    """Higher goes first."""
    turn: int = -1
    """The last turn of it that is saved, if it is not finished."""
    lease: int = 0
    """The last lease that had it; 0: none."""
    held: bool = False


Unit = list[Row]


@dataclass
class Ask:
    """A request for rows. `version` is that of the consumer's weights; None is what it did not say."""

    count: int
    version: int | None = None
    step: int | None = None
    discarded: list[Row] = field(default_factory=list)
    """Where a rule puts rows that this consumer will never want: they count as consumed."""


Rule = Callable[..., Iterable[Unit]]
Deal = Callable[[list[Unit], int], list[Unit]]
RULES: dict[str, Rule] = {}
DEALS: dict[str, Deal] = {}


def selection(rule: Rule) -> Rule:
    """Register a rule under its name: `rule(units, ask, **settings)` yields units."""
    RULES[rule.__name__] = rule
    return rule


def deal(function: Deal) -> Deal:
    """Register a way to share units between ranks: `function(units, shares)` returns each share's rows."""
    DEALS[function.__name__] = function
    return function


@selection
def first_come(units: Iterable[Unit], ask: Ask) -> Iterable[Unit]:
    """In the order in which rows became ready."""
    return units


@selection
def fresh(units: Iterable[Unit], ask: Ask, *, bound: int) -> Iterator[Unit]:
    """Rows that weights at most `bound` versions older than the asker's have made; older ones are discarded.

    A unit that has one stale row goes as a whole: half a group has no advantage. Put `whole_groups` before it.
    """
    if ask.version is None:
        raise DockError("the rule `fresh` needs the version of the asker's weights: lease(…, version=…)")
    for unit in units:
        if min(row.version for row in unit) < ask.version - bound:
            ask.discarded += unit
        else:
            yield unit


@selection
def whole_groups(units: Iterable[Unit], ask: Ask, *, size: int) -> Iterator[Unit]:
    """Groups of `size` rows, all of them ready, in the order in which they became whole."""
    waiting: dict[int, Unit] = {}
    for unit in units:
        for row in unit:
            together = waiting.setdefault(row.group, [])
            together.append(row)
            if row.group == -1 or len(together) == size:
                yield waiting.pop(row.group)


@selection
def of_step(units: Iterable[Unit], ask: Ask, *, rows: int) -> Iterator[Unit]:
    """Rows of the step that the asker names: `rows` of them, whose ids are those from step · rows on."""
    if ask.step is None:
        raise DockError("the rule `of_step` needs the asker's step: lease(…, step=…)")
    return (unit for unit in units if unit[0].id // rows == ask.step)


@selection
def by_priority(units: Iterable[Unit], ask: Ask) -> Iterable[Unit]:
    """Highest priority first; equals as they came."""
    return sorted(units, key=lambda unit: -max(row.priority for row in unit))


@deal
def balanced(units: list[Unit], shares: int) -> list[Unit]:
    """About as many tokens to every rank (longest processing time first, as in the databuffer)."""
    weights = torch.tensor([sum(max(row.tokens, 1) for row in unit) for unit in units], dtype=torch.int64)
    result: list[Unit] = [[] for _ in range(shares)]
    for unit, share in zip(units, assign(weights, shares).tolist()):
        result[share] += unit
    return result


@deal
def in_turn(units: list[Unit], shares: int) -> list[Unit]:
    """One unit to each rank in turn: as many units to every rank, whatever their length."""
    return [[row for unit in units[share::shares] for row in unit] for share in range(shares)]


def choose(rows: Iterable[Row], rules: Mapping[str, Mapping[str, Any]], ask: Ask) -> list[Unit]:
    """The units to hand out: as many as come before one that does not fit into `ask.count` rows."""
    units: Iterable[Unit] = ([row] for row in rows)
    for name, settings in rules.items():
        units = RULES[name](units, ask, **settings)
    chosen, total = [], 0
    if ask.count < 1:
        return chosen
    for unit in units:
        if total + len(unit) > ask.count:
            break
        chosen.append(unit)
        total += len(unit)
        if total == ask.count:
            break
    return chosen


def check_rules(consumer: str, rules: Mapping[str, Any], way: str) -> None:
    """Raises:
        DockError: a consumer names a rule or a deal that is not registered.
    """
    for name, known in [(rule, RULES) for rule in rules] + [(way, DEALS)]:
        if name not in known:
            raise DockError(f"consumer `{consumer}` wants its rows by `{name}`, which is not registered. "
                            f"{did_you_mean(name, known)}")
