"""Consumers of a dock, the layout that all its processes share, and the choice of the rows that a lease gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import torch

from distflow.data.assignment import assign
from distflow.dock.errors import DockError
from distflow.errors import did_you_mean
from distflow.rpc.connection import Address

Ids = numpy.ndarray  # [rows] int64


@dataclass(frozen=True)
class Consumer:
    """Stage of the pipeline that takes rows, as `rollout` or `trainer`; it has one index.

    Args:
        reads: a row is ready for the consumer as soon as it has all these columns.
        writes: the columns that it adds: a timeout names it when one is missing, and a lost shard's are made again.
        group_size: rows of one group, which are leased together once all of them are ready.
        step_rows: rows of a step: a lease for step n gets the ids from n · step_rows on. None: whatever is ready.
        home: number of the shard whose process keeps the index.
        seconds: how long a lease lasts without being renewed.
        can_roll_back: commits of steps can be rolled back until they are released; their rows stay as long.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    group_size: int = 1
    step_rows: int | None = None
    home: int = 0
    seconds: float = 60.0
    can_roll_back: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple(self.reads))
        object.__setattr__(self, "writes", tuple(self.writes))
        if self.seconds <= 0:
            raise DockError(f"a lease of consumer `{self.name}` must last longer than {self.seconds} s")


@dataclass(frozen=True)
class DockLayout:
    """Addresses of the shards by number, and the consumers.

    Row `i` lives in shard `i` modulo their count (MindSpeed RL: warehouses split the batch by sample index). Ids are
    unique in the run and best dense (step · rows + row): shards fill evenly, and consumed rows are a few ranges.
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
    version: int = 0  # of the weights that made it
    group: int = -1  # id shared by the samples of a prompt; -1: a group of its own
    turn: int = -1  # last saved turn, if the row is not finished
    lease: int = 0  # last lease that had the row; 0: none
    held: bool = False


RowGroup = list[RowState]


def choose(rows: Iterable[RowState], consumer: Consumer, count: int, step: int | None) -> list[RowGroup]:
    """Return the groups to lease, in the order in which they became ready: all before the first that does not fit into
    `count` rows. Rows after that are not looked at. Raises `DockError` if the consumer's step is missing."""
    chosen: list[RowGroup] = []
    for group in _groups(rows, consumer, step):
        if len(group) > count:
            break
        chosen.append(group)
        count -= len(group)
        if not count:
            break
    return chosen


def _groups(rows: Iterable[RowState], consumer: Consumer, step: int | None) -> Iterator[RowGroup]:
    if consumer.step_rows is not None and step is None:
        raise DockError(f"`{consumer.name}` takes its rows by step: lease(…, step=…)")
    waiting: dict[int, RowGroup] = {}
    for row in rows:
        if consumer.step_rows is not None and row.id // consumer.step_rows != step:
            continue
        group = waiting.setdefault(row.group, [])
        group.append(row)
        if row.group == -1 or len(group) == consumer.group_size:
            yield waiting.pop(row.group)


def deal(groups: list[RowGroup], shares: int) -> list[RowGroup]:
    """Share groups between the ranks that work on one step, about as many tokens to each; return each share's rows."""
    if shares == 1:
        return [[row for group in groups for row in group]]
    weights = torch.tensor([sum(max(row.tokens, 1) for row in group) for group in groups], dtype=torch.int64)
    result: list[RowGroup] = [[] for _ in range(shares)]
    for group, share in zip(groups, assign(weights, shares).tolist()):
        result[share] += group
    return result
