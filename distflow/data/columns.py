"""Columns as bytes, wherever they are sent or kept: batches in the dock and in caches, published weights, snapshots.

    ColumnForm    type and shape of a column's elements, and how many levels of raggedness it has
    ColumnEntry   line of a schema: the name of a column, its form, and how many elements each level has
    lay_out       where the buffers of a schema's columns lie, one after another
    Extents       where the rows of one column lie in memory
    encode        schema and bytes of rows, which may lie anywhere; `column_buffers` has what makes tensors of them

A column has one buffer for each level: the lengths of each level of raggedness, outermost first (int64), and then the
elements. A dense column has one buffer, and a tensor is a dense column of one row. Each buffer begins at a multiple of
`ALIGNMENT` bytes, so a schema says where everything lies. Nothing here loads torch or knows more of an element than its
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from distflow.data.row_copies import ScatteredRuns
from distflow.errors import ColumnError
from distflow.rpc.packing import aligned

Schema = Sequence[Sequence[Any]]
"""Entries of columns, as msgpack returns them."""
LENGTH = 8
"""Bytes of a length."""


class ColumnForm(NamedTuple):
    """Form that all rows of a column share: `shape` of an element of `width` bytes, `depth` levels of raggedness."""

    depth: int
    dtype: str
    shape: tuple[int, ...]
    width: int

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> ColumnForm:
        depth, dtype, shape, width = packed
        return cls(depth, dtype, tuple(shape), width)

    @property
    def widths(self) -> list[int]:
        """Bytes of an element of each buffer that rows have a part of: inner lengths, then the elements themselves."""
        return [LENGTH] * (self.depth - 1) + [self.width]

    def __str__(self) -> str:
        return f"{'ragged ' * self.depth}{self.dtype} {list(self.shape)}"


class ColumnEntry(NamedTuple):
    """Column of a schema. counts: the rows, and then for each level of raggedness the elements of all rows."""

    name: str
    form: ColumnForm
    counts: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer."""
        return [LENGTH * count for count in self.counts[:-1]] + [self.form.width * self.counts[-1]]


class PlacedColumn(NamedTuple):
    """Column of a schema, and where each of its buffers begins."""

    entry: ColumnEntry
    begins: list[int]

    def lengths(self, data: numpy.ndarray) -> list[numpy.ndarray]:
        """Return the lengths of each level of raggedness, outermost first, as views of `data` [bytes] uint8. Raises
        `ColumnError`: they do not add up to the elements of the next level."""
        found = []
        for begin, count, elements in zip(self.begins, self.entry.counts, self.entry.counts[1:]):
            lengths = data[begin : begin + LENGTH * count].view(numpy.int64)
            if count and not 0 <= lengths.min() <= lengths.max() <= elements:
                raise ColumnError(f"column `{self.entry.name}` arrived with a row of negative length, or longer than "
                                  f"its {elements} elements")
            if (total := int(lengths.sum())) != elements:
                raise ColumnError(f"column `{self.entry.name}` arrived with {elements} elements, and lengths of "
                                  f"{total}")
            found.append(lengths)
        return found


def lay_out(entries: Iterable[ColumnEntry]) -> tuple[list[PlacedColumn], int]:
    """Place the buffers of columns one after another; return the columns and the bytes of all."""
    placed, end = [], 0
    for entry in entries:
        begins = []
        for size in entry.sizes:
            begins.append(end)
            end += aligned(size)
        placed.append(PlacedColumn(entry, begins))
    return placed, end


def read_schema(schema: Schema, size: int) -> list[PlacedColumn]:
    """Return the columns of a schema. Raises `ColumnError`: it is not the schema of `size` bytes."""
    entries = [ColumnEntry(name, ColumnForm.unpack(form), tuple(counts)) for name, form, counts in schema]
    for name, form, counts in entries:
        if min(form.depth, form.width, *form.shape, *counts) < 0 or len(counts) != form.depth + 1:
            raise ColumnError(f"column `{name}` arrived with the impossible form {form} and {list(counts)} elements")
    placed, end = lay_out(entries)
    if end != size:
        raise ColumnError(f"columns of {end} bytes came as {size} bytes")
    return placed


class Extents(NamedTuple):
    """Rows of one column: `begin` [buffers, rows] int64 in bytes, and `count` [buffers, rows] int64 of elements. The
    lengths of the outermost level are the first buffer's counts, and no buffer of their own."""

    form: ColumnForm
    begin: numpy.ndarray
    count: numpy.ndarray

    @classmethod
    def between(cls, form: ColumnForm, begins: Iterable[int], bounds: Sequence[numpy.ndarray]) -> Extents:
        """Return the extents of rows that lie one after another. begins: of each buffer; bounds: see `row_bounds`."""
        begin = [at + width * bound[:-1] for at, width, bound in zip(begins, form.widths, bounds)]
        count = [bound[1:] - bound[:-1] for bound in bounds]
        if len(bounds) == 1:  # the usual case: nothing is copied
            return cls(form, begin[0][None], count[0][None])
        return cls(form, numpy.stack(begin), numpy.stack(count))

    def select(self, rows: Any) -> Extents:
        return Extents(self.form, self.begin[:, rows], self.count[:, rows])

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, their outermost lengths included."""
        sizes = sum(int(count.sum()) * width for count, width in zip(self.count, self.form.widths))
        return sizes + (LENGTH * self.count.shape[1] if self.form.depth else 0)

    def check_form(self, name: str, form: ColumnForm) -> None:
        if self.form != form:
            raise ColumnError(f"the rows of column `{name}` do not fit together: some are {form}, some {self.form}. "
                              "Their producers differ")


def row_bounds(rows: int, lengths: Sequence[numpy.ndarray]) -> list[numpy.ndarray]:
    """Return for each buffer that rows have a part of where each row's elements begin, and the last row's end
    [rows + 1]. lengths: of each level, outermost first."""
    bounds: list[numpy.ndarray] = []
    for level in lengths:
        ends = numpy.zeros(len(level) + 1, numpy.int64)
        level.cumsum(out=ends[1:])
        bounds.append(ends[bounds[-1]] if bounds else ends)
    return bounds or [numpy.arange(rows + 1)]


def read_rows(rows: int, schema: Schema, data: numpy.ndarray) -> dict[str, Extents]:
    """Return where the rows lie in the bytes of a schema, [bytes] uint8. Raises `ColumnError`: they do not fit."""
    found = {}
    for placed in read_schema(schema, len(data)):
        name, form, counts = placed.entry
        if counts[0] != rows:
            raise ColumnError(f"column `{name}` arrived with {counts[0]} rows, where {rows} are expected")
        bounds = row_bounds(rows, placed.lengths(data))
        found[name] = Extents.between(form, placed.begins[-len(bounds) :], bounds)
    return found


def encode(columns: Mapping[str, tuple[Extents, Iterable[numpy.ndarray]]]) -> tuple[list[ColumnEntry], list[Any]]:
    """Return schema and bytes, as parts of a message, of rows in any place. `columns`: where the rows lie, and the
    memory [bytes] uint8 of each buffer. Rows that lie one after another are not copied."""
    schema: list[ColumnEntry] = []
    parts: list[Any] = []
    for name, ((form, begin, count), memories) in columns.items():
        counts, buffers = [begin.shape[1]], list[Any]()
        if form.depth:
            counts += [int(elements.sum()) for elements in count]
            buffers.append(numpy.ascontiguousarray(count[0]).view(numpy.uint8).data)
        for memory, begins, elements, width in zip(memories, begin, count, form.widths):
            ends = begins + elements * width
            together = bool((begins[1:] == ends[:-1]).all())
            buffers.append(memory.data[int(begins[:1].sum()) : int(ends[-1:].sum())] if together else
                           ScatteredRuns(memory, begins, ends, 1))  # together: one run, or none
        for buffer in buffers:
            parts += [buffer, bytes(aligned(len(buffer)) - len(buffer))]
        schema.append(ColumnEntry(name, form, tuple(counts)))
    return schema, parts
