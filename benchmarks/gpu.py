"""Throughput, MFU, memory given back and reshard time on GPUs, for models of the shapes of Qwen2.5 0.5B and 7B.

Weights are random, made on the device without a download. Of each model: tokens per second and MFU of generation
(`rollout: hf`) and of a training step (`engine: fsdp`), by the FLOPs that `shapes.py` states over the device's bfloat16
peak; milliseconds of a decoded token, by kernels and the calls that launch them; how much memory the rollout and the
trainer give back and how long that takes; and the time of a reshard from training to generation. A model that cannot be
trained whole is trained with fewer layers, and the output says so.
Nothing is promised here, so the last line has no goal: its value is the tokens per second of the last model's training
step, and `figures` has the medians of everything.
`--as` measures in the shapes that other projects publish, and shows their figures (`as_published.py`).
Run by hand:  python -m benchmarks.gpu   (without a GPU:  --device cpu --shape tiny  shows that it works)
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import parts
from benchmarks.as_published import OF_PROJECT, PUBLISHED
from benchmarks.device import memory, name_of, versions
from benchmarks.group import on_ranks
from benchmarks.parts import LOADS, Bench, Part
from benchmarks.ratio import Spread, options, parsed, rounded, summary
from benchmarks.shapes import SHAPES
from workers.engines.devices import peak_of

VALUE = "/tokens_per_second"
RESULTS = Path(__file__).with_name("results") / "gpu.txt"


def measure(name: str, kind: str, repeats: int, host: float | None,
            published: str | None = None) -> tuple[str, list[Part]]:
    """What the ranks run on, and what was measured of a model, in order. `published`: in the rows of this project."""
    bench, found = Bench(SHAPES[name], LOADS[name], kind, repeats, host), []
    sides = (generating(bench), training(bench)) if published is None else (PUBLISHED[published](bench),)
    for part in (part for side in sides for part in as_far_as_it_fits(side)):
        found.append(part)
        if dist.get_rank() == 0:  # at once: a later part may fail, or there may be no time for it
            print(f"{name}: {part.text}", flush=True)
    return description(kind), found


def description(kind: str) -> str:
    """The hardware, and what drives it."""
    peak = peak_of(name_of(kind))
    known = f"peak {peak / 1e12:.0f} TFLOP/s in bfloat16" if peak else "peak unknown"
    return f"{name_of(kind)}, {parts.shown(memory(kind))}, {known}; {versions(kind)}"


def generating(bench: Bench) -> Iterator[Part]:
    rollout = bench.rollout(bench.shape)
    yield parts.generation(bench, rollout)
    yield parts.decoding(bench, rollout)
    yield parts.sleep(bench, rollout)


def training(bench: Bench) -> Iterator[Part]:
    """Only one of the two has its memory at a time, except for a reshard."""
    shape = bench.shape.trainable(memory(bench.kind) * dist.get_world_size())
    if shape.layers < bench.shape.layers:
        yield Part("layers", f"from here on with {shape.layers} of {bench.shape.layers} layers: no more can be trained "
                   "in this memory", {"layers": [shape.layers]})
    rollout, trainer = bench.both(shape)
    rollout.sleep()
    yield parts.training(bench, trainer, shape)
    rollout.wake()
    yield parts.reshard(bench, rollout, trainer)
    rollout.sleep()
    yield parts.swap(bench, "weights", lambda: [shard.to_local() for shard in trainer.shards().values()])
    yield parts.swap(bench, "optimizer", lambda: trainer.resident(weights=False))


def as_far_as_it_fits(measured: Iterable[Part]) -> Iterator[Part]:
    """All parts, or those before the memory was not enough, and that it was not."""
    try:
        yield from measured
    except torch.OutOfMemoryError as error:
        yield Part("memory", f"what comes next does not fit: {str(error).partition('. ')[0]}")


class Report:
    """Lines that are shown and kept in a file."""

    def __init__(self, file: Path | None):
        self.file, self.lines = file, []

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.keep(line)

    def keep(self, line: str) -> None:
        self.lines.append(line)
        if self.file:
            self.file.write_text("\n".join(self.lines) + "\n")


def run(given: argparse.Namespace) -> None:
    """Measure the models one after the other; the last line sums up."""
    report, figures = Report(given.output), {}
    rows = f", rows as {given.published} publishes them" if given.published else ""
    report.say(f"# python -m benchmarks.gpu   ranks: {given.ranks}, repeats: {given.repeats}{rows}")
    for name in given.shape:
        host = given.host_gib and given.host_gib * parts.GIB
        where, found = on_ranks(given.ranks, measure, name, given.device, given.repeats, host, given.published,
                                device=given.device)
        report.say(f"# {name}: {where}")
        for part in found:
            report.keep(f"{name}: {part.text}")
            figures |= {f"{name}/{part.name}/{key}": values for key, values in part.figures.items()}
    value = next((key for key in reversed(figures) if key.endswith(VALUE)), None)
    what = f"{value.split('/')[1]}, {value.partition('/')[0]}-shaped" if value else "nothing could be measured"
    claim = f"{what}, ranks: {given.ranks}, {where}"
    last = summary(claim, Spread.of(figures[value] if value else [0.0]), "tokens/s", goal=None, met=None)
    medians = {key: rounded(statistics.median(values)) for key, values in figures.items()}
    report.say(json.dumps({**last, "figures": medians}))


def device_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every benchmark for a GPU."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="a file for what is printed; default: one among the results, with "
                        "--device cpu none")


def has_device(given: argparse.Namespace, results: Path) -> bool:
    """Return whether there is the device that was asked for, or say what to do without it. What a GPU gives is kept in
    `results` if no other file was named."""
    if given.device == "cuda":
        if not torch.cuda.device_count():
            print(f"skipped: torch {torch.__version__} finds no GPU here; --device cpu --quick shows that it works")
            return False
        given.output = given.output or results
    return True


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, repeats=3)
    device_options(parser)
    parser.add_argument("--shape", choices=LOADS, nargs="+", help="models; default 0.5B 7B, with --as those of the "
                        "project, with --quick tiny")
    parser.add_argument("--as", choices=PUBLISHED, dest="published", help="rows as this project publishes them")
    parser.add_argument("--ranks", type=int, help="one for each GPU; default: all, with --device cpu 1")
    parser.add_argument("--host-gib", type=float, help="host memory that may be taken; default 0.9 of what is free")
    given = parsed(parser, arguments)
    if not has_device(given, RESULTS):
        return
    given.ranks = given.ranks or (torch.cuda.device_count() if given.device == "cuda" else 1)
    given.shape = given.shape or (["tiny"] if given.quick else OF_PROJECT.get(given.published, ["0.5B", "7B"]))
    run(given)


if __name__ == "__main__":
    main()
