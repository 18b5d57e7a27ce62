"""Stopped workers, and quiet ones: who suspects which, and when? (RobustRL, Figure 2)

A run of mode async on three ranks, a trainer and two rollouts, whose tool has a long tail: all ranks are idle for
seconds again and again, and healthy. Four times one of them is stopped (SIGSTOP), the trainer in training and a rollout
while it samples, and stays so for `HELD` seconds. What a supervisor observes of its worker, five times a second, is
recorded by a detector that suspects nobody. All three ways then look at this one record, with the same limit:

- rank     suspects a rank that has not computed for `limit` seconds, as ByteRobust by the paper's account.
- cluster  suspects the run when no rank has computed for so long.
- phase    distflow's own detectors (`distflow.recovery.detectors`), of which each knows in which phases it asks.

An alarm is a detection if its rank (of `cluster`: any) is stopped then, and false if none is. Others may wait for the
stopped one: an alarm about them is neither. What is measured in seconds on a small model scales with the limit alone.
Run by hand:  python -m benchmarks.detection
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from benchmarks.fault_matrix import DAG, SETTINGS
from benchmarks.ratio import Spread, conclude, options, parsed
from benchmarks.runs import run_once
from benchmarks.slow_tools import latency
from distflow import Turn, environment
from distflow.recovery.detectors import DETECTORS, Observation, detector
from distflow.telemetry.ettr import Event, read

HELD, RANKS = 30.0, 3
LIMITS, GOAL = (2.0, 4.0, 8.0), 4.0
WAYS = ("rank", "cluster", "phase")
_FILE = "DISTFLOW_OBSERVATIONS"
_COMPUTING, _RECENT = ("generating", "inference", "training", "computing"), 0.5
_TALK = """
  rollout:   {role: actor, type: MODEL_INFERENCE, function: converse, with: {environment: LongTail, group_size: 4,
              max_turns: 4, max_tokens: 48, step_seconds: 120.0}}"""


@environment(safe=True)
class LongTail:
    """Answers three turns, each after seconds that are distributed lognormally."""

    def __init__(self, question: str):
        self.said, self.turns = question, 0

    async def step(self, text: str) -> Turn:
        self.said, self.turns = self.said + text, self.turns + 1
        await asyncio.sleep(latency(self.said, 0.3, 1.2))
        return Turn(f"{len(text)} letters", done=self.turns == 3, reward=1 / (1 + len(text)))


@detector
def observer(observation: Observation) -> str | None:
    """Suspect nobody, and write down what was seen."""
    if folder := os.environ.get(_FILE):
        rank = os.environ["RANK"]
        with open(Path(folder) / f"{rank}.jsonl", "a") as file:
            print(json.dumps([time.time(), int(rank), asdict(observation)]), file=file)
    return None


@dataclass(frozen=True)
class Look:
    """What was seen of a rank at a moment."""

    moment: float
    rank: int
    seen: Observation


@dataclass(frozen=True)
class Hold:
    """When a rank was stopped, and when it had ended."""

    rank: int
    since: float
    until: float

    def covers(self, moment: float) -> bool:
        return self.since <= moment <= self.until


def suspects(seen: Observation, limit: float) -> bool:
    """Return whether distflow's detectors suspect a worker, with all their settings in proportion to `limit`."""
    return any((DETECTORS["stalled"](seen, seconds=limit), DETECTORS["frozen"](seen, seconds=limit),
                DETECTORS["no_tokens"](seen, seconds=limit, answer=limit / 6, stuck=10 * limit)))


def alarms(looks: Sequence[Look], limit: float) -> dict[str, list[tuple[float, int]]]:
    """Return when each way begins to suspect which rank."""
    worked: dict[int, float] = {}
    raised: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
    before: set[tuple[str, int]] = set()
    for look in looks:
        if look.seen.phase in ("starting", "ending"):
            worked[look.rank] = look.moment
            continue
        if look.seen.phase in _COMPUTING and look.seen.silent < _RECENT:
            worked[look.rank] = look.moment
        idle = {rank: look.moment - moment for rank, moment in worked.items()}
        now = {"rank": idle.get(look.rank, 0.0) > limit, "cluster": min(idle.values(), default=0.0) > limit,
               "phase": suspects(look.seen, limit)}
        for way, suspected in now.items():
            key = way, -1 if way == "cluster" else look.rank
            if suspected and key not in before:
                raised[way].append((look.moment, key[1]))
            before = before | {key} if suspected else before - {key}
    return raised


def holds_of(events: Sequence[Event]) -> Iterator[Hold]:
    """Yield when which rank was stopped: from the fault to the decision of its supervisor."""
    for event in events:
        if event["event"] == "fault_injected":
            ended = [each["time"] for each in events if each["event"] == "worker_ended"
                     and each["rank"] == event["rank"] and each["time"] > event["time"]]
            yield Hold(event["rank"], event["time"], min(ended, default=math.inf))


def judge(raised: Sequence[tuple[float, int]], holds: Sequence[Hold]) -> tuple[list[float], int]:
    """Return the seconds to each detection, and how many alarms are false."""
    took = [min((moment - hold.since for moment, rank in raised if hold.covers(moment) and rank in (-1, hold.rank)),
                default=math.inf) for hold in holds]
    return took, sum(not any(hold.covers(moment) for hold in holds) for moment, _ in raised)


def record(scratch: Path, faults: int) -> tuple[list[Look], list[Hold]]:
    """Run once; return what was seen, in order, and who was stopped."""
    talk = DAG.replace("ROLLOUT", _TALK).replace("LAST", "rollout").replace("REWARDS", "environment_rewards")
    (scratch / "detection.yaml").write_text(talk.replace("benchmarks.small_talk", "benchmarks.detection"))
    where = (("trainer", "training"), ("rollout", "generating"))
    stops = [{"kind": "stop", "group": group, "phase": phase, "step": 4 + 4 * number}
             for number, (group, phase) in enumerate(where[index % 2] for index in range(faults))]
    quiet = f"stalled: {{seconds: {HELD}}}, no_tokens: {{seconds: {HELD}, stuck: 600}}, frozen: {{seconds: {HELD}}}"
    with mock.patch.dict(os.environ, {_FILE: str(scratch)}):
        folder = run_once(scratch, "observed", scratch / "detection.yaml", "embedded.yaml", RANKS, (
            *SETTINGS[:-1], f"steps={8 + 4 * faults}", "mode=async", "groups.rollout=2", "staleness=1",
            f"robust={{restarts: 100, detectors: {{{quiet}, observer: {{}}}}}}", f"faults={json.dumps(stops)}"))
    lines = [json.loads(line) for file in scratch.glob("[0-9].jsonl") for line in file.read_text().splitlines()]
    looks = [Look(moment, rank, Observation(**seen)) for moment, rank, seen in sorted(lines, key=lambda line: line[0])]
    return looks, list(holds_of(read(folder)))


def main(arguments: list[str] | None = None) -> None:
    given = parsed(options(__doc__, repeats=None), arguments)
    with tempfile.TemporaryDirectory(prefix="detection-") as scratch:
        looks, holds = record(Path(scratch), 1 if given.quick else 4)
    print(f"{looks[-1].moment - looks[0].moment:.0f} s of {RANKS} ranks, {len(looks)} observations, {len(holds)} stops "
          f"of {Spread.of([hold.until - hold.since for hold in holds])} s")
    found = {(limit, way): judge(raised, holds) for limit in LIMITS for way, raised in alarms(looks, limit).items()}
    for (limit, way), (took, false) in found.items():
        print(f"limit {limit:g} s, {way:8} {false:4} false alarms; stops seen after "
              + ", ".join("never" if math.isinf(each) else f"{each:.1f} s" for each in took))
    ours, theirs = (found[GOAL, way][0] for way in ("phase", "cluster"))
    conclude(f"seconds until a stopped worker is seen, by the cluster over by rank and phase, limit {GOAL:g} s, up to "
             f"the {HELD:g} s that it lasts; no false alarm", Spread.of([min(HELD, their) / our for our, their in
             zip(ours, theirs)]), 1.0, holds=not any(found[limit, "phase"][1] for limit in LIMITS))


if __name__ == "__main__":
    main()
