"""Columns as flat byte buffers, and copies of rows between buffers.

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

from distflow.data.batch import ColumnData, Ragged, dtype_name, levels, of_levels

_MANY = 1024
"""Runs from which on short ones are copied by index, many at once: for fewer that costs as much as one by one."""
_SHORT, _PART = 2 << 10, 1 << 18
"""Bytes below which a run is short; and of those that are copied at once, which stay in the core's own cache."""


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
    return [ColumnBuffer(raw(data), bounds) for data, bounds in zip([*lengths[1:], values], bounds_of(column),
                                                                    strict=True)]


def column_of(form: ColumnForm, buffers: list[tuple[Tensor, np.ndarray]]) -> ColumnData:
    """Return the column with these buffers ([bytes] uint8, counts [rows]); views, not copies."""
    values = [data.view(torch.int64) for data, _ in buffers[:-1]]
    values.append(buffers[-1][0].view(getattr(torch, form.dtype)).reshape(-1, *form.shape)
                  if math.prod(form.shape) else torch.empty(int(buffers[-1][1].sum()), *form.shape,
                                                            dtype=getattr(torch, form.dtype)))
    return of_levels([torch.from_numpy(buffers[0][1]), *values[:-1]] if form.depth else [], values[-1])


class RowRuns(NamedTuple):
    first: np.ndarray
    last: np.ndarray


def runs_of(here: np.ndarray, there: np.ndarray) -> RowRuns:
    """Return the runs of rows numbered `here` [rows] at one end and `there` [rows] at the other; at least one row."""
    breaks = np.flatnonzero((here[1:] - here[:-1] != 1) | (there[1:] - there[:-1] != 1))
    return RowRuns(np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [len(here) - 1]]))


def copy_rows(source: np.ndarray, target: np.ndarray, source_at: np.ndarray, target_at: np.ndarray,
              counts: np.ndarray, width: int, runs: RowRuns) -> None:
    """Copy `counts[i]` elements of `width` bytes from element `source_at[i]` of `source` to element `target_at[i]` of
    `target` ([bytes] uint8), run by run."""
    begin, at = source_at[runs.first], target_at[runs.first]
    sizes = source_at[runs.last] + counts[runs.last] - begin
    short = (sizes * width < _SHORT) & (len(sizes) >= _MANY) & (width > 0)
    _copy_runs(source, target, begin[~short], at[~short], sizes[~short], width)
    exponents = np.frexp(sizes[short])[1]  # that of 2 ** n, which a size is below, and not below half of it
    for exponent in np.flatnonzero(np.bincount(exponents)[1:]).tolist():
        here, block = np.flatnonzero(short)[exponents == exponent + 1], 1 << exponent
        _copy_blocks(source, target, begin[here], at[here], sizes[here] - block, width, block)


def _copy_blocks(source: np.ndarray, target: np.ndarray, begin: np.ndarray, at: np.ndarray, more: np.ndarray,
                 width: int, block: int) -> None:
    """Copy runs of `block + more` elements, `more` being below `block`: of each the first `block` and the last `block`,
    which overlap. Every block is one item of an array whose items overlap too, so that numpy copies them by index."""
    item = np.dtype(f"V{block * width}")
    here, there = (np.ndarray(len(memory) // width - block + 1, item, memory, 0, width) for memory in (source, target))
    step = max(1, _PART // item.itemsize)
    for part in (slice(first, first + step) for first in range(0, len(begin), step)):
        there[at[part]] = here[begin[part]]
        if more[part].any():
            there[at[part] + more[part]] = here[begin[part] + more[part]]


def _copy_runs(source: np.ndarray, target: np.ndarray, begin: np.ndarray, at: np.ndarray, sizes: np.ndarray,
               width: int) -> None:
    here, there = source.data, target.data
    for start, to, length in zip((begin * width).tolist(), (at * width).tolist(), (sizes * width).tolist()):
        there[to : to + length] = here[start : start + length]


def raw(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
