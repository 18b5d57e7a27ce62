"""Moves rows from one layout to another: each once, directly, with a single copy within a machine (DistFlow §6.2).

    announce       each rank announces its rows and its free shared memory (`RowNotice`)
    Route          from all notices, each rank computes where every row will lie in its reader's memory
    Redistributor  moves: within a machine the holder writes a row to its final address; rows for other machines
                   travel in one `all_to_all_single`, packed, with sizes known at both ends, and the reader places them
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.data.column_buffers import ColumnBuffer, ColumnForm, buffers_of, column_of, form_of
from distflow.data.exchange import exchange, pack, unpack
from distflow.data.host_group import HostGroup
from distflow.data.row_copies import RowRuns, copy_rows, runs_of
from distflow.errors import ColumnError
from distflow.plan import Layout
from distflow.rpc.shared_memory import MappedMemory, MemoryAddress, SharedMemoryPool, memory_name, view_of
from distflow.telemetry.metrics import Metrics

_ALIGNED = 64
_SLACK = 1.25
"""Factor by which a new buffer exceeds the request: the next step's rows fit too, and untouched pages cost nothing."""
_SHOWN = 5

Destinations = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From the ids of all rows [rows] to pairs (row [pairs], share [pairs]): a row may go to several shares, or to none."""


class PoolNotice(NamedTuple):
    """Announcement of one rank's shared memory: its spare buffers, and those of other ranks that its tensors view."""

    spare: tuple[MemoryAddress, ...] = ()
    reads: tuple[MemoryAddress, ...] = ()

    @classmethod
    def unpack(cls, packed: Sequence) -> PoolNotice:
        return cls(*(tuple(MemoryAddress(*address) for address in addresses) for addresses in packed))


def choose(notices: Sequence[PoolNotice], wanted: Mapping[int, int]) -> dict[int, MemoryAddress | None]:
    """Return for each owner its smallest spare buffer of the wanted bytes, or None; the same on every rank."""
    read = {address for notice in notices for address in notice.reads}
    return {owner: min((address for address in notices[owner].spare if address.size >= size and address not in read),
                       key=lambda address: (address.size, address.inode), default=None)
            for owner, size in wanted.items() if size}


class RowMemory:
    """Shared memory of a machine's ranks: a buffer's owner uses rows in place that others wrote (DistFlow §6.2)."""

    def __init__(self, secret: bytes):
        name = memory_name("rows", secret)
        self.pool, self.mapped = SharedMemoryPool(name), MappedMemory(name, writable=True)
        self.reads: set[MemoryAddress] = set()

    def notice(self) -> PoolNotice:
        return PoolNotice(tuple(self.pool.spare), tuple(self.reads))

    def add(self, size: int) -> None:
        """Add a spare buffer; the largest one, which is too small, is given up."""
        if self.pool.spare:
            self.pool.spare.pop(max(self.pool.spare, key=lambda address: address.size))
        self.pool.add(int(size * _SLACK))

    def open(self, address: MemoryAddress) -> np.ndarray:
        return self.pool.spare[address] if address in self.pool.spare else self.mapped.open(address)

    def lease(self, address: MemoryAddress, size: int) -> Tensor:
        """Return the beginning of a buffer, [size] uint8, which is not used again before its last view is gone."""
        if address in self.pool.spare:
            return torch.from_numpy(self.pool.lease(address, size))
        self.reads.add(address)
        return torch.from_numpy(view_of(self.mapped.open(address), size, self.reads.discard, address))


class RowNotice(NamedTuple):
    """Announcement of a rank: ids of its rows [rows], per column its form and where its buffers' counts are in
    `counts`, arrays [rows] that buffers whose rows have as many elements each share."""

    ids: np.ndarray
    forms: dict[str, ColumnForm]
    buffers: dict[str, list[int]]
    counts: list[np.ndarray]
    pool: PoolNotice

    def counts_of(self, name: str, level: int) -> np.ndarray:
        """Return how many elements each row [rows] has in one of a column's buffers."""
        return self.counts[self.buffers[name][level]] if len(self.ids) else self.ids


def announce(batch: Batch, pool: PoolNotice) -> tuple[bytes, dict[str, list[ColumnBuffer]]]:
    buffers = {name: buffers_of(column) for name, column in batch.columns.items()}
    forms, numbers = [], {}
    for name, column in batch.columns.items():
        form = form_of(column)
        # a dense row has one element
        counts = [buffer.counts.tobytes() for buffer in buffers[name]] if form.depth else []
        forms.append((name, *form, [numbers.setdefault(part, len(numbers)) for part in counts] if counts else [-1]))
    header = pack([len(batch), pool, pack(forms)])
    parts = [len(header).to_bytes(8, "little"), header, bytes(-len(header) % 8), batch.ids.numpy().tobytes(), *numbers]
    return b"".join(parts), buffers


def read_notice(raw: bytes) -> RowNotice:
    size = int.from_bytes(raw[:8], "little")
    rows, pool, forms = unpack(raw[8 : 8 + size])
    numbers = np.frombuffer(raw, dtype=np.int64, offset=8 + size + -size % 8).reshape(-1, rows or 1)
    ids, *counts = numbers if rows else numbers.T
    described, buffers = _forms(forms)
    return RowNotice(ids, described, buffers, [*counts, np.ones(rows, dtype=np.int64)], PoolNotice.unpack(pool))


@functools.lru_cache(maxsize=64)
def _forms(packed: bytes) -> tuple[dict[str, ColumnForm], dict[str, list[int]]]:
    """Read what notices say of their columns: once for all ranks that say the same."""
    found = unpack(packed)
    return ({name: ColumnForm(depth, dtype, tuple(shape)) for name, depth, dtype, shape, _ in found},
            {name: buffers for name, *_, buffers in found})


def agree(notices: Sequence[RowNotice]) -> dict[str, ColumnForm]:
    """Return the form of each column; ranks without elements are ignored. Raises `ColumnError` if they differ."""
    holders = [rank for rank, notice in enumerate(notices) if len(notice.ids)] or [0]
    names = notices[holders[0]].forms
    for rank in holders:
        if notices[rank].forms.keys() != names.keys():
            odd = ", ".join(sorted(notices[rank].forms.keys() ^ names.keys()))
            raise ColumnError(f"rank {holders[0]} and rank {rank} do not have the same columns: only one has {odd}")
    return {name: _agree(name, notices, holders) for name in names}


def _agree(name: str, notices: Sequence[RowNotice], holders: list[int]) -> ColumnForm:
    announced = {rank: notices[rank].forms[name] for rank in holders}
    if len(set(announced.values())) == 1:
        return announced[holders[0]]
    full = [rank for rank in holders if notices[rank].counts_of(name, -1).any()] or holders[:1]
    first = announced[full[0]]
    for rank in holders:
        if announced[rank].depth != first.depth or (rank in full and announced[rank] != first):
            raise ColumnError(f"the parts of column `{name}` do not fit together: rank {full[0]} has {first}, rank "
                              f"{rank} has {announced[rank]}")
    return first


class BufferPart(NamedTuple):
    """One buffer of a column as it arrives: per pair `counts` elements, from element `at` of its share's buffer, which
    has `sizes[i]` bytes from byte `starts[i]`, in elements of `width` bytes."""

    width: int
    counts: np.ndarray
    at: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


class Route:
    """Pairs [pairs] of a row and a share, by share and then by id: `holder` is the rank that has the row, `position`
    its index there. Share `i` has the pairs `bounds[i]` … `bounds[i + 1] - 1`, of `totals[i]` bytes."""

    def __init__(self, notices: Sequence[RowNotice], forms: dict[str, ColumnForm], destinations: Destinations,
                 shares: int):
        ids = np.concatenate([notice.ids for notice in notices])
        rows = np.array([len(notice.ids) for notice in notices])
        row, share = destinations(ids)
        order = _by_share(ids[row], share, shares)
        row, share = row[order], share[order]
        self.holder = np.repeat(np.arange(len(notices)), rows)[row]
        self.position = row - (rows.cumsum() - rows)[self.holder]
        self.ids, self.share = ids[row], share
        self.bounds = np.searchsorted(share, np.arange(shares + 1))
        twice = (self.ids[1:] == self.ids[:-1]) & (share[1:] == share[:-1])
        if twice.any():
            one, other = self.holder[:-1][twice][0], self.holder[1:][twice][0]
            raise ColumnError(f"rows {self.ids[1:][twice][:_SHOWN].tolist()} of columns {', '.join(forms)} exist "
                              f"twice, on rank {one} and rank {other}")
        self.totals = np.zeros(shares, dtype=np.int64)
        holders = [notice for notice in notices if len(notice.ids)]
        shared: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.parts = {name: [self._part([notice.counts_of(name, level) for notice in holders], row, width, shared)
                             for level, width in enumerate(form.widths)] if holders else []
                      for name, form in forms.items()}

    def _part(self, announced: list[np.ndarray], row: np.ndarray, width: int, shared: dict) -> BufferPart:
        """Lay out one buffer. `announced`: each holder's counts; buffers with the same counts share their arrays."""
        key = tuple(map(id, announced))
        if key not in shared:
            counts = np.concatenate(announced)[row]
            ends = np.zeros(len(counts) + 1, dtype=np.int64)
            counts.cumsum(out=ends[1:])
            edges = ends[self.bounds]
            shared[key] = counts, ends[:-1] - edges[self.share], edges[1:] - edges[:-1]
        counts, at, elements = shared[key]
        sizes, starts = elements * width, self.totals
        self.totals = starts + -(-sizes // _ALIGNED) * _ALIGNED
        return BufferPart(width, counts, at, starts, sizes)

    def pairs(self, share: int, holder: int | None = None) -> np.ndarray:
        """Return the pairs of a share, or of those the ones whose rows a rank holds; by id."""
        every = np.arange(self.bounds[share], self.bounds[share + 1])
        return every if holder is None else every[self.holder[every] == holder]

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        alike: dict[int, list[BufferPart]] = {}
        for part in (part for parts in self.parts.values() for part in parts):
            alike.setdefault(id(part.counts), []).append(part)
        return sum((parts[0].counts * sum(part.width for part in parts) for parts in alike.values()),
                   np.zeros(len(self.ids), dtype=np.int64))

    def sent(self, holder: int) -> np.ndarray:
        """Return the bytes of rows that a rank sends to each share [shares]."""
        mine = self.holder == holder
        return _sums(self.share[mine], self.sizes[mine], len(self.totals))

    def received(self, share: int, ranks: int) -> np.ndarray:
        """Return the bytes of rows that a share gets from each rank [ranks]."""
        pairs = self.pairs(share)
        return _sums(self.holder[pairs], self.sizes[pairs], ranks)

    def crosses(self, machines: np.ndarray, destinations: Sequence[Destination]) -> bool:
        """Return whether any row goes to another machine; every rank finds the same. `machines` [ranks]."""
        shares, ranks = np.array([each[:2] for each in destinations], dtype=int).reshape(-1, 2).T
        home = np.full(len(self.totals), -1)
        home[shares] = machines[ranks]
        several = np.zeros(len(self.totals), dtype=bool)
        several[shares[home[shares] != machines[ranks]]] = True  # a share that is on two machines
        away = several[self.share] | (home[self.share] != machines[self.holder])
        return bool((away & (home[self.share] >= 0) & (self.sizes > 0)).any())


def _sums(index: np.ndarray, sizes: np.ndarray, length: int) -> np.ndarray:
    return np.bincount(index, sizes, length).astype(np.int64)


def _by_share(ids: np.ndarray, share: np.ndarray, shares: int) -> np.ndarray:
    if (ids[1:] >= ids[:-1]).all():  # the usual case; numbers as small as these are sorted in one pass
        return np.argsort(share.astype(np.min_scalar_type(shares)), kind="stable")
    return np.lexsort((ids, share))


Buffers = dict[str, list[ColumnBuffer]]


class Destination(NamedTuple):
    """Memory that receives a share's rows: that of its first rank on each machine; None if it has no bytes."""

    share: int
    rank: int
    address: MemoryAddress | None


class Redistributor:
    def __init__(self, rank: int, metrics: Metrics, limit: float):
        self.rank, self.metrics, self.limit = rank, metrics, limit
        self.moved = 0

    @functools.cached_property
    def host_group(self) -> HostGroup:
        return HostGroup(self.rank, self.limit)

    @functools.cached_property
    def memory(self) -> RowMemory:
        return RowMemory(self.host_group.secret)

    def move(self, held: Batch, layout: Layout, payload: bytes,
             find_destinations: Callable[[list[bytes]], Destinations], edge: str) -> Batch:
        """Return the rows that `layout` assigns to this rank, by id, with their columns; every rank must call it.

        `held`: this rank's rows, ids and lengths on the CPU; `find_destinations`: from all payloads to destinations,
        alike on every rank; `edge`: what bytes count for in metrics. Raises ColumnError on every rank: rows without a
        destination or held twice, or columns that do not fit together.
        """
        raw, buffers = announce(held, self.memory.notice())
        payloads = self.host_group.gather([raw, payload])
        notices = [read_notice(notice) for notice, _ in payloads]
        forms = agree(notices)
        route = Route(notices, forms, find_destinations([part for _, part in payloads]), layout.dp)
        destinations = self._reserve(route, layout, [notice.pool for notice in notices])
        machines = self.host_group.machines
        here = [each for each in destinations if machines[each.rank] == machines[self.rank]]
        memory = {each: self.memory.open(each.address) for each in here if each.address is not None}
        for target in memory:
            for part, buffer, pairs, runs in _rows(route, buffers, target.share, self.rank):
                copy_rows(buffer.data, _bytes_of(memory[target], part, target.share),
                          buffer.starts[route.position[pairs]],
                          part.at[pairs], part.counts[pairs], part.width, runs)
        sent = route.sent(self.rank)
        self._count(edge, route, sent, destinations, machines)
        if route.crosses(np.array(machines), destinations):
            self._send(buffers, route, sent, destinations, machines, memory)
        self.host_group.barrier()
        return self._read(forms, route, layout.share(self.rank), here)

    def _reserve(self, route: Route, layout: Layout, pools: list[PoolNotice]) -> list[Destination]:
        """Choose memory for all shares; where one lacks some, its owner adds a buffer and all ranks announce again."""
        owners: dict[tuple[int, int], int] = {}
        for rank, machine in enumerate(self.host_group.machines):
            share = layout.share(rank)
            if share is not None:
                owners.setdefault((share, machine), rank)
        wanted = {rank: int(route.totals[share]) for (share, _), rank in owners.items()}
        chosen = choose(pools, wanted)
        if None in chosen.values():
            if self.rank in chosen and chosen[self.rank] is None:
                self.memory.add(wanted[self.rank])
            pools = [PoolNotice.unpack(notice) for notice in self.host_group.gather(self.memory.notice())]
            chosen = choose(pools, wanted)
        return [Destination(share, rank, chosen.get(rank)) for (share, _), rank in owners.items()]

    def _send(self, buffers: Buffers, route: Route, sent: np.ndarray, destinations: list[Destination],
              machines: list[int], memory: dict[Destination, np.ndarray]) -> None:
        far = {each.rank: each.share for each in destinations if machines[each.rank] != machines[self.rank]}
        sizes = [int(sent[far[rank]]) if rank in far else 0 for rank in range(len(machines))]
        outgoing, position = np.empty(sum(sizes), dtype=np.uint8), 0
        for rank in sorted(far):
            for part, buffer, pairs, runs in _rows(route, buffers, far[rank], self.rank):
                counts = part.counts[pairs]
                size = int(counts.sum()) * part.width
                copy_rows(buffer.data, outgoing[position : position + size], buffer.starts[route.position[pairs]],
                          counts.cumsum() - counts, counts, part.width, runs)
                position += size
        mine = next((each for each in destinations if each.rank == self.rank), None)
        arriving = [0] * len(machines)
        if mine is not None:
            there = np.array(machines) == machines[self.rank]
            arriving = np.where(there, 0, route.received(mine.share, len(machines))).tolist()
        received, position = exchange(torch.from_numpy(outgoing), sizes, arriving).numpy(), 0
        for rank, size in enumerate(arriving):
            if mine is None or not size:
                continue
            pairs = route.pairs(mine.share, rank)
            runs = runs_of(np.arange(len(pairs)), pairs)
            for part in (part for parts in route.parts.values() for part in parts):
                counts = part.counts[pairs]
                size = int(counts.sum()) * part.width
                copy_rows(received[position : position + size], _bytes_of(memory[mine], part, mine.share),
                          counts.cumsum() - counts, part.at[pairs], counts, part.width, runs)
                position += size

    def _read(self, forms: dict[str, ColumnForm], route: Route, share: int | None, here: list[Destination]) -> Batch:
        if share is None or not len(route.ids):
            return Batch(torch.empty(0, dtype=torch.int64))
        target, pairs = next(each for each in here if each.share == share), route.pairs(share)
        raw = torch.empty(0, dtype=torch.uint8)
        if target.address is not None:
            raw = self.memory.lease(target.address, int(route.totals[share]))
        columns = {}
        for name, form in forms.items():
            buffers = [(_bytes_of(raw, part, share), part.counts[pairs]) for part in route.parts[name]]
            columns[name] = column_of(form, buffers)
        return Batch(torch.from_numpy(route.ids[pairs]), columns)

    def _count(self, edge: str, route: Route, to_shares: np.ndarray, destinations: list[Destination],
               machines: list[int]) -> None:
        sent = {each: int(to_shares[each.share]) for each in destinations if to_shares[each.share]}
        away = sum(size for each, size in sent.items() if each.rank != self.rank)
        arrived = sum(int(route.sizes[route.pairs(each.share)].sum()) - sent.get(each, 0)
                      for each in destinations if each.rank == self.rank)
        self.metrics.add(f"data/bytes/{edge}", sum(sent.values()))
        self.metrics.add("data/bytes_sent", away)
        self.metrics.add("data/bytes_between_machines",
                         sum(size for each, size in sent.items() if machines[each.rank] != machines[self.rank]))
        self.moved += away + arrived
        self.metrics.maximum("data/bytes_of_busiest_rank", self.moved)


def _rows(route: Route, buffers: Buffers, share: int, holder: int) -> \
        Iterator[tuple[BufferPart, ColumnBuffer, np.ndarray, RowRuns]]:
    """Yield for each buffer of the rows that go from this rank to a share: part, buffer, pairs, their runs."""
    pairs = route.pairs(share, holder)
    if len(pairs):
        runs = runs_of(route.position[pairs], pairs)
        for name, parts in route.parts.items():
            yield from ((part, buffer, pairs, runs) for part, buffer in zip(parts, buffers[name], strict=True))


def _bytes_of(memory: Any, part: BufferPart, share: int) -> Any:
    return memory[part.starts[share] : part.starts[share] + part.sizes[share]]
