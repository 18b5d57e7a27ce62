"""What `gpu.py` measures of a model on each rank: generation, sleep, a training step, swap, reshard.

Every row has all its tokens, equally many, so that the arithmetic is known exactly. A part that does not fit into
memory says so and has no figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.device import (
    free,
    held,
    host_free,
    most_allocated,
    name_of,
    pinned,
    synchronize,
)
from benchmarks.group import timed
from benchmarks.shapes import TRAINING, Shape
from distflow.config.dag import Role
from distflow.config.run import RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.weights.offload import HostOffload
from workers.engines import attention
from workers.engines.devices import fuse_norms, peak_of
from workers.engines.embedded import build_tokenizer
from workers.engines.fsdp import FSDPEngine
from workers.engines.hf import HFRollout
from workers.engines.rollout import SampledRow

GIB = 1024**3
_PINNED = 0.9
"""Of the free host memory, what may be pinned."""


@dataclass(frozen=True)
class Load:
    """Rows on each rank: `prompts` × `samples` are generated, `rows` trained on."""

    prompts: int
    samples: int
    rows: int
    prompt: int
    response: int
    micro_batch_tokens: int
    recompute: bool


LOADS = {"0.5B": Load(64, 4, 32, 512, 512, 16384, False), "7B": Load(64, 4, 16, 512, 512, 4096, True),
         "Qwen3-0.6B": Load(64, 4, 32, 512, 512, 16384, False), "Qwen3-4B": Load(64, 4, 16, 512, 512, 8192, True),
         "tiny": Load(2, 2, 4, 8, 8, 64, True)}


@dataclass
class Part:
    """What was measured, in words and as figures by name, those of each repeat; words alone if it could not be."""

    name: str
    text: str
    figures: dict[str, list[float]] = field(default_factory=dict)


class Bench:
    """One model on this rank's device."""

    def __init__(self, shape: Shape, load: Load, kind: str, repeats: int, host: float | None = None):
        """`host`: bytes of host memory that the ranks may take together; None: most of what is free."""
        self.shape, self.load, self.kind, self.repeats, self.host = shape, load, kind, repeats, host
        self.mesh = init_device_mesh(kind, (dist.get_world_size(),))
        self.peak = peak_of(name_of(kind))

    def settings(self) -> RoleRun:
        return RoleRun(micro_batch_tokens=self.load.micro_batch_tokens, recompute=self.load.recompute,
                       learning_rate=1e-6, dtype="auto", generation={"max_new_tokens": self.load.response})

    def rollout(self, shape: Shape) -> HFRollout:
        return self._rollout_of(self.model(shape))

    def both(self, shape: Shape) -> tuple[HFRollout, FSDPEngine]:
        """With the same weights."""
        model = self.model(shape)
        rollout = self._rollout_of(model)
        return rollout, FSDPEngine(model, self.settings(), self.mesh, pad_token=0, steps=10, role=Role(trained=True))

    def model(self, shape: Shape) -> torch.nn.Module:
        model = shape.build(self.kind)
        model.set_attn_implementation(attention.NAME)
        if self.kind == "cuda":
            fuse_norms(model)
        return model

    def _rollout_of(self, model: torch.nn.Module) -> HFRollout:
        never = self.shape.sizes.vocabulary  # as an end: no row draws it
        return HFRollout.build(model, build_tokenizer(["one"]), self.settings(), self.mesh, 0, [never])

    def seconds(self, work: Callable[[], object]) -> float:
        """Until the devices of all ranks are done."""
        return timed(lambda: (work(), synchronize(self.kind)))

    def repeated(self, work: Callable[[], object]) -> list[float]:
        """The first time, which is not counted, loads kernels."""
        return [self.seconds(work) for _ in range(self.repeats + 1)][1:]

    def tokens(self, count: int, length: int) -> Ragged:
        draw = torch.Generator().manual_seed(dist.get_rank())
        values = torch.randint(3, self.shape.sizes.vocabulary, (count * length,), generator=draw)
        return Ragged(values, torch.full((count,), length))

    def rates(self, seconds: list[float], tokens: int, flops: float) -> dict[str, list[float]]:
        """Of all ranks together, from the rows of one; `mfu` only where the peak is known."""
        known = {"mfu": [flops / each / self.peak for each in seconds]} if self.peak else {}
        return {"tokens_per_second": [tokens * dist.get_world_size() / each for each in seconds], **known}


def said(rates: dict[str, list[float]]) -> str:
    """Tokens per second and MFU in words."""
    speed = f"{statistics.median(rates['tokens_per_second']):,.0f} tokens/s"
    return f"{speed}, MFU {statistics.median(rates['mfu']):.1%}" if "mfu" in rates else f"{speed}, MFU unknown"


def generation(bench: Bench, rollout: HFRollout) -> Part:
    load = bench.load
    prompts, ids = bench.tokens(load.prompts, load.prompt), torch.arange(load.prompts * load.samples)
    seconds = bench.repeated(lambda: rollout.generate(prompts, load.samples, ids, 0))
    flops = load.prompts * bench.shape.flops(load.prompt, load.response, load.samples)
    rates = bench.rates(seconds, len(ids) * load.response, flops)
    return Part("generation", f"generation in {_dtype(rollout.dtype)}, {load.prompts} prompts of {load.prompt} tokens "
                f"× {load.samples} responses of {load.response}: {said(rates)} (responses' tokens)", rates)


def decoding(bench: Bench, rollout: HFRollout) -> Part:
    """Steps of a batch that is full: what they take, and of that the kernels and the calls that launch them; where they
    are captured, also what they take without that."""
    seconds, events = _decode(bench, rollout)
    launches = [event for event in events if "LaunchKernel" in event.key]
    kernels = sum(event.self_device_time_total if bench.kind == "cuda" else event.self_cpu_time_total
                  for event in events) / 1e3
    calls = sum(event.count for event in launches)
    launching = sum(event.self_cpu_time_total for event in launches) / 1e3
    figures = {"milliseconds": [1e3 * each for each in seconds], "kernel_milliseconds": [kernels],
               "launch_milliseconds": [launching], "launches": [calls]}
    if rollout.captures:
        rollout.captures = False
        figures["computed_milliseconds"] = [1e3 * each for each in _decode(bench, rollout)[0]]
        rollout.captures = True
    ms = {name: statistics.median(each) for name, each in figures.items()}
    without = f" (without CUDA graphs {ms['computed_milliseconds']:.3g} ms)" if rollout.captures else ""
    return Part("decoding", f"a token of {bench.load.prompts * bench.load.samples} rows in {ms['milliseconds']:.3g} ms"
                f"{without}; with a profiler {kernels:.3g} ms of it in kernels, {launching:.3g} ms in {calls:,} "
                "launches", figures)


def _decode(bench: Bench, rollout: HFRollout) -> tuple[list[float], Any]:
    """Return the seconds of a token in each repeat, and the profiled events of one."""
    load, session = bench.load, rollout.session(0)
    ids = torch.arange(load.prompts * load.samples)
    for rows in chunked(rollout.rows(bench.tokens(load.prompts, load.prompt), load.samples, ids), load.samples):
        session.add(rows)
    steps = max(1, min(20, load.response // 4))
    for _ in range(steps):
        session.step()
    seconds = [bench.seconds(lambda: [session.step() for _ in range(steps)]) / steps for _ in range(bench.repeats)][:2]
    with torch.profiler.profile() as profiled:
        session.step()
        synchronize(bench.kind)
    session.abort()
    return seconds, profiled.key_averages()


def chunked(rows: list[SampledRow], size: int) -> list[list[SampledRow]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def sleep(bench: Bench, rollout: HFRollout) -> Part:
    """Out and in again, without weights: those come by a reshard."""
    before, free_before = held(rollout.model.parameters()), free(bench.kind)
    asleep = [bench.seconds(rollout.sleep)]
    released, others = before - held(rollout.model.parameters()), free(bench.kind)
    awake = [bench.seconds(rollout.wake)]
    for _ in range(bench.repeats - 1):
        asleep.append(bench.seconds(rollout.sleep))
        awake.append(bench.seconds(rollout.wake))
    for_others = "" if others is None else f", {shown(others - free_before)} more for other processes"
    return Part("sleep", f"the rollout sleeps in {_ms(asleep)} and gives back {shown(released)}{for_others}; it wakes "
                f"in {_ms(awake)}", {"released_bytes": [released], "sleep_seconds": asleep, "wake_seconds": awake})


def training(bench: Bench, trainer: FSDPEngine, shape: Shape) -> Part:
    load = bench.load
    batch = Batch(torch.arange(load.rows), {"prompts": bench.tokens(load.rows, load.prompt),
                                            "responses": bench.tokens(load.rows, load.response)})
    each = load.rows * load.response * dist.get_world_size()
    seconds = bench.repeated(lambda: trainer.update(batch, lambda logprobs, *_: -logprobs.sum() / each, 1.0, 0))
    flops = TRAINING * load.rows * shape.flops(load.prompt, load.response)
    rates = bench.rates(seconds, load.rows * (load.prompt + load.response), flops)
    dtype = "bfloat16" if bench.kind == "cuda" else "float32"
    again = ", activations made again" if load.recompute else ""
    most = most_allocated(bench.kind)
    at_most = "" if most is None else f"; at most {shown(most)} allocated"
    return Part("training", f"training step in {dtype} over float32 weights and Adam{again}, {load.rows} rows of "
                f"{load.prompt} + {load.response} tokens on each rank: {said(rates)} (all tokens){at_most}", rates)


def swap(bench: Bench, name: str, tensors: Callable[[], Iterable[Tensor]]) -> Part:
    """To host memory and back. It is pinned for a GPU, and what would not fit there is not tried."""
    need = pinned(tensors()) if bench.kind == "cuda" else held(tensors())
    room = bench.host or _PINNED * host_free()
    fits = torch.tensor(need * dist.get_world_size() <= room, dtype=torch.int32)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    if not fits:
        return Part(f"swap {name}", f"{name} to host memory: not measured, it would take {shown(need)} of host memory "
                    f"on each rank, of {shown(room)}")
    host_offload, size, out, back = HostOffload(tensors), held(tensors()), [], []
    for _ in range(bench.repeats + 1):
        out.append(bench.seconds(host_offload.offload))
        gone = size - held(tensors())
        back.append(bench.seconds(lambda: (host_offload.reload(), host_offload.wait())))
    return Part(f"swap {name}", f"{name} to host memory: {shown(gone)} given back in {_ms(out[1:])}, there again in "
                f"{_ms(back[1:])}", {"released_bytes": [gone], "out_seconds": out[1:], "back_seconds": back[1:]})


def reshard(bench: Bench, rollout: HFRollout, trainer: FSDPEngine) -> Part:
    moved = 0

    def work() -> None:
        nonlocal moved
        moved = rollout.load(trainer.export(rollout.dtype, rollout.weight_buffers()), trainer.version)

    seconds = bench.repeated(work)
    ranks = dist.get_world_size()
    return Part("reshard", f"reshard from {ranks} shard{'s' * (ranks > 1)} to a whole model in {_dtype(rollout.dtype)} "
                f"on each rank, {shown(moved)}: {_ms(seconds)}", {"bytes": [moved], "seconds": seconds})


def shown(size: float) -> str:
    """Bytes, for people."""
    return f"{size / GIB:.3g} GiB" if size >= GIB else f"{size / 1024**2:.3g} MiB"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.3g} ms"
