"""A step's rows through a central buffer, the transfer dock and the databuffer (MindSpeed RL, Figures 7 and 9).

Four machines (network namespaces) of one rank each, with links of one rate. The rows of a step of GRPO (`rows.py`,
ragged) go from the rollout, data-parallel size 4, to the reference, of the same size, and with its log-probabilities to
the update, of size 2. Nothing is computed: what is timed is the flow alone, until the last rank has its rows.

- central     all rows are put into one shard on the first machine, and fetched from there (the replay buffer of MSRLB)
- dock        the transfer dock: a shard on each machine, where its rollout's rows are put
- databuffer  distflow's mode sync: by reference where a layout stays, else all-to-all

The other technique, the weights' allgather-swap on and off, is `reshard.py`'s. Linux as root only.
Run by hand:  python -m benchmarks.ablation
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import rows
from benchmarks.group import timed
from benchmarks.machines import address, machines, within
from benchmarks.ratio import Spread, add_size, conclude, options, parsed, ratios
from benchmarks.reshard import worst
from benchmarks.rows import NAMES, RAGGED, Case
from benchmarks.runs import ROOT, environment
from distflow.data.batch import Batch, ColumnData, Ragged
from distflow.data.databuffer import Databuffer
from distflow.data.exchange import gather_values
from distflow.dock import Consumer, DockClient
from distflow.dock.process import start
from distflow.plan import SOURCE, Column, Layout, Plan, Task, Transfer
from distflow.telemetry.metrics import Metrics

RANKS, TRAINERS = 4, 2
WAYS = ("central", "dock", "databuffer")
REFERENCE = "ref_log_probs"
ROLLOUT = tuple(name for name in NAMES if name != REFERENCE)
MIB = 2**20
_WAIT, _TOKEN = 120.0, b"ablation" * 4
_DEVICES = Path("/proc/self/net/dev")
NOTHING = Batch(torch.empty(0, dtype=torch.int64))
Columns = dict[str, ColumnData]


def scored(seen: Batch) -> Ragged:
    """Return what the reference has written of the rows that it saw."""
    old = seen["old_log_probs"]
    return Ragged(old.values.clone(), old.lengths)


class ByDock:
    """Rows by way of a dock with a shard on each machine, or on the first alone."""

    def __init__(self, rank: int, shards: int):
        self.rank, self.got = rank, NOTHING
        self.child = start(_TOKEN, host=address(rank), number=rank) if rank < shards else None
        found = [each for each in gather_values(self.child and list(self.child.address)) if each]
        self.client = DockClient([(host, port) for host, port in found], _TOKEN, f"rank {rank}", _WAIT,
                                 near=rank if shards > 1 else None)
        if rank == 0:
            self.client.configure((Consumer("reference", ROLLOUT), Consumer("update", NAMES)))
        dist.barrier()

    def step(self, ids: torch.Tensor, columns: Columns) -> None:
        self.client.put(Batch(ids, columns), version=0)
        lease = self.client.lease("reference", len(ids), wait=_WAIT)
        seen = self.client.fetch(lease)
        self.client.put(Batch(seen.ids, {REFERENCE: scored(seen)}))
        self.client.commit(lease)
        if self.rank < TRAINERS:
            lease = self.client.lease("update", len(ids) * RANKS // TRAINERS, wait=_WAIT)
            self.got = self.client.fetch(lease)
            self.client.commit(lease)

    def close(self) -> None:
        self.client.close()
        dist.barrier()
        if self.child:
            self.child.stop()


class ByDatabuffer:
    """Rows as in mode sync."""

    def __init__(self, rank: int):
        self.got = NOTHING
        form = {name: "Ragged" if name in rows.PER_TOKEN else "Tensor" for name in NAMES}
        reads = [Column(name, name, SOURCE, form[name]) for name in ROLLOUT]
        again = Column(REFERENCE, REFERENCE, "reference", form[REFERENCE])
        self.reference = Task("reference", "reference", "MODEL_INFERENCE", "logprobs", {}, tuple(reads), (REFERENCE,),
                              Layout(RANKS), (Transfer(SOURCE, ROLLOUT, "local"),))
        self.update = Task("update", "actor", "MODEL_TRAIN", "update", {}, (*reads, again), (), Layout(TRAINERS),
                           (Transfer(SOURCE, ROLLOUT, "all_to_all"), Transfer("reference", (REFERENCE,), "all_to_all")))
        plan = Plan("ablation", "sync", RANKS, (self.reference, self.update), Layout(RANKS))
        self.buffer = Databuffer(plan, rank, Metrics())

    def step(self, ids: torch.Tensor, columns: Columns) -> None:
        self.buffer.start(Batch(ids, columns))
        seen = self.buffer.take(self.reference)
        self.buffer.put(self.reference, {REFERENCE: scored(seen)}, seen.ids)
        self.got = self.buffer.take(self.update)

    def close(self) -> None:
        """Nothing is left but memory."""


def through() -> int:
    """Return the bytes that this machine has sent and received."""
    fields = [line.split() for line in _DEVICES.read_text().splitlines() if ":" in line and "lo:" not in line]
    return sum(int(each[1]) + int(each[9]) for each in fields)


def flow(rank: int, way: str, case: Case, repeats: int) -> list[dict[str, float]]:
    """Return by repeat the seconds of a step's rows, and the MiB through the link of the busiest machine."""
    side = ByDatabuffer(rank) if way == "databuffer" else ByDock(rank, RANKS if way == "dock" else 1)
    made = {name: Ragged(*column) if isinstance(column, tuple) else column
            for name, column in rows.make(case, rank, pad=False).items() if name != REFERENCE}
    count, found = case.rows // RANKS, []
    for repeat in range(-1, repeats):
        ids = torch.arange(count) * RANKS + rank + (repeat + 1) * case.rows
        columns = made | {"rewards": torch.rand(count)}
        sent = through()
        side.got = NOTHING
        seconds = timed(partial(side.step, ids, columns))
        arrived = gather_values(side.got.ids.tolist())
        if sorted(sum(arrived, [])) != list(range((repeat + 1) * case.rows, (repeat + 2) * case.rows)):
            raise SystemExit(f"{way}: not all rows have arrived once")
        found.append({"seconds": seconds, "link": worst((through() - sent) / MIB)})
    side.close()
    return found[1:]


def work(rank: int, folder: str, case: dict[str, Any], repeats: int) -> None:
    """Run one machine's rank; the first writes what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    found = {way: flow(rank, way, Case(**case), repeats) for way in WAYS}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def flows(case: Case, megabit: float, repeats: int) -> list[dict[str, dict[str, float]]]:
    """Return by repeat and way what `flow` measures."""
    with tempfile.TemporaryDirectory(prefix="ablation-") as folder, machines(RANKS, megabit) as names:
        ranks = [subprocess.Popen(within(name, sys.executable, "-m", "benchmarks.ablation", "--rank", json.dumps(
            [rank, folder, asdict(case), repeats])), cwd=ROOT, env=environment()) for rank, name in enumerate(names)]
        if any(rank.wait() for rank in ranks):
            raise SystemExit("a rank failed; see above")
        found = json.loads(Path(folder, "found.json").read_text())
    return [{way: found[way][repeat] for way in WAYS} for repeat in range(repeats)]


def main(arguments: list[str] | None = None) -> None:
    if sys.argv[1:2] == ["--rank"]:
        return work(*json.loads(sys.argv[2]))
    parser = options(__doc__)
    add_size(parser, "mib", 160, 20, "rows, padded")
    parser.add_argument("--megabit", type=float, default=1000.0, help="a second on each machine's link")
    given = parsed(parser, arguments)
    case = Case(given.mib, RANKS, TRAINERS, form=RAGGED)
    tokens = sum(int(case.lengths(name, torch.arange(case.rows)).sum()) for name in ("prompts", "responses"))
    moved = flows(case, given.megabit, given.repeats)
    print(f"{case.rows} rows, {tokens} tokens, {case.nbytes / MIB:.0f} MiB; links of {given.megabit:g} Mbit/s")
    for way in WAYS:
        speed = Spread.of([tokens / pair[way]["seconds"] for pair in moved])
        link = Spread.of([pair[way]["link"] for pair in moved])
        print(f"{way:11} tokens/s {speed}, through the busiest link {link} MiB", flush=True)
    conclude("tokens per second of a step's flow by the transfer dock, over a central buffer, 4 machines",
             ratios(moved, "central", "dock", lambda each: each["seconds"]), 1.0)
    return None


if __name__ == "__main__":
    main()
