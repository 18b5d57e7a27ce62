"""Columns as flat byte buffers.

Each level of a column is a buffer: its rows' bytes lie back to back, so many elements for each row. A dense column is
one buffer; so is a ragged one, since its lengths are the buffer's counts; each further level of raggedness adds one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distflow.data.batch import ColumnData, Ragged, dtype_name, from_levels, levels
from distflow.data.row_copies import as_bytes


class ColumnForm(NamedTuple):
    """Type and shape that all rows of a column share: `shape` of an element, `depth` levels of raggedness."""

    depth: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def widths(self) -> list[int]:
        """Bytes of an element of each buffer: inner lengths, then the elements themselves."""
        return [8] * (self.depth - 1) + [math.prod(self.shape) * getattr(torch, self.dtype).itemsize]

    def __str__(self) -> str:
        return f"{'ragged ' * self.depth}{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class ColumnBuffer:
    """`data` [bytes] uint8; row `i` has the elements `bounds[i]` … `bounds[i + 1] - 1` of it ([rows + 1] int64)."""

    data: np.ndarray
    bounds: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        return self.bounds[:-1]

    @functools.cached_property
    def counts(self) -> np.ndarray:
        return self.bounds[1:] - self.bounds[:-1]


def form_of(column: ColumnData) -> ColumnForm:
    lengths, values = levels(column)
    return ColumnForm(len(lengths), dtype_name(values.dtype), tuple(values.shape[1:]))


def bounds_of(column: ColumnData) -> list[np.ndarray]:
    """Return for each buffer, outermost first, where each row's elements begin and the last row's end [rows + 1]."""
    result: list[np.ndarray] = []
    for level in levels(column)[0]:
        ends = np.zeros(len(level) + 1, dtype=np.int64)
        level.cpu().numpy().cumsum(out=ends[1:])
        result.append(ends[result[-1]] if result else ends)
    return result or [np.arange(len(column) + 1)]


def elements_of(column: ColumnData) -> np.ndarray:
    """Return the number of elements of each row, at the innermost level [rows]."""
    if isinstance(column, Ragged) and not isinstance(column.values, Ragged):
        return column.lengths.cpu().numpy()
    bounds = bounds_of(column)[-1]
    return bounds[1:] - bounds[:-1]


def buffers_of(column: ColumnData) -> list[ColumnBuffer]:
    """Return the buffers of a column; a level that is contiguous and on the CPU is not copied."""
    lengths, values = levels(column)
    return [ColumnBuffer(as_bytes(data), bounds) for data, bounds in zip([*lengths[1:], values], bounds_of(column),
                                                                         strict=True)]


def column_of(form: ColumnForm, buffers: list[tuple[Tensor, np.ndarray]]) -> ColumnData:
    """Return the column with these buffers ([bytes] uint8, counts [rows]); views, not copies."""
    values = [data.view(torch.int64) for data, _ in buffers[:-1]]
    values.append(buffers[-1][0].view(getattr(torch, form.dtype)).reshape(-1, *form.shape)
                  if math.prod(form.shape) else torch.empty(int(buffers[-1][1].sum()), *form.shape,
                                                            dtype=getattr(torch, form.dtype)))
    return from_levels([torch.from_numpy(buffers[0][1]), *values[:-1]] if form.depth else [], values[-1])
