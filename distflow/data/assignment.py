"""Which share of a layout holds which rows in a step, so that all shares have about as many tokens.

Rows are assigned in units: all rows that stem from one prompt, if a task of the layout asks for that or reads rows of
prompts; otherwise each row as fine as the tasks read them. The first transfer to a layout decides, for the step.

Which rank gets which rows, so that all ranks have about as many tokens.
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


_NOTHING = np.empty((4, 0), dtype=np.int64)
_SHOWN = 5


class ShardAssignment(NamedTuple):
    """The share [units] of each unit, by its id [units], ascending."""

    units: np.ndarray
    shares: np.ndarray

    def destinations(self, fans: RowLineage, producer: str, layout: Layout) -> Destinations:
        """Where the rows of a producer go."""
        fan, unit = fans.of(producer), fans.unit(layout)
        if len(fan) < len(unit):
            times = fans.times(unit[len(fan) :])
            return lambda ids: self.of_coarser(ids, times)
        times = fans.times(fan[len(unit) :])
        return lambda ids: self.of_finer(ids, times)

    def joined(self, later: ShardAssignment) -> ShardAssignment:
        """These, and those of units with larger ids."""
        return ShardAssignment(np.concatenate([self.units, later.units]), np.concatenate([self.shares, later.shares]))

    def of_finer(self, ids: np.ndarray, times: int) -> tuple[np.ndarray, np.ndarray]:
        """(row, share) of each of the rows `ids`, of which `times` stem from one unit.

        Raises:
            ColumnError: a row stems from a unit that no rank had.
        """
        units = ids // times if times > 1 else ids
        if len(units) == len(self.units) and (units == self.units).all():  # the usual case: one row a unit, in order
            return np.arange(len(ids)), self.shares
        index = np.searchsorted(self.units, units)
        found = index < len(self.units)
        found[found] = self.units[index[found]] == units[found]
        if not found.all():
            raise ColumnError(f"some rank has rows {ids[~found][:_SHOWN].tolist()}, which stem from rows that no rank "
                              "had when this layout was filled")
        return np.arange(len(ids)), self.shares[index]

    def of_coarser(self, ids: np.ndarray, times: int) -> tuple[np.ndarray, np.ndarray]:
        """(row, share) for each share that has units of the rows `ids`, each of which has `times` units.

        Raises:
            ColumnError: no rank has a unit of a row.
        """
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
    """This rank's rows, counted for a layout: what each rank says before the homes are found."""

    def __init__(self, fans: RowLineage, layout: Layout):
        self.fans, self.layout, self.unit = fans, layout, fans.unit(layout)
        reads = [column for task in fans.tasks.values() if task.layout == layout for column in task.reads]
        tokens = {(column.producer, column.name) for column in reads if "Ragged" in column.form}
        text = {(column.producer, column.name) for column in reads if column.form == "list[str]"}
        self.counted = tokens or text
        self.tables: list[np.ndarray] = []

    def add(self, producer: str, batch: Batch, share: int | None, origin: bool) -> None:
        """Count rows of a producer.

        Args:
            share: of the layout, if these rows are in it already: later columns must join them.
            origin: whether the rows are where they were made; elsewhere they have been counted.
        """
        fan, ids = self.fans.of(producer), batch.ids.numpy()
        level = min(len(fan), len(self.unit))
        if fan[:level] != self.unit[:level]:
            return  # rows of another branch
        weight = np.full(len(ids), int(origin and level == len(self.unit)))
        for name, column in batch.columns.items():
            if origin and (producer, name) in self.counted and isinstance(column, Ragged):
                weight += elements_of(column)
        owner = -1 if share is None or level < len(self.unit) else share
        unit = ids // self.fans.times(fan[level:])
        self.tables.append(np.stack([np.full_like(ids, level), unit, weight, np.full_like(ids, owner)]))

    def to_bytes(self) -> bytes:
        """Each unit that this rank has, once, and its rows that are coarser than units."""
        return _merged(np.concatenate([*self.tables, _NOTHING], axis=1)).tobytes()

    def settle(self, census: list[bytes], machine_of: list[int]) -> tuple[ShardAssignment, float | None]:
        """The homes, from what every rank counted; and the heaviest share's load over the mean, None if all were
        settled before. Units stay on their machine (`machine_of` a rank) where that costs no balance."""
        tables = [np.frombuffer(raw, dtype=np.int64).reshape(4, -1) for raw in census]
        machine = np.repeat(machine_of, [table.shape[1] for table in tables])
        table = _merged(np.vstack([np.concatenate(tables, axis=1), machine]))
        begins = np.searchsorted(table[0], np.arange(len(self.unit) + 1)).tolist()
        _, units, weights, owners, at = table[:, begins[-1] :]
        for level in range(len(self.unit)):
            _, ids, tokens, *_ = table[:, begins[level] : begins[level + 1]]
            parent = units // self.fans.times(self.unit[level:])
            index = np.searchsorted(ids, parent).clip(max=max(len(ids) - 1, 0))
            weights = weights + np.where(ids[index] == parent, tokens[index], 0) if len(ids) else weights
        first, shares = self.layout.first, self.layout.dp
        machines = [machine_of[first + share * self.layout.width] for share in range(shares)]
        loads, settled = torch.from_numpy(weights.copy()), torch.from_numpy(owners.copy())
        homes = assign_near(loads, machines, torch.from_numpy(at.copy()), settled, self.layout.rows)
        free = bool((settled < 0).any())
        return ShardAssignment(units, homes.numpy()), imbalance(loads, homes, shares,
                                                                self.layout.rows) if free else None


def _merged(table: np.ndarray) -> np.ndarray:
    """Each (level, id) once, ascending, with its tokens in all, the share that any of its rows has, and, if there are
    machines, that of the most tokens."""
    level, unit = table[:2]
    if ((level[1:] > level[:-1]) | (level[1:] == level[:-1]) & (unit[1:] > unit[:-1])).all():
        return table  # the usual case: ranks have rows one after the other
    table = table[:, np.lexsort((table[2], unit, level))]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(table[:2]) != 0).any(axis=0)]))
    last = np.concatenate([first[1:], [table.shape[1]]]) - 1
    return np.vstack([table[:2, first], np.add.reduceat(table[2], first), np.maximum.reduceat(table[3], first),
                      table[4:, last]])
