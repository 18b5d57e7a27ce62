"""Slices of shards: rectangular parts of named tensors. What a rank holds of a tensor, however it is cut, is a slice of
it; the slices of all ranks make whole tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distflow.weights.errors import WeightsError


@dataclass(frozen=True)
class ShardSlice:
    """Part of the tensor `name`: along dimension `d`, `size[d]` entries from `start[d]` on, of `shape[d]`."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> ShardSlice:
        return cls(name, tuple(shape), (0,) * len(shape), tuple(shape), dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of this slice in the whole tensor."""
        return tuple(slice(begin, begin + length) for begin, length in zip(self.start, self.size))

    def rows_in(self, box: Box) -> range:
        """Return the entries along the first dimension that have to do with a box; none if the two do not meet."""
        spans = [(max(at - mine, 0), min(at + count - mine, most))
                 for at, count, mine, most in zip(*box, self.start, self.size)]
        return range(*spans[0]) if all(begin < end for begin, end in spans) else range(0)


Box = tuple[Sequence[int], Sequence[int]]
"""Start and size along each dimension of a tensor."""


@dataclass(frozen=True)
class Reads:
    """What a process reads of tensors that travel in `dtype`: the `boxes` of those that are named, the others whole."""

    boxes: Mapping[str, Sequence[Box]] = field(default_factory=dict)
    dtype: torch.dtype | None = None

    @property
    def suffix(self) -> str:
        """What follows a version's key where a process has only these parts of it."""
        text = repr(sorted(self.boxes.items()))
        return f"/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}" if self.boxes else ""

    @classmethod
    def on_machine(cls, machine: object, found: Sequence[tuple[object, Mapping[str, Any]]],
                   dtype: torch.dtype) -> Reads:
        """Return what the ranks of one engine that are on a `machine` read, given (machine, boxes) of each; all, where
        it has all of the ranks."""
        here = [boxes for each, boxes in found if each == machine]
        if len(here) == len(found):
            return cls()
        named = set[str].intersection(*map(set, here))  # `dict.fromkeys`: ranks that read the same
        return cls({name: [*dict.fromkeys((tuple(start), tuple(size)) for boxes in here for start, size in boxes[name])]
                    for name in sorted(named)}, dtype)


@dataclass(frozen=True)
class Split:
    """How the `ranks` of an engine that samples split tensors: along the last dimension where the name ends with one of
    `columns`, else along the first. Of others than these they read more than they need."""

    ranks: int = 1
    columns: tuple[str, ...] = ()

    def pieces(self, whole: ShardSlice, contents: Tensor) -> Iterator[tuple[int, ShardSlice, Tensor]]:
        """Yield the rank, slice and contents of each piece; vectors belong to all ranks, and come last."""
        if self.ranks == 1 or len(whole.shape) < 2:
            yield self.ranks, whole, contents
            return
        dim = len(whole.shape) - 1 if whole.name.endswith(self.columns) else 0
        for rank in range(self.ranks):
            begin, end = (max(whole.shape[dim] * edge // self.ranks - whole.start[dim], 0) for edge in (rank, rank + 1))
            length = min(end, whole.size[dim]) - begin
            if length > 0:
                start, size = list(whole.start), list(whole.size)
                start[dim], size[dim] = start[dim] + begin, length
                yield rank, replace(whole, start=tuple(start), size=tuple(size)), contents.narrow(dim, begin, length)


WHOLE = Split()


def slices_of(shards: Mapping[str, Tensor]) -> list[tuple[ShardSlice, Tensor]]:
    """Return this rank's slices and their contents, in the order of `shards`. No communication, no copy.

    Ranks that have the same slice of a DTensor (replicas of HSDP, or norms under tensor parallelism) divide such
    tensors between them, about evenly by bytes. Raises `WeightsError` if this rank's part of a tensor is no slice.
    """
    found: list[tuple[ShardSlice, Tensor]] = []
    dealt: dict[tuple[object, ...], list[int]] = {}
    for name, shard in shards.items():
        if not isinstance(shard, DTensor):
            found.append((ShardSlice.whole(name, tuple(shard.shape), shard.dtype), shard.detach()))
            continue
        shard_slice = _slice(name, shard)
        if _is_ours(shard, dealt) and shard_slice.numel:
            found.append((shard_slice, shard.to_local().detach()))
    return found


def _slice(name: str, shard: DTensor) -> ShardSlice:
    if any(placement.is_partial() for placement in shard.placements):
        raise WeightsError(f"tensor `{name}` is placed as {shard.placements}: a sum that has not been made yet. Reduce "
                           "it before it is published")
    size, start = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    if tuple(size) != tuple(shard.to_local().shape):
        raise WeightsError(f"tensor `{name}` is placed as {shard.placements} and has {list(shard.to_local().shape)} "
                           f"here where {list(size)} are expected; publish it as tensors of plain cuts (`Shard`)")
    return ShardSlice(name, tuple(shard.shape), tuple(start), tuple(size), shard.dtype)


def _is_ours(shard: DTensor, dealt: dict[tuple[object, ...], list[int]]) -> bool:
    """Return whether this rank publishes a repeated slice: the one with the fewest bytes so far does."""
    mesh = shard.device_mesh
    repeated = [dim for dim, placement in enumerate(shard.placements) if placement.is_replicate()]
    count = math.prod(mesh.size(dim) for dim in repeated)
    if count == 1:
        return True
    loads = dealt.setdefault((mesh, tuple(repeated)), [0] * count)
    turn = loads.index(min(loads))
    loads[turn] += shard.numel() * shard.dtype.itemsize
    mine, here = 0, mesh.get_coordinate() or []
    for dim in repeated:
        mine = mine * mesh.size(dim) + here[dim]
    return mine == turn
