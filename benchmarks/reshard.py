"""Weights from a training layout into a generation layout on 4 ranks: memory at the worst moment, and what stays.

Ours gathers tensor by tensor or in buckets, copies the slices that generation needs, and swaps the shards out. The
naive way gathers all whole tensors first, then copies, and keeps the shards (MindSpeed RL, Figure 3). The ideal holds
shards and slices and nothing else. On a CPU the host memory that shards are swapped to is the same memory: it is
counted apart, by its size. Over time (MindSpeed RL, Figure 10) shards and slices both stay where nothing is swapped.
Shards are made as by the engine that trains: matrices cut by columns and by rows in turn over tp, then everything over
dp by FSDP. The two ways take turns.
Run by hand:  python -m benchmarks.reshard
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.group import on_ranks, peak_over
from benchmarks.ratio import Spread, add_size, conclude, interleaved, options, parsed
from distflow.weights.offload import HostOffload
from distflow.weights.reshard import gather_tensors

RANKS, BUCKET = 4, 32 * 1024**2
GOAL = 1.2
MIB = 1024**2


@dataclass(frozen=True)
class Case:
    """From `source` (dp, tp) to `target` (dp, tp). With `experts` the cut dimension is that of experts: dp shares each
    have 1 / ep of them."""

    name: str
    source: tuple[int, int]
    target: tuple[int, int]
    experts: bool = False


CASES = [Case("dp 4 → whole on each rank", (4, 1), (4, 1)), Case("tp 2 × dp 2 → whole on each rank", (2, 2), (4, 1)),
         Case("tp 4 → tp 2 × dp 2", (1, 4), (2, 2)), Case("tp 2 × dp 2 → tp 2 × dp 2", (2, 2), (2, 2)),
         Case("ep 4 → ep 2", (1, 4), (2, 2), experts=True)]


def shapes(case: Case, mib: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of about `mib` MiB: matrices of 4 MiB, and norms."""
    each = (8, 256, 512) if case.experts else (1024, 1024)
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(mib // 4):
        found |= {f"layers.{layer}.weight": each, f"layers.{layer}.norm": (1024,)}
    return found


def cut(wholes: dict[str, Tensor], dp: int, tp: int) -> dict[str, DTensor]:
    """Cut tensors as FSDPEngine does: by the module's plan, and what is left of each tensor over dp."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    layers = nn.ModuleList(_layer(wholes[f"layers.{index}.weight"], wholes[f"layers.{index}.norm"])
                           for index in range(len(wholes) // 2))
    model = nn.ModuleDict({"layers": layers})
    for index, layer in enumerate(layers):
        if tp > 1:
            parallelize_module(layer[0], mesh["tp"], RowwiseParallel() if index % 2 else ColwiseParallel(),
                               src_data_rank=None)
        fully_shard(layer, mesh=mesh["dp"])
    return {name.replace("0.weight", "weight").replace("1.weight", "norm"): shard
            for name, shard in model.named_parameters()}


def cut_experts(wholes: dict[str, Tensor], dp: int, ep: int) -> dict[str, DTensor]:
    """Experts over ep alone, the rest whole on each rank."""
    mesh = init_device_mesh("cpu", (dp, ep))
    return {name: distribute_tensor(whole, mesh, [Replicate(), Shard(0) if whole.ndim > 1 else Replicate()])
            for name, whole in wholes.items()}


def _layer(weight: Tensor, norm: Tensor) -> nn.Sequential:
    linear, scale = nn.Linear(*reversed(weight.shape), bias=False), nn.RMSNorm(norm.shape)
    linear.weight, scale.weight = nn.Parameter(weight), nn.Parameter(norm)
    return nn.Sequential(linear, scale)


class Side:
    """One rank's shards, and the slices that generation needs."""

    def __init__(self, case: Case, mib: int):
        self.part, self.parts = dist.get_rank() % case.target[1], case.target[1]
        wholes = {name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
                  for name, shape in shapes(case, mib).items()}
        self.shards = (cut_experts if case.experts else cut)(wholes, *case.source)
        self.slices = {name: torch.zeros(self._sliced(tensor)) for name, tensor in self.shards.items()}
        self.host_offload = HostOffload(lambda: [shard.to_local() for shard in self.shards.values()])

    def _sliced(self, tensor: Tensor) -> tuple[int, ...]:
        return (tensor.shape[0] // self.parts if tensor.ndim > 1 else tensor.shape[0], *tensor.shape[1:])

    def place(self, name: str, whole: Tensor) -> None:
        mine = whole if self.parts == 1 or whole.ndim == 1 else whole.chunk(self.parts)[self.part]
        if mine.data_ptr() != self.slices[name].data_ptr():
            self.slices[name].copy_(mine)

    def gather(self) -> None:
        into = self.slices if self.parts == 1 else None
        for name, whole in gather_tensors(self.shards, into=into, bucket_bytes=BUCKET):
            self.place(name, whole)

    def ours(self) -> None:
        self.gather()
        self.host_offload.offload()

    def naive(self) -> None:
        for name, whole in {name: shard.full_tensor() for name, shard in self.shards.items()}.items():
            self.place(name, whole)

    def verify(self) -> None:
        for name, tensor in self.slices.items():
            whole = torch.arange(self.shards[name].numel(), dtype=torch.float32).view(self.shards[name].shape)
            if not torch.equal(tensor, whole.chunk(self.parts)[self.part] if whole.ndim > 1 else whole):
                raise SystemExit(f"rank {dist.get_rank()}: {name} did not arrive")
            tensor.zero_()


@torch.no_grad()
def measure(case: Case, mib: int, repeats: int) -> dict[str, Any]:
    """Return the bytes, the worst of all ranks: by repeat at the worst moment of either way, over the ideal."""
    side = Side(case, mib)
    for way in (side.ours, side.host_offload.reload, side.naive):  # first use, and what arrives
        way()
        if way != side.host_offload.reload:
            side.verify()
    slices = sum(tensor.nbytes for tensor in side.slices.values())
    ideal = slices + sum(shard.to_local().nbytes for shard in side.shards.values())
    pairs = interleaved({name: lambda _, way=way: worst(ideal + peak_over(way)) / ideal
                         for name, way in (("ours", side.gather), ("naive", side.naive))}, repeats)
    side.ours()
    left = sum(shard.to_local().untyped_storage().nbytes() for shard in side.shards.values())
    return {"pairs": pairs, "ideal": worst(ideal), "slices": worst(slices), "left": worst(left),
            "swapped": worst(side.host_offload.bytes)}


def worst(value: float) -> float:
    """Return the largest of all ranks."""
    most = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    add_size(parser, "mib", 256, 32, "weights")
    given = parsed(parser, arguments)
    peaks, holds = list[Spread](), True
    for case in CASES[:2] if given.quick else CASES:
        found = on_ranks(RANKS, measure, case, given.mib, given.repeats)
        ours, naive = (Spread.of([pair[way] for pair in found["pairs"]]) for way in ("ours", "naive"))
        peaks.append(ours)
        ideal, slices, left, swapped = (found[name] / MIB for name in ("ideal", "slices", "left", "swapped"))
        print(f"{case.name}, {given.mib} MiB: at the worst moment {ours} of the ideal {ideal:.0f} MiB a rank, naive "
              f"{naive}; {left:.0f} MiB of the shards stay, {swapped:.0f} MiB are in host memory. MiB over time with "
              f"swap: training {ideal - slices:.0f}, resharding {ours.median * ideal:.0f}, generating "
              f"{slices + left:.0f}; without: {ideal - slices:.0f}, {naive.median * ideal:.0f}, {ideal:.0f}",
              flush=True)
        holds &= left == 0 and (ours.median < naive.median or given.quick)
    conclude("reshard on 4 ranks: memory at the worst moment over the ideal, the worst layout; less than the naive "
             "way, and nothing redundant after it", max(peaks, key=lambda spread: spread.median), GOAL,
             unit="of the ideal", holds=holds, at_least=False)


if __name__ == "__main__":
    main()
