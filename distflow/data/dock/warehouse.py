"""A warehouse: the rows whose ids fall to it, by (row, column), until every consumer has committed them.

No sockets, threads or clocks: `service.py` has those and holds its lock around every call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy

from distflow.data.batch import Batch
from distflow.data.dock.errors import DockError, Full
from distflow.data.dock.intervals import Intervals
from distflow.data.dock.kept import Counts, Kept, Marks
from distflow.data.dock.layout import Ids
from distflow.data.dock.parcel import Heads, Parcel, gather, pack, spans_of, tokens_of
from distflow.schema.errors import ColumnError, listing

SHOWN = 8
_COMPACT_FROM = 256 << 10
"""Bytes of a parcel that is worth copying when half of its rows are gone."""


class Warehouse:
    """Rows of one warehouse of `count`; at most `max_rows` rows and `max_bytes` bytes are admitted."""

    def __init__(self, number: int = 0, count: int = 1, max_rows: int = 1 << 20, max_bytes: int = 16 << 30):
        self.number, self.count = number, count
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self.rows: dict[int, Kept] = {}
        self.places: dict[str, dict[int, int]] = {}
        """Column → row id → place; a place is a parcel's base plus a row in it."""
        self.parcels: list[Parcel] = []
        self.bases: list[int] = []
        self.next_base = self.nbytes = self.coming_rows = self.coming_bytes = 0
        self.thinned: dict[int, Parcel] = {}
        """Parcels that have lost rows since the last `_tidy`, by base."""
        self.gone = Intervals()
        """Rows that all consumers have committed, as id // count: dense where ids are."""
        self.counts = Counts()

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

    def put(self, batch: Batch, marks: Marks, turn: int | None = None) -> Ids:
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
            kept = self.rows.setdefault(row, Kept())
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

    def _mark(self, ids: list[int], fresh: list[int], marks: Marks) -> None:
        for name in ("version", "group", "priority"):
            values = getattr(marks, name)
            if values is not None:
                told = values.tolist()
                for place in fresh:
                    setattr(self.rows[ids[place]], name, told[place])

    def _shelve(self, batch: Batch, live: int) -> Parcel:
        parcel = Parcel(batch, self.next_base, 0)
        parcel.nbytes = batch.ids.nbytes + sum(parcel.column(name).nbytes for name in batch.columns)
        parcel.live = live
        self.next_base += len(batch) + 1
        self.parcels.append(parcel)
        self.bases.append(parcel.base)
        self.nbytes += parcel.nbytes
        return parcel

    def _remove(self, row: int, kept: Kept) -> None:
        self._forget_turn(kept)
        for place in {self.places[name].pop(row) for name in kept.columns}:
            self._release(place)
        del self.rows[row]
        self.gone.add(row // self.count)

    def _forget_turn(self, kept: Kept) -> None:
        if kept.saved >= 0:
            self._release(kept.saved)
            kept.turn = kept.saved = -1

    def _saved_columns(self, kept: Kept) -> Iterable[str]:
        """Those that are unfinished; columns that others make of the row meanwhile do not finish them."""
        return self._parcel(kept.saved).batch.columns if kept.saved >= 0 else ()

    def _parcel(self, place: int) -> Parcel:
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

    def _copy(self, parcel: Parcel, live: dict[int, tuple[int, list[str]]]) -> None:
        """The living rows of a parcel, in one of their own."""
        spans = spans_of(numpy.array(list(live)) + parcel.base, [parcel.base], [parcel])
        ids = numpy.array([row for row, _ in live.values()], numpy.int64)
        smaller = self._shelve(gather(ids, parcel.batch.columns, spans), len(live))
        for new, (row, names) in enumerate(live.values()):
            if not names:
                self.rows[row].saved = smaller.base + new
            for name in names:
                self.places[name][row] = smaller.base + new

    def living(self, parcel: Parcel) -> dict[int, tuple[int, list[str]]]:
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
