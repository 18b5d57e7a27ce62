"""Brings a role's weights to ranks that sample with it and do not train it, in the group of those that do.

That is in mode sync, and where ranks that train validate (`validation.group: trainer`).

    sent        surrounds the trainer's export: its first rank also sends what is exported to these ranks, by buckets
    received    yields there what is sent
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.data.exchange import gather_values
from distflow.rpc.packing import aligned, tensor_at
from distflow.weights.reshard import BUCKET_BYTES
from workers.engines.devices import group_along

Head = tuple[str, list[int], str]  # a tensor's name, shape and dtype


class WeightRoute:

    def __init__(self, training: Sequence[int], sampling: Sequence[int]):
        """`training`, `sampling`: the ranks that have the role's trainer and its rollout. Collective over all ranks."""
        others = [rank for rank in sampling if rank not in training]
        self.first = training[0]
        self.members = group_along(torch.tensor(sorted({*training, *sampling})), 0)
        self.receiving = group_along(torch.tensor(sorted([self.first, *others])), 0) if others else None

    def newer_version(self, trained: int | None, loaded: int | None) -> int | None:
        """Return the trainer's version if any rollout has another one, else None. Collective over the ranks of both.

        Args:
            trained: version of this rank's trainer; None if it has none.
            loaded: version of this rank's rollout; None if it has none.
        """
        versions = gather_values([trained, loaded], self.members)
        newest = next(version for version, _ in versions if version is not None)
        return newest if any(version not in (None, newest) for _, version in versions) else None

    def send_and_yield(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield a trainer's whole weights; from its first rank they also go to the ranks that only sample."""
        if self.receiving is None or dist.get_rank() != self.first:
            yield from weights
            return
        heads: list[Head] = []
        bucket, filled = torch.empty(0, dtype=torch.uint8), 0
        for name, tensor in weights:
            size = aligned(tensor.nbytes)
            if filled + size > len(bucket):
                self._send(heads, bucket)
                heads, filled = [], 0
                if size > len(bucket):
                    bucket = torch.empty(max(BUCKET_BYTES, size), dtype=torch.uint8, device=tensor.device)
            heads.append((name, [*tensor.shape], str(tensor.dtype).removeprefix("torch.")))
            copy = tensor_at(bucket, filled, tensor.shape, tensor.dtype)
            copy.copy_(tensor.detach())  # the next one may overwrite it
            filled += size
            yield name, tensor
        self._send(heads, bucket)
        self._heads([])

    def receive(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights that the trainer's first rank sends."""
        while heads := self._heads(None):
            edges = _edges(heads)
            buffer = torch.empty(edges[-1], dtype=torch.uint8, device=device)
            dist.broadcast(buffer, self.first, self.receiving)
            for (name, shape, dtype), start in zip(heads, edges):
                yield name, tensor_at(buffer, start, shape, getattr(torch, dtype))

    def first_of(self, value: Any) -> Any:
        """Return the value of the first rank that has one. Collective over the ranks of both engines."""
        return next(each for each in gather_values(value, self.members) if each is not None)

    def _send(self, heads: list[Head], bucket: Tensor) -> None:
        if heads:
            dist.broadcast(bucket[: _edges(self._heads(heads))[-1]], self.first, self.receiving)

    def _heads(self, own: list[Head] | None) -> list[Head]:
        """Return what the first rank says of the next bucket; empty after the last one."""
        return next(heads for heads in gather_values(own, self.receiving) if heads is not None)


def _edges(heads: Sequence[Head]) -> list[int]:
    """Return where each tensor begins in a bucket, and the bucket's size."""
    edges = [0]
    for _, shape, dtype in heads:
        edges.append(edges[-1] + aligned(math.prod(shape) * getattr(torch, dtype).itemsize))
    return edges
