"""Whole machines are killed at random, under a real etcd: is a prompt trained twice, lost, or of another lineage?

Modes async and semi_sync in turn, on three machines of one rank, of which one trains, and a fourth that waits for its
place. Each is a torchrun of its own on this computer; all share etcd's members, loopback and the run's folder. The seed
draws which machine is killed (all its processes at once, as when the power fails; one that waits or starts too), after
how many steps, and when in the step; another one comes for it at once.

Staleness is 0 and each row is sampled alone, as in fault_matrix.py: so each step must have the samples and the loss of
a run without faults, bit for bit, and the run must end with its very weights. A prompt that is trained twice, a lost
one, or one of another lineage would change both.
Run by hand:  python -m benchmarks.machine_kills
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path

from benchmarks.cluster import ROOT, Cluster, RunLost
from benchmarks.etcd import Etcd
from benchmarks.fault_matrix import SETTINGS, trouble, write_dag
from benchmarks.modes import run_once, steps_of
from benchmarks.ratio import Spread, add_size, conclude, options, parsed
from distflow.telemetry.ettr import read

MODES = ("async", "semi_sync")
RANKS, GAP = 3, (2, 5)
SLOW = "nodes.reward.with.reward=patient_brevity"
"""So that a machine has come again before the run is over."""


def run_with_kills(scratch: Path, name: str, dag: Path, settings: tuple[str, ...], kills: int, draw: random.Random,
                   etcd: Etcd) -> Path:
    """A run on machines, of which so many are killed; its folder."""
    words = [word for setting in (f"output={scratch}", *settings) for word in ("--set", setting)]
    line = ["--dag", str(dag), "--run-file", "embedded.yaml", "--name", name, *words, "--machines", f"2:{RANKS}"]
    logs = scratch / f"{name}-machines"
    logs.mkdir()
    cluster = Cluster(logs, scratch / name, line, store=etcd.address(name))
    cluster.environment["PYTHONPATH"] = str(ROOT)
    try:
        for number in range(RANKS + 1):
            cluster.start(f"machine-{number}")
        step = 0
        for number in range(kills):
            step = max(step, done_in(scratch / name)) + draw.randint(*GAP)
            cluster.eventually(lambda due=step: done_in(scratch / name) >= due)
            time.sleep(draw.random())  # anywhere in a step
            lost = draw.choice(sorted(cluster.machines))
            cluster.lose(lost)
            cluster.start(f"machine-{RANKS + 1 + number}")
        cluster.ends()
    finally:
        cluster.close()
    return scratch / name


def done_in(folder: Path) -> int:
    """The newest step in its metrics."""
    return max((line["step"] for line in steps_of(folder)), default=0) if (folder / "metrics.jsonl").is_file() else 0


def flags(arguments: list[str] | None) -> Namespace:
    parser = options(__doc__, repeats=None)
    add_size(parser, "seeds", 5, 1, "runs, each with a seed of its own")
    add_size(parser, "kills", 10, 1, "machines that each run loses")
    add_size(parser, "members", 3, 1, "of etcd")
    return parsed(parser, arguments)


def main(arguments: list[str] | None = None) -> None:
    given = flags(arguments)
    if not shutil.which("etcd"):
        sys.exit("etcd is not installed:  apt-get install etcd-server")
    good, steps = 0, (given.kills + 1) * GAP[1]
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, \
            contextlib.closing(Etcd(Path(folder), given.members)) as etcd:
        scratch, calm = Path(folder), dict[str, Path]()
        dag = write_dag(scratch, talks=False)
        for seed in range(given.seeds):
            mode = MODES[seed % len(MODES)]
            settings = (f"mode={mode}", f"groups.rollout={RANKS - 1}", f"steps={steps}", *SETTINGS, SLOW)
            if mode not in calm:
                calm[mode] = run_once(scratch, f"{mode}-calm", dag, "embedded.yaml", RANKS, settings)
            try:
                run = run_with_kills(scratch, f"kills-{seed}", dag, settings, given.kills, random.Random(seed), etcd)
            except RunLost as error:
                print(f"seed {seed}, {mode}: it did not come to its end\n{str(error)[-4000:]}", flush=True)
                continue
            failures = Counter(event["unit"] for event in read(run) if event["event"] == "failure")
            wrong = trouble(calm[mode], run)
            good += 0 if wrong else given.kills
            print(f"seed {seed}, {mode}: {given.kills} machines killed in {steps} steps, failures seen "
                  f"{dict(failures)}: {'; '.join(wrong) or 'it has ended as the run without faults'}", flush=True)
    share = good / (given.seeds * given.kills)
    conclude(f"of {given.seeds * given.kills} kills of whole machines under etcd, those in runs that ended with the "
             "samples, losses and weights of one without", Spread.of([share]), 1.0, unit="share")


if __name__ == "__main__":
    main()
