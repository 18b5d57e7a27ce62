"""Storage shard: rows by (id, column), kept until every consumer has committed them.

    RecordBatch    the rows of one message: one buffer, with views of its columns; slices of it answer requests
    StoredRow      metadata of a row; its columns lie at positions: the base of a batch plus the row's index there
    StorageShard   batches, positions and metadata; empty batches are dropped, half-empty large ones are copied

A batch is received, stored and sent again without being rebuilt: the bytes that arrive can only become columns. A
column's schema, in the message's header, is `[name, levels of raggedness, dtype, shape of an element, elements]`.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, dtype_name, levels, of_levels
from distflow.data.column_buffers import buffers_of, elements_of, form_of
from distflow.data.row_copies import ScatteredRuns, raw
from distflow.dock.errors import DockError
from distflow.dock.index import SHOWN, Intervals
from distflow.dock.selection import Ids
from distflow.errors import ColumnError, listing

_DTYPES = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
Spans = tuple["RecordBatch", Ids, Ids]  # rows starts[i]…stops[i] of a batch, for all i
Schema = list[list[Any]]
Message = tuple[dict[str, Any], list[Any]]
LiveRows = dict[int, tuple[int, list[str]]]
"""Rows of a batch that can still be read, by index: id and columns (none: a saved turn)."""


class StoredColumn:
    """Column as raw buffers with element sizes and row bounds; a ragged one's first has the rows' lengths."""

    def __init__(self, column: ColumnData):
        self.form = form_of(column)
        self.buffers = [(buffer.data, width, buffer.bounds)
                       for buffer, width in zip(buffers_of(column), self.form.widths, strict=True)]
        if self.form.depth:
            self.buffers.insert(0, (raw(levels(column)[0][0]), 8, numpy.arange(len(column) + 1)))
        self.nbytes = sum(len(data) for data, *_ in self.buffers)

    def append_rows(self, starts: Ids, stops: Ids, into: list[list[Any]]) -> int:
        """Append rows starts[i]…stops[i] to `into`, a list for each buffer; return the count of elements."""
        elements = 0
        for part, (data, width, bounds) in zip(into, self.buffers):
            begins, ends = bounds[starts], bounds[stops]
            elements = int((ends - begins).sum())
            part.append(ScatteredRuns(data, begins, ends, width) if len(starts) > 1 else
                        data.data[int(begins[0]) * width : int(ends[0]) * width])
        return elements


class RecordBatch:
    """Rows of one message as they came. `base` is the position of the first one among all rows of the shard."""

    def __init__(self, batch: Batch, base: int = 0):
        self.batch, self.base, self.nbytes = batch, base, 0
        self.live = len(batch)  # rows that still have a column here
        self._columns: dict[str, StoredColumn] = {}

    def column(self, name: str) -> StoredColumn:
        if name not in self._columns:
            self._columns[name] = StoredColumn(self.batch[name])
        return self._columns[name]

    def all_rows(self) -> Spans:
        return self, numpy.array([0]), numpy.array([len(self.batch)])


def tokens_of(batch: Batch) -> Ids:
    """Return each row's weight in balancing, [rows] int64: the elements of its longest ragged column but text."""
    result = numpy.zeros(len(batch), numpy.int64)
    for column in batch.columns.values():
        form = form_of(column)
        if form.depth and form.dtype != "uint8":
            result = numpy.maximum(result, elements_of(column))
    return result


def pack(ids: Ids, columns: Iterable[tuple[str, Sequence[Spans]]]) -> tuple[Schema, list[Any]]:
    """Return schema and buffers of a message with rows `ids`. Raises `ColumnError`: a column's spans differ in form."""
    buffers: list[Any] = [ids.data.cast("B") if len(ids) else b""]
    return [_pack_column(name, spans, buffers) for name, spans in columns], buffers


def _pack_column(name: str, spans: Sequence[Spans], buffers: list[Any]) -> list[Any]:
    first = spans[0][0].column(name)
    parts: list[list[Any]] = [[] for _ in first.buffers]
    elements = 0
    for records, starts, stops in spans:
        held = records.column(name)
        if held is not first and held.form != first.form:
            raise ColumnError(f"the rows of column `{name}` do not fit together: some are {first.form}, some "
                              f"{held.form}. Their producers differ")
        elements += held.append_rows(starts, stops, parts)
    for part in parts:
        buffers += part
        buffers.append(bytes(-sum(map(len, part)) % 8))
    return [name, *first.form, elements]


def unpack(rows: int, schema: Schema, data: Tensor) -> Batch:
    """Return a message's batch: views of `data` [bytes] uint8. Raises `ColumnError`: schema and bytes do not fit."""
    take = functools.partial(_take, data, position := [0])
    ids = take("ids", "int64", [rows])
    columns: dict[str, ColumnData] = {}
    for name, depth, dtype, shape, elements in schema:
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


def pack_live(records: RecordBatch, turns: Mapping[int | None, list[int]], versions: Ids) -> Iterator[Message]:
    """Yield puts of the live rows of a batch, given by turn (None: finished). `versions`: of all rows of the batch."""
    for turn, local in turns.items():
        ids, spans = records.batch.ids.numpy()[local], spans_of(numpy.array(local), [0], [records])
        schema, buffers = pack(ids, [(name, spans) for name in records.batch.columns])
        yield {"op": "put", "ids": ids.tobytes(), "columns": schema, "turn": turn,
               "versions": versions[local].tobytes()}, buffers


def spans_of(positions: Ids, bases: Sequence[int], batches: Sequence[RecordBatch]) -> list[Spans]:
    """Return the rows at `positions` of a shard, in that order, as spans of batches; `bases` are those of the batches,
    ascending. Between the positions of two batches there is always an unused one, so consecutive positions are in one
    batch."""
    if not len(positions):
        return []
    edges = numpy.flatnonzero(numpy.diff(positions) != 1) + 1
    starts = positions[numpy.concatenate([[0], edges])]
    stops = positions[numpy.concatenate([edges, [len(positions)]]) - 1] + 1
    numbers = numpy.searchsorted(bases, starts, side="right") - 1
    ends = [*(numpy.flatnonzero(numpy.diff(numbers)) + 1).tolist(), len(starts)]
    spans = []
    for begin, end in zip([0, *ends], ends):
        number = int(numbers[begin])
        spans.append((batches[number], starts[begin:end] - bases[number], stops[begin:end] - bases[number]))
    return spans


def order_of(wanted: Ids, there: Ids) -> Ids:
    """Return the positions in `there` of those of `wanted` that it has."""
    sorter = numpy.argsort(there)
    positions = numpy.searchsorted(there, wanted, sorter=sorter).clip(max=max(len(there) - 1, 0))
    found = sorter[positions] if len(there) else positions[:0]
    return found[there[found] == wanted] if len(there) else found


@dataclass(slots=True)
class StoredRow:
    """Metadata of a row in its shard; see `RowState`."""

    columns: frozenset[str] = frozenset()
    tokens: int = 0
    version: int = 0
    turn: int = -1
    saved: int = -1  # position of that turn's row
    consumed: frozenset[str] = frozenset()


def read_ids(data: bytes) -> Ids:
    return numpy.frombuffer(data, numpy.int64)


def read_tensor(data: bytes) -> Tensor:
    """Read [rows] int64 that may be changed."""
    return torch.from_numpy(read_ids(data).copy())


def read_table(data: bytes) -> Ids:
    """Read what `StorageShard.table` returned, from its bytes."""
    return read_ids(data).reshape(4, -1)


_COMPACT_FROM = 256 << 10  # bytes of a batch that is worth copying when half of its rows are gone


class StorageShard:
    """Rows of shard `number` of `count`. The rows of a group live in one shard (`DockLayout.shard_of`), and come in one
    put: so a group never has rows of two producers, and all of them become visible together."""

    def __init__(self, number: int = 0, count: int = 1, group_size: int = 1):
        self.number, self.count, self.group_size = number, count, group_size
        self.rows: dict[int, StoredRow] = {}
        self.positions: dict[str, dict[int, int]] = {}  # by column and row id
        self.batches: list[RecordBatch] = []
        self.bases: list[int] = []
        self.next_base = self.nbytes = 0
        self.thinned: dict[int, RecordBatch] = {}  # batches that have lost rows since the last `_compact`, by base
        self.gone = Intervals()  # rows that all consumers have committed, by `_local`

    def put(self, batch: Batch, versions: Ids | None = None, turn: int | None = None) -> Ids:
        """Store rows, and return the ids of those that were new; repeated ones are dropped.

        Args:
            versions: of the weights, one for each row; none, or an empty list, leaves what is known of a row.
            turn: of unfinished rows: they replace those of an earlier turn, and only `saved` returns them.

        Raises:
            DockError: rows have some of these columns already, but not all; a group is not whole; or there are no
                columns.
        """
        names = frozenset(batch.columns)
        ids = batch.ids.tolist()
        self._check(batch.ids.numpy(), names, turn)
        gone = self.gone.among(self._local(batch.ids.numpy()))
        fresh = numpy.flatnonzero(~gone).tolist()
        if not self.rows.keys().isdisjoint(ids):
            fresh = [local for local in fresh if self._wants(ids[local], names, turn)]
        if not fresh:
            return numpy.empty(0, numpy.int64)
        records = self._append(batch, len(fresh))
        self._note(records, fresh, names, turn, None if versions is None else versions.tolist())
        if turn is None:
            rows = ids if len(fresh) == len(ids) else [ids[local] for local in fresh]
            for name in names:
                self.positions.setdefault(name, {}).update(zip(rows, (records.base + numpy.array(fresh)).tolist()))
        self._compact()
        return batch.ids.numpy()[fresh]

    def _note(self, records: RecordBatch, fresh: list[int], names: frozenset[str], turn: int | None,
              versions: list[int] | None) -> None:
        """Note the metadata of those rows of a batch that are `fresh`."""
        ids, tokens = records.batch.ids.tolist(), tokens_of(records.batch).tolist()
        for local in fresh:
            stored = self.rows.get(ids[local])
            if stored is None:
                stored = self.rows[ids[local]] = StoredRow()
            if turn is not None or not names.isdisjoint(self._saved_columns(stored)):  # others do not finish a turn
                self._forget_turn(stored)
            stored.tokens = max(stored.tokens, tokens[local])
            if versions:
                stored.version = versions[local]
            if turn is None:
                stored.columns = stored.columns | names if stored.columns else names
            else:
                stored.turn, stored.saved = turn, records.base + local

    def read(self, ids: Ids, names: Sequence[str]) -> tuple[Schema, list[Any]]:
        """Return the schema and the buffers of rows `ids`, in that order; a `ColumnError` names what is missing."""
        columns = []
        for name in names:
            by_row = self.positions.get(name, {})
            try:
                positions = numpy.fromiter(map(by_row.__getitem__, ids.tolist()), numpy.int64, len(ids))
            except KeyError:
                raise ColumnError(self._absent(ids, name)) from None
            columns.append((name, spans_of(positions, self.bases, self.batches)))
        return pack(ids, columns)

    def saved(self, ids: Ids) -> tuple[Ids, Ids, Schema, list[Any]]:
        """Return those of `ids` that have a saved turn, the turns, and the rows' schema and buffers."""
        found = [row for row in ids.tolist() if row in self.rows and self.rows[row].saved >= 0]
        ids = numpy.array(found, numpy.int64)
        turns = numpy.array([self.rows[row].turn for row in found], numpy.int64)
        positions = numpy.array([self.rows[row].saved for row in found], numpy.int64)
        spans = spans_of(positions, self.bases, self.batches)
        names = list(spans[0][0].batch.columns) if spans else []
        return ids, turns, *pack(ids, [(name, spans) for name in names])

    def retire(self, consumer: str, ids: Iterable[int], all_consumers: frozenset[str]) -> None:
        """Mark rows as committed by a consumer: no process goes on with their saved turns. They leave once all have
        committed them."""
        left = []
        for row in ids:
            stored = self.rows.get(row)
            if stored is None:
                continue
            stored.consumed |= {consumer}
            self._forget_turn(stored)
            if stored.consumed >= all_consumers:
                left.append(row)
        self._remove(list(dict.fromkeys(left)))
        self._compact()

    def table(self, ids: Iterable[int]) -> Ids:
        """Return the metadata for the indexes, [4, rows] int64: id, tokens, version, turn."""
        known = [row for row in ids if row in self.rows]
        rows = [self.rows[row] for row in known]
        return numpy.array([known, [row.tokens for row in rows], [row.version for row in rows],
                            [row.turn for row in rows]], numpy.int64)

    def copies(self) -> list[Iterator[Message]]:
        """Return puts of all rows. They may be packed later: batches never change."""
        found = []
        for records in self.batches:
            turns: dict[int | None, list[int]] = {}
            for local, (row, names) in self.live_rows(records).items():
                turns.setdefault(None if names else self.rows[row].turn, []).append(local)
            versions = [self.rows[row].version if row in self.rows else 0 for row in records.batch.ids.tolist()]
            found.append(pack_live(records, turns, numpy.array(versions, numpy.int64)))
        return found

    def _wants(self, row: int, names: frozenset[str], turn: int | None) -> bool:
        stored = self.rows.get(row)
        if stored is None:
            return True
        there = stored.columns & names
        if turn is not None:
            return not there and turn > stored.turn and not stored.consumed
        if there and there != names:
            raise DockError(f"row {row} has {listing(sorted(there), 'already')} but not {', '.join(names - there)}: "
                            "columns that are made together must be put together, or those of two attempts would mix")
        return not there

    def _check(self, ids: Ids, names: frozenset[str], turn: int | None) -> None:
        if not names:
            raise DockError("a batch without columns has nothing to store; put rows together with a column of theirs")
        groups = ids // self.group_size
        if len(away := ids[groups % self.count != self.number]):
            raise DockError(f"row {away[0]} does not live in shard {self.number} of {self.count}; "
                            "this process has another layout than the dock")
        if len(numpy.unique(ids)) < len(ids):
            raise DockError("a batch has a row twice; row ids must be unique in the run")
        if self.group_size == 1 or turn is not None:
            return
        found, counts = numpy.unique(groups, return_counts=True)
        if len(torn := numpy.flatnonzero(counts < self.group_size)):
            first = int(found[torn[0]]) * self.group_size
            raise DockError(f"of rows {first} to {first + self.group_size - 1}, which are one group, only "
                            f"{counts[torn[0]]} came. Put the rows of a group together, or those of two producers "
                            "would mix")

    def _local(self, row: Any) -> Any:
        """Return a row's number among those of this shard, or of each of an array of rows: dense where ids are, so that
        ranges of them are few."""
        return row // (self.group_size * self.count) * self.group_size + row % self.group_size

    def _append(self, batch: Batch, live: int) -> RecordBatch:
        records = RecordBatch(batch, self.next_base)
        records.nbytes = batch.ids.nbytes + sum(records.column(name).nbytes for name in batch.columns)
        records.live = live
        self.next_base += len(batch) + 1
        self.batches.append(records)
        self.bases.append(records.base)
        self.nbytes += records.nbytes
        return records

    def _remove(self, ids: list[int]) -> None:
        for row in ids:
            for position in {self.positions[name].pop(row) for name in self.rows.pop(row).columns}:
                self._release(position)
        self.gone.update(self._local(numpy.array(ids, numpy.int64)))

    def _forget_turn(self, stored: StoredRow) -> None:
        if stored.saved >= 0:
            self._release(stored.saved)
            stored.turn = stored.saved = -1

    def _saved_columns(self, stored: StoredRow) -> Iterable[str]:
        return self._batch_at(stored.saved).batch.columns if stored.saved >= 0 else ()

    def _batch_at(self, position: int) -> RecordBatch:
        return self.batches[bisect_right(self.bases, position) - 1]

    def _release(self, position: int) -> None:
        records = self._batch_at(position)
        records.live -= 1
        self.thinned[records.base] = records

    def _compact(self) -> None:
        """Drop empty batches, and copy the live rows of large ones that are half empty."""
        for base, records in self.thinned.items():
            if records.live and (records.nbytes < _COMPACT_FROM or 2 * records.live > len(records.batch)):
                continue
            live = self.live_rows(records) if records.live else {}
            at = bisect_right(self.bases, base) - 1
            self.batches.pop(at)
            self.bases.pop(at)
            self.nbytes -= records.nbytes
            if live:
                self._copy(records, live)
        self.thinned = {}

    def _copy(self, records: RecordBatch, live: LiveRows) -> None:
        smaller = self._append(records.batch.select(torch.tensor(list(live))), len(live))
        for new, (row, names) in enumerate(live.values()):
            if not names:
                self.rows[row].saved = smaller.base + new
            for name in names:
                self.positions[name][row] = smaller.base + new

    def live_rows(self, records: RecordBatch) -> LiveRows:
        result = {}
        for local, row in enumerate(records.batch.ids.tolist()):
            position = records.base + local
            names = [name for name in records.batch.columns if self.positions.get(name, {}).get(row) == position]
            if names or (row in self.rows and self.rows[row].saved == position):
                result[local] = (row, names)
        return result

    def _absent(self, ids: Ids, name: str) -> str:
        by_row = self.positions.get(name, {})
        missing = [row for row in ids.tolist() if row not in by_row]
        gone = [row for row in missing if self._local(row) in self.gone]
        unknown = [row for row in missing if row not in self.rows]
        if gone:
            return f"rows {gone[:SHOWN]} were committed by all consumers and have left shard {self.number}"
        if unknown:
            return f"shard {self.number} has never seen rows {unknown[:SHOWN]}"
        there = self.rows[missing[0]].columns
        return (f"rows {missing[:SHOWN]} in shard {self.number} have no column `{name}` yet. "
                f"{listing(sorted(there), 'They have')}")
