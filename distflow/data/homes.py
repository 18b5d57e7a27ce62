"""Which share of a layout holds which rows in a step, so that all shares have about as many tokens.

Rows are assigned in units: all rows that stem from one prompt, if a task of the layout asks for that or reads rows of
prompts; otherwise each row as fine as the tasks read them. The first transfer to a layout decides, for the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from distflow.data.balance import assign_near, imbalance
from distflow.data.batch import Batch, Ragged
from distflow.data.routing import Destinations
from distflow.data.strips import elements_of
from distflow.schema.errors import ColumnError
from distflow.schema.plan import Fans, Layout

_NOTHING = np.empty((4, 0), dtype=np.int64)
_SHOWN = 5


class Homes(NamedTuple):
    """The share [units] of each unit, by its id [units], ascending."""

    units: np.ndarray
    shares: np.ndarray

    def destinations(self, fans: Fans, producer: str, layout: Layout) -> Destinations:
        """Where the rows of a producer go."""
        fan, unit = fans.of(producer), fans.unit(layout)
        if len(fan) < len(unit):
            times = fans.times(unit[len(fan) :])
            return lambda ids: self.of_coarser(ids, times)
        times = fans.times(fan[len(unit) :])
        return lambda ids: self.of_finer(ids, times)

    def joined(self, later: Homes) -> Homes:
        """These, and those of units with larger ids."""
        return Homes(np.concatenate([self.units, later.units]), np.concatenate([self.shares, later.shares]))

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


class Census:
    """This rank's rows, counted for a layout: what each rank says before the homes are found."""

    def __init__(self, fans: Fans, layout: Layout):
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

    def settle(self, census: list[bytes], machine_of: list[int]) -> tuple[Homes, float | None]:
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
        return Homes(units, homes.numpy()), imbalance(loads, homes, shares, self.layout.rows) if free else None


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
