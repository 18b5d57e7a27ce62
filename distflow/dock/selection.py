"""Which ready rows a consumer gets next, and how the ranks of its group share them: plain functions in two registries.

A rule takes units (lists of rows that stay together) in the order in which they became ready and yields units in the
order in which they shall go. Rules follow one another, so that `fresh`, `whole_groups` and `by_priority` combine. It
is lazy: rows that nobody asks for are not looked at. Your own:

    @selection
    def shortest_first(units, ask):
        return sorted(units, key=lambda unit: sum(row.tokens for row in unit))

Who consumes what, and where everything lives: the few facts that all processes of a dock share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
import torch

from distflow.data.assignment import assign
from distflow.dock.errors import DockError
from distflow.errors import did_you_mean

Address = tuple[str, int]
"""Host and port."""
Ids = numpy.ndarray
"""[rows] int64."""


@dataclass(frozen=True)
class Consumer:
    """A worker state that takes rows, as `reward` or `update`; it has one controller.

    A row is ready for it as soon as it has all columns of `reads`. `writes` says which columns it owes to others: that
    is how the dock knows whom to name when one is missing, and what to do again when a warehouse was lost. `rules`
    are names of the selection registry with their settings, applied in order: `{"fresh": {"bound": 1}}`. Its
    controller lives with warehouse number `home`. `seconds`: how long a lease lasts without a sign of life. `recalls`:
    its commits of steps can be taken back until they are settled; their rows stay as long.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    deal: str = "balanced"
    home: int = 0
    seconds: float = 60.0
    recalls: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple(self.reads))
        object.__setattr__(self, "writes", tuple(self.writes))
        check_rules(self.name, self.rules, self.deal)
        if self.seconds <= 0:
            raise DockError(f"a lease of consumer `{self.name}` must last longer than {self.seconds} s")


@dataclass(frozen=True)
class DockLayout:
    """The warehouses by number, and the consumers. Row `i` lives in warehouse `i` modulo their count.

    Row ids must be unique in the run and are best dense (step · rows + row): then warehouses fill evenly, and what
    was consumed is remembered as a few ranges (MindSpeed RL: warehouses split the batch by sample index).
    """

    addresses: tuple[Address, ...]
    consumers: tuple[Consumer, ...]

    def __post_init__(self) -> None:
        names = [consumer.name for consumer in self.consumers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DockError(f"each consumer has one controller, but there are several named {', '.join(twice)}")
        for consumer in self.consumers:
            if not 0 <= consumer.home < len(self.addresses):
                raise DockError(f"consumer `{consumer.name}` lives with warehouse {consumer.home}, but warehouses are "
                                f"numbered 0 to {len(self.addresses) - 1}")

    def consumer(self, name: str) -> Consumer:
        for consumer in self.consumers:
            if consumer.name == name:
                return consumer
        hint = did_you_mean(name, [consumer.name for consumer in self.consumers])
        raise DockError(f"there is no consumer `{name}` at this dock. {hint}")

    def writers(self, column: str) -> list[Consumer]:
        """The consumers that owe a column."""
        return [consumer for consumer in self.consumers if column in consumer.writes]

    def split(self, ids: Ids) -> Iterable[tuple[int, Ids]]:
        """Which of `ids` live in which warehouse: (its number, their places in `ids`), for those that have any."""
        homes = ids % len(self.addresses)
        for number in range(len(self.addresses)):
            places = numpy.flatnonzero(homes == number)
            if len(places):
                yield number, places

    def to_plain(self) -> dict[str, Any]:
        """As msgpack carries it."""
        return {"addresses": [list(address) for address in self.addresses],
                "consumers": [asdict(consumer) for consumer in self.consumers]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> DockLayout:
        return cls(tuple((host, port) for host, port in plain["addresses"]),
                   tuple(Consumer(**consumer) for consumer in plain["consumers"]))


@dataclass(slots=True)
class RowState:
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


Unit = list[RowState]


@dataclass
class LeaseRequest:
    """A request for rows. `version` is that of the consumer's weights; None is what it did not say."""

    count: int
    version: int | None = None
    step: int | None = None
    discarded: list[RowState] = field(default_factory=list)
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
def first_come(units: Iterable[Unit], ask: LeaseRequest) -> Iterable[Unit]:
    """In the order in which rows became ready."""
    return units


@selection
def fresh(units: Iterable[Unit], ask: LeaseRequest, *, bound: int) -> Iterator[Unit]:
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
def whole_groups(units: Iterable[Unit], ask: LeaseRequest, *, size: int) -> Iterator[Unit]:
    """Groups of `size` rows, all of them ready, in the order in which they became whole."""
    waiting: dict[int, Unit] = {}
    for unit in units:
        for row in unit:
            together = waiting.setdefault(row.group, [])
            together.append(row)
            if row.group == -1 or len(together) == size:
                yield waiting.pop(row.group)


@selection
def of_step(units: Iterable[Unit], ask: LeaseRequest, *, rows: int) -> Iterator[Unit]:
    """Rows of the step that the asker names: `rows` of them, whose ids are those from step · rows on."""
    if ask.step is None:
        raise DockError("the rule `of_step` needs the asker's step: lease(…, step=…)")
    return (unit for unit in units if unit[0].id // rows == ask.step)


@selection
def by_priority(units: Iterable[Unit], ask: LeaseRequest) -> Iterable[Unit]:
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


def choose(rows: Iterable[RowState], rules: Mapping[str, Mapping[str, Any]], ask: LeaseRequest) -> list[Unit]:
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
