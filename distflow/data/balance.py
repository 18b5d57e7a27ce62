"""Which rank gets which rows, so that all ranks have about as many tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

_TOLERANCE = 1.01
"""A share may be this much heavier if its rows need not cross to another machine for it."""


_ONE_BY_ONE = 16
"""Units for each share that even out what dealing left uneven."""


def assign(weights: Tensor, shares: int, settled: Tensor | None = None) -> Tensor:
    """The share of each unit: [units] int64, for `weights` [units] of tokens.

    Longest processing time first (Graham 1969): the heaviest unit goes to the lightest share; the heaviest share is
    then at most 4/3 of the optimum. Many units that are much alike are dealt out instead: then it is at most 1% above
    the mean. Ties go to the lower unit, to the share with fewer units, to the lower share, so
    that every rank computes the same.

    Args:
        settled: [units]: the share of a unit that has one already, -1 for one that is free.
    """
    order = torch.sort(weights, descending=True, stable=True).indices
    if settled is None or not bool((settled >= 0).any()):
        dealt = _deal(weights, order, shares)
        if dealt is not None:
            return dealt
        settled = torch.full_like(weights, -1)
    return _greedy(weights, order, shares, settled)


def _greedy(weights: Tensor, order: Tensor, shares: int, settled: Tensor) -> Tensor:
    """Each free unit in turn to the lightest share."""
    units = order[settled[order] < 0]
    heap = [(load, count, share) for share, (load, count) in enumerate(zip(*_taken(weights, shares, settled)))]
    heapq.heapify(heap)
    chosen = []
    for size in weights[units].tolist():
        load, count, share = heap[0]
        chosen.append(share)
        heapq.heapreplace(heap, (load + size, count + 1, share))
    result = settled.clone()
    result[units] = torch.tensor(chosen, dtype=torch.int64)
    return result


def _deal(weights: Tensor, order: Tensor, shares: int) -> Tensor | None:
    """The same for many units without a loop over them: dealt out forth and back, like cards, and only the lightest
    one by one. None if there are too few units, or if that leaves a share heavier than one of even shares may be."""
    many = len(order) // shares // 2 * 2 - _ONE_BY_ONE
    if many <= 0:
        return None
    if int(weights.min()) == int(weights.max()):
        return torch.arange(len(weights)) % shares
    there = torch.arange(shares)
    result = torch.full_like(weights, -1)
    result[order[: many * shares]] = torch.cat([there, there.flip(0)]).repeat(many // 2)
    result = _greedy(weights, order[many * shares :], shares, result)
    return result if _heaviest(weights, result, shares) <= int(weights.sum()) / shares * _TOLERANCE else None


def assign_near(weights: Tensor, machines: Sequence[int], at: Tensor, settled: Tensor | None = None) -> Tensor:
    """The same, at most 1% heavier, with as many units as that allows left on the machine that they are on.

    Each unit goes to the lightest share of its machine as long as the load stays within what `assign` reaches for its
    heaviest share, and 1% more; those that do not fit go to the lightest share of all. If that ends heavier, `assign`
    it is.

    Args:
        machines: [shares]: the machine of each share.
        at: [units]: the machine of each unit; -1 if it does not matter.
    """
    shares = len(machines)
    anywhere = assign(weights, shares, settled)
    if len(set(machines)) == 1:
        return anywhere
    bound = int(_heaviest(weights, anywhere, shares) * _TOLERANCE)
    settled = torch.full_like(weights, -1) if settled is None else settled
    loads, counts = _taken(weights, shares, settled)
    result, sizes, home, moved = settled.tolist(), weights.tolist(), at.tolist(), False
    heaps: dict[int, list[tuple[int, int, int]]] = {machine: [] for machine in set(machines)}
    for share, machine in enumerate(machines):
        heapq.heappush(heaps[machine], (loads[share], counts[share], share))
    for unit in torch.sort(weights, descending=True, stable=True).indices.tolist():
        heap = heaps.get(home[unit])
        if result[unit] >= 0:
            continue
        if not heap or heap[0][0] + sizes[unit] > bound:
            moved = True
            continue
        load, count, share = heap[0]
        result[unit] = share
        heapq.heapreplace(heap, (load + sizes[unit], count + 1, share))
    near = torch.tensor(result, dtype=torch.int64)
    rest = assign(weights, shares, near) if moved else near
    return rest if _heaviest(weights, rest, shares) <= bound else anywhere


def _taken(weights: Tensor, shares: int, settled: Tensor) -> tuple[list[int], list[int]]:
    """Each share's load, and its units, so far."""
    units = settled >= 0
    none = torch.zeros(shares, dtype=torch.int64)
    loads = none.index_add(0, settled[units], weights[units])
    return loads.tolist(), torch.bincount(settled[units], minlength=shares).tolist()


def _heaviest(weights: Tensor, shares_of: Tensor, shares: int) -> int:
    return int(torch.zeros(shares, dtype=torch.int64).index_add_(0, shares_of, weights).max())


def imbalance(weights: Tensor, shares_of: Tensor, shares: int) -> float:
    """The heaviest share's load over the mean load; 1.0 is perfect."""
    loads = torch.zeros(shares, dtype=torch.int64).index_add_(0, shares_of, weights)
    total = int(loads.sum())
    return int(loads.max()) * shares / total if total else 1.0
