"""Copies rows between byte buffers, those that stay together at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_MANY = 96
"""Runs of similar length from which on short ones are copied by index, at once: for fewer that costs more than one by
one."""
_SHORT, _PART = 2 << 10, 1 << 18
"""Bytes below which a run is short; and of those that are copied at once, which stay in the core's own cache."""


class RowRuns(NamedTuple):
    first: np.ndarray
    last: np.ndarray


def runs_of(here: np.ndarray, there: np.ndarray) -> RowRuns:
    """Return the runs of rows numbered `here` [rows] at one end and `there` [rows] at the other; at least one row."""
    breaks = np.flatnonzero((here[1:] - here[:-1] != 1) | (there[1:] - there[:-1] != 1))
    return RowRuns(np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [len(here) - 1]]))


class ElementRuns(NamedTuple):
    """Runs of elements: `sizes[i]` from element `begin[i]` of one end on, which are `at[i]` … at the other."""

    begin: np.ndarray
    at: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, source_at: np.ndarray, target_at: np.ndarray, counts: np.ndarray, runs: RowRuns) -> ElementRuns:
        """Return the elements of runs of rows: a row has `counts[i]`, from `source_at[i]` and `target_at[i]` on."""
        begin = source_at[runs.first]
        return cls(begin, target_at[runs.first], source_at[runs.last] + counts[runs.last] - begin)


def copy_rows(source: np.ndarray, target: np.ndarray, source_at: np.ndarray, target_at: np.ndarray,
              counts: np.ndarray, width: int, runs: RowRuns) -> None:
    """Copy `counts[i]` elements of `width` bytes from element `source_at[i]` of `source` to element `target_at[i]` of
    `target` ([bytes] uint8), run by run."""
    copy_runs(source, target, *ElementRuns.of(source_at, target_at, counts, runs), width)


def copy_runs(source: np.ndarray, target: np.ndarray, begin: np.ndarray, at: np.ndarray, sizes: np.ndarray,
              width: int) -> None:
    """Copy runs of `sizes[i]` elements from element `begin[i]` of `source` to element `at[i]` of `target`."""
    if not width:
        return
    if len(sizes) < _MANY:
        _copy_singly(source, target, begin, at, sizes, width)
        return
    exponents = np.frexp(sizes)[1]  # that of 2 ** n, which a size is below, and not below half of it
    many = np.bincount(exponents) >= _MANY
    many[0] = False  # nothing to copy
    many[int(np.frexp(_SHORT // width)[1]) :] = False
    singly = ~many[exponents] if many.any() else slice(None)
    _copy_singly(source, target, begin[singly], at[singly], sizes[singly], width)
    for exponent in np.flatnonzero(many).tolist():
        here, block = np.flatnonzero(exponents == exponent), 1 << exponent - 1
        _copy_blocks(source, target, begin[here], at[here], sizes[here] - block, width, block)


class ScatteredRuns:
    """Runs of elements of a byte buffer as one part of a message: they are copied once, to where it is sent from.

    Of `data` ([bytes] uint8) the elements `begins[i]` … `ends[i] - 1`, of `width` bytes each.
    """

    def __init__(self, data: np.ndarray, begins: np.ndarray, ends: np.ndarray, width: int):
        self.data, self.begins, self.sizes, self.width = data, begins, ends - begins, width
        self.nbytes = int(self.sizes.sum()) * width

    def __len__(self) -> int:
        return self.nbytes

    def copy_to(self, memory: memoryview) -> None:
        """Write all runs, back to back, into memory of `len(self)` bytes."""
        target = np.frombuffer(memory, np.uint8)
        copy_runs(self.data, target, self.begins, self.sizes.cumsum() - self.sizes, self.sizes, self.width)


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


def _copy_singly(source: np.ndarray, target: np.ndarray, begin: np.ndarray, at: np.ndarray, sizes: np.ndarray,
                  width: int) -> None:
    here, there = source.data, target.data
    for start, to, length in zip((begin * width).tolist(), (at * width).tolist(), (sizes * width).tolist()):
        there[to : to + length] = here[start : start + length]


def raw(tensor: Tensor) -> np.ndarray:
    import torch  # whoever has a tensor has loaded it; shards of the dock handle bytes alone

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
