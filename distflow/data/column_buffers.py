"""Columns of tensors as the buffers of `columns`, and back: views wherever these lie on the CPU, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, Ragged, dtype_name, from_levels, levels
from distflow.data.columns import ColumnEntry, ColumnForm, Extents, Schema, read_schema, row_bounds
from distflow.data.row_copies import as_bytes, copy_runs
from distflow.errors import ColumnError
from distflow.rpc.packing import tensor_at

Take = Callable[[int], np.ndarray]
"""Returns memory of so many bytes, [bytes] uint8."""


class ColumnBuffer(NamedTuple):
    """`data` [bytes] uint8; row `i` has the elements `bounds[i]` … `bounds[i + 1] - 1` of it ([rows + 1] int64)."""

    data: np.ndarray
    bounds: np.ndarray


def form_of(column: ColumnData) -> ColumnForm:
    lengths, values = levels(column)
    return _form(len(lengths), values.dtype, values.shape[1:])


def _form(depth: int, dtype: torch.dtype, shape: Sequence[int]) -> ColumnForm:
    return ColumnForm(depth, dtype_name(dtype), tuple(shape), math.prod(shape) * dtype.itemsize)


def bounds_of(column: ColumnData) -> list[np.ndarray]:
    return row_bounds(len(column), [level.cpu().numpy() for level in levels(column)[0]])


def elements_of(column: ColumnData) -> np.ndarray:
    """Return the number of elements of each row, at the innermost level [rows]."""
    if isinstance(column, Ragged) and not isinstance(column.values, Ragged):
        return column.lengths.cpu().numpy()
    bounds = bounds_of(column)[-1]
    return bounds[1:] - bounds[:-1]


def buffers_of(column: ColumnData) -> list[ColumnBuffer]:
    """Return the buffers that rows have a part of."""
    lengths, values = levels(column)
    return [ColumnBuffer(as_bytes(data), bounds) for data, bounds in zip([*lengths[1:], values], bounds_of(column),
                                                                         strict=True)]


def column_of(name: str, form: ColumnForm, lengths: np.ndarray, buffers: Sequence[Tensor], elements: int) -> ColumnData:
    """Return the column with these buffers, [bytes] uint8, as views. lengths: of the outermost level, if it is ragged;
    elements: of all rows. Raises `ColumnError`: they do not fit together."""
    *inner, values = (data.view(dtype) if len(data) else torch.empty(0, dtype=dtype) for data, dtype in
                      zip(buffers, [*[torch.int64] * (len(buffers) - 1), dtype_of(name, form)]))
    return from_levels([torch.from_numpy(lengths), *inner] if form.depth else [], values.reshape(elements, *form.shape))


def dtype_of(name: str, form: ColumnForm) -> torch.dtype:
    """Return the type of a column's elements. Raises `ColumnError`: they are not elements of this torch."""
    dtype: Any = getattr(torch, form.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ColumnError(f"column `{name}` is of type {form.dtype}, which torch {torch.__version__} does not have. "
                          "Install the same torch on all machines")
    if form.width != dtype.itemsize * math.prod(form.shape):
        raise ColumnError(f"column `{name}` arrived with elements of {form.width} bytes that are to be {form}")
    return dtype


def rows_of(batch: Batch) -> dict[str, tuple[Extents, list[np.ndarray]]]:
    """Return where the rows of a batch lie, for `encode`: each column's extents, and the memory of its buffers."""
    found = {}
    for name, column in batch.columns.items():
        form, buffers = form_of(column), buffers_of(column)
        found[name] = (Extents.between(form, [0] * len(buffers), [buffer.bounds for buffer in buffers]),
                       [buffer.data for buffer in buffers])
    return found


def decode_batch(ids: Tensor, schema: Schema, data: np.ndarray) -> Batch:
    """Return a message's batch: views of `data` [bytes] uint8. Raises `ColumnError`: schema and bytes do not fit."""
    columns, whole = dict[str, ColumnData](), torch.from_numpy(data)
    for placed in read_schema(schema, len(data)):
        name, form, counts = placed.entry
        outermost = (placed.lengths(data) or [np.empty(0, np.int64)])[0]
        buffers = [whole[begin : begin + size] for begin, size in zip(placed.begins, placed.entry.sizes)]
        columns[name] = column_of(name, form, outermost, buffers[min(form.depth, 1) :], counts[-1])
    return Batch(ids, columns)


def tensor_entry(name: str, dtype: torch.dtype, shape: Sequence[int]) -> ColumnEntry:
    """Return the line of a schema for one tensor: a dense column of one row."""
    return ColumnEntry(name, _form(0, dtype, shape), (1,))


def decode_tensors(schema: Schema, data: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a schema: views of `data` [bytes] uint8. Raises `ColumnError`: schema and bytes do not fit.
    """
    return {entry.name: tensor_at(data, begins[0], entry.form.shape, dtype_of(entry.name, entry.form))
            for entry, begins in read_schema(schema, len(data))}


class ReadRows(NamedTuple):
    """Rows that lie in `memory` [bytes] uint8, and where each of them is to stand in the result, [rows]."""

    memory: np.ndarray
    columns: dict[str, Extents]
    there: np.ndarray


def gather(ids: Tensor, parts: Sequence[ReadRows], take: Take) -> Batch:
    """Return the rows `ids` [rows] of several memories, each copied once. Raises `ColumnError`: columns differ in name
    or form, or a row is not within its memory."""
    names = parts[0].columns.keys()
    for part in parts[1:]:
        if part.columns.keys() != names:
            raise ColumnError(f"not all rows have columns {', '.join(sorted(part.columns.keys() ^ names))}")
    return Batch(ids, {name: _gather(name, len(ids), parts, take) for name in names})


def _gather(name: str, rows: int, parts: Sequence[ReadRows], take: Take) -> ColumnData:
    form = parts[0].columns[name].form
    for part in parts:
        part.columns[name].check_form(name, form)
    lengths, buffers, elements = np.empty(0, np.int64), list[Tensor](), 0
    for number, width in enumerate(form.widths):
        counts = np.empty(rows, np.int64)
        for part in parts:
            counts[part.there] = part.columns[name].count[number]
        lengths, ends = counts if not number else lengths, counts.cumsum()
        elements = int(ends[-1])
        target = take(elements * width)
        for part in parts:
            _copy(name, part, number, width, (ends - counts)[part.there] * width, target)
        buffers.append(torch.from_numpy(target))
    return column_of(name, form, lengths, buffers, elements)


def _copy(name: str, part: ReadRows, number: int, width: int, at: np.ndarray, target: np.ndarray) -> None:
    extents = part.columns[name]
    try:
        copy_runs(part.memory, target, extents.begin[number], at, extents.count[number] * width, 1)
    except ColumnError as error:
        raise ColumnError(f"column `{name}`: {error}") from None
