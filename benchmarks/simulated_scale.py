"""SIMULATION, not a measurement: the data path up to 1,024 GPUs, from costs that are measured here on a few processes.

Measured on this machine, in each repeat: what routing costs for each row, what a message between ranks costs, how fast
memory is copied, and how fast rank 0 passes rows on (`rank0.py`). Given, not measured: machines of eight GPUs whose
memory serves all of them at once, their links (--gigabit), the share of a link that transfers reach (--efficiency; the
reciprocal of what `dataflow_across_machines.py` prints as times the link bound), that a message between machines costs
what one within a machine does here, and the rest of a step (--compute), which is the same at every size, as rows per
GPU are. The share --crossing of the rows changes its machine.

- distflow: a machine's ranks copy their rows at once; what crosses uses the machine's own link; every rank hears every
  other's notice, passed on by one rank of each machine in a ring, and routes all rows.
- a central buffer: all rows come in and go out over the link of one machine.
- a single controller: one process takes every row and passes it on.

Linearity is a step's time on one machine over its time on N GPUs: 1 where time stays flat as GPUs and rows grow
together.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gloo_ranks import Host  # noqa: E402 - needs the path above
from benchmarks.ratio import Spread, conclude, options, parsed  # noqa: E402
from benchmarks.rows import PADDED, PER_TOKEN, Case  # noqa: E402
from distflow.data.assignment import assign  # noqa: E402
from distflow.data.column_buffers import ColumnForm  # noqa: E402
from distflow.data.redistribute import PoolNotice, Route, RowNotice, agree  # noqa: E402

PER_MACHINE = 8
COLUMNS = len(PER_TOKEN)
GOAL = 0.9


@dataclass(frozen=True)
class Costs:
    """Seconds for each row and column that is routed, for each message, for each byte copied by one rank and for each
    byte that rank 0 passes on."""

    route: float
    message: float
    copy: float
    pass_on: float


@dataclass(frozen=True)
class Load:
    """What one GPU contributes: rows, and bytes of a row. `link` is in bytes per second, `compute` in seconds."""

    rows: int
    row: int
    link: float
    crossing: float
    compute: float
    edges: int

    @property
    def notice(self) -> int:
        """Bytes that announce a row: its id and each column's length."""
        return 8 * (COLUMNS + 1)


def measured(repeat: int) -> Costs:
    return Costs(_route(16_384 + repeat), _message(), _copy(), _pass_on())


def _route(rows: int) -> float:
    """By routing so many rows of 64 ranks to 64 shares, balanced by tokens."""
    ranks, made = 64, np.random.default_rng(rows)
    form = ColumnForm(1, "int64", ())
    notices = []
    for ids in np.array_split(np.arange(rows), ranks):
        counts = {f"column{number}": [made.integers(1, 2000, len(ids))] for number in range(COLUMNS)}
        notices.append(RowNotice(ids, dict.fromkeys(counts, form), counts, PoolNotice()))
    begin = time.perf_counter()
    weights = np.concatenate([sum(part[0] for part in notice.counts.values()) for notice in notices])
    shares = assign(torch.from_numpy(weights), ranks).numpy()
    Route(notices, agree(notices), lambda ids: (np.arange(len(ids)), shares), ranks).traffic(ranks)
    return (time.perf_counter() - begin) / rows / COLUMNS


def _message() -> float:
    """Half of what a gather and a meeting of four ranks take: an empty redistribution."""
    host = Host("databuffer")
    try:
        host.prepare(asdict(Case(0, 4, 2, 0, PADDED, 8, 8)))
        host.make()
        return statistics.median(host.round(repeat)["seconds"] for repeat in range(1, 30)) / 2
    finally:
        host.close()


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
    """The modelled time of one redistribution, for each architecture."""
    machines, size = max(1, gpus // PER_MACHINE), load.rows * load.row
    several = machines > 1
    notices = gpus * load.rows * load.notice
    ours = size * costs.copy + costs.message * (2 + (machines - 1)) + gpus * load.rows * COLUMNS * costs.route
    if several:
        ours += PER_MACHINE * size * load.crossing / load.link + notices / load.link
    return {"distflow": ours, "a central buffer": 2 * gpus * size * (costs.copy if not several else 1 / load.link),
            "a single controller": gpus * size * costs.pass_on}


def linearity(gpus: int, load: Load, costs: Costs) -> dict[str, float]:
    few, many = seconds(PER_MACHINE, load, costs), seconds(gpus, load, costs)
    return {name: (load.compute + load.edges * few[name]) / (load.compute + load.edges * many[name]) for name in many}


def table(load: Load, costs: Costs) -> Iterator[str]:
    yield (f"SIMULATION of {load.rows} rows of {load.row / 2**20:.2f} MiB for each GPU, {load.crossing:.0%} crossing, "
           f"{load.edges} redistributions beside {load.compute:g} s")
    yield (f"measured here: {costs.route * 1e9:.0f} ns a row and column to route, {costs.message * 1e3:.2f} ms a "
           f"message, copies at {1e-9 / costs.copy:.1f} GB/s, rank 0 at {1e-9 / costs.pass_on:.2f} GB/s")
    yield "  GPUs  milliseconds of one redistribution, and linearity of the step"
    for gpus in (8, 64, 256, 1024):
        times, linear = seconds(gpus, load, costs), linearity(gpus, load, costs)
        yield f"  {gpus:5} " + " ".join(f"{name} {1000 * times[name]:,.0f} ({linear[name]:.3f}) " for name in times)


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=16, help="for each GPU")
    parser.add_argument("--tokens", type=int, default=8192, help="of a row")
    parser.add_argument("--gigabit", type=float, default=200.0, help="of a machine's link, in Gbit/s")
    parser.add_argument("--efficiency", type=float, default=0.85, help="share of it that a transfer reaches")
    parser.add_argument("--crossing", type=float, default=0.1, help="share of the rows that changes its machine")
    parser.add_argument("--compute", type=float, default=30.0, help="seconds of a step beside the redistributions")
    parser.add_argument("--edges", type=int, default=4, help="redistributions in a step")
    given = parsed(parser, arguments)
    row = given.tokens * sum(dtype.itemsize for dtype in PER_TOKEN.values())
    link = given.gigabit * 1e9 / 8 * given.efficiency
    load = Load(given.rows, row, link, given.crossing, given.compute, given.edges)
    runs = [measured(repeat) for repeat in range(given.repeats)]
    print("\n".join(table(load, sorted(runs, key=lambda costs: costs.route)[len(runs) // 2])))
    found = Spread.of([linearity(1024, load, costs)["distflow"] for costs in runs])
    conclude(f"SIMULATION: linearity of a step of {given.compute:g} s from 8 to 1,024 GPUs", found, GOAL,
             unit="of linear")


if __name__ == "__main__":
    main()
