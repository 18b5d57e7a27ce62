"""Which rank gets which rows, so that all ranks have about as many tokens."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor


def assign(weights: Tensor, shares: int) -> Tensor:
    """The share of each unit: [units] int64, for `weights` [units] of tokens.

    Longest processing time first (Graham 1969): the heaviest unit goes to the lightest share; at most 4/3 of the
    optimum. Ties go to the lower unit and the lower share, so that every rank computes the same.
    """
    loads = [(0, share) for share in range(shares)]
    result = torch.empty(len(weights), dtype=torch.int64)
    for unit in torch.sort(weights, descending=True, stable=True).indices.tolist():
        load, share = heapq.heappop(loads)
        result[unit] = share
        heapq.heappush(loads, (load + int(weights[unit]), share))
    return result


def imbalance(weights: Tensor, shares_of: Tensor, shares: int) -> float:
    """The heaviest share's load over the mean load; 1.0 is perfect."""
    loads = torch.zeros(shares, dtype=torch.int64).index_add_(0, shares_of, weights)
    total = int(loads.sum())
    return int(loads.max()) * shares / total if total else 1.0
