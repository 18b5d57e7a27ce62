"""A warehouse: the rows whose ids fall to it, by (row, column), until every consumer has committed them.

No sockets, threads or clocks: `service.py` has those and holds its lock around every call.

Rows as buffers: a batch goes onto a line, lies in a warehouse and leaves it again without being rebuilt.

What arrives in one message is a parcel: one buffer, with views of its columns. A request for any of its rows is
answered by slices of that buffer, which the kernel gathers. No pickle: what arrives can only become columns. Their
header travels in the message's: `[name, levels of raggedness, dtype, shape of an element, elements]`.

What a warehouse knows of a row, what its producer said of it, and what it counts.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, dtype_name, levels, of_levels
from distflow.data.column_buffers import elements_of, form_of, raw, strips_of
from distflow.dock.errors import DockError, Full
from distflow.dock.index import Intervals
from distflow.dock.selection import Ids
from distflow.errors import ColumnError, listing

_DTYPES = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
Span = tuple["RecordBatch", int, int]
"""Rows start…stop of a parcel."""
Heads = list[list[Any]]


class HeldColumn:
    """A column as raw bytes: its strips, and before them, if it is ragged, one of the rows' own lengths."""

    def __init__(self, column: ColumnData):
        self.form = form_of(column)
        self.strips = [(memoryview(strip.data), width, strip.bounds.tolist())
                       for strip, width in zip(strips_of(column), self.form.widths, strict=True)]
        if self.form.depth:
            self.strips.insert(0, (memoryview(raw(levels(column)[0][0])), 8, range(len(column) + 1)))
        self.nbytes = sum(len(data) for data, *_ in self.strips)

    def cut(self, start: int, stop: int, into: list[list[memoryview]]) -> int:
        """Append the buffers of rows start…stop to `into`, one list a strip; returns how many elements they have."""
        for part, (data, width, bounds) in zip(into, self.strips):
            first, last = bounds[start], bounds[stop]
            part.append(data[first * width : last * width])
        return last - first


class RecordBatch:
    """The rows of one message as they came. `base` is the place of its first row among all rows of its warehouse."""

    def __init__(self, batch: Batch, base: int, nbytes: int):
        self.batch, self.base, self.nbytes = batch, base, nbytes
        self.live = len(batch)
        """Rows that still have a column here."""
        self.held: dict[str, HeldColumn] = {}

    def column(self, name: str) -> HeldColumn:
        if name not in self.held:
            self.held[name] = HeldColumn(self.batch[name])
        return self.held[name]


def tokens_of(batch: Batch) -> Ids:
    """[rows]: the elements in each row's longest ragged column that is not text; what a row weighs in balancing."""
    result = numpy.zeros(len(batch), numpy.int64)
    for column in batch.columns.values():
        form = form_of(column)
        if form.depth and form.dtype != "uint8":
            result = numpy.maximum(result, elements_of(column))
    return result


def pack(ids: Ids, columns: Iterable[tuple[str, Sequence[Span]]]) -> tuple[Heads, list[Any]]:
    """The header and the buffers of a message that has rows `ids`, each column gathered from its spans.

    Raises:
        ColumnError: the spans of a column do not have one form.
    """
    heads: Heads = []
    buffers: list[Any] = [memoryview(ids).cast("B") if len(ids) else b""]
    for name, spans in columns:
        heads.append(_gather(name, spans, buffers))
    return heads, buffers


def _gather(name: str, spans: Sequence[Span], buffers: list[Any]) -> list[Any]:
    first = spans[0][0].column(name)
    parts: list[list[memoryview]] = [[] for _ in first.strips]
    elements = 0
    for parcel, start, stop in spans:
        held = parcel.column(name)
        if held is not first and held.form != first.form:
            raise ColumnError(f"the rows of column `{name}` do not fit together: some are {first.form}, some "
                              f"{held.form}. Their producers differ")
        elements += held.cut(start, stop, parts)
    for part in parts:
        buffers += part
        buffers.append(bytes(-sum(map(len, part)) % 8))
    return [name, *first.form, elements]


def gather(ids: Ids, names: Iterable[str], spans: Sequence[Span]) -> Batch:
    """Rows of parcels as a batch of their own: one copy, and several times faster than by index for long rows."""
    heads, buffers = pack(ids, [(name, spans) for name in names])
    data = torch.empty(sum(map(len, buffers)), dtype=torch.uint8)
    view, position = memoryview(data.numpy()), 0
    for buffer in buffers:
        view[position : position + len(buffer)] = buffer
        position += len(buffer)
    return unpack(len(ids), heads, data)


def unpack(rows: int, heads: Heads, data: Tensor) -> Batch:
    """The batch of a message; its columns are views of `data` [bytes] uint8.

    Raises:
        ColumnError: the header and the bytes do not fit together.
    """
    take = functools.partial(_take, data, position := [0])
    ids = take("ids", "int64", [rows])
    columns: dict[str, ColumnData] = {}
    for name, depth, dtype, shape, elements in heads:
        lengths: list[Tensor] = []
        for _ in range(depth):
            part = take(name, "int64", [int(lengths[-1].sum()) if lengths else rows])
            if len(part) and int(part.min()) < 0:
                raise ColumnError(f"column `{name}` arrived with a row of negative length")
            lengths.append(part)
        columns[name] = of_levels(lengths, take(name, dtype, [elements, *shape]))
    if position[0] != len(data):
        raise ColumnError(f"a batch of {position[0]} bytes came as {len(data)} bytes")
    return Batch(ids, columns)


def _take(data: Tensor, position: list[int], name: str, dtype: str, shape: list[int]) -> Tensor:
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise ColumnError(f"column `{name}` is of type {dtype}, which torch {torch.__version__} does not have")
    if min(shape) < 0:
        raise ColumnError(f"column `{name}` arrived with the impossible shape {shape}")
    size = math.prod(shape) * kind.itemsize
    part = data[position[0] : position[0] + size]
    if len(part) < size:
        raise ColumnError(f"a batch of {len(data)} bytes ends within column `{name}`, which has {size} bytes")
    position[0] += size + -size % 8
    if part.storage_offset() % kind.itemsize:  # complex128 may lie between two of its own
        part = part.clone()
    return part.view(kind).reshape(shape)


def spans_of(places: Ids, bases: Sequence[int], parcels: Sequence[RecordBatch]) -> list[Span]:
    """Rows at `places` of a warehouse as few spans: neighbours in a parcel are one. `bases`: of each parcel, ascending.

    Between the places of two parcels there is always one that nobody has, so neighbours are in one parcel.
    """
    if not len(places):
        return []
    edges = numpy.flatnonzero(numpy.diff(places) != 1) + 1
    begins, ends = [0, *edges.tolist()], [*edges.tolist(), len(places)]
    spans = []
    for first, begin, end in zip(places[begins].tolist(), begins, ends):
        parcel = parcels[bisect_right(bases, first) - 1]
        spans.append((parcel, first - parcel.base, first - parcel.base + end - begin))
    return spans


def order_of(wanted: Ids, there: Ids) -> Ids:
    """Places in `there` of those of `wanted` that it has, in the order of `wanted`."""
    sorter = numpy.argsort(there)
    places = numpy.searchsorted(there, wanted, sorter=sorter).clip(max=max(len(there) - 1, 0))
    found = sorter[places] if len(there) else places[:0]
    return found[there[found] == wanted] if len(there) else found


@dataclass(slots=True)
class StoredRow:
    """What a warehouse knows of a row."""

    columns: frozenset[str] = frozenset()
    tokens: int = 0
    version: int = 0
    group: int = -1
    priority: int = 0
    turn: int = -1
    """The last saved turn of a row that is not finished."""
    saved: int = -1
    """The place of that turn's rows."""
    consumed: set[str] = field(default_factory=set)


@dataclass
class RowMeta:
    """What a producer says of its rows; None leaves what is known: weight version, group, priority ([rows] int64)."""

    version: Ids | None = None
    group: Ids | None = None
    priority: Ids | None = None


@dataclass
class StorageCounts:
    """What went through a warehouse, for metrics."""

    rows_in: int = 0
    rows_out: int = 0
    duplicates: int = 0
    """Rows that came again and were dropped."""
    removed: int = 0


SHOWN = 8
_COMPACT_FROM = 256 << 10
"""Bytes of a parcel that is worth copying when half of its rows are gone."""


class StorageShard:
    """Rows of one warehouse of `count`; at most `max_rows` rows and `max_bytes` bytes are admitted."""

    def __init__(self, number: int = 0, count: int = 1, max_rows: int = 1 << 20, max_bytes: int = 16 << 30):
        self.number, self.count = number, count
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self.rows: dict[int, StoredRow] = {}
        self.places: dict[str, dict[int, int]] = {}
        """Column → row id → place; a place is a parcel's base plus a row in it."""
        self.parcels: list[RecordBatch] = []
        self.bases: list[int] = []
        self.next_base = self.nbytes = self.coming_rows = self.coming_bytes = 0
        self.thinned: dict[int, RecordBatch] = {}
        """Parcels that have lost rows since the last `_tidy`, by base."""
        self.gone = Intervals()
        """Rows that all consumers have committed, as id // count: dense where ids are."""
        self.counts = StorageCounts()

    def reserve(self, ids: Ids, nbytes: int) -> int | None:
        """Room for rows that are about to arrive: how many of them are new, or None if there is no room now.

        Columns for rows that are here already always find room: rows could otherwise never be finished and leave.

        Raises:
            Full: they would not fit into the empty warehouse.
        """
        new = sum(row not in self.rows and row // self.count not in self.gone for row in ids.tolist())
        if new > self.max_rows or (new and nbytes > self.max_bytes):
            raise Full(f"{new} rows of {nbytes} bytes never fit into warehouse {self.number}, which has room for "
                       f"{self.max_rows} rows of {self.max_bytes} bytes in all. Put fewer at once")
        rows, held = len(self.rows) + self.coming_rows + new, self.nbytes + self.coming_bytes + nbytes
        if new and (rows > self.max_rows or held > self.max_bytes):
            return None
        self.coming_rows += new
        self.coming_bytes += nbytes
        return new

    def unreserve(self, new: int, nbytes: int) -> None:
        """The reserved rows have arrived, or never will."""
        self.coming_rows -= new
        self.coming_bytes -= nbytes

    def put(self, batch: Batch, marks: RowMeta, turn: int | None = None) -> Ids:
        """Keep rows, and return the ids of those that were new; the others came before and are dropped.

        With `turn`, the rows are unfinished: they replace those of an earlier turn and are for `saved` alone.

        Raises:
            DockError: rows have some of these columns already, but not all; or there are no columns.
        """
        names = frozenset(batch.columns)
        if not names:
            raise DockError("a batch without columns has nothing to keep; put rows together with a column of theirs")
        ids = batch.ids.tolist()
        if len(set(ids)) < len(ids):
            raise DockError("a batch has a row twice; row ids must be unique in the run")
        fresh = [place for place, row in enumerate(ids) if self._wants(row, names, turn)]
        self.counts.rows_in += len(fresh)
        self.counts.duplicates += len(ids) - len(fresh)
        if not fresh:
            return numpy.empty(0, numpy.int64)
        parcel = self._shelve(batch, len(fresh))
        tokens = tokens_of(batch).tolist()
        for place in fresh:
            row = ids[place]
            kept = self.rows.setdefault(row, StoredRow())
            if turn is not None or not names.isdisjoint(self._saved_columns(kept)):
                self._forget_turn(kept)
            kept.tokens = max(kept.tokens, tokens[place])
            if turn is not None:
                kept.turn, kept.saved = turn, parcel.base + place
                continue
            kept.columns |= names
        self._mark(ids, fresh, marks)
        if turn is None:
            for name in names:
                self.places.setdefault(name, {}).update((ids[place], parcel.base + place) for place in fresh)
        self._tidy()
        return batch.ids.numpy()[fresh]

    def cut(self, ids: Ids, names: Sequence[str]) -> tuple[Heads, list[Any]]:
        """The header and buffers of rows `ids`, in that order.

        Raises:
            ColumnError: rows or columns are not here; names them.
        """
        columns = []
        for name in names:
            shelf = self.places.get(name, {})
            try:
                places = numpy.fromiter(map(shelf.__getitem__, ids.tolist()), numpy.int64, len(ids))
            except KeyError:
                raise ColumnError(self._absent(ids, name)) from None
            columns.append((name, spans_of(places, self.bases, self.parcels)))
        self.counts.rows_out += len(ids)
        return pack(ids, columns)

    def saved(self, ids: Ids) -> tuple[Ids, Ids, Heads, list[Any]]:
        """Those of `ids` that have a saved turn, that turn, and the rows' header and buffers."""
        found = [row for row in ids.tolist() if row in self.rows and self.rows[row].saved >= 0]
        ids = numpy.array(found, numpy.int64)
        turns = numpy.array([self.rows[row].turn for row in found], numpy.int64)
        places = numpy.array([self.rows[row].saved for row in found], numpy.int64)
        spans = spans_of(places, self.bases, self.parcels)
        names = list(spans[0][0].batch.columns) if spans else []
        return ids, turns, *pack(ids, [(name, spans) for name in names])

    def retire(self, consumer: str, ids: Iterable[int], all_consumers: frozenset[str]) -> int:
        """A consumer has committed rows; those that all have committed leave. Returns how many left."""
        left = 0
        for row in ids:
            kept = self.rows.get(row)
            if kept is None:
                continue
            kept.consumed.add(consumer)
            if kept.consumed >= all_consumers:
                self._remove(row, kept)
                left += 1
        self.counts.removed += left
        self._tidy()
        return left

    def table(self, ids: Iterable[int]) -> Ids:
        """[6, rows] int64: id, tokens, version, group, priority, turn; what a controller is told."""
        rows = [(row, kept.tokens, kept.version, kept.group, kept.priority, kept.turn)
                for row in ids if (kept := self.rows.get(row)) is not None]
        return numpy.array(rows, numpy.int64).reshape(-1, 6).T

    def lay(self, batch: Batch, turn: bool) -> None:
        """Put rows of a snapshot back, whose marks are known already. `turn`: they are the last saved turns."""
        parcel = self._shelve(batch, len(batch))
        for local, row in enumerate(batch.ids.tolist()):
            if turn:
                self.rows[row].saved = parcel.base + local
                continue
            self.rows[row].columns |= frozenset(batch.columns)
            for name in batch.columns:
                self.places.setdefault(name, {})[row] = parcel.base + local

    def _wants(self, row: int, names: frozenset[str], turn: int | None) -> bool:
        if row % self.count != self.number:
            raise DockError(f"row {row} does not live in warehouse {self.number} of {self.count}; "
                            "this process has another layout than the dock")
        if row // self.count in self.gone:
            return False
        kept = self.rows.get(row)
        if kept is None:
            return True
        there = kept.columns & names
        if turn is not None:
            return not there and turn > kept.turn
        if there and there != names:
            raise DockError(f"row {row} has {listing(sorted(there), 'already')} but not {', '.join(names - there)}: "
                            "columns that are made together must be put together, or those of two attempts would mix")
        return not there

    def _mark(self, ids: list[int], fresh: list[int], marks: RowMeta) -> None:
        for name in ("version", "group", "priority"):
            values = getattr(marks, name)
            if values is not None:
                told = values.tolist()
                for place in fresh:
                    setattr(self.rows[ids[place]], name, told[place])

    def _shelve(self, batch: Batch, live: int) -> RecordBatch:
        parcel = RecordBatch(batch, self.next_base, 0)
        parcel.nbytes = batch.ids.nbytes + sum(parcel.column(name).nbytes for name in batch.columns)
        parcel.live = live
        self.next_base += len(batch) + 1
        self.parcels.append(parcel)
        self.bases.append(parcel.base)
        self.nbytes += parcel.nbytes
        return parcel

    def _remove(self, row: int, kept: StoredRow) -> None:
        self._forget_turn(kept)
        for place in {self.places[name].pop(row) for name in kept.columns}:
            self._release(place)
        del self.rows[row]
        self.gone.add(row // self.count)

    def _forget_turn(self, kept: StoredRow) -> None:
        if kept.saved >= 0:
            self._release(kept.saved)
            kept.turn = kept.saved = -1

    def _saved_columns(self, kept: StoredRow) -> Iterable[str]:
        """Those that are unfinished; columns that others make of the row meanwhile do not finish them."""
        return self._parcel(kept.saved).batch.columns if kept.saved >= 0 else ()

    def _parcel(self, place: int) -> RecordBatch:
        return self.parcels[bisect_right(self.bases, place) - 1]

    def _release(self, place: int) -> None:
        """One row less in a parcel."""
        parcel = self._parcel(place)
        parcel.live -= 1
        self.thinned[parcel.base] = parcel

    def _tidy(self) -> None:
        """Let go of parcels that are empty, and copy what is left of large ones that are half empty."""
        for base, parcel in self.thinned.items():
            if parcel.live and (parcel.nbytes < _COMPACT_FROM or 2 * parcel.live > len(parcel.batch)):
                continue
            live = self.living(parcel) if parcel.live else {}
            at = bisect_right(self.bases, base) - 1
            self.parcels.pop(at)
            self.bases.pop(at)
            self.nbytes -= parcel.nbytes
            if live:
                self._copy(parcel, live)
        self.thinned = {}

    def _copy(self, parcel: RecordBatch, live: dict[int, tuple[int, list[str]]]) -> None:
        """The living rows of a parcel, in one of their own."""
        spans = spans_of(numpy.array(list(live)) + parcel.base, [parcel.base], [parcel])
        ids = numpy.array([row for row, _ in live.values()], numpy.int64)
        smaller = self._shelve(gather(ids, parcel.batch.columns, spans), len(live))
        for new, (row, names) in enumerate(live.values()):
            if not names:
                self.rows[row].saved = smaller.base + new
            for name in names:
                self.places[name][row] = smaller.base + new

    def living(self, parcel: RecordBatch) -> dict[int, tuple[int, list[str]]]:
        """Which rows of a parcel are still asked for: (id, under which columns; none: as a saved turn)."""
        result = {}
        for local, row in enumerate(parcel.batch.ids.tolist()):
            place = parcel.base + local
            names = [name for name in parcel.batch.columns if self.places.get(name, {}).get(row) == place]
            if names or (row in self.rows and self.rows[row].saved == place):
                result[local] = (row, names)
        return result

    def _absent(self, ids: Ids, name: str) -> str:
        shelf = self.places.get(name, {})
        missing = [row for row in ids.tolist() if row not in shelf]
        gone = [row for row in missing if row // self.count in self.gone]
        unknown = [row for row in missing if row not in self.rows]
        if gone:
            return f"rows {gone[:SHOWN]} were committed by all consumers and have left warehouse {self.number}"
        if unknown:
            return f"warehouse {self.number} has never seen rows {unknown[:SHOWN]}"
        there = self.rows[missing[0]].columns
        return (f"rows {missing[:SHOWN]} in warehouse {self.number} have no column `{name}` yet. "
                f"{listing(sorted(there), 'They have')}")
