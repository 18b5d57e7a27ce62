"""Kinds of faults, of every group, in every phase of a step, in every mode: does the run end as one without any?

A kind is an exception, SIGKILL, SIGSTOP, a pause, or the kernel's end for lack of memory. A group is all ranks of mode
sync, and of semi_sync where none only samples (colocated); the trainer, which in semi_sync samples too (a hybrid); and
a rollout, in async the relay of a second one. Each cell is a fault of `faults:` in a step of its own; a run has all
cells of its mode, one after the other, with a reference model, and a checkpoint in every step. Staleness is 0, so that
every mode must sample what the run without faults has sampled, have its losses, and end with its very weights. For that
each rank samples one row at a time, and the reference sees whole steps: rows that are computed together round
otherwise, and one token in some hundred thousand is another one by that.

A cell is passed if its fault has happened and the run ended so. Some phases of a rollout do not come in every step, as
where the other rollout was quicker: these cells are tried in two steps, and else told as not reached.
The other kinds, and phases at the ends of a run, are those of tests/test_recovery.py.
Memory is that of a control group (root only); without one those cells are left out, and it is said.

With `--soak 1200` so many kills are ordered in one run of mode async instead, of the trainer and of a rollout in every
step, at moments that the seed draws.
Run by hand:  python -m benchmarks.fault_matrix
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

from benchmarks.control_group import control_group, limit_memory
from benchmarks.ratio import Spread, conclude, options, parsed
from benchmarks.runs import run_once, steps_of
from distflow.telemetry.ettr import account, read

KINDS = {"raise": True, "kill": True, "stop": True, "slow": False, "oom": True}
"""Whether the worker ends of it."""


@dataclass(frozen=True)
class Course:
    """A run: of its ranks so many are rollouts; its phases by group. `talks`: with a tool."""

    mode: str
    ranks: int
    rollouts: int
    phases: dict[str, tuple[str, ...]]
    talks: bool = True

    def __str__(self) -> str:
        colocated = "-colocated" if self.mode == "semi_sync" and not self.rollouts else ""
        return self.mode + ("-without-tools" if not self.talks else colocated)


STEP = ("computing", "inference", "training", "saving", "publishing")
ROLLOUT = ("waiting", "generating", "tools", "pulling")
COURSES = {
    "sync": [Course("sync", 2, 0, {"trainer": ("generating", *STEP)}, talks=False),
             Course("sync", 2, 0, {"trainer": ("generating", "tools")})],
    "async": [Course("async", 3, 2, {"trainer": ("waiting", *STEP), "rollout": ROLLOUT})],
    "semi_sync": [Course("semi_sync", 3, 1, {"trainer": ("generating", "tools", *STEP), "rollout": ROLLOUT})],
    "colocated": [Course("semi_sync", 2, 0, {"trainer": ("generating", "tools", *STEP[:-1])})]}
SOAK = 1200
"""Kills in one run that torchft has published."""
MEMORY = 4 << 30
"""Bytes that all processes of a run may have together."""
TALK = """
  rollout:   {role: actor, type: MODEL_INFERENCE, function: converse, with: {environment: PatientTool, group_size: 4,
              max_turns: 4, max_tokens: 48}}"""
ANSWER = """
  rollout:   {role: actor, type: MODEL_INFERENCE, function: generate, with: {group_size: 4}}
  reward:    {role: reward, type: COMPUTE, function: score, dependencies: [rollout], with: {reward: brevity}}"""
DAG = """name: matrix
imports: [benchmarks.small_talk]
roles: {actor: {trained: true}, reference: {copy_of: actor}}
nodes:ROLLOUT
  reference: {role: reference, type: MODEL_INFERENCE, function: logprobs, dependencies: [rollout]}
  advantage: {role: actor, type: COMPUTE, function: group_advantage, dependencies: [LAST], reads: {rewards: REWARDS}}
  update:    {role: actor, type: MODEL_TRAIN, function: policy_update, dependencies: [advantage, reference],
              with: {kl: 0.001}}
"""
SETTINGS = ("validation=null", "data.batch=6", "checkpoint={every: 1, keep: 2}", "staleness=0",
            "roles.actor.model={architecture: qwen3, layers: 2, hidden: 64, heads: 2, kv_heads: 1}",
            "roles.actor.generation.max_new_tokens=8", "roles.actor.generation.batch_rows=1",
            "robust={restarts: 100000, detectors: {stalled: {seconds: 8}, no_tokens: {seconds: 6, answer: 4}, "
            "frozen: {seconds: 6}}, machine_silence: 5}")


@dataclass(frozen=True)
class Cell:
    """One fault: of which group, in which phase."""

    kind: str
    group: str
    phase: str

    def fault(self, step: int) -> dict[str, Any]:
        return {"kind": self.kind, "group": self.group, "phase": self.phase, "step": step, "seconds": 1.0}


def cells(course: Course, kinds: Sequence[str]) -> Iterator[Cell]:
    for group, phases in course.phases.items():
        yield from (Cell(kind, group, phase) for phase in phases for kind in kinds)


def run_course(scratch: Path, course: Course, wanted: Sequence[Cell],
               group: Path | None) -> tuple[set[Cell], list[str]]:
    """Run a course; return the cells whose fault has happened, and what is wrong with the run in which they did."""
    again = [cell for cell in wanted if cell.group == "rollout"]
    tried, due = [*wanted, *again], [2]  # steps: a rollout may come late to its phase, and failing twice in one ends it
    for cell in tried:
        due.append(due[-1] + (2 if cell.group == "rollout" else 1))
    apart = () if course.mode == "sync" else (f"mode={course.mode}", f"groups.rollout={course.rollouts}")
    dag = write_dag(scratch, course.talks)
    faults = json.dumps([cell.fault(step) for step, cell in zip(due, tried)])
    settings = (f"steps={due[-1]}", *SETTINGS, *apart)
    calm = run_once(scratch, f"{course}-calm", dag, "embedded.yaml", course.ranks, settings)
    stormy = run_once(scratch, str(course), dag, "embedded.yaml", course.ranks, (*settings, f"faults={faults}"),
                      group=group)
    events = read(stormy)
    happened = [tried[event["fault"]] for event in events if event["event"] == "fault_injected"]
    found = account(events).recoveries
    took = [seconds for each in found if not isnan(seconds := each.start + each.connect + each.load)]
    print(f"{course}: {due[-1]} steps, {len(happened)} faults, {len(found)} restarts"
          + (f", each {Spread.of(took)} s" if took else ""), flush=True)
    wrong = differences(calm, stormy)
    if len(found) != (deadly := sum(KINDS[cell.kind] for cell in happened)):
        wrong.append(f"{deadly} faults end a worker, and {len(found)} restarts were seen")
    return set(happened), wrong


def soak(scratch: Path, kills: int) -> tuple[int, list[str]]:
    """Order so many kills in one run, in every step one of each group; return how many have happened, since a rollout
    that was quicker spares the other, and what is wrong with the run."""
    course, = COURSES["async"]
    due = [(step, group) for step in range(2, kills // 2 + 2) for group in course.phases]
    faults = json.dumps([{"kind": "kill", "group": group, "step": step} for step, group in due])
    settings = (f"steps={due[-1][0] + 1}", *SETTINGS, "mode=async", f"groups.rollout={course.rollouts}")
    dag = write_dag(scratch, course.talks)
    calm = run_once(scratch, "calm", dag, "embedded.yaml", course.ranks, settings)
    stormy = run_once(scratch, "stormy", dag, "embedded.yaml", course.ranks, (*settings, f"faults={faults}"))
    events = read(stormy)
    happened = sum(event["event"] == "fault_injected" for event in events)
    found = account(events)
    print(f"{due[-1][0] + 1} steps, {happened} of {kills} kills, {len(found.recoveries)} restarts, effective "
          f"{found.ettr:.3f}", flush=True)
    return happened, differences(calm, stormy)


def write_dag(folder: Path, talks: bool) -> Path:
    """Write the algorithm of these runs, with a tool or without."""
    dag = folder / f"matrix-{'tools' if talks else 'no-tools'}.yaml"
    dag.write_text(DAG.replace("ROLLOUT", TALK if talks else ANSWER).replace("LAST", "rollout" if talks else "reward")
                   .replace("REWARDS", "environment_rewards" if talks else "rewards"))
    return dag


def differences(calm: Path, stormy: Path) -> list[str]:
    """Return in what the run with faults differs from the one without."""
    found, theirs, ours = [], steps_of(calm), steps_of(stormy)
    if [line["step"] for line in ours] != [line["step"] for line in theirs]:
        found.append("a step is missing, or was counted twice")
    for one, other in zip(ours, theirs):
        if one["response/fingerprint"] != other["response/fingerprint"]:
            found.append(f"step {one['step']} has other samples")
        if one["loss"] != other["loss"]:  # nan is another one than itself
            found.append(f"step {one['step']} has another loss")
    model = "model/model.safetensors"
    if (calm / model).read_bytes() != (stormy / model).read_bytes():
        found.append("the weights differ")
    return found


def table(course: Course, wanted: Sequence[Cell], happened: set[Cell]) -> None:
    """Print a row for each phase of each group."""
    kinds = list(dict.fromkeys(cell.kind for cell in wanted))
    for group, phase in dict.fromkeys((cell.group, cell.phase) for cell in wanted):
        told = ", ".join(f"{kind} {'happened' if Cell(kind, group, phase) in happened else 'NOT REACHED'}"
                         for kind in kinds)
        print(f"{course}, {group}, {phase}: {told}")


def flags(arguments: list[str] | None) -> Namespace:
    parser = options(__doc__, repeats=None)
    parser.add_argument("--part", choices=COURSES, action="append", help="default: all; with --quick sync")
    parser.add_argument("--soak", type=int, help="so many kills in one run, in place of the matrix")
    given = parsed(parser, arguments)
    given.part = list(dict.fromkeys(given.part or (["sync"] if given.quick else COURSES)))
    return given


def main(arguments: list[str] | None = None) -> None:
    given = flags(arguments)
    if given.soak:
        with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
            happened, wrong = soak(Path(scratch), given.soak)
        print("\n".join(wrong) or "the run has ended as the one without kills: same samples, losses and weights")
        conclude("kills of trainer and rollouts in one run that ended bit for bit as the one without",
                 Spread.of([0.0 if wrong else happened]), SOAK, unit="kills", holds=not wrong)
        return
    kinds = ["kill"] if given.quick else list(KINDS)
    wrong, reached, asked = [], 0, 0
    with tempfile.TemporaryDirectory(prefix="matrix-") as scratch, contextlib.ExitStack() as stack:
        group = None
        if "oom" in kinds:
            try:
                group = stack.enter_context(control_group("memory", "matrix"))
                limit_memory(group, MEMORY)
            except OSError as error:
                print(f"without the kernel's end for lack of memory: no control group can be made here, {error}")
                kinds.remove("oom")
        for course in [course for part in given.part for course in COURSES[part][: 1 if given.quick else None]]:
            wanted = list(cells(course, kinds))
            happened, found = run_course(Path(scratch), course, wanted, group)
            table(course, wanted, happened)
            wrong += [f"{course}: {each}" for each in found]
            reached, asked = reached + len(happened), asked + len(wanted)
    print("\n".join(wrong) or "each run has ended as the one without faults")
    conclude(f"cells of {asked} (kind, group, phase, mode) whose fault has happened in a run that ended as one without",
             Spread.of([0.0 if wrong else reached / asked]), 1.0, unit="share", holds=not wrong)


if __name__ == "__main__":
    main()
