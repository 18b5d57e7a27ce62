"""Which rows of a step stay when a node drops some, whatever node they come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.data.assignment import ShardAssignment
from distflow.data.batch import Batch
from distflow.plan import Fan, RowLineage, common


@dataclass(frozen=True, eq=False)
class KeptRows:
    """The rows that stay, of all ranks: their ids [rows], and the nodes that repeated them, outermost first."""

    ids: Tensor
    fan: Fan

    def ancestors(self, fans: RowLineage, level: int) -> Tensor:
        """Ids, ascending, of the rows that these stem from, after the first `level` repetitions."""
        return torch.unique(self.ids // fans.times(self.fan[level:]))

    def among(self, fans: RowLineage, ids: Tensor, fan: Fan) -> Tensor:
        """[rows] bool: which of the rows `ids` stay.

        A finer row stays with the row that it stems from, a coarser one as long as any of its rows stays, and a row of
        another branch as long as the row that both stem from.
        """
        level = len(common([self.fan, fan]))
        return torch.isin(ids // fans.times(fan[level:]), self.ancestors(fans, level))

    def of(self, fans: RowLineage, batch: Batch, fan: Fan) -> Batch:
        """The rows of `batch` that stay; the batch itself if all do."""
        stay = self.among(fans, batch.ids, fan)
        return batch if bool(stay.all()) else batch.select(stay.nonzero().squeeze(1))

    def of_homes(self, fans: RowLineage, homes: ShardAssignment, unit: Fan) -> ShardAssignment:
        stay = self.among(fans, torch.from_numpy(homes.units), unit).numpy()
        return ShardAssignment(homes.units[stay], homes.shares[stay])


def joined(first: Batch, second: Batch) -> Batch:
    """The rows of two draws, of which `first` has the smaller ids."""
    filled = [batch for batch in (first, second) if len(batch)]
    return Batch.concat(filled) if filled else second  # a rank without rows may lack the columns too
