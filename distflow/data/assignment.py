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
"""How much later the last share may be done so that its rows need not cross to another machine."""
_RUNS = 4
"""Runs of units that a share gets, from all over the step."""


def assign(weights: Tensor, shares: int, fixed: Tensor | None = None) -> Tensor:
    """Return the share of each unit, [units] int64, for `weights` [units] of tokens; `fixed` [units]: that it has
    already, or -1."""
    return assign_near(weights, [0] * shares, torch.zeros_like(weights), fixed)


def assign_near(weights: Tensor, machines: Sequence[int], at: Tensor, fixed: Tensor | None = None,
                parts: Sequence[int] = ()) -> Tensor:
    """Assign units longest processing time first (Graham 1969), at most 4/3 of the optimum, leaving as many on their
    machine as lets the last share be done at most 1% later. Ties go to lower units and shares, so that every rank
    computes the same.

    `machines`: [shares]; `at`: [units], -1 if it does not matter; `parts`: [shares], the work that each is to have, in
    proportion (Gonzalez, Ibarra and Sahni 1977). Each machine fills its shares; the rest goes to any.
    """
    near = np.full(len(weights), -1) if fixed is None else fixed.numpy().copy()
    return torch.from_numpy(_assign_near(weights.numpy(), np.array(machines), at.numpy(), near, parts))


def _assign_near(sizes: np.ndarray, machine_of: np.ndarray, located: np.ndarray, near: np.ndarray,
                 parts: Sequence[int]) -> np.ndarray:
    due, anywhere, everywhere = np.array(parts or [1] * len(machine_of)), near.copy(), np.ones(len(sizes), bool)
    latest = _soonest(sizes, everywhere, anywhere, due)
    if (machine_of == machine_of[0]).all():
        return anywhere
    for machine in np.unique(machine_of):
        _soonest(sizes, located == machine, near, np.where(machine_of == machine, due, 0), latest * _TOLERANCE)
    return near if _soonest(sizes, everywhere, near, due) <= latest * _TOLERANCE else anywhere


def _soonest(sizes: np.ndarray, those: np.ndarray, result: np.ndarray, parts: np.ndarray,
             limit: float = np.inf) -> float:
    """Assign those units in `result` that have no share, heaviest first, each to the share that is done first with it.
    Those that no share can finish by `limit` stay without; with no limit, units without weight come last, by number.
    Equally heavy units of a share are runs of neighbours, which move at once. Return when the last share is done."""
    numbers = np.ones_like(sizes)
    for weights, some in ((sizes, those & (sizes > 0)), (numbers, those)) if limit == np.inf else ((sizes, those),):
        loads, counts = (_loads(each, result, len(parts)).tolist() for each in (weights, numbers))
        alike = [(part, [(loads[share], counts[share], share) for share in np.flatnonzero(parts == part).tolist()])
                 for part in np.unique(parts[parts > 0]).tolist()]
        for _, heap in alike:
            heapq.heapify(heap)
        units = np.flatnonzero(some & (result < 0)) if alike else numbers[:0]
        units = units[np.argsort(-weights[units], kind="stable")]
        chosen = np.full(len(units), -1)
        for turn, size in enumerate(weights[units].tolist()):
            part, heap = alike[0] if len(alike) == 1 else min(
                alike, key=lambda each: ((each[1][0][0] + size) / each[0], each[1][0][1:]))
            load, count, share = heap[0]
            if load + size <= limit * part:
                chosen[turn] = share
                heapq.heapreplace(heap, (load + size, count + 1, share))
        runs = np.arange(len(units)) * _RUNS // max(len(units), 1)
        result[units] = chosen[np.lexsort((chosen % (len(parts) + 1), runs, -weights[units]))]
    return float((_loads(sizes, result, len(parts))[parts > 0] / parts[parts > 0]).max(initial=0))


def _loads(sizes: np.ndarray, shares_of: np.ndarray, shares: int) -> np.ndarray:
    """Return the tokens of each share [shares]; units of share -1 have none yet."""
    return np.bincount(shares_of + 1, sizes, shares + 1)[1:].astype(np.int64)


def imbalance(sizes: np.ndarray, shares_of: np.ndarray, shares: int, parts: Sequence[int] = ()) -> float:
    """Return the heaviest share's load over what it should have; 1.0 is perfect."""
    loads = _loads(sizes, shares_of, shares)
    due = np.array(parts or [1] * shares)
    total, most = int(loads.sum()), float((loads[due > 0] / due[due > 0]).max())
    return most * int(due.sum()) / total if total else 1.0


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
        order = np.argsort(ids)
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
    order = np.lexsort((table[:, 2], table[:, 1], table[:, 0]))
    table = table[order]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(table[:, :2], axis=0) != 0).any(1)])[: len(table)])
    last = np.append(first, len(table))[1:] - 1
    return np.stack([*table[first, :2].T, np.add.reduceat(table[:, 2], first), np.maximum.reduceat(table[:, 3], first)],
                    axis=1), machines[order[last]]
