"""Records how long each node with a model takes on each rank: `times.jsonl`, for `distflow plan --from`.

Metrics have the time of the slowest rank; a plan for unlike devices needs each rank's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

from distflow.measurements import NodeTiming
from distflow.telemetry import events
from distflow.telemetry.run_reader import is_number, parsed

_ALL, _EVERY = 32, 8
"""The first steps are all written, then one of so many: the file of a long run on many ranks stays small."""
_COLD, _LATEST = 2, 64
NAME = "times.jsonl"


@dataclass(frozen=True)
class StepTimings:
    """Timings of a rank's nodes in a step. seconds: also of what no node does. plan: digest of the plan in force."""

    plan: str
    step: int
    rank: int
    seconds: float
    nodes: Mapping[str, NodeTiming]


class TimingsFile:
    """Timings file of a run, as one rank appends to it."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.rank, self.plan = 0, ""
        self.nodes: dict[str, NodeTiming] = {}

    def open(self, path: Path, rank: int, plan: str) -> None:
        """Write steps to this file from now on. `plan`: the digest of the plan in force."""
        self.path, self.rank, self.plan, self.nodes = path, rank, plan, {}

    def add(self, node: str, taken: NodeTiming) -> None:
        """Add what a node took in the step under way."""
        if self.path is not None:
            self.nodes.setdefault(node, NodeTiming()).add(taken)

    def write(self, step: int, seconds: float) -> None:
        """Write a step that is done, counted from 1."""
        nodes, self.nodes = self.nodes, {}
        if self.path is None or (step > _ALL and step % _EVERY):
            return
        each = {name: [round(taken.seconds, 5), *astuple(taken)[1:]] for name, taken in nodes.items()}
        said = {"plan": self.plan, "step": step, "rank": self.rank, "seconds": round(seconds, 5), "nodes": each}
        events.add_or_drop(self.path, [json.dumps(said)])


def read(path: Path) -> list[StepTimings]:
    """Return the steps of all ranks; of a step that was repeated, the last time. Torn lines are passed over."""
    found: dict[tuple[int, int], StepTimings] = {}
    for line in path.read_bytes().split(b"\n"):
        said = parsed(line) or {}
        try:
            nodes = {name: NodeTiming(*each) for name, each in said["nodes"].items()
                     if isinstance(each, list) and all(map(is_number, each))}
            step = StepTimings(said["plan"], said["step"], said["rank"], said["seconds"], nodes)
        except (TypeError, KeyError, AttributeError):  # a part of a line may be JSON too
            continue
        if type(step.step) is type(step.rank) is int and is_number(step.seconds):
            found[step.step, step.rank] = step
    return [found[key] for key in sorted(found)]


@dataclass(frozen=True)
class MedianTimings:
    """Median timings over `steps` steps. A rank without rows may have nothing of a node."""

    steps: int
    seconds: float
    nodes: Mapping[tuple[str, int], NodeTiming]  # by node and rank


def usual(steps: Iterable[StepTimings], ranks: int, plan: str) -> MedianTimings:
    """Return the medians over the latest steps by this plan that all of as many ranks have written; the first steps,
    which warm up, do not count. `steps` is 0 if there are none."""
    steps_by_number: dict[int, list[StepTimings]] = {}
    for step in (step for step in steps if step.plan == plan):
        steps_by_number.setdefault(step.step, []).append(step)
    nodes = {node for parts in steps_by_number.values() for part in parts for node in part.nodes}
    chosen = [parts for _, parts in sorted(steps_by_number.items()) if [part.rank for part in parts] == [*range(ranks)]
              and nodes == {node for part in parts for node in part.nodes}][_COLD:][-_LATEST:]
    if not chosen:
        return MedianTimings(0, 0.0, {})
    return MedianTimings(len(chosen), median(max(part.seconds for part in parts) for parts in chosen),
                         {(node, rank): _median([parts[rank].nodes.get(node, NodeTiming()) for parts in chosen])
                          for node in nodes for rank in range(ranks)})


def _median(each: list[NodeTiming]) -> NodeTiming:
    seconds, *counts = (median(values) for values in zip(*map(astuple, each)))
    return NodeTiming(seconds, *map(round, counts))


_current = TimingsFile()


def current() -> TimingsFile:
    return _current
