"""Copies rows between byte buffers: by compiled_copies.c, or by numpy where it was installed without a compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distflow.errors import ColumnError

try:
    from distflow.data.compiled_copies import copy_runs as _copy_compiled
except ImportError:
    _copy_compiled = None
COPIES = "copies of rows: " + (
    "compiled" if _copy_compiled else
    "by numpy, several times slower for short rows; reinstall where there is a C compiler")
"""What copies rows here, for people."""

if TYPE_CHECKING:
    from torch import Tensor

_MANY = 96
"""Runs of similar length from which on numpy copies short ones by index, at once: for fewer that costs more than one by
one."""
_SHORT, _PART = 2 << 10, 1 << 18
"""Bytes below which a run is short; and of those that are copied at once, which stay in the core's own cache."""


def copy_runs(source: np.ndarray, target: np.ndarray, begin: np.ndarray, at: np.ndarray, sizes: np.ndarray,
              width: int) -> None:
    """Copy `sizes[i]` elements of `width` bytes from element `begin[i]` of `source` to element `at[i]` of `target`.

    Args:
        source, target: [bytes] uint8; they may be parts of one buffer, but no run is where another one goes.
        begin, at, sizes: [runs] int64. Runs that lie side by side at both ends are copied at once.

    Raises `ColumnError`: a run does not lie within both buffers; nothing was copied.
    """
    if not width:
        return
    begin, at, sizes = (np.ascontiguousarray(each, np.int64) for each in (begin, at, sizes))
    outside = (_copy_compiled or _copy_by_numpy)(source, target, begin, at, sizes, width)
    if outside >= 0:
        raise ColumnError(f"a row of {sizes[outside]} elements of {width} bytes, from element {begin[outside]} of "
                          f"{len(source) // width} to element {at[outside]} of {len(target) // width}, does not lie "
                          "within both. Its producer announced other lengths than it wrote")


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


def _copy_by_numpy(source: np.ndarray, target: np.ndarray, begin: np.ndarray, at: np.ndarray, sizes: np.ndarray,
                   width: int) -> int:
    """Copy as `copy_runs` of compiled_copies.c does; return -1, or the first run that is not within both buffers."""
    if not (source.flags.c_contiguous and target.flags.c_contiguous and target.flags.writeable):
        raise ValueError("rows are copied between buffers whose bytes lie side by side, into one that may be written")
    here, there = len(source) // width, len(target) // width
    outside = (begin < 0) | (at < 0) | (sizes < 0) | (begin > here - sizes) | (at > there - sizes)
    if outside.any():
        return int(outside.argmax())
    begin, at, sizes = _merge_adjacent(begin, at, sizes)
    if len(sizes) < _MANY:
        _copy_singly(source, target, begin, at, sizes, width)
        return -1
    exponents = np.frexp(sizes)[1]  # that of 2 ** n, which a size is below, and not below half of it
    many = np.bincount(exponents) >= _MANY
    many[0] = False  # nothing to copy
    many[int(np.frexp(_SHORT // width)[1]) :] = False
    singly = ~many[exponents] if many.any() else slice(None)
    _copy_singly(source, target, begin[singly], at[singly], sizes[singly], width)
    for exponent in np.flatnonzero(many).tolist():
        here, block = np.flatnonzero(exponents == exponent), 1 << exponent - 1
        _copy_blocks(source, target, begin[here], at[here], sizes[here] - block, width, block)
    return -1


def _merge_adjacent(begin: np.ndarray, at: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join runs that lie side by side at both ends."""
    ends, there = begin + sizes, at + sizes
    edges = np.flatnonzero((begin[1:] != ends[:-1]) | (at[1:] != there[:-1])) + 1
    first = np.concatenate([np.zeros(min(len(begin), 1), np.int64), edges])
    last = np.concatenate([edges, [len(begin)]])[: len(first)] - 1
    return begin[first], at[first], ends[last] - begin[first]


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


def as_bytes(tensor: Tensor) -> np.ndarray:
    import torch  # whoever has a tensor has loaded it; shards of the dock handle bytes alone

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
