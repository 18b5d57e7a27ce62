"""Resharding: gathers training shards into whole tensors, bucket by bucket (allgather of MindSpeed RL, §3.2).

A large tensor is gathered straight to its target, where there is one; small ones travel together. `all_gather` and
`reduce_scatter` have the newer of the two names that torch uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from distflow.errors import EngineError
from distflow.weights.fingerprint import Sums, sums_of
from distflow.weights.shard_slice import slices_of

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


BUCKET_BYTES = 256 * 1024 * 1024
_LARGE = 1024 * 1024
"""Bytes from which a tensor travels alone: one more message costs less than copying it out of a bucket."""
_BLOCKS, _BLOCK_BYTES = 8, 4 * 1024 * 1024
"""Parts of a tensor that are gathered one by one where they cannot be gathered to where they are to lie: so many at
most, of so many bytes at least, since with blocks of 0.5 MiB it takes twice as long."""


@torch.no_grad()
def gather_tensors(shards: Mapping[str, Tensor], dtype: torch.dtype | None = None,
                   into: Mapping[str, Tensor] | None = None,
                   bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor whole, by name. Collective; a tensor may be overwritten as soon as the next one is requested.

    Args:
        shards: DTensors that one dimension of their mesh cuts, or FSDP what tensor parallelism has cut evenly, with
            its dimension before the other's; or plain tensors, which are yielded as they are.
        dtype: in which they travel and are yielded; None: each in its own.
        into: whole, contiguous tensors of the same names, of `dtype`, that are filled in place where that saves a copy.
        bucket_bytes: how much is gathered at a time, but at least one tensor.
    """
    bucket: dict[str, tuple[DTensor, Tensor]] = {}
    key, size = None, 0
    for name, shard in shards.items():
        kind, target = dtype or shard.dtype, (into or {}).get(name)
        if target is not None and target.shape != shard.shape:
            raise EngineError(f"parameter `{name}` has shape {list(shard.shape)} in training and {list(target.shape)} "
                              "in generation")
        if not isinstance(shard, DTensor):
            yield name, shard.to(kind)
            continue
        _check(name, shard)
        count = shard.numel() * kind.itemsize
        if count >= _LARGE:
            yield name, _gather_one(shard, kind, target)
            continue
        key_here = (shard.device_mesh, shard.placements, kind)
        if bucket and (size + count > bucket_bytes or key_here != key):
            yield from _gather_bucket(bucket)
            bucket, size = {}, 0
        bucket[name], key, size = (shard, shard.to_local().to(kind)), key_here, size + count
    if bucket:
        yield from _gather_bucket(bucket)


def sums_of_shards(shards: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Sums:
    """Return the sums of whole tensors, of which nothing is gathered. Collective over the shards' meshes, on `device`.
    """
    slices, found = slices_of(shards), {}
    for mesh in dict.fromkeys(getattr(shard, "device_mesh", None) for shard in shards.values()):
        names = [name for name, shard in shards.items() if getattr(shard, "device_mesh", None) == mesh]
        local = sums_of(((each.name, part.to(dtype)) for each, part in slices if each.name in {*names}), dtype)
        values = torch.tensor([local.get(name, 0) for name in names], device=device)
        for group in mesh.get_all_groups() if mesh else ():
            dist.all_reduce(values, group=group)
        found |= dict(zip(names, values.tolist()))
    return {name: found[name] for name in shards}


def _check(name: str, shard: DTensor) -> None:
    """Require that the order and the sizes of a shard's cuts can be undone."""
    if any(placement.is_partial() for placement in shard.placements):
        raise EngineError(f"parameter `{name}` is placed as {shard.placements}: only cut or repeated tensors can be "
                          "gathered")
    *earlier, (mesh_dim, last) = _cuts(shard) or [(0, 0)]
    size = shard.device_mesh.size(mesh_dim)
    if earlier and shard.shape[last] % size:
        raise EngineError(f"parameter `{name}` {list(shard.shape)} is cut {size} ways along dimension {last}, "
                          f"which they do not divide, and by another mesh dimension too ({shard.placements}); such a "
                          "tensor cannot be gathered. Leave it whole in the tensor-parallel plan")
    if any(dim == last and type(shard.placements[index]) is Shard for index, dim in earlier):
        raise EngineError(f"parameter `{name}` is cut twice along dimension {last} ({shard.placements}), but not "
                          "by FSDP after tensor parallelism; such a tensor cannot be gathered")


def _cuts(shard: DTensor) -> list[tuple[int, int]]:
    """Return (mesh dimension, tensor dimension) of each cut, the last one made first: FSDP cuts what tp has left."""
    return [(index, placement.dim)  # type: ignore[reportAttributeAccessIssue]: of Shard, and of FSDP's strided one
            for index, placement in enumerate(shard.placements) if not placement.is_replicate()]


def _sizes(shard: DTensor) -> list[list[int]]:
    cuts, shape, shapes = _cuts(shard), list(shard.shape), []
    for mesh_dim, dim in reversed(cuts):
        shapes.insert(0, list(shape))
        shape[dim] = _piece(shape[dim], shard.device_mesh.size(mesh_dim))
    return shapes


def _piece(length: int, parts: int) -> int:
    """Return the longest piece that a dimension is cut into: the last ones may be shorter, or empty."""
    return math.ceil(length / parts)


def _gather_one(shard: DTensor, dtype: torch.dtype, target: Tensor | None) -> Tensor:
    local = shard.to_local().to(dtype)
    cuts, shapes = _cuts(shard), _sizes(shard)
    for number, ((mesh_dim, dim), shape) in enumerate(zip(cuts, shapes)):
        group, parts = shard.device_mesh.get_group(mesh_dim), shard.device_mesh.size(mesh_dim)
        even = shape[dim] % parts == 0
        whole = target if even and number == len(cuts) - 1 and target is not None and target.is_contiguous() else None
        if not even:
            pieces = _gather(_padded(local, dim, _piece(shape[dim], parts)), parts, group)
            local = _join_pieces(pieces, dim, shape[dim])
            continue
        whole = local.new_empty(shape) if whole is None else whole
        if dim == 0:
            all_gather(whole, local.contiguous(), group=group)
        else:  # pieces of a row lie apart: they are gathered beside it
            blocks = min(_BLOCKS, max(1, whole.nbytes // _BLOCK_BYTES))
            for part, mine in zip(whole.chunk(blocks), local.chunk(blocks)):
                part.unflatten(dim, (parts, -1)).movedim(dim, 0).copy_(_gather(mine, parts, group))
        local = whole
    return local


def _gather_bucket(bucket: dict[str, tuple[DTensor, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    locals_ = {name: local for name, (_, local) in bucket.items()}
    first = next(iter(bucket.values()))[0]
    for number, (mesh_dim, dim) in enumerate(_cuts(first)):
        group, parts = first.device_mesh.get_group(mesh_dim), first.device_mesh.size(mesh_dim)
        lengths = {name: _sizes(shard)[number][dim] for name, (shard, _) in bucket.items()}
        padded = {name: _padded(local, dim, _piece(lengths[name], parts)) for name, local in locals_.items()}
        everyone = _gather(torch.cat([part.reshape(-1) for part in padded.values()]), parts, group)
        start = 0
        for name, part in padded.items():
            pieces = everyone[:, start : start + part.numel()].reshape(parts, *part.shape)
            locals_[name] = _join_pieces(pieces, dim, lengths[name])
            start += part.numel()
    yield from locals_.items()


def _padded(local: Tensor, dim: int, length: int) -> Tensor:
    missing = length - local.shape[dim]
    return torch.cat([local, local.new_zeros(*local.shape[:dim], missing, *local.shape[dim + 1 :])], dim) \
        if missing else local


def _gather(mine: Tensor, parts: int, group: dist.ProcessGroup) -> Tensor:
    """Return [parts, *mine.shape]."""
    mine = mine.contiguous()
    everyone = mine.new_empty(parts, *mine.shape)
    all_gather(everyone.view(parts * mine.shape[0], *mine.shape[1:]), mine, group=group)
    return everyone


def _join_pieces(pieces: Tensor, dim: int, length: int) -> Tensor:
    """Return […, length, …] of [parts, …, piece, …]."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, length)
