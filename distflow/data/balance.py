"""Which rank gets which rows, so that all ranks have about as many tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
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
    sizes = weights.numpy()
    return torch.from_numpy(_assign(sizes, _heaviest_first(sizes), shares, _settled(sizes, settled)))


def _assign(sizes: np.ndarray, order: np.ndarray, shares: int, settled: np.ndarray) -> np.ndarray:
    if not (settled >= 0).any():
        dealt = _deal(sizes, order, shares)
        if dealt is not None:
            return dealt
    return _greedy(sizes, order, shares, settled)


def _greedy(sizes: np.ndarray, order: np.ndarray, shares: int, settled: np.ndarray) -> np.ndarray:
    """Each free unit in turn to the lightest share."""
    units = order[settled[order] < 0]
    heap = [(load, count, share) for share, (load, count) in enumerate(zip(*_taken(sizes, shares, settled)))]
    heapq.heapify(heap)
    chosen = []
    for size in sizes[units].tolist():
        load, count, share = heap[0]
        chosen.append(share)
        heapq.heapreplace(heap, (load + size, count + 1, share))
    result = settled.copy()
    result[units] = chosen
    return result


def _deal(sizes: np.ndarray, order: np.ndarray, shares: int) -> np.ndarray | None:
    """The same for many units without a loop over them: dealt out forth and back, like cards, and only the lightest
    one by one. None if there are too few units, or if that leaves a share heavier than one of even shares may be."""
    many = len(order) // shares // 2 * 2 - _ONE_BY_ONE
    if many <= 0:
        return None
    if sizes.min() == sizes.max():
        return np.arange(len(sizes)) % shares
    there = np.arange(shares)
    result = np.full(len(sizes), -1)
    result[order[: many * shares]] = np.tile(np.concatenate([there, there[::-1]]), many // 2)
    result = _greedy(sizes, order[many * shares :], shares, result)
    return result if _heaviest(sizes, result, shares) <= int(sizes.sum()) / shares * _TOLERANCE else None


def assign_near(weights: Tensor, machines: Sequence[int], at: Tensor, settled: Tensor | None = None,
                parts: Sequence[int] = ()) -> Tensor:
    """The same, at most 1% heavier, with as many units as that allows left on the machine that they are on.

    Each machine fills its shares with its own units, heaviest first, as long as their loads stay within what `assign`
    reaches for its heaviest share, and 1% more; those that do not fit go to the lightest share of all. If that ends
    heavier, `assign` it is.

    Args:
        machines: [shares]: the machine of each share.
        at: [units]: the machine of each unit; -1 if it does not matter.
        parts: [shares]: how much work each share is to have, in proportion, if they are not alike.
    """
    if parts:
        return torch.from_numpy(_uneven(weights.numpy(), np.array(machines), at.numpy(),
                                        _settled(weights.numpy(), settled), np.array(parts)))
    sizes, places, machine_of = weights.numpy(), at.numpy(), np.array(machines)
    order, shares, near = _heaviest_first(sizes), len(machines), _settled(sizes, settled)
    anywhere = _assign(sizes, order, shares, near)
    if (machine_of == machine_of[0]).all():
        return torch.from_numpy(anywhere)
    heaviest = _heaviest(sizes, anywhere, shares)
    bound, free = int(heaviest * _TOLERANCE), order[near[order] < 0]
    loads, counts = _taken(sizes, shares, near)
    for machine in np.unique(machine_of).tolist():
        there, units = np.flatnonzero(machine_of == machine), free[places[free] == machine]
        taken = [(loads[share], counts[share], share) for share in there.tolist()]
        near[units] = _near(sizes[units], taken, heaviest, bound)
    rest = _greedy(sizes, order, shares, near) if (near < 0).any() else near
    return torch.from_numpy(rest if _heaviest(sizes, rest, shares) <= bound else anywhere)


def _near(sizes: np.ndarray, taken: list[tuple[int, int, int]], heaviest: int, bound: int) -> np.ndarray:
    """The share of each of a machine's units, heaviest first, -1 for one that does not fit.

    Args:
        taken: (load, units, share) of each of its shares.
    """
    result = np.full(len(sizes), -1)
    if not any(count for _, count, _ in taken):
        fitting = sizes[: np.searchsorted(sizes.cumsum(), heaviest * len(taken), side="right")]
        dealt = _deal(fitting, np.arange(len(fitting)), len(taken))
        if dealt is not None and _heaviest(fitting, dealt, len(taken)) <= bound:
            result[: len(fitting)] = np.array([share for *_, share in taken])[dealt]
            return result
    heapq.heapify(taken)
    for unit, size in enumerate(sizes.tolist()):
        load, count, share = taken[0]
        if load + size <= bound:
            result[unit] = share
            heapq.heapreplace(taken, (load + size, count + 1, share))
    return result


def _heaviest_first(sizes: np.ndarray) -> np.ndarray:
    """[units]; of equal ones the lower first. Plain numbers sort in a third of the time of a stable order; each is made
    of a size and a unit, for which the sizes must stay below 2^63 by the units."""
    numbers = (sizes.max(initial=0) - sizes) * len(sizes) + np.arange(len(sizes))
    numbers.sort()
    return numbers % max(len(sizes), 1)


def _settled(sizes: np.ndarray, settled: Tensor | None) -> np.ndarray:
    """A copy that may be filled."""
    return np.full(len(sizes), -1) if settled is None else settled.numpy().copy()


def _taken(sizes: np.ndarray, shares: int, settled: np.ndarray) -> tuple[list[int], list[int]]:
    """Each share's load, and its units, so far."""
    units = settled >= 0
    return _loads(sizes[units], settled[units], shares).tolist(), np.bincount(settled[units], minlength=shares).tolist()


def _loads(sizes: np.ndarray, shares_of: np.ndarray, shares: int) -> np.ndarray:
    """[shares]; exact below 2^53."""
    return np.bincount(shares_of, sizes, shares).astype(np.int64)


def _heaviest(sizes: np.ndarray, shares_of: np.ndarray, shares: int) -> int:
    return int(_loads(sizes, shares_of, shares).max())


def imbalance(weights: Tensor, shares_of: Tensor, shares: int, parts: Sequence[int] = ()) -> float:
    """The heaviest share's load over what it should have; 1.0 is perfect."""
    loads = _loads(weights.numpy(), shares_of.numpy(), shares)
    due = np.array(parts or [1] * shares)
    total, most = int(loads.sum()), float((loads[due > 0] / due[due > 0]).max())
    return most * int(due.sum()) / total if total else 1.0


def _uneven(sizes: np.ndarray, machines: np.ndarray, places: np.ndarray, near: np.ndarray, parts: np.ndarray) -> \
        np.ndarray:
    """`assign_near` for unlike shares: each unit to the share that is then the first to be done with its load
    (Gonzalez, Ibarra and Sahni 1977), and before that to one on its machine that is done before the last one anyway.
    Many free units on a single machine are dealt out."""
    alone, by_size = (machines == machines[0]).all(), _heaviest_first(sizes)
    dealt = _deal_uneven(sizes, by_size, parts) if alone and not (near >= 0).any() else None
    if dealt is not None:
        return dealt
    order, anywhere = by_size[near[by_size] < 0], near.copy()
    latest = _soonest(sizes, order, anywhere, parts)
    if alone:
        return anywhere
    for machine in np.unique(machines):
        there = np.where(machines == machine, parts, 0)
        own = order[places[order] == machine]
        if there.any():
            _soonest(sizes, own, near, there, latest * _TOLERANCE)
    rest = order[near[order] < 0]
    return near if _soonest(sizes, rest, near, parts) <= latest * _TOLERANCE else anywhere


def _deal_uneven(sizes: np.ndarray, order: np.ndarray, parts: np.ndarray) -> np.ndarray | None:
    """`_deal` to as many hands as there are parts, of which each share has its own; None if that leaves a share heavier
    than it may be."""
    dealt = _deal(sizes, order, int(parts.sum()))
    if dealt is None:
        return None
    result = np.repeat(np.arange(len(parts)), parts)[dealt]
    due = parts * (int(sizes.sum()) / int(parts.sum()) * _TOLERANCE)
    return result if (_loads(sizes, result, len(parts)) <= due).all() else None


def _soonest(sizes: np.ndarray, units: Sequence[int], result: np.ndarray, parts: np.ndarray,
             limit: float = np.inf) -> float:
    """Give `units` their shares in `result`, those excepted that no share can have done by `limit`; when the last share
    is done. Shares without a part get none."""
    some = np.flatnonzero(parts)
    loads, due = _loads(sizes[result >= 0], result[result >= 0], len(parts))[some].astype(float), parts[some]
    for unit in units:
        done = (loads + sizes[unit]) / due
        share = int(done.argmin())
        if done[share] <= limit:
            result[unit] = some[share]
            loads[share] += sizes[unit]
    return float((loads / due).max())
