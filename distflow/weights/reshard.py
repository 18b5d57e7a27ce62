"""Weights from the training layout (sharded over all ranks) into the generation layout (whole on each rank)."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from distflow.schema.errors import EngineError

BUCKET_BYTES = 256 * 1024 * 1024


@torch.no_grad()
def gather_into(shards: dict[str, Tensor], targets: dict[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> int:
    """Fill `targets` in place, bucket by bucket (MindSpeed RL's allgather, without its swap so far). Collective.
    Returns the bytes that were filled.

    Args:
        shards: parameters by name, DTensors sharded on dimension 0 of a one-dimensional mesh, or plain tensors.
        targets: whole tensors of the same names and shapes, of any dtype; shards travel in it.
        bucket_bytes: what is gathered at a time, but at least one parameter; about twice as much memory is needed.

    Raises:
        EngineError: the two sides do not have the same parameters, or a parameter is sharded otherwise.
    """
    _check(shards, targets)
    bucket: list[str] = []
    size, kind = 0, None
    for name, shard in shards.items():
        target = targets[name]
        if not isinstance(shard, DTensor):
            target.copy_(shard)
            continue
        bytes_here, kind_here = target.numel() * target.element_size(), (shard.device_mesh, target.dtype)
        if bucket and (size + bytes_here > bucket_bytes or kind_here != kind):
            _gather_bucket(bucket, shards, targets)
            bucket, size = [], 0
        bucket.append(name)
        size, kind = size + bytes_here, kind_here
    if bucket:
        _gather_bucket(bucket, shards, targets)
    return sum(targets[name].numel() * targets[name].element_size() for name in shards)


def _check(shards: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    odd = sorted(shards.keys() ^ targets.keys())
    if odd:
        raise EngineError(f"the trained and the generating model have different parameters: only one has {odd[:5]}")
    for name, shard in shards.items():
        if shard.shape != targets[name].shape:
            raise EngineError(f"parameter `{name}` has shape {list(shard.shape)} in training and "
                              f"{list(targets[name].shape)} in generation")
        if isinstance(shard, DTensor) and (shard.device_mesh.ndim != 1 or tuple(shard.placements) != (Shard(0),)):
            raise EngineError(f"parameter `{name}` is placed as {shard.placements} on a mesh of "
                              f"{shard.device_mesh.ndim} dimensions; only shards of dimension 0 on a mesh of one can "
                              "be gathered")


def _gather_bucket(names: list[str], shards: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    """One all-gather: dimension 0 is cut into pieces of ceil(rows / ranks), of which the last may be short or empty."""
    mesh: DeviceMesh = shards[names[0]].device_mesh
    parts, sizes = [], []
    for name in names:
        shard = shards[name]
        size = math.ceil(shard.shape[0] / mesh.size()) * math.prod(shard.shape[1:])
        local = shard.to_local().flatten().to(targets[name].dtype)
        parts.append(torch.nn.functional.pad(local, (0, size - len(local))))
        sizes.append(size)
    mine = torch.cat(parts)
    everyone = mine.new_empty(mesh.size(), len(mine))
    dist.all_gather(list(everyone.unbind(0)), mine, group=mesh.get_group())
    for name, piece in zip(names, everyone.split(sizes, 1)):
        target = targets[name]
        target.copy_(piece.reshape(-1)[: target.numel()].view(target.shape))
