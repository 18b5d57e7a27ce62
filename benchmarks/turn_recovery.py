"""Random kills while conversations are under way: does each go on at the turn where it stood, with the same tokens?

In each mode, with environments of each kind (steps repeated, restored from a snapshot, stateless),
a run is broken again and again: as the seed draws, SIGKILL for a worker, of the trainer or of a rollout, or for one of
the processes in which environments run, at a moment that is drawn too, once conversations go on. The files of the run
say which conversations the dead worker had begun, and after how many answered turns; the event `conversations_resumed`
of whoever went on says at which turn. A conversation that went back, if only by one turn, or that began again, was not
resumed. Environments that have lost their process must show in nothing; the next kill waits until they are there again,
since a step that has lost two is not tried a third time.

Each run is compared with one of mode sync in which nothing happens: every step must have the same tokens, by their
fingerprint, and the same loss to 1e-5. For that each rank samples one row at a time, and staleness is 0.
Run by hand:  python -m benchmarks.turn_recovery --kills 100
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ratio import Spread, add_size, conclude, options, parsed
from benchmarks.runs import ROOT, environment, run_command, run_once, steps_of
from distflow.telemetry.ettr import read
from distflow.telemetry.processes import children

RANKS = {"sync": (1, ()), "async": (3, ("groups.rollout=2", "staleness=0")),
         "semi_sync": (2, ("groups.rollout=1", "staleness=0"))}
KINDS = ("Counted", "Restored", "Forgetful")
TURNS, PATIENCE, SETTLE = 5, 180.0, 4.0
DAG = """name: turns
imports: [benchmarks.small_talk]
roles: {actor: {trained: true}}
nodes:
  rollout:   {role: actor, type: MODEL_INFERENCE, function: converse, with: {environment: KIND, group_size: 4,
              max_turns: 5, max_tokens: 256}}
  advantage: {role: actor, type: COMPUTE, function: group_advantage, dependencies: [rollout],
              reads: {rewards: environment_rewards}}
  update:    {role: actor, type: MODEL_TRAIN, function: policy_update, dependencies: [advantage]}
"""
SETTINGS = ("validation=null", "data.batch=6", "checkpoint={every: 5, keep: 2}", "samples=all", "report=false",
            "roles.actor.model={architecture: qwen3, layers: 2, hidden: 64, heads: 2, kv_heads: 1}",
            "roles.actor.generation.max_new_tokens=8", "roles.actor.generation.batch_rows=1",
            "robust={restarts: 100000}")


@dataclass
class Kill:
    """What was killed when, and the conversations that the process had begun, with their answered turns."""

    what: str
    at: float
    begun: dict[int, int] = field(default_factory=dict)


class Course:
    """A run that is broken while it goes on."""

    def __init__(self, scratch: Path, mode: str, kind: str, seed: int):
        self.mode, self.kind, self.draw = mode, kind, random.Random(f"{seed} {mode} {kind}")
        self.scratch, self.folder = scratch, scratch / f"{mode}-{kind}"
        self.dag = scratch / f"{kind}.yaml"
        self.dag.write_text(DAG.replace("KIND", kind))
        self.seed, self.kills = seed, list[Kill]()

    def run(self, wanted: int) -> None:
        """Break it so many times, let it do a step more, and end it."""
        ranks, apart = RANKS[self.mode]
        line = run_command(self.dag, "embedded.yaml", self.folder.name, ranks, (
            f"output={self.scratch}", *SETTINGS, f"seed={self.seed}", "steps=100000", f"mode={self.mode}", *apart))
        said = (self.scratch / f"{self.folder.name}.txt").open("w+")
        with said, subprocess.Popen(line, cwd=ROOT, stdout=said, stderr=said, env=environment()) as run:
            try:
                self._await(run, lambda: len(self.steps()) >= 1)
                while len(self.kills) < wanted:
                    self._break(run)
                done = len(self.steps())
                self._await(run, lambda: len(self.steps()) > done)
                run.send_signal(signal.SIGTERM)
                run.wait(PATIENCE)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                said.seek(0)
                raise SystemExit(f"{said.read()[-6000:]}\n{self.folder.name}: {error}") from error
            finally:
                run.kill()

    def steps(self) -> list[dict[str, Any]]:
        return steps_of(self.folder)

    def _await(self, run: subprocess.Popen, there: Any) -> None:
        until = time.monotonic() + PATIENCE
        while not there():
            if run.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the run has ended" if run.poll() is not None else f"nothing came in {PATIENCE} s")
            time.sleep(0.02)

    def _break(self, run: subprocess.Popen) -> None:
        """Kill one process, once its rank has answers of conversations that it did not have before."""
        rank = self.draw.choice(sorted({event["rank"] for event in read(self.folder)
                                        if event["event"] == "worker_ready"}))
        environment = self.draw.random() < 0.25
        had = self._size()
        self._await(run, lambda: self._size() > had + 200)
        time.sleep(self.draw.random())
        workers = {event["rank"]: event["pid"] for event in read(self.folder) if event["event"] == "worker_ready"}
        ended = {event.get("pid") for event in read(self.folder) if event["event"] == "worker_ended"}
        victims = [*environments(workers[rank])] if environment else [workers[rank]]
        if not victims or victims[0] in ended:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim := self.draw.choice(victims), signal.SIGKILL)
            kill = Kill(f"an environment of rank {rank}" if environment else f"rank {rank}", time.time())
            while not environment and Path(f"/proc/{victim}/cmdline").exists() and Path(
                    f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.001)
            kill.begun = {} if environment else self._begun(rank)
            self.kills.append(kill)
        if environment:
            time.sleep(SETTLE)
        else:
            self._await(run, lambda: any(event["event"] == "worker_ready" and event["rank"] == rank
                                         and event["time"] > kill.at for event in read(self.folder)))

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("trajectories/*"))

    def _begun(self, rank: int) -> dict[int, int]:
        """Return the conversations that a rank had last, and that are not over, with their answered turns."""
        newest: dict[int, tuple[int, int, bool]] = {}  # turn, rank, over; by row
        for path in self.folder.glob("trajectories/*"):
            for turn in lines(path):
                if turn["turn"] >= newest.get(turn["row"], (0,))[0]:
                    over = turn.get("done", True) or turn["turn"] == TURNS
                    newest[turn["row"]] = turn["turn"], int(path.stem.removeprefix("rank")), over
        for event in self._resumed():
            for row, turns in zip(event["rows"], event["turns"]):
                if row in newest and turns >= newest[row][0]:
                    newest[row] = newest[row][0], event["rank"], newest[row][2]
        return {row: turn for row, (turn, holder, over) in newest.items() if holder == rank and not over}

    def _resumed(self) -> list[dict[str, Any]]:
        return [event for event in read(self.folder) if event["event"] == "conversations_resumed"]

    def judge(self, calm: Sequence[dict[str, Any]]) -> tuple[int, int, list[str]]:
        """Return how many conversations were lost and resumed at their turn, and what is wrong with the run."""
        resumed = self._resumed()
        wrong, lost, good = [], 0, 0
        for kill in self.kills:
            found = {row: turns for event in reversed(resumed) if event["time"] >= kill.at
                     for row, turns in zip(event["rows"], event["turns"])}
            back = [f"{row} ({found.get(row, 'none')} of {turn})" for row, turn in kill.begun.items()
                    if found.get(row, -1) < turn]
            lost, good = lost + len(kill.begun), good + len(kill.begun) - len(back)
            print(f"{self.mode}, {self.kind}: {kill.what} was killed with {len(kill.begun)} conversations that had "
                  f"answers" + (f"; NOT resumed at their turn: {', '.join(back)}" if back else ""), flush=True)
        for one, other in zip(calm, self.steps()):
            if one["response/fingerprint"] != other["response/fingerprint"]:
                wrong.append(f"{self.mode}, {self.kind}: step {one['step']} has other tokens")
            elif not abs(one["loss"] - other["loss"]) <= 1e-5:
                wrong.append(f"{self.mode}, {self.kind}: step {one['step']} has another loss")
        failed = sum(event["event"] in ("environment_failed", "environment_differs") for event in read(self.folder))
        return lost, good, [*wrong, *([f"{self.mode}, {self.kind}: {failed} failures of environments"] * (failed > 0))]


def lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):  # its end may not be written yet
            yield json.loads(line)


def environments(worker: int) -> Iterator[int]:
    """Yield the processes in which a worker's environments run."""
    for server in children(worker):
        with contextlib.suppress(OSError):
            if b"workers.isolation.child" in Path(f"/proc/{server}/cmdline").read_bytes():
                yield from children(server)


def flags(arguments: list[str] | None) -> Namespace:
    parser = options(__doc__, repeats=None)
    add_size(parser, "kills", 100, 5, "in all")
    add_size(parser, "seed", 0, 0, "of the moments and of the run")
    parser.add_argument("--mode", choices=RANKS, action="append", help="default: all; with --quick async")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all; with --quick Counted")
    given = parsed(parser, arguments)
    given.mode = given.mode or (["async"] if given.quick else [*RANKS])
    given.kind = given.kind or (["Counted"] if given.quick else [*KINDS])
    return given


def main(arguments: list[str] | None = None) -> None:
    given = flags(arguments)
    lost, good, kills, steps, wrong = 0, 0, 0, 0, list[str]()
    with tempfile.TemporaryDirectory(prefix="turns-") as scratch:
        courses = [(mode, kind) for kind in given.kind for mode in given.mode]
        for kind in given.kind:
            broken = []
            for mode in given.mode:
                left = len(courses) - courses.index((mode, kind))
                broken.append(Course(Path(scratch), mode, kind, given.seed))
                broken[-1].run(-(-(given.kills - kills) // left))
                kills += len(broken[-1].kills)
                print(f"{mode}, {kind}: {len(broken[-1].kills)} kills in {len(broken[-1].steps())} steps", flush=True)
            longest = max(len(course.steps()) for course in broken)
            calm = steps_of(run_once(Path(scratch), f"calm-{kind}", broken[0].dag, "embedded.yaml", 1, (
                *SETTINGS, f"seed={given.seed}", f"steps={longest}")))
            for course in broken:
                judged = course.judge(calm)
                lost, good, wrong = lost + judged[0], good + judged[1], wrong + judged[2]
                steps += len(course.steps())
    print("\n".join(wrong) or f"all {steps} steps have the tokens and losses of runs in which nothing happens")
    conclude(f"of {lost} conversations lost in {kills} random kills, those that went on at the turn where they stood",
             Spread.of([good / max(lost, 1)]), 1.0, unit="share", holds=not wrong)


if __name__ == "__main__":
    main()
