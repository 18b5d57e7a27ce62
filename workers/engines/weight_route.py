"""Brings a role's weights to ranks that sample with it and do not train it, in the group of those that do.

That is in mode sync, and in semi_sync where all ranks train and sample in turns.

    sent        surrounds the trainer's export: its first rank also sends what is exported to these ranks, by buckets
    received    yields there what is sent
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.data.column_buffers import decode_tensors, tensor_entry
from distflow.data.columns import ColumnEntry
from distflow.data.exchange import gather_values
from distflow.rpc.packing import aligned, tensor_at
from distflow.weights.reshard import BUCKET_BYTES
from workers.engines.devices import group_along


class WeightRoute:

    def __init__(self, training: Sequence[int], sampling: Sequence[int]):
        """`training`, `sampling`: the ranks that have the role's trainer and its rollout. Collective over all ranks."""
        others = [rank for rank in sampling if rank not in training]
        self.sender = training[0]
        self.members = group_along(torch.tensor(sorted({*training, *sampling})), 0)
        self.receiving = group_along(torch.tensor(sorted([self.sender, *others])), 0) if others else None

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
        """Yield a trainer's whole weights; from its first rank they also go to the ranks that only sample, which wait
        until the last one has been taken."""
        if self.receiving is None or dist.get_rank() != self.sender:
            yield from weights
            return
        schema: list[ColumnEntry] = []
        bucket, filled = torch.empty(0, dtype=torch.uint8), 0
        for name, tensor in weights:
            size = aligned(tensor.nbytes)
            if filled + size > len(bucket):
                self._send(schema, bucket[:filled])
                schema, filled = [], 0
                if size > len(bucket):
                    bucket = torch.empty(max(BUCKET_BYTES, size), dtype=torch.uint8, device=tensor.device)
            schema.append(tensor_entry(name, tensor.dtype, tensor.shape))
            copy = tensor_at(bucket, filled, tensor.shape, tensor.dtype)
            copy.copy_(tensor.detach())  # the next one may overwrite it
            filled += size
            yield name, tensor
        self._send(schema, bucket[:filled])
        self._exchange_schema([])

    def receive(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights that the trainer's first rank sends."""
        while message := self._exchange_schema(None):
            size, schema = message
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            dist.broadcast(buffer, self.sender, self.receiving)
            yield from decode_tensors(schema, buffer).items()

    def first_of(self, value: Any) -> Any:
        """Return the value of the first rank that has one. Collective over the ranks of both engines."""
        return next(each for each in gather_values(value, self.members) if each is not None)

    def _send(self, schema: list[ColumnEntry], bucket: Tensor) -> None:
        if schema:
            self._exchange_schema([len(bucket), schema])
            dist.broadcast(bucket, self.sender, self.receiving)

    def _exchange_schema(self, own: list[Any] | None) -> list[Any]:
        """Return bytes and schema of the first rank's next bucket; an empty list after the last one."""
        return next(each for each in gather_values(own, self.receiving) if each is not None)
