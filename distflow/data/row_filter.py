"""Drops rows from a step, whatever node they come from, when a node keeps only some."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.data.assignment import ShardAssignment
from distflow.data.batch import Batch
from distflow.plan import Lineage, RowLineage, common


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Rows that remain, of all ranks: their ids [rows], and the nodes that repeated them, outermost first."""

    ids: Tensor
    fan: Lineage

    def ancestors(self, lineage: RowLineage, level: int) -> Tensor:
        """Return the ids, ascending, of the rows that these stem from, after the first `level` repetitions."""
        return torch.unique(self.ids // lineage.times(self.fan[level:]))

    def is_kept(self, lineage: RowLineage, ids: Tensor, fan: Lineage) -> Tensor:
        """Return which of the rows `ids` remain, [rows] bool: with the row that they stem from, as long as any of their
        rows remains, or, of another branch, with the row that both stem from."""
        level = len(common([self.fan, fan]))
        return torch.isin(ids // lineage.times(fan[level:]), self.ancestors(lineage, level))

    def of(self, lineage: RowLineage, batch: Batch, fan: Lineage) -> Batch:
        stay = self.is_kept(lineage, batch.ids, fan)
        return batch if bool(stay.all()) else batch.select(stay.nonzero().squeeze(1))

    def of_assignment(self, lineage: RowLineage, assignment: ShardAssignment, unit: Lineage) -> ShardAssignment:
        stay = self.is_kept(lineage, torch.from_numpy(assignment.units), unit).numpy()
        return ShardAssignment(assignment.units[stay], assignment.shares[stay])


def concat_non_empty(first: Batch, second: Batch) -> Batch:
    filled = [batch for batch in (first, second) if len(batch)]
    return Batch.concat(filled) if filled else second  # a rank without rows may lack the columns too
