"""Weights from the training layout (sharded over all ranks) into the generation layout (whole on each rank)."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 256 * 1024 * 1024


@torch.no_grad()
def gather_into(shards: dict[str, Tensor], targets: dict[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Fill `targets` in place, bucket by bucket (MindSpeed RL's allgather, without its swap so far).

    Args:
        shards: parameters by name, DTensors sharded on dimension 0 over one mesh, or plain tensors.
        targets: whole tensors of the same names and shapes, of any dtype.
        bucket_bytes: what is gathered at a time; the only extra memory.
    """
    bucket: list[str] = []
    size = 0
    for name, shard in shards.items():
        if not isinstance(shard, DTensor):
            targets[name].copy_(shard)
            continue
        bucket.append(name)
        size += shard.numel() * shard.element_size()
        if size >= bucket_bytes:
            _gather_bucket({name: shards[name] for name in bucket}, targets)
            bucket, size = [], 0
    if bucket:
        _gather_bucket({name: shards[name] for name in bucket}, targets)


def _gather_bucket(shards: dict[str, DTensor], targets: dict[str, Tensor]) -> None:
    mesh = next(iter(shards.values())).device_mesh
    ranks = mesh.size()
    parts, sizes = [], []
    for shard in shards.values():
        rows = math.ceil(shard.shape[0] / ranks)
        size = rows * math.prod(shard.shape[1:])
        local = shard.to_local().flatten()
        parts.append(torch.nn.functional.pad(local, (0, size - len(local))))
        sizes.append(size)
    mine = torch.cat(parts)
    everyone = mine.new_empty(ranks, len(mine))
    dist.all_gather(list(everyone.unbind(0)), mine, group=mesh.get_group())
    for (name, shard), piece in zip(shards.items(), everyone.split(sizes, 1)):
        targets[name].copy_(piece.reshape(-1)[: shard.numel()].view(shard.shape))
