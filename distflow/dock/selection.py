"""Selection of the rows that a consumer gets next, and the layout that all processes of a dock share.

A rule takes groups (lists of rows that stay together) in the order in which they became ready and yields groups in
the order in which they are to be leased. Rules are chained, so that `fresh`, `whole_groups` and `by_priority` combine,
and lazy: rows that no lease needs are not looked at. A deal shares groups between the ranks that work on one step.
Both are plain functions in a registry. A rule of one's own:

    @selection
    def shortest_first(groups, ask):
        return sorted(groups, key=lambda group: sum(row.tokens for row in group))
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
from distflow.rpc.connection import Address

Ids = numpy.ndarray
"""[rows] int64."""


@dataclass(frozen=True)
class Consumer:
    """Stage of the pipeline that takes rows, as `reward` or `update`; it has one index.

    Args:
        reads: a row is ready for the consumer as soon as it has all these columns.
        writes: the columns that it adds: a timeout names it when one is missing, and a lost shard's are made again.
        rules: names of the selection registry with their settings, applied in order: `{"fresh": {"bound": 1}}`.
        home: number of the shard whose process keeps the index.
        seconds: how long a lease lasts without being renewed.
        can_roll_back: commits of steps can be rolled back until they are released; their rows stay as long.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    deal: str = "balanced"
    home: int = 0
    seconds: float = 60.0
    can_roll_back: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple(self.reads))
        object.__setattr__(self, "writes", tuple(self.writes))
        check_rules(self.name, self.rules, self.deal)
        if self.seconds <= 0:
            raise DockError(f"a lease of consumer `{self.name}` must last longer than {self.seconds} s")


@dataclass(frozen=True)
class DockLayout:
    """Addresses of the shards by number, and the consumers. Row `i` lives in shard `i` modulo their count.

    Row ids must be unique in the run and are best dense (step · rows + row): then shards fill evenly, and the
    consumed rows are a few ranges (MindSpeed RL: warehouses split the batch by sample index).
    """

    addresses: tuple[Address, ...]
    consumers: tuple[Consumer, ...]

    def __post_init__(self) -> None:
        names = [consumer.name for consumer in self.consumers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DockError(f"each consumer has one index, but there are several named {', '.join(twice)}")
        for consumer in self.consumers:
            if not 0 <= consumer.home < len(self.addresses):
                raise DockError(f"consumer `{consumer.name}` lives with shard {consumer.home}, but shards are "
                                f"numbered 0 to {len(self.addresses) - 1}")

    def consumer(self, name: str) -> Consumer:
        for consumer in self.consumers:
            if consumer.name == name:
                return consumer
        hint = did_you_mean(name, [consumer.name for consumer in self.consumers])
        raise DockError(f"there is no consumer `{name}` at this dock. {hint}")

    def writers(self, column: str) -> list[Consumer]:
        return [consumer for consumer in self.consumers if column in consumer.writes]

    def split(self, ids: Ids) -> Iterable[tuple[int, Ids]]:
        """Yield (shard number, positions in `ids`) for each shard in which any of the rows live."""
        shards = ids % len(self.addresses)
        for number in range(len(self.addresses)):
            positions = numpy.flatnonzero(shards == number)
            if len(positions):
                yield number, positions

    def to_plain(self) -> dict[str, Any]:
        return {"addresses": [list(address) for address in self.addresses],
                "consumers": [asdict(consumer) for consumer in self.consumers]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> DockLayout:
        return cls(tuple((host, port) for host, port in plain["addresses"]),
                   tuple(Consumer(**consumer) for consumer in plain["consumers"]))


@dataclass(slots=True)
class RowState:
    """Metadata of a row in a consumer's index."""

    id: int
    columns: set[str]
    tokens: int = 0
    version: int = 0
    """Of the weights that made it."""
    group: int = -1
    """Id shared by the samples of a prompt; -1: a group of its own."""
    priority: int = 0
    """Higher goes first."""
    turn: int = -1
    """Last saved turn, if the row is not finished."""
    lease: int = 0
    """Last lease that had the row; 0: none."""
    held: bool = False


RowGroup = list[RowState]


@dataclass
class LeaseRequest:
    """Request for rows. `version` is that of the consumer's weights."""

    count: int
    version: int | None = None
    step: int | None = None
    discarded: list[RowState] = field(default_factory=list)
    """Rows that a rule drops for good: they count as consumed."""


Rule = Callable[..., Iterable[RowGroup]]
Deal = Callable[[list[RowGroup], int], list[RowGroup]]
RULES: dict[str, Rule] = {}
DEALS: dict[str, Deal] = {}


def selection(rule: Rule) -> Rule:
    """Register a rule under its name: `rule(groups, ask, **settings)` yields groups."""
    RULES[rule.__name__] = rule
    return rule


def deal(function: Deal) -> Deal:
    """Register a way to share groups between ranks: `function(groups, shares)` returns each share's rows."""
    DEALS[function.__name__] = function
    return function


@selection
def first_come(groups: Iterable[RowGroup], ask: LeaseRequest) -> Iterable[RowGroup]:
    """Yield rows in the order in which they became ready."""
    return groups


@selection
def fresh(groups: Iterable[RowGroup], ask: LeaseRequest, *, bound: int) -> Iterator[RowGroup]:
    """Yield rows of weights at most `bound` versions older than the consumer's; discard older ones.

    A group with a stale row is discarded whole: half a group has no advantage. Put `whole_groups` before this rule.
    """
    if ask.version is None:
        raise DockError("the rule `fresh` needs the version of the consumer's weights: lease(…, version=…)")
    for group in groups:
        if min(row.version for row in group) < ask.version - bound:
            ask.discarded += group
        else:
            yield group


@selection
def whole_groups(groups: Iterable[RowGroup], ask: LeaseRequest, *, size: int) -> Iterator[RowGroup]:
    """Yield groups of `size` rows, all of them ready, in the order in which they became whole."""
    waiting: dict[int, RowGroup] = {}
    for group in groups:
        for row in group:
            together = waiting.setdefault(row.group, [])
            together.append(row)
            if row.group == -1 or len(together) == size:
                yield waiting.pop(row.group)


@selection
def of_step(groups: Iterable[RowGroup], ask: LeaseRequest, *, rows: int) -> Iterator[RowGroup]:
    """Yield the `rows` rows of the requested step: ids from step · rows on."""
    if ask.step is None:
        raise DockError("the rule `of_step` needs a step: lease(…, step=…)")
    return (group for group in groups if group[0].id // rows == ask.step)


@selection
def by_priority(groups: Iterable[RowGroup], ask: LeaseRequest) -> Iterable[RowGroup]:
    """Yield groups by priority, highest first; equal ones as they came."""
    return sorted(groups, key=lambda group: -max(row.priority for row in group))


@deal
def balanced(groups: list[RowGroup], shares: int) -> list[RowGroup]:
    """Give every rank about as many tokens (longest processing time first, as in the databuffer)."""
    weights = torch.tensor([sum(max(row.tokens, 1) for row in group) for group in groups], dtype=torch.int64)
    result: list[RowGroup] = [[] for _ in range(shares)]
    for group, share in zip(groups, assign(weights, shares).tolist()):
        result[share] += group
    return result


@deal
def in_turn(groups: list[RowGroup], shares: int) -> list[RowGroup]:
    """Give one group to each rank in turn: as many groups to every rank, whatever their length."""
    return [[row for group in groups[share::shares] for row in group] for share in range(shares)]


def choose(rows: Iterable[RowState], rules: Mapping[str, Mapping[str, Any]], ask: LeaseRequest) -> list[RowGroup]:
    """Return the groups to lease: as many as come before one that does not fit into `ask.count` rows."""
    groups: Iterable[RowGroup] = ([row] for row in rows)
    for name, settings in rules.items():
        groups = RULES[name](groups, ask, **settings)
    chosen, total = [], 0
    if ask.count < 1:
        return chosen
    for group in groups:
        if total + len(group) > ask.count:
            break
        chosen.append(group)
        total += len(group)
        if total == ask.count:
            break
    return chosen


def check_rules(consumer: str, rules: Mapping[str, Any], deal: str) -> None:
    """Raise `DockError` if a consumer names a rule or a deal that is not registered."""
    for name, known in [(rule, RULES) for rule in rules] + [(deal, DEALS)]:
        if name not in known:
            raise DockError(f"consumer `{consumer}` wants its rows by `{name}`, which is not registered. "
                            f"{did_you_mean(name, known)}")
