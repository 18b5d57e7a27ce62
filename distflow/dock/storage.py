"""Storage shard: rows by (id, column), kept until every consumer has committed them.

    StoredRows     metadata of rows, in arrays; each row has a slot, which is used again when it has left
    ColumnTable    where the rows of a column lie in the heap, by slot, and of which batch they are
    StoredBatch    rows of one put: a part of the heap, with the bytes as they came
    StorageShard   all of these; empty batches are dropped, half-empty large ones are copied

A batch stays where it was received, and rows are read from there: by the clients of this machine in place, by others
through messages. `data/columns.py` has the form.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from distflow.data.columns import ColumnForm, Extents, Schema, encode, read_rows
from distflow.dock.errors import DockError
from distflow.dock.index import SHOWN
from distflow.dock.intervals import Intervals
from distflow.dock.slots import Ids, SlotTable, grown
from distflow.errors import ColumnError, listing
from distflow.rpc.messages import write_parts
from distflow.rpc.shared_heap import SharedHeap

Columns = dict[str, Extents]
_COMPACT_FROM = 256 << 10  # bytes of a batch that is worth copying when half of its rows are gone


def read_ids(data: bytes) -> Ids:
    return numpy.frombuffer(data, numpy.int64)


def read_table(data: bytes) -> Ids:
    """Read what `StorageShard.table` returned, from its bytes."""
    return read_ids(data).reshape(4, -1)


def tokens_of(columns: Columns, rows: int) -> Ids:
    """Return each row's weight in balancing, [rows] int64: the elements of its longest ragged column but text."""
    result = numpy.zeros(rows, numpy.int64)
    for extents in columns.values():
        if extents.form.depth and extents.form.dtype != "uint8":
            result = numpy.maximum(result, extents.count[-1])
    return result


def pack(columns: Columns, memory: numpy.ndarray) -> tuple[Schema, list[Any]]:
    """Return schema and parts of a message with rows that lie in `memory`."""
    return encode({name: (extents, itertools.repeat(memory)) for name, extents in columns.items()})


class StoredRows(SlotTable):
    """Metadata of a shard's rows. turns: of the saved turn, or -1."""

    def __init__(self) -> None:
        super().__init__("tokens", "versions", "turns")
        self.consumers: set[str] = set()  # that have committed rows

    def add(self, ids: Ids) -> Ids:
        slots = super().add(ids)
        self["turns"][slots] = -1
        return slots

    def consumed_by(self, consumer: str) -> numpy.ndarray:
        """Return by slot whether a consumer has committed a row, to be read and changed."""
        if consumer not in self.consumers:
            self.consumers.add(consumer)
            self.add_array(f"consumed by {consumer}")
        return self[f"consumed by {consumer}"]

    def marks_of(self, consumer: str) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return by slot the lease and the step that a consumer's index has written to a row, to be read and changed.
        """
        names = f"lease of {consumer}", f"step of {consumer}"
        for name in names:
            if name not in self.arrays:
                self.add_array(name)
        return self[names[0]], self[names[1]]


class ColumnTable:
    """Where the rows of one column lie in the heap, by slot. batch: number of the batch, -1: the row lacks the column.
    form: number among `forms`."""

    def __init__(self) -> None:
        self.forms: list[ColumnForm] = []
        self.rows = 0
        self.batch, self.form = numpy.empty(0, numpy.int64), numpy.empty(0, numpy.int64)
        self.begin, self.count = numpy.empty((0, 0), numpy.int64), numpy.empty((0, 0), numpy.int64)

    def has(self, slots: Ids) -> numpy.ndarray:
        """Return which rows have the column, [slots] bool; slots may be -1."""
        return self.batches_of(slots) >= 0

    def batches_of(self, slots: Ids) -> Ids:
        """Return the numbers of the batches that rows are of, or -1; slots may be -1."""
        found = numpy.full(len(slots), -1)
        known = (slots >= 0) & (slots < len(self.batch))
        found[known] = self.batch[slots[known]]
        return found

    def put(self, slots: Ids, batch: int, extents: Extents) -> None:
        """Note where rows lie; none of them has the column."""
        if (last := int(slots.max(initial=-1))) >= len(self.batch):
            size = max(last + 1, 2 * len(self.batch))
            self.batch, self.form = grown(self.batch, size, -1), grown(self.form, size)
            self.begin, self.count = grown(self.begin, size), grown(self.count, size)
        if (more := len(extents.begin) - len(self.begin)) > 0:
            self.begin, self.count = (numpy.concatenate([each, numpy.zeros((more, each.shape[1]), numpy.int64)])
                                      for each in (self.begin, self.count))
        if extents.form not in self.forms:
            self.forms.append(extents.form)
        self.batch[slots], self.form[slots] = batch, self.forms.index(extents.form)
        self.begin[: len(extents.begin), slots] = extents.begin
        self.count[: len(extents.count), slots] = extents.count
        self.rows += len(slots)

    def get(self, name: str, slots: Ids) -> Extents:
        """Return where rows lie, which have the column. Raises `ColumnError`: they differ in form."""
        numbers = numpy.unique(self.form[slots]).tolist() if len(self.forms) > 1 else [0]
        form = self.forms[numbers[0]]
        buffers = len(form.widths)
        found = Extents(form, self.begin[:buffers, slots], self.count[:buffers, slots])
        for number in numbers[1:]:
            found.check_form(name, self.forms[number])
        return found

    def remove(self, slots: Ids) -> Ids:
        """Forget rows; return the numbers of the batches that those which had the column are of."""
        batches = self.batches_of(slots)
        there = batches >= 0
        self.batch[slots[there]] = -1
        self.rows -= int(there.sum())
        return batches[there]


@dataclass(eq=False)
class StoredBatch:
    """Rows of one put, in a part of the heap. live: cells (row and column) that are still read. slots: of its rows when
    they came; each may have another row by now. turn: of saved rows, or None."""

    memory: numpy.ndarray
    slots: Ids
    names: tuple[str, ...]
    turn: int | None
    live: int
    nbytes: int

    @property
    def cells(self) -> int:
        return len(self.slots) * len(self.names)


class StorageShard:
    """Rows of shard `number` of `count`. The rows of a group live in one shard (`DockLayout.shard_of`), and come in one
    put: so a group never has rows of two producers, and all of them become visible together."""

    def __init__(self, number: int = 0, count: int = 1, group_size: int = 1, heap: SharedHeap | None = None):
        self.number, self.count, self.group_size = number, count, group_size
        self.heap = heap or SharedHeap()
        self.rows = StoredRows()
        self.columns: dict[str, ColumnTable] = {}
        self.saved_columns: dict[str, ColumnTable] = {}  # of saved turns
        self.batches: dict[int, StoredBatch] = {}
        self.thinned: set[int] = set()  # batches that have lost rows since the last `_compact`
        self.next_batch = self.nbytes = 0
        self.attempts: dict[str, int] = {}  # of each consumer's group, as its index knows it
        self.gone = Intervals()  # rows that all consumers have committed, by `_local_number`

    def put(self, ids: Ids, schema: Schema, payload: numpy.ndarray, versions: Ids | None = None,
            turn: int | None = None) -> Ids:
        """Store rows of a message, and return the ids of those that were new; repeated ones are dropped.

        Args:
            payload: [bytes] uint8, taken from the `heap`; it stays there.
            versions: of the weights, one for each row; none, or an empty list, leaves what is known of a row.
            turn: of unfinished rows: they replace those of an earlier turn, and only `read_saved` returns them.

        Raises:
            ColumnError: schema and payload do not fit together.
            DockError: rows have some of these columns already, but not all; a group is not whole; or there are no
                columns.
        """
        columns = read_rows(len(ids), schema, payload)
        self._check(ids, columns, turn)
        slots = self.rows.find(ids)
        wanted = ~self.gone.contains_each(self._local_number(ids)) & self._is_new(ids, slots, columns, turn)
        if not wanted.any():
            return ids[:0]
        fresh = slice(None) if wanted.all() else numpy.flatnonzero(wanted)
        there, ids = slots[fresh], ids[fresh]
        if (new := there < 0).any():
            there[new] = self.rows.add(ids[new])
        self._forget_turns(there if turn is not None else self._finished_turns(there, columns))
        tokens = tokens_of(columns, len(slots))[fresh]
        self.rows["tokens"][there] = numpy.maximum(self.rows["tokens"][there], tokens)
        if versions is not None and len(versions):
            self.rows["versions"][there] = versions[fresh]
        if turn is not None:
            self.rows["turns"][there] = turn
        self._append(payload, there, {name: extents.select(fresh) for name, extents in columns.items()}, turn)
        self._compact()
        return ids

    def read(self, ids: Ids, names: Sequence[str]) -> tuple[Columns, list[numpy.ndarray]]:
        """Return where columns of rows lie in the heap, and the parts of it that must be held as long as they are read.
        Raises `ColumnError`, which names what is missing."""
        slots, columns, batches = self.rows.find(ids), {}, list[Ids]()
        for name in names:
            table = self.columns.get(name, ColumnTable())
            batches.append(table.batches_of(slots))
            if len(missing := ids[batches[-1] < 0]):
                raise ColumnError(self._missing_column(missing, name))
            columns[name] = table.get(name, slots)
        return columns, self._memories(batches)

    def read_saved(self, ids: Ids) -> tuple[Ids, Ids, Columns, list[numpy.ndarray]]:
        """Return those of `ids` that have a saved turn, the turns, and where the rows lie as `read` does."""
        slots = self.rows.find_present(ids)
        slots = slots[self.rows["turns"][slots] >= 0]
        ids, columns, batches = self.rows["ids"][slots], {}, list[Ids]()
        for name, table in self.saved_columns.items():
            found = table.batches_of(slots)
            if len(found) and found[0] >= 0:
                if (found < 0).any():
                    raise ColumnError(f"not all saved turns of rows {ids[:SHOWN].tolist()} have a "
                                      f"column `{name}`. Their producers differ")
                batches.append(found)
                columns[name] = table.get(name, slots)
        return ids, self.rows["turns"][slots], columns, self._memories(batches)

    def retire(self, consumer: str, ids: Ids, all_consumers: frozenset[str]) -> None:
        """Mark rows as committed by a consumer: no process goes on with their saved turns. They leave once all have
        committed them."""
        slots = numpy.unique(self.rows.find_present(ids))
        self.rows.consumed_by(consumer)[slots] = True
        self._forget_turns(slots)
        marks = [self.rows.consumed_by(each)[slots] for each in all_consumers]
        self._remove(slots[numpy.logical_and.reduce(marks)])
        self._compact()

    def remove(self, ids: Ids) -> None:
        """Remove rows that no consumer waits for."""
        self._remove(self.rows.find_present(ids))
        self._compact()

    def mark(self, consumer: str, marks: Ids, attempt: int) -> None:
        """Write to rows by which lease, and in which step, they are leased or committed (`ConsumerIndex.marks`)."""
        ids, *values = marks
        slots = self.rows.find(ids)
        for array, value in zip(self.rows.marks_of(consumer), values):
            array[slots[slots >= 0]] = value[slots >= 0]
        self.attempts[consumer] = attempt

    def marked(self) -> dict[str, int]:
        """Return how many rows have a lease or a commit of each consumer written to them."""
        slots = self.rows.all()
        return {name: int((self.rows.marks_of(name)[0][slots] > 0).sum()) for name in self.attempts}

    def marks(self, consumer: str, ids: Ids) -> Ids:
        """Return what `mark` has written to rows that are here, [3, rows]."""
        slots = self.rows.find(ids)
        return numpy.stack([ids, *(array[slots] for array in self.rows.marks_of(consumer))])

    def forms(self, ids: Ids) -> Iterator[tuple[list[str], Ids]]:
        """Yield (columns, ids) of rows for each set of columns that some of them have."""
        slots, names = self.rows.find_present(ids), sorted(self.columns)
        kind = numpy.zeros(len(slots), numpy.int64)
        for name in names:  # rows of one set have one number
            _, kind = numpy.unique(2 * kind + self.columns[name].has(slots), return_inverse=True)
        for number in range(int(kind.max(initial=-1)) + 1):
            alike = slots[kind == number]
            yield [name for name in names if self.columns[name].has(alike[:1])[0]], self.rows["ids"][alike]

    def table(self, ids: Ids) -> Ids:
        """Return the metadata for the indexes, [4, rows] int64: id, tokens, version, turn."""
        slots = self.rows.find_present(ids)
        return numpy.stack([self.rows[name][slots] for name in ("ids", "tokens", "versions", "turns")])

    def _is_new(self, ids: Ids, slots: Ids, columns: Columns, turn: int | None) -> numpy.ndarray:
        """Return which rows are not here yet in this form, [rows] bool."""
        if (slots < 0).all():
            return numpy.ones(len(ids), bool)
        has = [self.columns.get(name, ColumnTable()).has(slots) for name in columns]
        some, every, known = numpy.logical_or.reduce(has), numpy.logical_and.reduce(has), slots >= 0
        if turn is not None:
            wanted = ~some
            wanted[known] &= turn > self.rows["turns"][slots[known]]
            for consumer in self.rows.consumers:
                wanted[known] &= self.rows.consumed_by(consumer)[slots[known]] == 0
            return wanted
        if len(torn := numpy.flatnonzero(some & ~every)):
            row = int(ids[torn[0]])
            there = [name for name, table in self.columns.items() if table.has(slots[torn[:1]])[0]]
            lacks = sorted(columns.keys() - there)
            there = sorted(columns.keys() & there)
            raise DockError(f"row {row} has {listing(there, 'already')} but not {', '.join(lacks)}: columns that are "
                            "made together must be put together, or those of two attempts would mix")
        return ~some

    def _check(self, ids: Ids, columns: Columns, turn: int | None) -> None:
        if not columns:
            raise DockError("a batch without columns has nothing to store; put rows together with a column of theirs")
        groups = ids // self.group_size
        if len(away := ids[groups % self.count != self.number]):
            raise DockError(f"row {away[0]} does not live in shard {self.number} of {self.count}; "
                            "this process has another layout than the dock")
        if (ids[1:] <= ids[:-1]).any() and len(numpy.unique(ids)) < len(ids):
            raise DockError("a batch has a row twice; row ids must be unique in the run")
        if self.group_size == 1 or turn is not None:
            return
        found, counts = numpy.unique(groups, return_counts=True)
        if len(torn := numpy.flatnonzero(counts < self.group_size)):
            first = int(found[torn[0]]) * self.group_size
            raise DockError(f"of rows {first} to {first + self.group_size - 1}, which are one group, only "
                            f"{counts[torn[0]]} came. Put the rows of a group together, or those of two producers "
                            "would mix")

    def _local_number(self, row: Any) -> Any:
        """Return a row's number among those of this shard, or of each of an array of rows: dense where ids are, so that
        ranges of them are few."""
        return row // (self.group_size * self.count) * self.group_size + row % self.group_size

    def _append(self, memory: numpy.ndarray, slots: Ids, columns: Columns, turn: int | None) -> None:
        batch = StoredBatch(memory, slots, tuple(columns), turn, len(slots) * len(columns), len(memory))
        self.batches[self.next_batch] = batch
        tables, at = self.columns if turn is None else self.saved_columns, self.heap.offset_of(memory)
        for name, (form, begin, count) in columns.items():
            tables.setdefault(name, ColumnTable()).put(slots, self.next_batch, Extents(form, begin + at, count))
        self.next_batch += 1
        self.nbytes += batch.nbytes

    def _remove(self, slots: Ids) -> None:
        for table in self.columns.values():
            self._release(table.remove(slots))
        self.gone.update(self._local_number(self.rows["ids"][slots]))
        self.rows.remove(slots)

    def _finished_turns(self, slots: Ids, columns: Columns) -> Ids:
        """Return those rows whose saved turn is finished by these columns; others do not finish it."""
        ended = [self.saved_columns[name].has(slots) for name in columns if name in self.saved_columns]
        return slots[numpy.logical_or.reduce(ended)] if ended else slots[:0]

    def _forget_turns(self, slots: Ids) -> None:
        slots = slots[self.rows["turns"][slots] >= 0]
        if len(slots):
            for table in self.saved_columns.values():
                self._release(table.remove(slots))
            self.rows["turns"][slots] = -1

    def _release(self, batches: Ids) -> None:
        """Note cells that are gone, by the numbers of their batches."""
        for number, cells in zip(*(each.tolist() for each in numpy.unique(batches, return_counts=True))):
            self.batches[number].live -= cells
            self.thinned.add(number)

    def _compact(self) -> None:
        """Drop empty batches, and copy the live rows of large ones that are half empty; later if there is no room: what
        was put is stored, and must not seem to have failed."""
        waiting = set[int]()
        for number in self.thinned:
            batch = self.batches[number]
            if batch.live and (batch.nbytes < _COMPACT_FROM or 2 * batch.live > batch.cells):
                continue
            if batch.live and not self._copy(number, batch):
                waiting.add(number)
                continue
            self.nbytes -= batch.nbytes
            del self.batches[number]
        self.thinned = waiting

    def _copy(self, number: int, batch: StoredBatch) -> bool:
        """Copy the live rows of a batch into one of their own; what was read before stays where it was. Return whether
        there is room for it."""
        slots, columns = self._live_rows(number, batch)
        schema, parts = pack(columns, self.heap.memory)
        try:
            memory = self.heap.take(sum(map(len, parts)))
        except MemoryError:
            return False
        write_parts(memory.data, parts)
        tables = self.columns if batch.turn is None else self.saved_columns
        for name in batch.names:
            tables[name].remove(slots)
        self._append(memory, slots, read_rows(len(slots), schema, memory), batch.turn)
        return True

    def _live_rows(self, number: int, batch: StoredBatch) -> tuple[Ids, Columns]:
        """Return the slots of a batch's rows that are still read, and where they lie."""
        tables = self.columns if batch.turn is None else self.saved_columns
        slots = batch.slots[tables[batch.names[0]].batches_of(batch.slots) == number]
        return slots, {name: tables[name].get(name, slots) for name in batch.names}

    def _memories(self, batches: Sequence[Ids]) -> list[numpy.ndarray]:
        numbers: set[int] = set()
        for found in batches:
            numbers.update(found[:1].tolist() if (found == found[:1]).all() else numpy.unique(found).tolist())
        return [self.batches[number].memory for number in numbers]

    def _missing_column(self, missing: Ids, name: str) -> str:
        gone = missing[self.gone.contains_each(self._local_number(missing))].tolist()
        unknown = missing[self.rows.find(missing) < 0].tolist()
        if gone:
            return f"rows {gone[:SHOWN]} were committed by all consumers and have left shard {self.number}"
        if unknown:
            return f"shard {self.number} has never seen rows {unknown[:SHOWN]}"
        slot = self.rows.find(missing[:1])
        there = sorted(each for each, table in self.columns.items() if table.has(slot)[0])
        return (f"rows {missing[:SHOWN].tolist()} in shard {self.number} have no column `{name}` yet. "
                f"{listing(there, 'They have')}")
