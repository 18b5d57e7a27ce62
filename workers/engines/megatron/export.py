"""Gathers Megatron's slices into whole tensors with Hugging Face names, a bucket at a time.

The ranks that have a slice each gather them, then the stage that owns a bucket sends it to the others; no rank holds
more than its own slices and one bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from distflow.errors import EngineError
from distflow.plan import Layout
from distflow.weights.reshard import BUCKET_BYTES, all_gather
from workers.engines.megatron.weights import WeightEntry


class Exporter:
    """Exports the parameters `mine` of this rank's stage, by Megatron's names. `shapes` are those of whole tensors."""

    def __init__(self, entries: Sequence[WeightEntry], mine: Mapping[str, Tensor], shapes: Mapping[str, torch.Size],
                 layout: Layout, groups: ProcessGroupCollection, dtype: torch.dtype, device: torch.device):
        self.entries = [entry for entry in entries if not entry.copies]
        self.mine, self.shapes, self.layout = mine, shapes, layout
        self.groups, self.dtype, self.device = groups, dtype, device

    @torch.no_grad()
    def export(self, dtype: torch.dtype | None = None, into: Mapping[str, Tensor] | None = None,
               bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """See `distflow.weights.reshard.gather_tensors`. Collective over the ranks of each share."""
        kind, into = dtype or self.dtype, into or {}
        for name, place in into.items():
            if name in self.shapes and place.shape != self.shapes[name]:
                raise EngineError(f"parameter `{name}` has shape {list(self.shapes[name])} in training and "
                                  f"{list(place.shape)} in generation")
        bucket: list[WeightEntry] = []
        size = 0
        for entry in self.entries:
            count = sum(self.shapes[name].numel() for name in entry.theirs) * kind.itemsize
            if bucket and (size + count > bucket_bytes or self._key(entry) != self._key(bucket[0])):
                yield from self._whole(bucket, kind, into)
                bucket, size = [], 0
            bucket.append(entry)
            size += count
        if bucket:
            yield from self._whole(bucket, kind, into)

    def _key(self, entry: WeightEntry) -> tuple[int, str]:
        return entry.stage, entry.split

    def _whole(self, bucket: list[WeightEntry], dtype: torch.dtype, into: Mapping[str, Tensor],
               ) -> Iterator[tuple[str, Tensor]]:
        """Gather the tensors of entries on one stage with one split: one message, or two with several stages."""
        stage, split = self._key(bucket[0])
        ways = getattr(self.layout, split) if split else 1
        shapes = [shape for entry in bucket for shape in entry.shapes(self.shapes, self.layout)]
        pieces = torch.empty(ways, sum(map(math.prod, shapes)), dtype=dtype, device=self.device)
        if stage == self.groups.pp.rank():
            slices = [part for entry in bucket for part in entry.part([self.mine[name] for name in entry.ours])]
            flat = torch.cat([part.reshape(-1).to(dtype) for part in slices])
            if ways > 1:
                all_gather(pieces.view(-1), flat, group=getattr(self.groups, split))
            else:
                pieces[0] = flat
        if self.layout.pp > 1:
            dist.broadcast(pieces, group=self.groups.pp, group_src=stage)
        names = [(name, entry) for entry in bucket for name in entry.theirs]
        columns = pieces.split([math.prod(shape) for shape in shapes], 1)
        for (name, entry), shape, column in zip(names, shapes, columns):
            yield name, self._joined(column.view(ways, *shape) if ways == 1 else column.reshape(ways, *shape),
                                     entry.dim, self.shapes[name], into.get(name))

    def _joined(self, pieces: Tensor, dim: int, shape: torch.Size, place: Tensor | None) -> Tensor:
        if len(pieces) == 1:
            return pieces[0]
        whole = pieces.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, shape[dim])
        if place is None or place.dtype != whole.dtype:
            return whole.contiguous()
        return place.copy_(whole)
