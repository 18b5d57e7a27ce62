"""Rows from one layout to another: each once, directly, and within a machine with a single copy (DistFlow §6.2).

The ranks announce what they hold and which memory they have free. From that, each computes where every row will lie
in its reader's memory. Within a machine the holder of a row writes it right there; rows for other machines go in one
`all_to_all_single`, packed, with sizes that both ends know already, and their reader puts them in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from distflow.data.batch import Batch
from distflow.data.exchange import exchange
from distflow.data.neighbours import Neighbours
from distflow.data.routing import Destinations, Part, Route, agree, announce, read_notice
from distflow.data.strips import Form, Runs, Strip, column_of, copy_rows, runs_of
from distflow.data.warehouse import Stock, Warehouse, choose
from distflow.observe.metrics import Metrics
from distflow.schema.plan import Layout

Strips = dict[str, list[Strip]]


class Place(NamedTuple):
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
        self.warehouse = Warehouse(rank)
        self.moved = 0
        """Bytes of rows that left or reached this rank in this step."""

    @functools.cached_property
    def neighbours(self) -> Neighbours:
        return Neighbours(self.rank, self.limit, self.group)

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

    def _reserve(self, route: Route, layout: Layout, stocks: list[Stock]) -> tuple[list[Place], list[Stock]]:
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
            stocks = [Stock.unpack(msgpack.unpackb(raw))
                      for raw in self.neighbours.gather(msgpack.packb(self.warehouse.stock()))]
            chosen = choose(stocks, wanted)
        return [Place(share, rank, chosen[rank]) for (share, _), rank in owners.items()], stocks

    def _send(self, strips: Strips, route: Route, traffic: np.ndarray, places: list[Place], machines: list[int],
              memory: dict[Place, np.ndarray]) -> None:
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

    def _read(self, forms: dict[str, Form], route: Route, share: int | None, here: list[Place],
              memory: dict[Place, np.ndarray]) -> Batch:
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

    def _count(self, edge: str, traffic: np.ndarray, places: list[Place], machines: list[int]) -> None:
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


def _rows(route: Route, strips: Strips, share: int, holder: int) -> Iterator[tuple[Part, Strip, np.ndarray, Runs]]:
    """Each strip of the rows that go from this rank to a share, its own strip, their pairs, and their runs."""
    pairs = route.pairs(share, holder)
    if len(pairs):
        runs = runs_of(route.position[pairs], pairs)
        for name, parts in route.parts.items():
            yield from ((part, strip, pairs, runs) for part, strip in zip(parts, strips[name], strict=True))


def _strip(memory: Any, part: Part, share: int) -> Any:
    """The part of a share's memory that one strip has."""
    return memory[part.starts[share] : part.starts[share] + part.sizes[share]]
