"""Rows from one layout to another: each once, directly, and within a machine with a single copy (DistFlow §6.2).

The ranks announce what they hold and which memory they have free. From that, each computes where every row will lie
in its reader's memory. Within a machine the holder of a row writes it right there; rows for other machines go in one
`all_to_all_single`, packed, with sizes that both ends know already, and their reader puts them in place.

Where each row goes when a layout changes: computed from what the ranks announce, the same on all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from distflow.data.batch import Batch
from distflow.data.column_buffers import (
    ColumnBuffer,
    ColumnForm,
    RowRuns,
    column_of,
    copy_rows,
    form_of,
    runs_of,
    strips_of,
)
from distflow.data.exchange import exchange
from distflow.data.host_group import HostGroup
from distflow.errors import ColumnError
from distflow.plan import Layout
from distflow.rpc.shared_memory import PoolNotice, SharedMemoryPool, choose
from distflow.telemetry.metrics import Metrics

_ALIGNED = 64
_SHOWN = 5

Destinations = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From the ids of all rows [rows] to pairs (row [pairs], share [pairs]): a row may go to several shares, or to none."""


class RowNotice(NamedTuple):
    """What a rank announces: its rows' ids [rows], and per column its form and its rows' counts, one [rows] a strip.

    Columns whose rows have as many elements each, as all that a policy writes of its tokens, share one array.
    """

    ids: np.ndarray
    forms: dict[str, ColumnForm]
    counts: dict[str, list[np.ndarray]]
    stock: PoolNotice


def announce(batch: Batch, stock: PoolNotice) -> tuple[bytes, dict[str, list[ColumnBuffer]]]:
    """A rank's notice as bytes, and the strips that it speaks of."""
    strips = {name: strips_of(column) for name, column in batch.columns.items()}
    forms, numbers = [], {}
    for name, column in batch.columns.items():
        form = form_of(column)
        counts = [strip.counts.tobytes() for strip in strips[name]] if form.depth else []  # a dense row has one element
        forms.append((name, *form, [numbers.setdefault(part, len(numbers)) for part in counts]))
    header = msgpack.packb([len(batch), forms, stock])
    header += b"\0" * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, batch.ids.numpy().tobytes(), *numbers]), strips


def read_notice(raw: bytes) -> RowNotice:
    """What `announce` packed."""
    size = int.from_bytes(raw[:8], "little")
    reader = msgpack.Unpacker()
    reader.feed(raw[8 : 8 + size])
    rows, forms, stock = reader.unpack()
    numbers = np.frombuffer(raw, dtype=np.int64, offset=8 + size)
    ids, *distinct = [numbers[start : start + rows] for start in range(0, len(numbers), rows)] if rows else [numbers]
    once = np.ones(rows, dtype=np.int64)
    described, counts = {}, {}
    for name, depth, dtype, shape, strips in forms:
        described[name] = ColumnForm(depth, dtype, tuple(shape))
        counts[name] = [distinct[strip] if rows else ids for strip in strips] if depth else [once]
    return RowNotice(ids, described, counts, PoolNotice.unpack(stock))


def agree(notices: Sequence[RowNotice]) -> dict[str, ColumnForm]:
    """The form of each column. A rank without rows, or with empty ones only, has no say if another has elements.

    Raises:
        ColumnError: the ranks' elements differ in type or shape, or their columns are not the same.
    """
    holders = [rank for rank, notice in enumerate(notices) if len(notice.ids)] or [0]
    names = notices[holders[0]].forms
    for rank in holders:
        if notices[rank].forms.keys() != names.keys():
            odd = ", ".join(sorted(notices[rank].forms.keys() ^ names.keys()))
            raise ColumnError(f"rank {holders[0]} and rank {rank} do not have the same columns: only one has {odd}")
    return {name: _agree(name, notices, holders) for name in names}


def _agree(name: str, notices: Sequence[RowNotice], holders: list[int]) -> ColumnForm:
    said = {rank: notices[rank].forms[name] for rank in holders}
    if len(set(said.values())) == 1:
        return said[holders[0]]
    full = [rank for rank in holders if notices[rank].counts[name][-1].any()] or holders[:1]
    first = said[full[0]]
    for rank in holders:
        if said[rank].depth != first.depth or (rank in full and said[rank] != first):
            raise ColumnError(f"the parts of column `{name}` do not fit together: rank {full[0]} has {first}, rank "
                              f"{rank} has {said[rank]}")
    return first


class StripPart(NamedTuple):
    """One strip of the rows that arrive. Per pair: `counts` elements, from element `at` of its share's strip.

    Share `i`'s strip lies at byte `starts[i]` of its memory and has `sizes[i]` bytes, in elements of `width` bytes.
    """

    width: int
    counts: np.ndarray
    at: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


class Route:
    """The rows' way: pairs of a row and a share, by share and then by id.

    holder, position, ids: [pairs]: the rank that has the row, where in its batch, its id. `bounds` [shares + 1]: share
    `i` has the pairs `bounds[i]` … `bounds[i + 1] - 1`. `totals` [shares]: bytes of a share's memory.

    Raises:
        ColumnError: a share would get a row twice.
    """

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
        known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.parts = {name: [self._part([notice.counts[name][level] for notice in holders], row, width, known)
                             for level, width in enumerate(form.widths)] if holders else []
                      for name, form in forms.items()}

    def _part(self, said: list[np.ndarray], row: np.ndarray, width: int, known: dict) -> StripPart:
        """`said`: each holder's counts. Strips for which all said the same share their arrays, which are `known`."""
        key = tuple(map(id, said))
        if key not in known:
            counts = np.concatenate(said)[row]
            ends = np.zeros(len(counts) + 1, dtype=np.int64)
            counts.cumsum(out=ends[1:])
            edges = ends[self.bounds]
            known[key] = counts, ends[:-1] - edges[self.share], edges[1:] - edges[:-1]
        counts, at, elements = known[key]
        sizes, starts = elements * width, self.totals
        self.totals = starts + -(-sizes // _ALIGNED) * _ALIGNED
        return StripPart(width, counts, at, starts, sizes)

    def pairs(self, share: int, holder: int | None = None) -> np.ndarray:
        """The pairs of a share, or those of them whose rows a rank has; by id."""
        every = np.arange(self.bounds[share], self.bounds[share + 1])
        return every if holder is None else every[self.holder[every] == holder]

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """[pairs]: bytes of each row."""
        alike: dict[int, list[StripPart]] = {}
        for part in (part for parts in self.parts.values() for part in parts):
            alike.setdefault(id(part.counts), []).append(part)
        return sum((parts[0].counts * sum(part.width for part in parts) for parts in alike.values()),
                   np.zeros(len(self.ids), dtype=np.int64))

    def traffic(self, ranks: int) -> np.ndarray:
        """[ranks, shares]: bytes of rows that a rank has and a share gets."""
        shares = len(self.totals)
        sums = np.bincount(self.holder * shares + self.share, self.sizes, ranks * shares)
        return sums.astype(np.int64).reshape(ranks, shares)


def _by_share(ids: np.ndarray, share: np.ndarray, shares: int) -> np.ndarray:
    """[pairs]: their order by share and then by id."""
    if (ids[1:] >= ids[:-1]).all():  # the usual case; numbers as small as these are sorted in one pass
        return np.argsort(share.astype(np.min_scalar_type(shares)), kind="stable")
    return np.lexsort((ids, share))


Strips = dict[str, list[ColumnBuffer]]


class Destination(NamedTuple):
    """Where a share's rows are put: in the memory of its first rank on each machine that has ranks of it.

    number: of the segment; -1 if the share has no bytes.
    """

    share: int
    rank: int
    number: int


class Redistributor:
    """One rank's part in moving rows between the ranks of a group."""

    def __init__(self, rank: int, metrics: Metrics, limit: float, group: dist.ProcessGroup | None = None):
        self.rank, self.metrics, self.limit, self.group = rank, metrics, limit, group
        self.warehouse = SharedMemoryPool(rank)
        self.moved = 0
        """Bytes of rows that left or reached this rank in this step."""

    @functools.cached_property
    def neighbours(self) -> HostGroup:
        return HostGroup(self.rank, self.limit, self.group)

    def move(self, held: Batch, layout: Layout, rider: bytes, settle: Callable[[list[bytes]], Destinations],
             edge: str) -> Batch:
        """The rows that `layout` gives to this rank, by id, with their columns; every rank must call it.

        Args:
            held: this rank's rows; ids and lengths are on the CPU.
            rider: what this rank tells the others to find the rows' destinations.
            settle: from all ranks' riders to which rows go to which shares of `layout`; the same on every rank.
            edge: what the bytes are counted for in the metrics.

        Raises:
            ColumnError: on every rank: rows without a place or with two, or columns that do not fit together.
        """
        raw, strips = announce(held, self.warehouse.stock())
        told = [msgpack.unpackb(part) for part in self.neighbours.gather(msgpack.packb([raw, rider]))]
        notices = [read_notice(notice) for notice, _ in told]
        forms = agree(notices)
        route = Route(notices, forms, settle([part for _, part in told]), layout.dp)
        places, stocks = self._reserve(route, layout, [notice.stock for notice in notices])
        machines = self.neighbours.machines
        here = [place for place in places if machines[place.rank] == machines[self.rank]]
        memory = {place: self.warehouse.open(stocks, place.rank, place.number) for place in here if place.number >= 0}
        for place in memory:
            for part, strip, pairs, runs in _rows(route, strips, place.share, self.rank):
                copy_rows(strip.data, _strip(memory[place], part, place.share), strip.starts[route.position[pairs]],
                          part.at[pairs], part.counts[pairs], part.width, runs)
        traffic = route.traffic(len(notices))
        self._count(edge, traffic, places, machines)
        apart = np.array(machines)[:, None] != np.array([machines[place.rank] for place in places], dtype=int)
        if traffic[:, [place.share for place in places]][apart].any():
            self._send(strips, route, traffic, places, machines, memory)
        self.neighbours.meet()
        return self._read(forms, route, layout.share(self.rank), here, memory)

    def _reserve(self, route: Route, layout: Layout, stocks: list[PoolNotice]) -> tuple[list[Destination],
                                                                                        list[PoolNotice]]:
        """The places of all shares. Where one lacks memory, its owner adds some and all announce their stocks anew."""
        owners: dict[tuple[int, int], int] = {}
        for rank, machine in enumerate(self.neighbours.machines):
            share = layout.share(rank)
            if share is not None:
                owners.setdefault((share, machine), rank)
        wanted = {rank: int(route.totals[share]) for (share, _), rank in owners.items()}
        chosen = choose(stocks, wanted)
        if None in chosen.values():
            if self.rank in chosen and chosen[self.rank] is None:
                self.warehouse.add(wanted[self.rank])
            stocks = [PoolNotice.unpack(msgpack.unpackb(raw))
                      for raw in self.neighbours.gather(msgpack.packb(self.warehouse.stock()))]
            chosen = choose(stocks, wanted)
        return [Destination(share, rank, chosen[rank]) for (share, _), rank in owners.items()], stocks

    def _send(self, strips: Strips, route: Route, traffic: np.ndarray, places: list[Destination], machines: list[int],
              memory: dict[Destination, np.ndarray]) -> None:
        """The rows that cross between machines, in one all-to-all; each part holds one strip after the other."""
        far = {place.rank: place.share for place in places if machines[place.rank] != machines[self.rank]}
        sizes = [int(traffic[self.rank, far[rank]]) if rank in far else 0 for rank in range(len(machines))]
        outgoing, position = np.empty(sum(sizes), dtype=np.uint8), 0
        for rank in sorted(far):
            for part, strip, pairs, runs in _rows(route, strips, far[rank], self.rank):
                counts = part.counts[pairs]
                size = int(counts.sum()) * part.width
                copy_rows(strip.data, outgoing[position : position + size], strip.starts[route.position[pairs]],
                          counts.cumsum() - counts, counts, part.width, runs)
                position += size
        mine = next((place for place in places if place.rank == self.rank), None)
        arriving = [int(traffic[rank, mine.share]) if mine and machines[rank] != machines[self.rank] else 0
                    for rank in range(len(machines))]
        received, position = exchange(torch.from_numpy(outgoing), sizes, arriving, self.group).numpy(), 0
        for rank, size in enumerate(arriving):
            if not size:
                continue
            pairs = route.pairs(mine.share, rank)
            runs = runs_of(np.arange(len(pairs)), pairs)
            for part in (part for parts in route.parts.values() for part in parts):
                counts = part.counts[pairs]
                size = int(counts.sum()) * part.width
                copy_rows(received[position : position + size], _strip(memory[mine], part, mine.share),
                          counts.cumsum() - counts, part.at[pairs], counts, part.width, runs)
                position += size

    def _read(self, forms: dict[str, ColumnForm], route: Route, share: int | None, here: list[Destination],
              memory: dict[Destination, np.ndarray]) -> Batch:
        if share is None or not len(route.ids):
            return Batch(torch.empty(0, dtype=torch.int64))
        place, pairs = next(place for place in here if place.share == share), route.pairs(share)
        raw = torch.empty(0, dtype=torch.uint8)
        if place in memory:
            raw = self.warehouse.lease(memory[place], place.rank, place.number, int(route.totals[share]))
        columns = {}
        for name, form in forms.items():
            strips = [(_strip(raw, part, share), part.counts[pairs]) for part in route.parts[name]]
            columns[name] = column_of(form, strips)
        return Batch(torch.from_numpy(route.ids[pairs]), columns)

    def _count(self, edge: str, traffic: np.ndarray, places: list[Destination], machines: list[int]) -> None:
        """Bytes of rows: of the edge in all, those that leave this rank, and those that leave this machine."""
        sent = {place: int(traffic[self.rank, place.share]) for place in places}
        away = sum(size for place, size in sent.items() if place.rank != self.rank)
        arrived = sum(int(traffic[:, place.share].sum()) - sent[place] for place in places if place.rank == self.rank)
        self.metrics.add(f"data/bytes/{edge}", sum(sent.values()))
        self.metrics.add("data/bytes_sent", away)
        self.metrics.add("data/bytes_between_machines",
                         sum(size for place, size in sent.items() if machines[place.rank] != machines[self.rank]))
        self.moved += away + arrived
        self.metrics.maximum("data/bytes_of_busiest_rank", self.moved)


def _rows(route: Route, strips: Strips, share: int, holder: int) -> Iterator[tuple[StripPart, ColumnBuffer,
                                                                                   np.ndarray, RowRuns]]:
    """Each strip of the rows that go from this rank to a share, its own strip, their pairs, and their runs."""
    pairs = route.pairs(share, holder)
    if len(pairs):
        runs = runs_of(route.position[pairs], pairs)
        for name, parts in route.parts.items():
            yield from ((part, strip, pairs, runs) for part, strip in zip(parts, strips[name], strict=True))


def _strip(memory: Any, part: StripPart, share: int) -> Any:
    """The part of a share's memory that one strip has."""
    return memory[part.starts[share] : part.starts[share] + part.sizes[share]]
