"""SIMULATION, not a measurement: a step on up to 10,000 GPUs, from costs that are measured here on a few processes.

Measured on this machine, in each repeat, with the project's own code: what a rank computes at each simulated size (it
reads the notices of all ranks, assigns their rows, routes them, and merges the metrics of all ranks), how fast memory
is copied, and how fast rank 0 passes rows on (`rank0.py`).

Given, not measured: machines of eight GPUs whose memory serves all of them at once; a message between machines and each
further peer of an all-to-all (--latency, --peer: between processes that share two cores, one waits for a core and not
for a network); the links (--gigabit) and the share of a link that transfers reach (--efficiency; the reciprocal of what
`dataflow_across_machines.py` prints as times the link bound); and the rest of a step: its seconds on one GPU are drawn
for each GPU from a lognormal distribution (--compute, --spread), and all wait for the slowest, whatever moves the data.
The share --crossing of the rows changes its machine.

- distflow: a machine's ranks copy their rows at once; what crosses uses the machine's own link, in an all-to-all over
  all ranks; every rank hears every other's notice, passed on by one rank of each machine in a ring, and routes all.
- a central buffer: all rows come in and go out over the link of one machine.
- a single controller: one process takes every row and passes it on.

Linearity is a step's time on one machine over its time on N GPUs: 1 where time stays flat as GPUs and rows grow
together.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gloo_ranks import Host  # noqa: E402 - needs the path above
from benchmarks.ratio import Spread, conclude, options, parsed  # noqa: E402
from benchmarks.rows import PER_TOKEN, Case  # noqa: E402
from distflow.data.assignment import RowCounts  # noqa: E402
from distflow.data.batch import Batch, Ragged  # noqa: E402
from distflow.data.redistribute import PoolNotice, Route, RowNotices, ShareReceivers, agree_on_forms, announce  # noqa: E402
from distflow.plan import SOURCE, Column, Layout, RowLineage, Task  # noqa: E402
from distflow.telemetry.metrics import Metrics  # noqa: E402

PER_MACHINE = 8
SIZES = (8, 64, 256, 1024, 4096, 10_000)
COLUMNS = len(PER_TOKEN)
MEANS, MAXIMA, PER_RANK = 40, 15, 4
"""Metrics of a rank in a step of `grpo.yaml`, by kind."""
GOALS = {1024: 0.95, 4096: 0.95, 10_000: 0.9}


@dataclass(frozen=True)
class Costs:
    """Seconds of a rank for one redistribution and for the metrics of a step, by number of ranks; for each byte copied
    by one rank and for each byte that rank 0 passes on."""

    route: dict[int, float]
    metrics: dict[int, float]
    copy: float
    pass_on: float


@dataclass(frozen=True)
class Load:
    """What one GPU contributes: rows, and bytes of a row. `link` is in bytes per second; `compute` are the seconds that
    the slowest of so many GPUs takes."""

    rows: int
    row: int
    link: float
    message: float
    peer: float
    crossing: float
    compute: dict[int, float]
    edges: int

    @property
    def notice(self) -> int:
        """Bytes that announce a row: its id and each column's length."""
        return 8 * (COLUMNS + 1)


def measured(repeat: int, rows: int, sizes: Sequence[int]) -> Costs:
    return Costs({ranks: _route(ranks, rows, repeat) for ranks in sizes}, {ranks: _metrics(ranks) for ranks in sizes},
                 _copy(), _pass_on())


def _route(ranks: int, rows: int, repeat: int) -> float:
    """Return what one rank computes to know where the rows of all go: each rank has `rows`, from all over the step as
    after a first redistribution; they are balanced by tokens, and stay on their machine as far as that allows."""
    made, notices = np.random.default_rng(repeat), []
    layout, machines = Layout(ranks), (np.arange(ranks) // PER_MACHINE * PER_MACHINE).tolist()
    reads = tuple(Column(name, name, SOURCE, "Ragged") for name in PER_TOKEN)
    lineage = RowLineage([Task("reads", "actor", "COMPUTE", "reads", {}, reads, (), layout)], Layout(1))
    for ids in np.sort(made.permutation(ranks * rows).reshape(ranks, rows)):
        lengths = [torch.from_numpy(made.integers(1, 2000, rows)) for _ in range(2)]  # a prompt's and its response's
        columns = {name: Ragged(torch.empty(int(lengths[name != "prompts"].sum()), dtype=torch.bool),
                                lengths[name != "prompts"]) for name in PER_TOKEN}
        batch, counts = Batch(torch.from_numpy(ids), columns), RowCounts(lineage, layout)
        counts.add(SOURCE, batch, None, origin=True)
        notices.append(announce(batch, PoolNotice(), counts.to_bytes())[0])
    receivers = ShareReceivers.of(layout, machines)
    begin = time.process_time()
    found = RowNotices(notices)
    assignment, _ = RowCounts(lineage, layout).assign(found.payloads(), machines)
    route = Route(found, agree_on_forms(found), assignment.destinations(lineage, SOURCE, layout), ranks)
    route.sent(0)
    route.received(0, ranks)
    route.crosses_machines(np.array(machines), receivers)
    return time.process_time() - begin


def _metrics(ranks: int) -> float:
    """Return what a rank computes to reduce the metrics of all."""
    mine = Metrics()
    for number in range(max(MEANS, MAXIMA, PER_RANK)):
        mine.mean(f"mean/{number}", number)
        if number < MAXIMA:
            mine.maximum(f"maximum/{number}", number)
        if number < PER_RANK:
            mine.per_rank(f"own/{number}", number, 1.0)
    raw = [mine.take()] * ranks
    mine.collect(lambda _: raw[:1])  # which imports what it needs
    begin = time.process_time()
    mine.collect(lambda _: raw)
    return time.process_time() - begin


def _copy() -> float:
    source, target = np.ones(2**26, dtype=np.uint8), np.empty(2**26, dtype=np.uint8)
    target[:] = source
    begin = time.perf_counter()
    for _ in range(4):
        target[:] = source
    return (time.perf_counter() - begin) / 4 / len(source)


def _pass_on() -> float:
    case, host = Case(80, 4, 4, 4), Host("rank0")
    try:
        host.prepare(asdict(case))
        host.make()
        host.round(1)
        return statistics.median(host.round(number)["seconds"] for number in range(2, 7)) / case.nbytes
    finally:
        host.close()


def seconds(gpus: int, load: Load, costs: Costs) -> dict[str, float]:
    """Return the modelled time of one redistribution, for each architecture."""
    machines, size = max(1, gpus // PER_MACHINE), load.rows * load.row
    several = machines > 1
    notices = gpus * load.rows * load.notice
    ours = size * costs.copy + load.message * (2 + (machines - 1)) + costs.route[gpus]
    if several:
        ours += PER_MACHINE * size * load.crossing / load.link + notices / load.link + gpus * load.peer
    return {"distflow": ours, "a central buffer": 2 * gpus * size * (costs.copy if not several else 1 / load.link),
            "a single controller": gpus * size * costs.pass_on}


def step(gpus: int, load: Load, costs: Costs) -> dict[str, float]:
    """Return the modelled time of a step. Only distflow has its metrics reduced by each rank."""
    return {name: load.compute[gpus] + load.edges * moved + costs.metrics[gpus] * (name == "distflow")
            for name, moved in seconds(gpus, load, costs).items()}


def linearity(gpus: int, load: Load, costs: Costs) -> dict[str, float]:
    few, many = step(PER_MACHINE, load, costs), step(gpus, load, costs)
    return {name: few[name] / many[name] for name in many}


def slowest(gpus: int, compute: float, spread: float) -> float:
    """Return the mean seconds of the slowest of so many GPUs, whose logarithms are normal with deviation `spread`."""
    drawn = np.random.default_rng(0).lognormal(np.log(compute), spread, (200, gpus))
    return float(drawn.max(1).mean())


def table(load: Load, costs: Costs) -> Iterator[str]:
    yield (f"SIMULATION of {load.rows} rows of {load.row / 2**20:.2f} MiB for each GPU, {load.crossing:.0%} crossing, "
           f"{load.edges} redistributions a step")
    yield (f"measured here: copies at {1e-9 / costs.copy:.1f} GB/s, rank 0 at {1e-9 / costs.pass_on:.2f} GB/s, `route` "
           f"and `metrics`; given: {load.message * 1e6:.0f} us a message, {load.peer * 1e6:.0f} us a peer")
    yield "   GPUs  route ms  metrics ms  slowest s  ms of one redistribution (linearity of the step)"
    for gpus in costs.route:
        times, linear = seconds(gpus, load, costs), linearity(gpus, load, costs)
        yield (f"  {gpus:5}  {1000 * costs.route[gpus]:8,.0f}  {1000 * costs.metrics[gpus]:10,.0f}  "
               f"{load.compute[gpus]:9.2f}  "
               + " ".join(f"{name} {1000 * times[name]:,.0f} ({linear[name]:.3f}) " for name in times))


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=16, help="for each GPU")
    parser.add_argument("--tokens", type=int, default=8192, help="of a row")
    parser.add_argument("--gigabit", type=float, default=200.0, help="of a machine's link, in Gbit/s")
    parser.add_argument("--efficiency", type=float, default=0.85, help="share of it that a transfer reaches")
    parser.add_argument("--latency", type=float, default=100.0, help="of a message between machines, in microseconds")
    parser.add_argument("--peer", type=float, default=20.0, help="of each peer of an all-to-all, in microseconds")
    parser.add_argument("--crossing", type=float, default=0.1, help="share of the rows that changes its machine")
    parser.add_argument("--compute", type=float, default=30.0, help="median seconds of a step on a GPU, beside these")
    parser.add_argument("--spread", type=float, default=0.005, help="of these seconds: deviation of their logarithm")
    parser.add_argument("--edges", type=int, default=4, help="redistributions in a step")
    given = parsed(parser, arguments)
    row = given.tokens * sum(dtype.itemsize for dtype in PER_TOKEN.values())
    link = given.gigabit * 1e9 / 8 * given.efficiency
    sizes = SIZES[:4] if given.quick else SIZES
    compute = {gpus: slowest(gpus, given.compute, given.spread) for gpus in sizes}
    load = Load(given.rows, row, link, given.latency * 1e-6, given.peer * 1e-6, given.crossing, compute,
                given.edges)
    runs = [measured(repeat, given.rows, sizes) for repeat in range(given.repeats)]
    print("\n".join(table(load, sorted(runs, key=lambda costs: costs.route[sizes[-1]])[len(runs) // 2])))
    for gpus in [gpus for gpus in GOALS if gpus in sizes]:
        found = Spread.of([linearity(gpus, load, costs)["distflow"] for costs in runs])
        conclude(f"SIMULATION: linearity of a step of {given.compute:g} s from 8 to {gpus:,} GPUs", found, GOALS[gpus],
                 unit="of linear")


if __name__ == "__main__":
    main()
