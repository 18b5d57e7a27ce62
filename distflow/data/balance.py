"""Which rank gets which rows, so that all ranks have about as many tokens."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor


def assign(weights: Tensor, shares: int, settled: Tensor | None = None) -> Tensor:
    """The share of each unit: [units] int64, for `weights` [units] of tokens.

    Longest processing time first (Graham 1969): the heaviest unit goes to the lightest share; the heaviest share is
    then at most 4/3 of the optimum. Ties go to the lower unit, to the share with fewer units, to the lower share, so
    that every rank computes the same.

    Args:
        settled: [units]: the share of a unit that has one already, -1 for one that is free.
    """
    result = torch.full_like(weights, -1) if settled is None else settled.clone()
    loads, counts = [0] * shares, [0] * shares
    sizes = weights.tolist()
    for unit in (result >= 0).nonzero().squeeze(1).tolist():
        loads[result[unit]] += sizes[unit]
        counts[result[unit]] += 1
    heap = list(zip(loads, counts, range(shares)))
    heapq.heapify(heap)
    for unit in torch.sort(weights, descending=True, stable=True).indices.tolist():
        if result[unit] < 0:
            load, count, share = heapq.heappop(heap)
            result[unit] = share
            heapq.heappush(heap, (load + sizes[unit], count + 1, share))
    return result


def imbalance(weights: Tensor, shares_of: Tensor, shares: int) -> float:
    """The heaviest share's load over the mean load; 1.0 is perfect."""
    loads = torch.zeros(shares, dtype=torch.int64).index_add_(0, shares_of, weights)
    total = int(loads.sum())
    return int(loads.max()) * shares / total if total else 1.0
