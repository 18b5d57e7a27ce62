"""Copies rows between byte buffers: by compiled_copies.c, or in Python where it was installed without a compiler."""

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
    "in Python, several times slower for short rows; reinstall where there is a C compiler")
"""What copies rows here, for people."""

if TYPE_CHECKING:
    from torch import Tensor


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
    outside = (_copy_compiled or _copy_in_python)(source, target, begin, at, sizes, width)
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


def _copy_in_python(source: np.ndarray, target: np.ndarray, begin: np.ndarray, at: np.ndarray, sizes: np.ndarray,
                    width: int) -> int:
    """Copy as `copy_runs` of compiled_copies.c does; return -1, or the first run that is not within both buffers."""
    if not (source.flags.c_contiguous and target.flags.c_contiguous and target.flags.writeable):
        raise ValueError("rows are copied between buffers whose bytes lie side by side, into one that may be written")
    here, there = len(source) // width, len(target) // width
    outside = (begin < 0) | (at < 0) | (sizes < 0) | (begin > here - sizes) | (at > there - sizes)
    if outside.any():
        return int(outside.argmax())
    for start, to, size in zip((begin * width).tolist(), (at * width).tolist(), (sizes * width).tolist()):
        target.data[to : to + size] = source.data[start : start + size]
    return -1


def as_bytes(tensor: Tensor) -> np.ndarray:
    import torch  # whoever has a tensor has loaded it; shards of the dock handle bytes alone

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
