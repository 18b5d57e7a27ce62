"""Packs tensors into one buffer: the distance of each from the next, and the tensor that begins at a byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64  # bytes: a line of the cache, and more than any element needs
Size = TypeVar("Size", int, numpy.ndarray)


def aligned(size: Size) -> Size:
    """Return a number of bytes, or an array of such numbers, rounded up so that a tensor may begin behind them."""
    return size + -size % ALIGNMENT


def tensor_at(buffer: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a view of the tensor that begins at byte `start` of a buffer [bytes] uint8."""
    return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view((*shape,))
