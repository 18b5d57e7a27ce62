"""Whole machines are killed at random, under a real etcd: is a prompt trained twice, lost, or of another lineage?

Modes async and semi_sync in turn, on three machines of one rank, of which one trains, and a fourth that waits for its
place. Each is a torchrun of its own on this computer; all share etcd's members, loopback and the run's folder. The seed
draws which machine is killed (all its processes at once, as when the power fails; one that waits or starts too), after
how many steps, and when in the step; another one comes for it at once.

Staleness is 0 and each row is sampled alone, as in fault_matrix.py: so each step must have the samples and the loss of
a run without faults, bit for bit, and the run must end with its very weights. A prompt that is trained twice, a lost
one, or one of another lineage would change both. In semi_sync the rows are conversations, since what the trainer has
begun goes to others at the end of a turn; a row without turns goes on behind its last token, which rounds otherwise.
Run by hand:  python -m benchmarks.machine_kills
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cluster import Cluster, RunLost
from benchmarks.etcd import Etcd
from benchmarks.fault_matrix import SETTINGS, differences, write_dag
from benchmarks.ratio import Spread, add_size, conclude, options, parsed
from benchmarks.runs import run_once, steps_of, with_set
from distflow.telemetry.ettr import read
from distflow.telemetry.processes import children

RANKS, _LAST_WORDS = 3, 5.0
SLOW = "nodes.reward.with.reward=patient_brevity"


@dataclass(frozen=True)
class Course:
    """talks: with a tool. gap: least and most steps between two kills, so that most machines have come again. more:
    settings that slow its steps down."""

    talks: bool
    gap: tuple[int, int]
    more: tuple[str, ...] = ()


COURSES = {"async": Course(False, (2, 5), (SLOW,)), "semi_sync": Course(True, (4, 10))}
PARTS = {"launch.py": ("supervisor", "worker"), "distflow.dock.process": ("", "shard"),
         "workers.isolation": ("", "", "environment server", "environment")}
"""What processes with this in their command line are, by how far they stand below torchrun."""
LETHAL = ("torchrun", "supervisor")


def parts_of(process: int, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the processes below one, and what they are."""
    for child in children(process):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{child}/cmdline").read_text()
            yield from ((names[depth], child) for word, names in PARTS.items()
                        if word in words and any(names[depth : depth + 1]))
        yield from parts_of(child, depth + 1)


def kill_part(cluster: Cluster, draw: random.Random) -> tuple[str, str]:
    """Kill one of a machine's processes. Return what it was, and the machine, if that goes with it."""
    name = draw.choice(sorted(cluster.machines))
    found = dict[str, list[int]](torchrun=[cluster.machines[name].pid])
    for part, process in parts_of(cluster.machines[name].pid):
        found.setdefault(part, []).append(process)
    part = draw.choice(sorted(found))
    with contextlib.suppress(ProcessLookupError):
        os.kill(draw.choice(found[part]), signal.SIGKILL)
    return part, name if part in LETHAL else ""


def run_with_kills(scratch: Path, name: str, dag: Path, settings: tuple[str, ...], gaps: Sequence[int], last: int,
                   draw: random.Random, etcd: Etcd, parts: bool) -> tuple[Path, Counter[str]]:
    """Run on machines, of which one is killed after each of `gaps` steps, or one of its parts, until another one could
    not take its place before the last step; return the run's folder, and what was killed how often."""
    line = ["--dag", str(dag), "--run-file", "embedded.yaml", "--name", name, "--machines", f"2:{RANKS}",
            *with_set((f"output={scratch}", *settings))]
    logs = scratch / f"{name}-machines"
    logs.mkdir()
    cluster = Cluster(logs, scratch / name, line, store=etcd.address(name))
    try:
        for number in range(RANKS + 1):
            cluster.start(f"machine-{number}")
        step, killed = 0, Counter[str]()
        for number, gap in enumerate(gaps):
            step = max(step, done_in(scratch / name)) + gap
            if parts and step > last - max(gaps):
                break
            cluster.wait_until(lambda due=step: done_in(scratch / name) >= due)
            time.sleep(draw.random())  # anywhere in a step
            part, lost = kill_part(cluster, draw) if parts else ("machine", draw.choice(sorted(cluster.machines)))
            killed[part] += 1
            if lost:
                cluster.kill(lost, after=_LAST_WORDS if parts else 0.0)
                cluster.start(f"machine-{RANKS + 1 + number}")
        cluster.wait_for_exit()
    finally:
        cluster.close()
    return scratch / name, killed


def done_in(folder: Path) -> int:
    """Return the newest step in a run's metrics."""
    return max((line["step"] for line in steps_of(folder)), default=0)


def flags(arguments: list[str] | None) -> Namespace:
    parser = options(__doc__, repeats=None)
    add_size(parser, "seeds", 5, 1, "runs, each with a seed of its own")
    parser.add_argument("--mode", choices=COURSES, action="append", help="default: all in turn")
    add_size(parser, "kills", 10, 1, "machines that each run loses")
    add_size(parser, "members", 3, 1, "of etcd")
    parser.add_argument("--parts", action="store_true", help="kill single processes, of all kinds")
    return parsed(parser, arguments)


def main(arguments: list[str] | None = None) -> None:
    given = flags(arguments)
    if not shutil.which("etcd"):
        sys.exit("etcd is not installed:  apt-get install etcd-server")
    good, asked, modes = 0, 0, given.mode or list(COURSES)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, \
            contextlib.closing(Etcd(Path(folder), given.members)) as etcd:
        scratch, calm = Path(folder), dict[str, Path]()
        for seed in range(given.seeds):
            mode, draw = modes[seed % len(modes)], random.Random(seed)
            course = replace(COURSES[mode], gap=(1, 3)) if given.parts else COURSES[mode]
            dag, steps = write_dag(scratch, course.talks), (given.kills + 1) * course.gap[1]
            settings = (f"mode={mode}", f"groups.rollout={RANKS - 1}", f"steps={steps}", *SETTINGS, *course.more)
            if mode not in calm:
                calm[mode] = run_once(scratch, f"{mode}-calm", dag, "embedded.yaml", RANKS, settings)
            try:
                gaps = [draw.randint(*course.gap) for _ in range(given.kills)]
                run, killed = run_with_kills(scratch, f"kills-{seed}", dag, settings, gaps, steps, draw, etcd,
                                             given.parts)
            except RunLost as error:
                print(f"seed {seed}, {mode}: it did not come to its end\n{str(error)[-4000:]}", flush=True)
                asked += given.kills
                continue
            failures = Counter(event["group"] for event in read(run) if event["event"] == "failure")
            wrong = differences(calm[mode], run)
            good, asked = good + (0 if wrong else sum(killed.values())), asked + sum(killed.values())
            print(f"seed {seed}, {mode}: killed {dict(killed)} in {steps} steps, failures seen {dict(failures)}: "
                  f"{'; '.join(wrong) or 'it has ended as the run without faults'}", flush=True)
    what = "single processes" if given.parts else "whole machines"
    conclude(f"of {asked} kills of {what} under etcd, those in runs that ended with the "
             "samples, losses and weights of one without", Spread.of([good / max(asked, 1)]), 1.0, unit="share")


if __name__ == "__main__":
    main()
