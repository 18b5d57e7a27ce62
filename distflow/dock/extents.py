"""Where rows lie in memory: for each buffer of a column the row's first byte, and how many elements it has there.

A dense column is one buffer with one element a row. A ragged one has a buffer for each level of raggedness: the lengths
of inner levels, then the elements; the lengths of the outermost level are the first buffer's counts.

A message's payload has the ids [rows] int64, and for each column the lengths of each level, outermost first, and the
elements; all of them padded to 8 bytes. Its schema, in the header, is `[name, levels of raggedness, dtype, shape of an
element, its bytes, elements]` a column. Nothing here, nor in what stores rows, knows more of an element than its bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy

from distflow.errors import ColumnError

Schema = list[list[Any]]


class ElementForm(NamedTuple):
    """Form that all rows of a column share: `shape` of an element of `width` bytes, `depth` levels of raggedness."""

    depth: int
    dtype: str
    shape: tuple[int, ...]
    width: int

    @property
    def widths(self) -> list[int]:
        """Bytes of an element of each buffer: inner lengths, then the elements themselves."""
        return [8] * (self.depth - 1) + [self.width]

    def __str__(self) -> str:
        return f"{'ragged ' * self.depth}{self.dtype} {list(self.shape)}"


class Extents(NamedTuple):
    """Rows of one column: `begin` [buffers, rows] int64 in bytes, and `count` [buffers, rows] int64 of elements."""

    form: ElementForm
    begin: numpy.ndarray
    count: numpy.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, their outermost lengths included."""
        sizes = sum(int(count.sum()) * width for count, width in zip(self.count, self.form.widths))
        return sizes + (8 * self.count.shape[1] if self.form.depth else 0)

    def check_form(self, name: str, form: ElementForm) -> None:
        if self.form != form:
            raise ColumnError(f"the rows of column `{name}` do not fit together: some are {form}, some {self.form}. "
                              "Their producers differ")


def form_of_schema(name: str, depth: int, dtype: str, shape: list[int], width: int) -> ElementForm:
    form = ElementForm(depth, dtype, tuple(shape), width)
    if min(form.depth, form.width, *form.shape) < 0:
        raise ColumnError(f"column `{name}` arrived with the impossible form {form}")
    return form


def read_payload(rows: int, schema: Schema, data: numpy.ndarray) -> dict[str, Extents]:
    """Return where the rows of a message lie in its payload `data` [bytes] uint8. Raises `ColumnError`: schema and
    bytes do not fit."""
    reader = _PayloadReader(data)
    reader.take("ids", 8 * rows)
    found = {}
    for name, *form, elements in schema:
        found[name] = reader.column(name, form_of_schema(name, *form), rows, elements)
    if reader.position != len(data):
        raise ColumnError(f"a batch of {reader.position} bytes came as {len(data)} bytes")
    return found


class _PayloadReader:
    def __init__(self, data: numpy.ndarray):
        self.data, self.position = data, 0

    def take(self, name: str, size: int) -> int:
        """Return where the next `size` bytes begin."""
        begin = self.position
        if not 0 <= size <= len(self.data) - begin:
            raise ColumnError(f"a batch of {len(self.data)} bytes ends within column `{name}`, which has {size} bytes")
        self.position += size + -size % 8
        return begin

    def column(self, name: str, form: ElementForm, rows: int, elements: int) -> Extents:
        begin, count, bounds = [], [], numpy.arange(rows + 1)
        for level in range(form.depth):
            at = self.take(name, 8 * int(bounds[-1]))
            lengths = self.data[at : at + 8 * int(bounds[-1])].view(numpy.int64)
            if level:
                begin.append(at + 8 * bounds[:-1])
                count.append(numpy.diff(bounds))
            ends = numpy.zeros(len(lengths) + 1, numpy.int64)
            lengths.cumsum(out=ends[1:])
            if len(lengths) and min(lengths.min(), ends.min()) < 0:  # a sum that is too large turns negative
                raise ColumnError(f"column `{name}` arrived with a row of negative length")
            bounds = ends[bounds] if level else ends
        if int(bounds[-1]) != elements:
            raise ColumnError(f"column `{name}` arrived with {elements} elements, and lengths of {bounds[-1]}")
        begin.append(self.take(name, form.width * elements) + form.width * bounds[:-1])
        count.append(numpy.diff(bounds))
        if len(begin) == 1:  # the usual case: nothing is copied
            return Extents(form, begin[0][None], count[0][None])
        return Extents(form, numpy.stack(begin), numpy.stack(count))
