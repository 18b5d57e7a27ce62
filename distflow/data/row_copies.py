"""Copies rows between byte buffers, those that stay together at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


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
    here, there = source.data, target.data
    for start, to, length in zip((begin * width).tolist(), (at * width).tolist(), (sizes * width).tolist()):
        there[to : to + length] = here[start : start + length]


def raw(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
