"""Batches as they are sent, stored and read: the client's side of what `storage.py` keeps.

    RecordBatch   rows of a batch as raw buffers, any of which can be put into a message
    unpack        the batch of a message, as views of its bytes
    gather        a batch of rows that lie anywhere in the memory of several shards: each is copied once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, dtype_name, from_levels, levels
from distflow.data.column_buffers import buffers_of, form_of
from distflow.data.row_copies import ScatteredRuns, as_bytes, copy_runs
from distflow.dock.extents import ElementForm, Extents, Schema, read_payload
from distflow.dock.slots import Ids
from distflow.errors import ColumnError

_DTYPES = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
Take = Callable[[int], numpy.ndarray]
"""Returns memory of so many bytes, [bytes] uint8."""


class RecordBatch:
    """Rows of a batch as raw buffers with element sizes and row bounds; a ragged column's first has the lengths."""

    def __init__(self, batch: Batch):
        self.ids = batch.ids.to("cpu", torch.int64).numpy()
        self.columns = {name: _raw_column(column) for name, column in batch.columns.items()}

    def pack(self, rows: Ids | None = None) -> tuple[Schema, list[Any]]:
        """Return schema and parts of a message with rows at these positions, or with all."""
        rows = numpy.arange(len(self.ids)) if rows is None else rows
        together = bool((rows[1:] - rows[:-1] == 1).all())
        starts, stops = (rows[:1], rows[-1:] + 1) if together else (rows, rows + 1)
        schema: Schema = []
        parts: list[Any] = [numpy.ascontiguousarray(self.ids[rows]).data.cast("B") if len(rows) else b""]
        for name, (form, buffers) in self.columns.items():
            elements = 0
            for data, width, bounds in buffers:
                begins, ends = bounds[starts], bounds[stops]
                elements = int((ends - begins).sum())
                parts.append(data.data[int(begins.sum()) * width : int(ends.sum()) * width] if together else
                             ScatteredRuns(data, begins, ends, width))  # together: one run, or none
                parts.append(bytes(-len(parts[-1]) % 8))
            schema.append([name, *form, elements])
        return schema, parts


def _raw_column(column: ColumnData) -> tuple[ElementForm, list[tuple[numpy.ndarray, int, Ids]]]:
    form = form_of(column)
    buffers = [(each.data, width, each.bounds) for each, width in zip(buffers_of(column), form.widths, strict=True)]
    if form.depth:
        buffers.insert(0, (as_bytes(levels(column)[0][0]), 8, numpy.arange(len(column) + 1)))
    return ElementForm(form.depth, form.dtype, form.shape, form.widths[-1]), buffers


def unpack(rows: int, schema: Schema, data: numpy.ndarray) -> Batch:
    """Return a message's batch: views of `data` [bytes] uint8. Raises `ColumnError`: schema and bytes do not fit."""
    ids, columns, whole = data[: 8 * rows].view(numpy.int64), {}, torch.from_numpy(data)
    for name, extents in read_payload(rows, schema, data).items():
        form = _check_form(name, extents.form)
        begins = [int(begin[0]) if rows else 0 for begin in extents.begin]
        sizes = [int(count.sum()) for count in extents.count]
        lengths = [torch.from_numpy(extents.count[0])] if form.depth else []
        lengths += [torch.from_numpy(data[begin : begin + 8 * size].view(numpy.int64))
                    for begin, size in zip(begins, sizes[:-1])]
        columns[name] = from_levels(lengths, _elements(whole[begins[-1] :][: sizes[-1] * form.width], form, sizes[-1]))
    return Batch(torch.from_numpy(ids), columns)


class ReadRows(NamedTuple):
    """Rows that lie in `memory` [bytes] uint8, and where each of them is to stand in the result, [rows]."""

    memory: numpy.ndarray
    columns: dict[str, Extents]
    there: Ids


def gather(ids: Tensor, parts: Sequence[ReadRows], take: Take) -> Batch:
    """Return the rows `ids` [rows] of several memories, each copied once. Raises `ColumnError`: columns differ in name
    or form, or a row is not within its memory."""
    names = parts[0].columns.keys()
    for part in parts[1:]:
        if part.columns.keys() != names:
            raise ColumnError(f"not all rows have columns {', '.join(sorted(part.columns.keys() ^ names))}")
    return Batch(ids, {name: _gather(name, len(ids), parts, take) for name in names})


def _gather(name: str, rows: int, parts: Sequence[ReadRows], take: Take) -> ColumnData:
    form = _check_form(name, parts[0].columns[name].form)
    for part in parts:
        part.columns[name].check_form(name, form)
    lengths, values = list[Tensor](), torch.empty(0)
    for number, width in enumerate(form.widths):
        counts = numpy.empty(rows, numpy.int64)
        for part in parts:
            counts[part.there] = part.columns[name].count[number]
        ends = counts.cumsum()
        if form.depth and not number:
            lengths.append(torch.from_numpy(counts))
        target = take(int(ends[-1]) * width)
        for part in parts:
            _copy(name, part, number, width, (ends - counts)[part.there] * width, target)
        if number < len(form.widths) - 1:
            lengths.append(torch.from_numpy(target.view(numpy.int64)))
        else:
            values = _elements(torch.from_numpy(target), form, int(ends[-1]))
    return from_levels(lengths, values)


def _copy(name: str, part: ReadRows, number: int, width: int, at: Ids, target: numpy.ndarray) -> None:
    extents = part.columns[name]
    try:
        copy_runs(part.memory, target, extents.begin[number], at, extents.count[number] * width, 1)
    except ColumnError as error:
        raise ColumnError(f"column `{name}`: {error}") from None


def _check_form(name: str, form: ElementForm) -> ElementForm:
    kind = _DTYPES.get(form.dtype)
    if kind is None:
        raise ColumnError(f"column `{name}` is of type {form.dtype}, which torch {torch.__version__} does not have")
    if form.width != kind.itemsize * numpy.prod(form.shape, dtype=numpy.int64):
        raise ColumnError(f"column `{name}` arrived with elements of {form.width} bytes that are to be {form}")
    return form


def _elements(data: Tensor, form: ElementForm, elements: int) -> Tensor:
    kind = _DTYPES[form.dtype]
    if not len(data):
        return torch.empty(elements, *form.shape, dtype=kind)
    if data.storage_offset() % kind.itemsize:  # complex128 may lie between two of its own
        data = data.clone()
    return data.view(kind).reshape(elements, *form.shape)
