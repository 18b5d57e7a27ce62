"""Copies rows between byte buffers, those that stay together at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_MANY = 1024
"""Runs from which on short ones are copied by index, many at once: for fewer that costs as much as one by one."""
_SHORT, _PART = 2 << 10, 1 << 18
"""Bytes below which a run is short; and of those that are copied at once, which stay in the core's own cache."""


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
