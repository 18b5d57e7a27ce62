"""Consumers of a dock, the layout that all its processes share, and what decides which rows a lease gets."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy

from distflow.dock.errors import DockError
from distflow.dock.slots import Ids
from distflow.errors import did_you_mean
from distflow.rpc.connection import Address


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
        seconds: how long a lease lasts without being renewed.
        can_roll_back: commits of steps can be rolled back until they are released; their rows stay as long.
        row_bytes: bytes that it, and those after it, write of a row at its longest. Where the dock has no room
            (`DockLayout.max_bytes`), it leases only rows of steps that others wait for (`DockClient.require`). 0: it
            waits for no room.
        ids: first id, and end, of the rows that it takes. A row leaves when all consumers of its range have committed.
        home: number of the machine on which its first rank is. The process of that machine's shard keeps its index.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    group_size: int = 1
    step_rows: int | None = None
    seconds: float = 60.0
    can_roll_back: bool = False
    row_bytes: int = 0
    ids: tuple[int, int] = (0, 1 << 62)
    home: int = 0

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

    def home_of(self, consumer: str) -> int:
        """Return the number of the shard whose process keeps a consumer's index."""
        return self.consumer(consumer).home % len(self.addresses)

    def homes(self, consumers: Iterable[Consumer] | None = None) -> list[int]:
        """Return the numbers of the shards whose processes keep indexes, of all consumers or of these."""
        return sorted({each.home % len(self.addresses) for each in consumers or self.consumers})

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


class ReadyRows:
    """Rows that a consumer may lease, in whole groups, by step. Groups are counted as they become whole, so to see that
    a step lacks some costs nothing, however many are ready. Group g has the ids from g · group_size on."""

    def __init__(self, consumer: Consumer):
        self.group_size, self.step_rows = consumer.group_size, consumer.step_rows
        self.rows = 0
        self.parts: dict[int, int] = {}  # rows of groups that are not whole, by group
        self.queues: dict[int, deque[Ids]] = {}  # whole groups by step, in the order in which they became so
        self.counts: dict[int, int] = {}  # how many those are

    def __len__(self) -> int:
        return self.rows

    def step_of(self, row: int) -> int:
        return row // self.step_rows if self.step_rows else 0

    def add(self, ids: Ids, first: bool = False) -> None:
        """Add rows that it does not have; the groups that are whole by that are the last to be leased of their step, or
        the `first`."""
        self.rows += len(ids)
        for step, groups in self._by_step(self._completed_groups(ids)):
            queue = self.queues.setdefault(step, deque())
            (queue.appendleft if first else queue.append)(groups)
            self.counts[step] = self.counts.get(step, 0) + len(groups)

    def discard(self, ids: Ids) -> None:
        """Remove rows that it has."""
        self.rows -= len(ids)
        groups, counts = numpy.unique(ids // self.group_size, return_counts=True)
        whole = numpy.array([group not in self.parts for group in groups.tolist()], bool)
        for step, gone in self._by_step(groups[whole]):
            kept = [part[~numpy.isin(part, gone)] for part in self.queues[step]]
            self.queues[step] = deque(part for part in kept if len(part))
            self._subtract(step, len(gone))
        for group, count in zip(groups.tolist(), counts.tolist()):
            if left := self.parts.pop(group, self.group_size) - count:
                self.parts[group] = left

    def steps(self, step: int | None) -> list[int]:
        """Return the steps of which a lease for this step may get groups, the oldest first; None: for any step."""
        if step is None or not self.step_rows:
            return sorted(self.counts)
        return [step] if step in self.counts else []

    def count(self, step: int | None) -> int:
        """Return how many rows a lease for this step could get; None: for any step."""
        return self.group_size * sum(self.counts[each] for each in self.steps(step))

    def first_groups(self, step: int, most: int) -> Ids:
        """Return the groups of a step that are to be leased first, `most` of them at most."""
        found, lacking = [numpy.empty(0, numpy.int64)], most
        for part in self.queues[step]:
            if lacking <= 0:
                break
            found.append(part[:lacking])
            lacking -= len(part)
        return numpy.concatenate(found)

    def bring_forward(self, step: int, wanted: Callable[[Ids], numpy.ndarray]) -> None:
        """Have the groups of a step leased first of whose first rows `wanted` returns True."""
        groups = numpy.concatenate([*self.queues[step]])
        first = wanted(groups * self.group_size)
        self.queues[step] = deque([part for part in (groups[first], groups[~first]) if len(part)])

    def pop(self, step: int, count: int) -> None:
        """Remove the first groups of a step."""
        queue, self.rows = self.queues[step], self.rows - count * self.group_size
        left = count
        while left:
            part = queue.popleft()
            if len(part) > left:
                queue.appendleft(part[left:])
            left -= min(len(part), left)
        self._subtract(step, count)

    def rows_of(self, groups: Ids) -> Ids:
        return (groups[:, None] * self.group_size + numpy.arange(self.group_size)).reshape(-1)

    def _completed_groups(self, ids: Ids) -> Ids:
        """Return the groups that are whole with these rows, in the order of their last ones."""
        if self.group_size == 1:
            return ids
        groups, last, counts = numpy.unique(ids[::-1] // self.group_size, return_index=True, return_counts=True)
        for at in numpy.flatnonzero(counts < self.group_size).tolist():
            counts[at] += self.parts.pop(int(groups[at]), 0)
            if counts[at] < self.group_size:
                self.parts[int(groups[at])] = int(counts[at])
        whole = counts == self.group_size
        return groups[whole][numpy.argsort(-last[whole])]

    def _by_step(self, groups: Ids) -> Iterator[tuple[int, Ids]]:
        if not len(groups):
            return
        steps = groups * self.group_size // self.step_rows if self.step_rows else numpy.zeros_like(groups)
        for step in [int(steps[0])] if (steps == steps[0]).all() else numpy.unique(steps).tolist():
            yield step, groups[steps == step]

    def _subtract(self, step: int, count: int) -> None:
        self.counts[step] -= count
        if not self.counts[step]:
            del self.counts[step], self.queues[step]


class StorageBudget:
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

    def record(self, shard: int, size: int, rows: int) -> None:
        self.stored[shard] = size, rows
        if written := sum(rows for _, rows in self.stored.values()):
            self.mean = max(self.bytes / written, 1)

    def rows_that_fit(self, longest: int) -> float:
        """Return how many rows under way, of at most `longest` bytes each, fit beside what is stored."""
        return (self.limit - self.bytes) // min(self.mean, longest) if self.limit < math.inf else math.inf


def split_groups(ids: Ids, tokens: Ids, group_size: int, shares: int) -> list[Ids]:
    """Share whole groups of rows `ids` [rows], which ascend, between the ranks that work on one step, about as many
    `tokens` [rows] to each; return each share's rows. The same groups are shared alike in whatever order they have
    come, so that their training rounds alike."""
    if shares == 1:
        return [ids]
    weights = numpy.maximum(tokens, 1).reshape(-1, group_size).sum(axis=1)
    import torch  # the process of a shard starts without it

    from distflow.data.assignment import assign

    share_of = assign(torch.from_numpy(weights), shares).numpy().repeat(group_size)
    return [ids[share_of == share] for share in range(shares)]
