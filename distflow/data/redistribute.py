"""Moves rows from one layout to another: each once, directly, with a single copy within a machine (DistFlow §6.2).

    announce       each rank announces its rows and its free shared memory; all read the notices of all (`RowNotices`)
    Route          from all notices, each rank computes where every row will lie in its reader's memory
    Redistributor  moves: within a machine the holder writes a row to its final address; long runs of rows for other
                   machines are sent from where they lie to there; other rows travel packed by `all_to_all_single`, in
                   up to 16 rounds, with sizes known at both ends, and the reader places them
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from distflow.data.batch import Batch
from distflow.data.column_buffers import ColumnBuffer, buffers_of, column_of, form_of
from distflow.data.columns import ColumnForm
from distflow.data.exchange import exchange, pack, send_each, unpack
from distflow.data.host_group import HostGroup
from distflow.data.row_copies import copy_runs
from distflow.errors import ColumnError
from distflow.plan import Layout
from distflow.rpc.packing import aligned
from distflow.rpc.shared_memory import MappedMemory, MemoryAddress, SharedMemoryPool, memory_name, view_of
from distflow.telemetry.metrics import Metrics

_SLACK = 1.25
"""Factor by which a new buffer exceeds the request: the next step's rows fit too, and untouched pages cost nothing."""
_SHOWN = 5
ROUND_BYTES = 2 << 20
"""Of rows that a rank sends to or gets from other machines at once; they are in memory twice meanwhile."""
_MOST_ROUNDS = 16
"""Of many rows a sixteenth goes at once, since all ranks wait for each other in each round."""
LONG_RUN = 32 << 10
"""Mean bytes of a column's rows that lie side by side at both ends, from which on these are not copied to be sent."""

Destinations = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From the ids of all rows [rows] to pairs (row [pairs], share [pairs]): a row may go to several shares, or to none."""


class PoolNotice(NamedTuple):
    """Announcement of one rank's shared memory: its spare buffers, and those of other ranks that its tensors view."""

    spare: tuple[MemoryAddress, ...] = ()
    reads: tuple[MemoryAddress, ...] = ()

    @classmethod
    def unpack(cls, packed: Sequence) -> PoolNotice:
        return cls(*(tuple(MemoryAddress(*address) for address in addresses) for addresses in packed))


def choose_buffers(notices: Mapping[int, PoolNotice], wanted: Mapping[int, int]) -> dict[int, MemoryAddress | None]:
    """Return for each owner its smallest spare buffer of the wanted bytes, or None; the same on every rank of a
    machine. `notices`: of all its ranks, which alone can use each other's memory."""
    read = {address for notice in notices.values() for address in notice.reads}
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


def announce(batch: Batch, pool: PoolNotice, payload: bytes = b"") -> tuple[bytes, dict[str, list[ColumnBuffer]]]:
    """Return a rank's notice, and the buffers of its columns. `payload`: what else it tells all others.

    A notice is numbers of 8 bytes: how many rows, a sum of the columns' forms, and bytes of three parts; these parts,
    which are the forms, the rank's shared memory and the payload; then arrays [rows] of the rows' ids and of the counts
    of the columns' buffers. Buffers whose rows have as many elements each share an array.
    """
    buffers = {name: buffers_of(column) for name, column in batch.columns.items()}
    forms, numbers = [], {}
    for name, column in batch.columns.items():
        form = form_of(column)
        # a dense row has one element
        counts = [np.diff(buffer.bounds).tobytes() for buffer in buffers[name]] if form.depth else []
        forms.append((name, form, [numbers.setdefault(each, len(numbers)) for each in counts] or [_DENSE]))
    parts = [pack(forms), pack(pool), payload]
    head = np.array([len(batch), xxhash.xxh3_64_intdigest(parts[0]) >> 1, *map(len, parts)]).tobytes()
    padded = [part + bytes(-len(part) % 8) for part in parts]
    return b"".join([head, *padded, batch.ids.numpy().tobytes(), *numbers]), buffers


_HEAD, _DENSE = 5, -1
"""Numbers that a notice begins with; in place of the number of an array: each row has one element."""
_NO_ROWS, _ = announce(Batch(torch.empty(0, dtype=torch.int64)), PoolNotice())
"""Notice of a rank that takes no part in a move."""


class RowNotices:
    """Notices of all ranks, read at once. rows: how many each rank has [ranks]; ids: of all rows, one rank's after the
    other's [rows]; forms: what ranks that have rows say of their columns, by the first rank that says so."""

    def __init__(self, notices: Sequence[bytes]):
        self.notices = notices
        sizes = np.fromiter(map(len, notices), np.int64, len(notices)) // 8
        self.numbers, begins = np.frombuffer(b"".join(notices), np.int64), sizes.cumsum() - sizes
        self.rows, sums, *self.sizes = self.numbers[begins[:, None] + np.arange(_HEAD)].T
        self.parts = np.cumsum([np.full(len(notices), 8 * _HEAD), *(size + -size % 8 for size in self.sizes)], axis=0)
        """Byte at which each part of a notice begins, and at which the last one ends [4, ranks]."""
        first = begins + self.parts[-1] // 8
        self.at = np.repeat(first - (self.rows.cumsum() - self.rows), self.rows) + np.arange(self.rows.sum())
        self.forms, self.describes = self._read_forms(sums)
        self.known = dict[tuple[int, ...], np.ndarray]()
        self.ids = self._array(0)

    def _read_forms(self, sums: np.ndarray) -> tuple[dict[int, ColumnForms], np.ndarray]:
        """Return the forms, and for each rank which of them are its own [ranks]. `sums`: alike where they are."""
        ranks = np.flatnonzero(self.rows) if self.rows.any() else np.zeros(1, np.int64)
        _, first, number = np.unique(sums[ranks], return_index=True, return_inverse=True)
        describes = np.zeros(len(self.rows), np.int64)
        describes[ranks] = ranks[first][number]
        first.sort()
        return dict(zip(ranks[first].tolist(), map(read_forms, self._part(0, ranks[first])))), describes

    def _part(self, number: int, ranks: np.ndarray) -> list[bytes]:
        """Return one of the parts of the notices of some ranks."""
        begins, sizes = self.parts[number][ranks], self.sizes[number][ranks]
        return [self.notices[rank][begin:end] for rank, begin, end in
                zip(ranks.tolist(), begins.tolist(), (begins + sizes).tolist())]

    def pools(self, ranks: Sequence[int]) -> dict[int, PoolNotice]:
        return {rank: PoolNotice.unpack(unpack(part)) for rank, part in zip(ranks, self._part(1, np.array(ranks)))}

    def payloads(self) -> list[bytes]:
        return self._part(2, np.arange(len(self.notices)))

    def counts_of(self, name: str, level: int) -> np.ndarray:
        """Return how many elements each row has in one of a column's buffers [rows]."""
        key = tuple(described.arrays[name][level] for described in self.forms.values())
        if key not in self.known:
            numbers = np.zeros(len(self.rows), np.int64)
            numbers[list(self.forms)] = key
            self.known[key] = np.ones_like(self.ids) if _DENSE in key else self._array(1 + numbers[self.describes])
        return self.known[key]

    def _array(self, number: np.ndarray | int) -> np.ndarray:
        """Return the array with this number, of each rank [ranks] or of all: one rank's after the other's [rows]."""
        return self.numbers[self.at + np.repeat(number * self.rows, self.rows)]


class ColumnForms(NamedTuple):
    """By column its form, and the numbers of the arrays with the counts of its buffers."""

    forms: dict[str, ColumnForm]
    arrays: dict[str, list[int]]


@functools.lru_cache(maxsize=64)
def read_forms(packed: bytes) -> ColumnForms:
    found = unpack(packed)
    return ColumnForms({name: ColumnForm.unpack(form) for name, form, _ in found},
                       {name: arrays for name, _, arrays in found})


def agree_on_forms(notices: RowNotices) -> dict[str, ColumnForm]:
    """Return the form of each column; ranks without elements are ignored. Raises `ColumnError` if they differ."""
    first, *others = notices.forms
    names = notices.forms[first].forms
    for rank in others:
        if notices.forms[rank].forms.keys() != names.keys():
            odd = ", ".join(sorted(notices.forms[rank].forms.keys() ^ names.keys()))
            raise ColumnError(f"rank {first} and rank {rank} do not have the same columns: only one has {odd}")
    return {name: _agree(name, notices) for name in names}


def _agree(name: str, notices: RowNotices) -> ColumnForm:
    announced = {rank: described.forms[name] for rank, described in notices.forms.items()}
    if len(set(announced.values())) == 1:
        return next(iter(announced.values()))
    if len({form.depth for form in announced.values()}) > 1:
        full = list(announced)
    else:
        full = _with_elements(name, notices) or list(announced)[:1]
    first = full[0]
    for rank in full:
        if announced[rank] != announced[first]:
            raise ColumnError(f"the parts of column `{name}` do not fit together: rank {first} has {announced[first]}, "
                              f"rank {rank} has {announced[rank]}")
    return announced[first]


def _with_elements(name: str, notices: RowNotices) -> list[int]:
    """Return those of the ranks of `notices.forms` that say what some rank says that has elements of a column."""
    return np.unique(np.repeat(notices.describes, notices.rows)[notices.counts_of(name, -1) > 0]).tolist()


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

    def __init__(self, notices: RowNotices, forms: dict[str, ColumnForm], destinations: Destinations, shares: int):
        ids, rows = notices.ids, notices.rows
        row, share = destinations(ids)
        order = _by_share(ids[row], share, shares)
        row, share = row[order], share[order]
        self.holder = np.repeat(np.arange(len(rows)), rows)[row]
        self.position = row - (rows.cumsum() - rows)[self.holder]
        self.ids, self.share = ids[row], share
        self.bounds = np.concatenate([[0], np.bincount(share, minlength=shares).cumsum()])
        twice = (self.ids[1:] == self.ids[:-1]) & (share[1:] == share[:-1])
        if twice.any():
            one, other = sorted((self.holder[:-1][twice][0], self.holder[1:][twice][0]))
            raise ColumnError(f"rows {self.ids[1:][twice][:_SHOWN].tolist()} of columns {', '.join(forms)} exist "
                              f"twice, on rank {one} and rank {other}")
        self.parts, self.totals = self._lay_out(notices, forms, row)

    def _lay_out(self, notices: RowNotices, forms: dict[str, ColumnForm], row: np.ndarray) -> \
            tuple[dict[str, list[BufferPart]], np.ndarray]:
        """Return the buffers of each column, and the bytes of each share [shares]. Buffers whose rows have as many
        elements each share their arrays."""
        parts: dict[str, list[BufferPart]] = {name: [] for name in forms}
        levels = [(name, width, notices.counts_of(name, level)) for name, form in forms.items()
                  for level, width in enumerate(form.widths)] if len(row) else []
        laid_out = dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]()
        for announced in {id(counts): counts for *_, counts in levels}.values():
            counts, ends = announced[row], np.zeros(len(row) + 1, dtype=np.int64)
            counts.cumsum(out=ends[1:])
            edges = ends[self.bounds]
            laid_out[id(announced)] = counts, ends[:-1] - edges[self.share], edges[1:] - edges[:-1]
        sizes = np.zeros((len(levels) + 1, len(self.bounds) - 1), np.int64)
        for index, (_, width, announced) in enumerate(levels):
            sizes[index] = laid_out[id(announced)][2] * width
        whole = aligned(sizes)
        starts = whole.cumsum(0) - whole
        for (name, width, announced), start, size in zip(levels, starts, sizes):
            counts, at, _ = laid_out[id(announced)]
            parts[name].append(BufferPart(width, counts, at, start, size))
        return parts, starts[-1]

    def all_pairs(self, share: int) -> slice:
        """Return which pairs are those of a share; by id."""
        return slice(int(self.bounds[share]), int(self.bounds[share + 1]))

    def pairs(self, share: int, holder: int) -> np.ndarray:
        """Return the pairs of a share whose rows a rank holds; by id."""
        every = self.all_pairs(share)
        return every.start + np.flatnonzero(self.holder[every] == holder)

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
        pairs = self.all_pairs(share)
        return _sums(self.holder[pairs], self.sizes[pairs], ranks)

    @functools.cached_property
    def run_begins(self) -> np.ndarray:
        """Whether a pair does not lie behind the one before it at both ends [pairs]."""
        begins = np.ones(len(self.ids), dtype=bool)
        begins[1:] = (np.diff(self.holder) != 0) | (np.diff(self.share) != 0) | (np.diff(self.position) != 1)
        return begins

    @functools.cached_property
    def in_place(self) -> np.ndarray:
        """Whether the rows that a pair's share gets from its holder lie in long runs [pairs]."""
        _, link = np.unique(self.share * (self.holder.max(initial=0) + 1) + self.holder, return_inverse=True)
        messages = np.bincount(link, self.run_begins) * sum(map(len, self.parts.values()))
        return (np.bincount(link, self.sizes) >= LONG_RUN * messages)[link]

    def rounds(self, machines: np.ndarray, receivers: ShareReceivers, most: int) -> int:
        """Return in how many rounds rows go packed to other machines, so that no rank sends or gets many more than
        `most` bytes in one; 0 if none does. Every rank finds the same. `machines` [ranks]."""
        names, machine = np.unique(machines, return_inverse=True)
        there = np.zeros((len(self.totals), len(names)), dtype=bool)
        there[receivers.shares, machine[receivers.ranks]] = True
        here, sizes = machine[self.holder], self.sizes * ~self.in_place
        leave = there.sum(1)[self.share] - there[self.share, here]  # to how many machines a pair's row goes
        sent = _sums(self.holder, sizes * leave, len(machines))
        held = _sums(self.share * len(names) + here, sizes, there.size).reshape(there.shape)
        got = held[receivers.shares].sum(1) - held[receivers.shares, machine[receivers.ranks]]
        return -(-max(int(sent.max(initial=0)), int(got.max(initial=0))) // most)


def _sums(index: np.ndarray, sizes: np.ndarray, length: int) -> np.ndarray:
    return np.bincount(index, sizes, length).astype(np.int64)


def _by_share(ids: np.ndarray, share: np.ndarray, shares: int) -> np.ndarray:
    """Sort by share and then by id; numbers as small as shares are sorted in one pass."""
    order = np.arange(len(ids)) if (ids[1:] >= ids[:-1]).all() else np.argsort(ids)
    return order[np.argsort(share[order].astype(np.min_scalar_type(shares)), kind="stable")]


Buffers = dict[str, list[ColumnBuffer]]
Pairs = dict[int, np.ndarray]
"""By rank, pairs of a route whose rows are exchanged with it."""


class ShareReceivers(NamedTuple):
    """Ranks that receive the rows of shares: the first of each share on each machine. shares, ranks: [receivers]."""

    shares: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of(cls, layout: Layout, machines: Sequence[int]) -> ShareReceivers:
        """`machines`: [ranks]."""
        found: dict[tuple[int, int], int] = {}
        for rank in range(layout.first, layout.last + 1):
            found.setdefault((layout.share(rank) or 0, machines[rank]), rank)
        return cls(np.array([share for share, _ in found], np.int64), np.array([*found.values()], np.int64))


class Destination(NamedTuple):
    """Memory on this machine that receives a share's rows: that of its first rank here; None if it has no bytes."""

    share: int
    rank: int
    address: MemoryAddress | None


class Redistributor:
    """One rank's part of moves among `ranks`, or all. These alone share its memory, and know who still reads it."""

    def __init__(self, rank: int, metrics: Metrics, limit: float, ranks: Sequence[int] | None = None):
        self.rank, self.metrics, self.limit, self.ranks = rank, metrics, limit, ranks
        self.moved = 0
        self.receivers = dict[Layout, ShareReceivers]()

    @functools.cached_property
    def host_group(self) -> HostGroup:
        return HostGroup(self.rank, self.limit, self.ranks)

    @functools.cached_property
    def memory(self) -> RowMemory:
        return RowMemory(self.host_group.secret)

    def move(self, held: Batch, layout: Layout, payload: bytes,
             find_destinations: Callable[[list[bytes]], Destinations], edge: str) -> Batch:
        """Return the rows that `layout` assigns to this rank, by id, with their columns. All of the ranks call it.

        `held`: this rank's rows, ids and lengths on the CPU; `find_destinations`: from all payloads to destinations,
        alike on every rank; `edge`: what bytes count for in metrics. Raises ColumnError on every rank: rows without a
        destination or held twice, or columns that do not fit together.
        """
        notice, buffers = announce(held, self.memory.notice(), payload)
        said = dict(zip(self.host_group.ranks, self.host_group.gather_bytes(notice)))
        notices = RowNotices([said.get(rank, _NO_ROWS) for rank in range(len(self.host_group.machines))])
        forms = agree_on_forms(notices)
        route = Route(notices, forms, find_destinations(notices.payloads()), layout.dp)
        machines, receivers = np.array(self.host_group.machines), self._receivers(layout)
        here = self._reserve(route, receivers, machines, notices)
        memory = {each: self.memory.open(each.address) for each in here if each.address is not None}
        for target in memory:
            for part, buffer, runs in _rows(route, buffers, route.pairs(target.share, self.rank)):
                copy_runs(buffer.data, _bytes_of(memory[target], part, target.share), *runs, part.width)
        sent = route.sent(self.rank)
        self._count(edge, route, sent, receivers, machines)
        if not self.host_group.on_one_machine:
            self._send(buffers, route, receivers, machines, memory)
        self.host_group.barrier()
        return self._read(forms, route, layout.share(self.rank), here)

    def _receivers(self, layout: Layout) -> ShareReceivers:
        if layout not in self.receivers:
            self.receivers[layout] = ShareReceivers.of(layout, self.host_group.machines)
        return self.receivers[layout]

    def _reserve(self, route: Route, receivers: ShareReceivers, machines: np.ndarray,
                 notices: RowNotices) -> list[Destination]:
        """Choose memory for the shares on this machine; where one lacks some, its owner adds a buffer and the machine's
        ranks announce again."""
        here = machines[receivers.ranks] == machines[self.rank]
        owners = dict(zip(receivers.ranks[here].tolist(), receivers.shares[here].tolist()))
        wanted = {rank: int(route.totals[share]) for rank, share in owners.items()}
        chosen = choose_buffers(notices.pools(self.host_group.local_ranks), wanted)
        if None in chosen.values():
            if self.rank in chosen and chosen[self.rank] is None:
                self.memory.add(wanted[self.rank])
            pools = self.host_group.gather_on_host(self.memory.notice())
            chosen = choose_buffers({rank: PoolNotice.unpack(pool) for rank, pool in pools.items()}, wanted)
        return [Destination(share, rank, chosen.get(rank)) for rank, share in owners.items()]

    def _send(self, buffers: Buffers, route: Route, receivers: ShareReceivers, machines: np.ndarray,
              memory: dict[Destination, np.ndarray]) -> None:
        """Exchange rows with other machines: long runs in place, others a few at a time, so that none of them is in
        memory twice for long."""
        far = machines[receivers.ranks] != machines[self.rank]
        leaving = {rank: route.pairs(share, self.rank) for rank, share in
                   sorted(zip(receivers.ranks[far].tolist(), receivers.shares[far].tolist()))}
        mine = next((each for each in memory if each.rank == self.rank), None)
        arriving = {} if mine is None else {
            rank: route.pairs(mine.share, rank) for rank in np.flatnonzero(
                (machines != machines[self.rank]) & (route.received(mine.share, len(machines)) > 0)).tolist()}
        self._send_in_place(buffers, route, _of_long_runs(route, leaving, True), _of_long_runs(route, arriving, True),
                            memory, mine)
        leaving, arriving = _of_long_runs(route, leaving, False), _of_long_runs(route, arriving, False)
        rounds = min(_MOST_ROUNDS, route.rounds(machines, receivers, ROUND_BYTES))
        if not rounds:
            return
        parts = [tuple(_part(route, pairs, self.rank, number, rounds) for pairs in (leaving, arriving))
                 for number in range(rounds)]
        outgoing, received = (np.empty(max(each.bytes for each in one), dtype=np.uint8) for one in zip(*parts))
        for going, coming in parts:
            _pack(buffers, route, going, outgoing)
            exchange(torch.from_numpy(outgoing[: going.bytes]), going.sizes(self.host_group.ranks),
                     torch.from_numpy(received[: coming.bytes]), coming.sizes(self.host_group.ranks),
                     self.host_group.group)
            if mine is not None:
                _place(received, route, coming, memory[mine], mine.share)

    def _send_in_place(self, buffers: Buffers, route: Route, leaving: Pairs, arriving: Pairs,
                       memory: dict[Destination, np.ndarray], mine: Destination | None) -> None:
        index = self.host_group.ranks.index
        outgoing = [(index(rank), run) for rank, pairs in leaving.items()
                    for part, buffer, (begin, _, counts) in _rows(route, buffers, pairs)
                    for run in _runs(route, pairs, buffer.data, begin, counts, part.width)]
        received = [(index(rank), run) for rank, pairs in arriving.items() if mine
                    for part in (part for parts in route.parts.values() for part in parts)
                    for run in _runs(route, pairs, _bytes_of(memory[mine], part, mine.share), part.at[pairs],
                                     part.counts[pairs], part.width)]
        send_each(outgoing, received, self.host_group.group)

    def _read(self, forms: dict[str, ColumnForm], route: Route, share: int | None, here: list[Destination]) -> Batch:
        if share is None or not len(route.ids):
            return Batch(torch.empty(0, dtype=torch.int64))
        target, pairs = next(each for each in here if each.share == share), route.all_pairs(share)
        raw = torch.empty(0, dtype=torch.uint8)
        if target.address is not None:
            raw = self.memory.lease(target.address, int(route.totals[share]))
        columns = {}
        for name, form in forms.items():
            parts = route.parts[name]
            columns[name] = column_of(name, form, parts[0].counts[pairs].copy(),
                                      [_bytes_of(raw, part, share) for part in parts],
                                      int(parts[-1].counts[pairs].sum()))
        return Batch(torch.from_numpy(route.ids[pairs].copy()), columns)

    def _count(self, edge: str, route: Route, to_shares: np.ndarray, receivers: ShareReceivers,
               machines: np.ndarray) -> None:
        sent, own = to_shares[receivers.shares], receivers.ranks == self.rank
        away = int(sent[~own].sum())
        arrived = sum(int(route.sizes[route.all_pairs(share)].sum()) for share in receivers.shares[own].tolist()) - \
            int(sent[own].sum())
        self.metrics.add(f"data/bytes/{edge}", int(sent.sum()))
        self.metrics.add("data/bytes_sent", away)
        self.metrics.add("data/bytes_between_machines",
                         int(sent[machines[receivers.ranks] != machines[self.rank]].sum()))
        self.moved += away + arrived


def _rows(route: Route, buffers: Buffers, pairs: np.ndarray) -> \
        Iterator[tuple[BufferPart, ColumnBuffer, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Yield for each buffer of the rows of some pairs, which this rank holds: part, buffer, and of each row [rows] its
    first element here, the one that it becomes there, and how many it has."""
    if not len(pairs):
        return
    position, known = route.position[pairs], dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]()
    for name, parts in route.parts.items():
        for part, buffer in zip(parts, buffers[name], strict=True):
            if id(part.at) not in known:  # else another buffer's rows have as many elements each
                known[id(part.at)] = buffer.bounds[position], part.at[pairs], part.counts[pairs]
            yield part, buffer, known[id(part.at)]


def _of_long_runs(route: Route, pairs: Pairs, long: bool) -> Pairs:
    """Return the pairs whose rows lie in long runs, or else the others."""
    return {rank: each for rank, each in pairs.items() if len(each) and bool(route.in_place[each[0]]) is long}


def _runs(route: Route, pairs: np.ndarray, data: np.ndarray, begin: np.ndarray, counts: np.ndarray,
          width: int) -> Iterator[Tensor]:
    """Yield the bytes of each run of rows in one of a column's buffers, [bytes] uint8, where there are some."""
    first = np.flatnonzero(route.run_begins[pairs])
    sizes = np.add.reduceat(counts, first) * width
    for at, size in zip((begin[first] * width).tolist(), sizes.tolist()):
        if size:
            yield torch.from_numpy(data[at : at + size])


class ExchangedRows(NamedTuple):
    """Pairs whose rows go to other ranks in one round, or come from them, and their bytes; by rank."""

    pairs: dict[int, np.ndarray]
    bytes_by_rank: dict[int, int]

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_rank.values())

    def sizes(self, ranks: Sequence[int]) -> list[int]:
        return [self.bytes_by_rank.get(rank, 0) for rank in ranks]


def _part(route: Route, pairs: dict[int, np.ndarray], rank: int, number: int, of: int) -> ExchangedRows:
    """Return what a rank exchanges in one round of several, alike on both sides. Few rows of many pairs of ranks are
    spread over the rounds, too."""
    part = dict[int, np.ndarray]()
    for other, each in pairs.items():
        begin = len(each) * number + (rank + other) % of
        part[other] = each[begin // of : (begin + len(each)) // of]
    return ExchangedRows(part, {rank: int(route.sizes[each].sum()) for rank, each in part.items()})


def _pack(buffers: Buffers, route: Route, going: ExchangedRows, outgoing: np.ndarray) -> None:
    """Copy rows into a message, one rank's after the other's."""
    position = 0
    for pairs in going.pairs.values():
        for part, buffer, (begin, _, counts) in _rows(route, buffers, pairs):
            size = int(counts.sum()) * part.width
            copy_runs(buffer.data, outgoing[position : position + size], begin, counts.cumsum() - counts, counts,
                      part.width)
            position += size


def _place(received: np.ndarray, route: Route, coming: ExchangedRows, memory: np.ndarray, share: int) -> None:
    """Copy rows of a message to where they lie in the memory of their share."""
    position = 0
    for pairs in coming.pairs.values():
        for part in (part for parts in route.parts.values() for part in parts):
            counts = part.counts[pairs]
            size = int(counts.sum()) * part.width
            copy_runs(received[position : position + size], _bytes_of(memory, part, share), counts.cumsum() - counts,
                      part.at[pairs], counts, part.width)
            position += size


def _bytes_of(memory: Any, part: BufferPart, share: int) -> Any:
    start = int(part.starts[share])
    return memory[start : start + int(part.sizes[share])]
