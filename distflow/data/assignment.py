"""Assigns rows to the data-parallel shares of a layout, balanced by tokens.

Rows are assigned in units: all rows that stem from one prompt, if a task of the layout asks for that or reads rows of
prompts; otherwise single rows, as fine as the tasks read them. The first transfer to a layout decides, for the step.

    RowCounts          each rank counts its rows and their tokens; the counts of all ranks are gathered
    assign             balances units over shares; `assign_near` also leaves units on their machine
    ShardAssignment    the result: the share of each unit, and from it of the rows of any producer
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distflow.data.batch import Batch, Ragged
from distflow.data.column_buffers import elements_of
from distflow.data.redistribute import Destinations
from distflow.errors import ColumnError
from distflow.plan import Layout, RowLineage

_TOLERANCE = 1.01
"""How much heavier a share may become so that its rows stay together, or need not cross to another machine."""


_ROWS = 1.05
"""How many more units than the mean a share may get so that they stay together."""

_RUNS, _ONE_BY_ONE = 4, 16
"""Runs of units that a share gets, from all over the step, and units that are placed one by one to even loads out."""


def assign(weights: Tensor, shares: int, fixed: Tensor | None = None) -> Tensor:
    """Return the share of each unit, [units] int64, for `weights` [units] of tokens; `fixed` [units]: that it has
    already, or -1.

    Many units go out in runs or forth and back, at most 1% above the mean; others go longest processing time first
    (Graham 1969), at most 4/3 of the optimum. Ties go to lower units and shares, so that every rank computes the same.
    """
    sizes = weights.numpy()
    return torch.from_numpy(_assign(sizes, shares, _fixed(sizes, fixed)))


def _assign(sizes: np.ndarray, shares: int, fixed: np.ndarray) -> np.ndarray:
    runs = None if (fixed >= 0).any() else _many(sizes, shares)
    return _greedy(sizes, shares, fixed) if runs is None else runs


def _greedy(sizes: np.ndarray, shares: int, fixed: np.ndarray) -> np.ndarray:
    """Assign units heaviest first, each to the lightest share; those without weight at last, by number."""
    free = np.flatnonzero((fixed < 0) & (sizes > 0))
    units, result = free[_heaviest_first(sizes[free])], fixed.copy()
    result[units] = _lightest_first(sizes[units], *_taken(sizes, shares, fixed))
    return _greedy(np.ones_like(sizes), shares, result) if (result < 0).any() else result


def _lightest_first(sizes: np.ndarray, loads: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the share of each of `sizes` [units], which descend: the one that is the lightest when its turn comes, of
    equally light ones that with the fewest units, and of those the first. `loads`, `counts`: [shares]."""
    shares, most, chosen = len(loads), int(counts.max(initial=0)) + len(sizes) + 1, []
    heap = [(load * most + count) * shares + share  # one number sorts by all three
            for share, (load, count) in enumerate(zip(loads.tolist(), counts.tolist()))]
    heapq.heapify(heap)
    for size in sizes.tolist():
        chosen.append(heap[0] % shares)
        heapq.heapreplace(heap, heap[0] + (size * most + 1) * shares)
    return np.array(chosen, np.int64)


def _many(sizes: np.ndarray, shares: int) -> np.ndarray | None:
    """Assign many units without placing each: runs of as many units, else of as many tokens, where shares then differ
    little in both; else forth and back. None if there are too few, or a share gets too heavy."""
    if len(sizes) // shares <= _ONE_BY_ONE:
        return None
    heavy, most = int(sizes.sum()) / shares * _TOLERANCE, np.ceil(len(sizes) / shares * _ROWS)
    for weights in (np.ones_like(sizes), sizes):
        runs = _cut(sizes, weights, shares)
        if _heaviest(sizes, runs, shares) <= heavy and np.bincount(runs).max() <= most:
            return runs
    dealt = _deal(sizes, shares)
    return dealt if _heaviest(sizes, dealt, shares) <= heavy else None


def _cut(sizes: np.ndarray, weights: np.ndarray, shares: int) -> np.ndarray:
    """Deal out runs of units of as much weight, since rows that stay together move at once, but the last of each share
    one by one."""
    ends, runs = weights.cumsum(), shares * _RUNS
    twice = 2 * int(ends[-1])  # products with it may exceed 64 bits
    first = np.searchsorted(2 * ends - weights, [-(-run * twice // runs) for run in range(runs)])  # by a unit's middle
    result = np.repeat(np.arange(runs) % shares, np.diff(first, append=len(sizes)))
    last = np.bincount(result, minlength=shares).cumsum()[:, None] - np.arange(1, _ONE_BY_ONE + 1)
    result[_stable_order(result, shares)[np.maximum(last, 0)]] = -1
    return _greedy(sizes, shares, result)


def _deal(sizes: np.ndarray, shares: int) -> np.ndarray:
    """Deal units forth and back, heaviest first, but the lightest one by one."""
    many, there = len(sizes) // shares // 2 * 2 - _ONE_BY_ONE, np.arange(shares)
    result = np.full(len(sizes), -1)
    result[_heaviest_first(sizes)[: many * shares]] = np.tile(np.concatenate([there, there[::-1]]), many // 2)
    return _greedy(sizes, shares, result)


def assign_near(weights: Tensor, machines: Sequence[int], at: Tensor, fixed: Tensor | None = None,
                parts: Sequence[int] = ()) -> Tensor:
    """Assign units as `assign` does, at most 1% heavier, leaving as many as that allows on their machine.

    `machines`: [shares]; `at`: [units], -1 if it does not matter; `parts`: [shares], the work that each is to have, in
    proportion. Each machine fills its shares, as `assign` would; the rest goes to the lightest share of all.
    """
    sizes = weights.numpy()
    return torch.from_numpy(_assign_near(sizes, np.array(machines), at.numpy(), _fixed(sizes, fixed), parts))


def _assign_near(sizes: np.ndarray, machine_of: np.ndarray, located: np.ndarray, near: np.ndarray,
                 parts: Sequence[int]) -> np.ndarray:
    if parts:
        return _assign_to_unlike_shares(sizes, machine_of, located, near, np.array(parts))
    shares, anywhere = len(machine_of), _assign(sizes, len(machine_of), near)
    if (machine_of == machine_of[0]).all():
        return anywhere
    heaviest = _heaviest(sizes, anywhere, shares)
    bound = int(heaviest * _TOLERANCE)
    _fill_machines(sizes, machine_of, located, near, heaviest, bound)
    rest = _greedy(sizes, shares, near) if (near < 0).any() else near
    return rest if _heaviest(sizes, rest, shares) <= bound else anywhere


def _fill_machines(sizes: np.ndarray, machine_of: np.ndarray, located: np.ndarray, near: np.ndarray, heaviest: int,
                   bound: int) -> None:
    """Assign units in `near` to shares of their own machine, as long as none exceeds `bound`."""
    loads, counts = _taken(sizes, len(machine_of), near)
    free = np.flatnonzero(near < 0)
    free = free[np.argsort(located[free], kind="stable")]
    machines, begins = np.unique(located[free], return_index=True)
    shares_of = {machine: np.flatnonzero(machine_of == machine) for machine in np.unique(machine_of).tolist()}
    for machine, own in zip(machines.tolist(), np.split(free, begins[1:])):
        if (there := shares_of.get(machine)) is not None:
            taken = list(zip(loads[there].tolist(), counts[there].tolist(), there.tolist()))
            near[own] = _fit_on_own_machine(sizes[own], taken, heaviest, bound)


def _fit_on_own_machine(sizes: np.ndarray, taken: list[tuple[int, int, int]], heaviest: int, bound: int) -> np.ndarray:
    """Return the shares of a machine's units; -1: does not fit. `taken`: (load, units, share)."""
    result = np.full(len(sizes), -1)
    if not any(count for _, count, _ in taken):
        fitting = sizes[: np.searchsorted(sizes.cumsum(), heaviest * len(taken), side="right")]
        runs = _many(fitting, len(taken))
        if runs is not None and _heaviest(fitting, runs, len(taken)) <= bound:
            result[: len(fitting)] = np.array([share for *_, share in taken])[runs]
            return result
    heapq.heapify(taken)
    for unit in _heaviest_first(sizes).tolist():
        size = int(sizes[unit])
        load, count, share = taken[0]
        if load + size <= bound:
            result[unit] = share
            heapq.heapreplace(taken, (load + size, count + 1, share))
    return result


def _heaviest_first(sizes: np.ndarray) -> np.ndarray:
    """Sort units by size, ties by number. Numbers made of both sort in a third of the time of a stable order."""
    numbers = (sizes.max(initial=0) - sizes) * len(sizes) + np.arange(len(sizes))
    numbers.sort()
    return numbers % max(len(sizes), 1)


def _stable_order(numbers: np.ndarray, below: int) -> np.ndarray:
    """Sort by small numbers, all `below` some number: as small types they are sorted in one pass."""
    return np.argsort(numbers.astype(np.min_scalar_type(below)), kind="stable")


def _ascending(numbers: np.ndarray) -> np.ndarray:
    return np.argsort(numbers) if (numbers[1:] < numbers[:-1]).any() else np.arange(len(numbers))


def _fixed(sizes: np.ndarray, fixed: Tensor | None) -> np.ndarray:
    return np.full(len(sizes), -1) if fixed is None else fixed.numpy().copy()


def _taken(sizes: np.ndarray, shares: int, fixed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and units of each share [shares]."""
    number = fixed + 1  # 0 of those that have none yet
    return _loads(sizes, number, shares + 1)[1:], np.bincount(number, minlength=shares + 1)[1:]


def _loads(sizes: np.ndarray, shares_of: np.ndarray, shares: int) -> np.ndarray:
    return np.bincount(shares_of, sizes, shares).astype(np.int64)


def _heaviest(sizes: np.ndarray, shares_of: np.ndarray, shares: int) -> int:
    return int(_loads(sizes, shares_of, shares).max())


def imbalance(sizes: np.ndarray, shares_of: np.ndarray, shares: int, parts: Sequence[int] = ()) -> float:
    """Return the heaviest share's load over what it should have; 1.0 is perfect."""
    loads = _loads(sizes, shares_of, shares)
    due = np.array(parts or [1] * shares)
    total, most = int(loads.sum()), float((loads[due > 0] / due[due > 0]).max())
    return most * int(due.sum()) / total if total else 1.0


def _assign_to_unlike_shares(sizes: np.ndarray, machines: np.ndarray, located: np.ndarray, near: np.ndarray,
                             parts: np.ndarray) -> np.ndarray:
    """Assign units to unlike shares: each to the one that then finishes its load first (Gonzalez, Ibarra and Sahni
    1977), preferring one on the unit's machine that finishes before the last one anyway."""
    on_one_machine, by_size = (machines == machines[0]).all(), _heaviest_first(sizes)
    runs = _cut_uneven(sizes, parts) if on_one_machine and not (near >= 0).any() else None
    if runs is not None:
        return runs
    order, anywhere = by_size[near[by_size] < 0], near.copy()
    latest = _soonest(sizes, order, anywhere, parts)
    if on_one_machine:
        return anywhere
    for machine in np.unique(machines):
        there = np.where(machines == machine, parts, 0)
        own = order[located[order] == machine]
        if there.any():
            _soonest(sizes, own, near, there, latest * _TOLERANCE)
    rest = order[near[order] < 0]
    return near if _soonest(sizes, rest, near, parts) <= latest * _TOLERANCE else anywhere


def _cut_uneven(sizes: np.ndarray, parts: np.ndarray) -> np.ndarray | None:
    runs = _many(sizes, int(parts.sum()))
    if runs is None:
        return None
    result = np.repeat(np.arange(len(parts)), parts)[runs]
    due = parts * (int(sizes.sum()) / int(parts.sum()) * _TOLERANCE)
    return result if (_loads(sizes, result, len(parts)) <= due).all() else None


def _soonest(sizes: np.ndarray, units: np.ndarray, result: np.ndarray, parts: np.ndarray,
             limit: float = np.inf) -> float:
    """Assign `units` in `result`, but those that no share can finish by `limit`; return when the last finishes."""
    some = np.flatnonzero(parts)
    loads, due = _loads(sizes[result >= 0], result[result >= 0], len(parts))[some].astype(float), parts[some]
    for unit in units:
        done = (loads + sizes[unit]) / due
        share = int(done.argmin())
        if done[share] <= limit:
            result[unit] = some[share]
            loads[share] += sizes[unit]
    return float((loads / due).max())


_NOTHING = np.empty((0, 4), dtype=np.int64)
_SHOWN = 5


class ShardAssignment(NamedTuple):
    """Share of each unit: `units` [units] are ids, ascending, and `shares` [units] their shares."""

    units: np.ndarray
    shares: np.ndarray

    def destinations(self, lineage: RowLineage, producer: str, layout: Layout) -> Destinations:
        fan, unit = lineage.of(producer), lineage.unit(layout)
        if len(fan) < len(unit):
            times = lineage.times(unit[len(fan) :])
            return lambda ids: self.of_coarser(ids, times)
        times = lineage.times(fan[len(unit) :])
        return lambda ids: self.of_finer(ids, times)

    def to_bytes(self) -> bytes:
        return np.stack([self.units, self.shares]).tobytes()

    @classmethod
    def of_bytes(cls, raw: bytes) -> ShardAssignment:
        return cls(*np.frombuffer(raw, np.int64).reshape(2, -1))

    def joined(self, later: ShardAssignment) -> ShardAssignment:
        return ShardAssignment(np.concatenate([self.units, later.units]), np.concatenate([self.shares, later.shares]))

    def of_finer(self, ids: np.ndarray, times: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (row, share) of each of the rows `ids`, of which `times` stem from one unit; by id."""
        order = _ascending(ids)
        units = ids[order] // times if times > 1 else ids[order]
        if np.array_equal(units, self.units):  # the usual case: one row a unit
            return order, self.shares
        index = np.searchsorted(self.units, units)
        found = index < len(self.units)
        found[found] = self.units[index[found]] == units[found]
        if not found.all():
            raise ColumnError(f"some rank has rows {ids[order][~found][:_SHOWN].tolist()}, which stem from rows that "
                              "no rank had when this layout was filled")
        return order, self.shares[index]

    def of_coarser(self, ids: np.ndarray, times: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (row, share) for each share that has units of the rows `ids`, each of which has `times` units."""
        childless = ids[~np.isin(ids, self.units // times)]
        if len(childless):
            raise ColumnError(f"rows {childless[:_SHOWN].tolist()} lost all {times} rows that a node made of each; no "
                              "rank has one")
        wanted = np.unique(np.stack([self.units // times, self.shares]), axis=1)
        order = np.argsort(ids, kind="stable")
        first = np.searchsorted(ids, wanted[0], sorter=order)
        last = np.searchsorted(ids, wanted[0], side="right", sorter=order)
        row = order[np.concatenate([np.arange(*ends) for ends in zip(first, last)])] if len(first) else order[:0]
        return row, np.repeat(wanted[1], last - first)


class RowCounts:
    """Rows and tokens of this rank, counted for a layout before its rows are assigned."""

    def __init__(self, lineage: RowLineage, layout: Layout):
        self.lineage, self.layout, self.unit = lineage, layout, lineage.unit(layout)
        reads = [column for task in lineage.tasks.values() if task.layout == layout for column in task.reads]
        tokens = {(column.producer, column.name) for column in reads if "Ragged" in column.form}
        text = {(column.producer, column.name) for column in reads if column.form == "list[str]"}
        self.counted = tokens or text
        self.tables: list[np.ndarray] = []

    def add(self, producer: str, batch: Batch, share: int | None, origin: bool) -> None:
        """Count rows of a producer. `share`: of the layout, if they are in it already: later columns must join them.
        `origin`: whether they are where they were made; elsewhere they have been counted."""
        fan, ids = self.lineage.of(producer), batch.ids.numpy()
        level = min(len(fan), len(self.unit))
        if fan[:level] != self.unit[:level]:
            return  # rows of another branch
        weight = np.full(len(ids), int(origin and level == len(self.unit)))
        for name, column in batch.columns.items():
            if origin and (producer, name) in self.counted and isinstance(column, Ragged):
                weight += elements_of(column)
        owner = -1 if share is None or level < len(self.unit) else share
        unit = ids // self.lineage.times(fan[level:])
        self.tables.append(np.stack([np.full_like(ids, level), unit, weight, np.full_like(ids, owner)], axis=1))

    def to_bytes(self) -> bytes:
        """Return the counts: each unit that this rank has, once, and its rows that are coarser than units."""
        table = np.concatenate([*self.tables, _NOTHING])
        return _merged(table, np.zeros(len(table), np.int64))[0].tobytes()

    def assign(self, counts: list[bytes], machine_of: list[int],
               parts: Sequence[int] = ()) -> tuple[ShardAssignment, float | None]:
        """Assign all units from the counts of every rank, and return the heaviest share's load over the mean with it
        (None if no unit was free). Units stay on their machine (`machine_of` a rank) where that costs no balance.
        `parts`: [shares], the work that each is to have, in proportion."""
        machines = np.array(machine_of)
        table = np.frombuffer(b"".join(counts), np.int64).reshape(-1, _NOTHING.shape[1])
        rows = np.fromiter(map(len, counts), np.int64, len(counts)) // (8 * _NOTHING.shape[1])
        table, at = _merged(table, np.repeat(machines, rows))
        begins = np.searchsorted(table[:, 0], np.arange(len(self.unit) + 1)).tolist()
        units, weights, owners = table[begins[-1] :, 1:].T.copy()
        at = at[begins[-1] :]
        for level in range(len(self.unit)):
            _, ids, tokens, _ = table[begins[level] : begins[level + 1]].T
            parent = units // self.lineage.times(self.unit[level:])
            index = np.searchsorted(ids, parent).clip(max=max(len(ids) - 1, 0))
            weights = weights + np.where(ids[index] == parent, tokens[index], 0) if len(ids) else weights
        shares, stride = self.layout.dp, self.layout.leader(1) - self.layout.leader(0)
        of_shares = machines[self.layout.first + stride * np.arange(shares)]
        chosen = _assign_near(weights, of_shares, at, owners.copy(), parts)
        uneven = imbalance(weights, chosen, shares, parts) if (owners < 0).any() else None
        return ShardAssignment(units, chosen), uneven


def _merged(table: np.ndarray, machines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge rows of equal (level, unit), ascending: tokens are added, the machine is that of the most tokens. `table`:
    [rows, (level, unit, tokens, owner)]; `machines`: [rows]."""
    numbers = table[:, 0] * (table[:, 1].max(initial=0) + 1) + table[:, 1]
    if (numbers[1:] > numbers[:-1]).all():
        return table, machines
    order = np.argsort(numbers)
    repeated = np.diff(numbers[order]) == 0
    if not repeated.any():
        return np.take(table, order, axis=0), machines[order]
    order = np.lexsort((table[:, 2], numbers))
    table, first = table[order], np.flatnonzero(np.concatenate([[True], ~repeated]))
    last = np.concatenate([first[1:], [len(table)]]) - 1
    return np.stack([*table[first, :2].T, np.add.reduceat(table[:, 2], first), np.maximum.reduceat(table[:, 3], first)],
                    axis=1), machines[order[last]]
