"""Consumers of a dock, the layout that all its processes share, and what decides which rows a lease gets."""

from __future__ import annotations

import math
from collections import OrderedDict
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
        group_size: rows of one group, which are leased together once all of them are ready. Group g has the ids from
            g · group_size on.
        step_rows: rows of a step: a lease for step n gets the ids from n · step_rows on, and one for no step those of
            the oldest. None: whatever is ready.
        home: number of the shard whose process keeps the index.
        seconds: how long a lease lasts without being renewed.
        can_roll_back: commits of steps can be rolled back until they are released; their rows stay as long.
        row_bytes: bytes that it, and those after it, write of a row at its longest. Where the dock has no room
            (`DockLayout.max_bytes`), it leases only rows of steps that others wait for (`DockClient.require`). 0: it
            waits for no room.
        ids: first id, and end, of the rows that it takes. A row leaves when all consumers of its range have committed.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    group_size: int = 1
    step_rows: int | None = None
    home: int = 0
    seconds: float = 60.0
    can_roll_back: bool = False
    row_bytes: int = 0
    ids: tuple[int, int] = (0, 1 << 62)

    def __post_init__(self) -> None:
        for name in ("reads", "writes", "ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.seconds <= 0:
            raise DockError(f"a lease of consumer `{self.name}` must last longer than {self.seconds} s")


@dataclass(frozen=True)
class DockLayout:
    """Addresses of the shards by number, the consumers, and the bytes that a shard should store at most.

    Group `g` lives in shard `g` modulo their count (MindSpeed RL: warehouses split the batch by sample index). Ids are
    unique in the run and best dense (step · rows + row): shards fill evenly, and consumed rows are a few ranges.
    """

    addresses: tuple[Address, ...]
    consumers: tuple[Consumer, ...]
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        names = [consumer.name for consumer in self.consumers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DockError(f"each consumer has one index, but there are several named {', '.join(twice)}")
        for consumer in self.consumers:
            if not 0 <= consumer.home < len(self.addresses):
                raise DockError(f"consumer `{consumer.name}` lives with shard {consumer.home}, but shards are "
                                f"numbered 0 to {len(self.addresses) - 1}")
            if self.group_size % consumer.group_size:
                raise DockError(f"the {self.group_size} rows that live together do not divide into the groups of "
                                f"consumer `{consumer.name}`, {consumer.group_size} rows each")

    @property
    def group_size(self) -> int:
        """Rows that live in one shard, and are put together: the largest group of any consumer."""
        return max((consumer.group_size for consumer in self.consumers), default=1)

    def shard_of(self, rows: Any) -> Any:
        """Return the number of the shard in which a row lives, or of each of an array of rows."""
        return rows // self.group_size % len(self.addresses)

    def consumer(self, name: str) -> Consumer:
        for consumer in self.consumers:
            if consumer.name == name:
                return consumer
        hint = did_you_mean(name, [consumer.name for consumer in self.consumers])
        raise DockError(f"there is no consumer `{name}` at this dock. {hint}")

    def split(self, ids: Ids) -> Iterable[tuple[int, Ids]]:
        """Yield (shard number, positions in `ids`) for each shard in which any of the rows live."""
        shards = self.shard_of(ids)
        for number in range(len(self.addresses)):
            positions = numpy.flatnonzero(shards == number)
            if len(positions):
                yield number, positions

    def to_plain(self) -> dict[str, Any]:
        return {"addresses": [list(address) for address in self.addresses],
                "consumers": [asdict(consumer) for consumer in self.consumers], "max_bytes": self.max_bytes}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> DockLayout:
        return cls(tuple((host, port) for host, port in plain["addresses"]),
                   tuple(Consumer(**consumer) for consumer in plain["consumers"]), plain["max_bytes"])


@dataclass(slots=True)
class RowState:
    """Metadata of a row in a consumer's index."""

    id: int
    columns: frozenset[str]
    tokens: int = 0
    version: int = 0  # of the weights that made it
    turn: int = -1  # last saved turn, if the row is not finished
    lease: int = 0  # last lease that had the row; 0: none
    held: bool = False


RowGroup = list[RowState]


class ReadyRows:
    """Rows that a consumer may lease, in whole groups, by step. Groups are counted as they become whole, so to see that
    a step lacks some costs nothing, however many are ready."""

    def __init__(self, consumer: Consumer):
        self.group_size, self.step_rows = consumer.group_size, consumer.step_rows
        self.rows: dict[int, RowState] = {}
        self.parts: dict[int, RowGroup] = {}  # of groups that are not whole, by group
        self.steps: dict[int, OrderedDict[int, RowGroup]] = {}  # whole groups, in the order in which they became so

    def __contains__(self, row: int) -> bool:
        return row in self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def step_of(self, row: int) -> int:
        return row // self.step_rows if self.step_rows else 0

    def add(self, row: RowState, first: bool = False) -> None:
        """Add a row; if its group is whole by that, as the last to be leased of its step, or the `first`."""
        if row.id in self.rows:
            return
        self.rows[row.id] = row
        number = row.id // self.group_size
        part = self.parts.pop(number, [])
        part.append(row)
        if len(part) < self.group_size:
            self.parts[number] = part
        else:
            groups = self.steps.setdefault(self.step_of(row.id), OrderedDict())
            groups[number] = part
            if first:
                groups.move_to_end(number, last=False)

    def discard(self, row: int) -> None:
        if self.rows.pop(row, None) is None:
            return
        number, step = row // self.group_size, self.step_of(row)
        group = self.parts.pop(number, None) or self.steps[step].pop(number)
        if step in self.steps and not self.steps[step]:
            del self.steps[step]
        if rest := [each for each in group if each.id != row]:
            self.parts[number] = rest

    def count(self, step: int | None) -> int:
        """Return how many rows a lease for this step could get; None: for any step."""
        return self.group_size * sum(len(groups) for _, groups in self._of(step))

    def groups(self, step: int | None) -> Iterator[RowGroup]:
        """Yield whole groups of this step, or of all steps, the oldest first."""
        for _, groups in sorted(self._of(step)):
            yield from groups.values()

    def _of(self, step: int | None) -> Iterable[tuple[int, OrderedDict[int, RowGroup]]]:
        if step is None or not self.step_rows:
            return self.steps.items()
        return [(step, self.steps[step])] if step in self.steps else []


class Room:
    """Bytes that the shards store, and those that they should store at most.

    Rows that are under way count with the mean of those that have come: their longest form is many times what most of
    them take, so room for that would keep rollouts idle. Before any has come there is nothing better.
    """

    def __init__(self, limit: float = math.inf):
        self.limit, self.mean = limit, math.inf
        self.stored: dict[int, tuple[int, int]] = {}  # by shard: bytes, and rows that all consumers have written

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.stored.values())

    def note(self, shard: int, size: int, rows: int) -> None:
        self.stored[shard] = size, rows
        if written := sum(rows for _, rows in self.stored.values()):
            self.mean = self.bytes / written

    def fits(self, rows: int, longest: int) -> bool:
        """Return whether so many rows under way, of at most `longest` bytes each, fit beside what is stored."""
        return self.limit == math.inf or self.bytes + rows * min(self.mean, longest) <= self.limit


def deal(groups: list[RowGroup], shares: int) -> list[RowGroup]:
    """Share groups between the ranks that work on one step, about as many tokens to each; return each share's rows.
    The same groups are shared alike in whatever order they have come, so that their training rounds alike."""
    groups = sorted(groups, key=lambda group: group[0].id // len(group))
    if shares == 1:
        return [[row for group in groups for row in group]]
    weights = torch.tensor([sum(max(row.tokens, 1) for row in group) for group in groups], dtype=torch.int64)
    result: list[RowGroup] = [[] for _ in range(shares)]
    for group, share in zip(groups, assign(weights, shares).tolist()):
        result[share] += group
    return result
