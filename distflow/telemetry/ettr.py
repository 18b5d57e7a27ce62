"""Computes what failures have cost a run, from its events: recovery times and ETTR (RobustRL §7.2).

A rank is effective from when its worker is ready until a worker of its restart group dies, or makes its last progress
before it hangs. ETTR is the effective share of the time of all ranks, so that the rollouts count while the trainer
starts again, as #rollout / (#rollout + #trainer). Work that is done twice counts as effective, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distflow.telemetry.run_reader import EventTail

STARTS_AGAIN = "starts again"
Event = dict[str, Any]


@dataclass
class Recovery:
    """One failure and its recovery. Times are in seconds, nan for what has not happened; `began` counts from the run's
    first ready worker.

    detect: from the last progress to the decision. start: until the new workers are forked. connect, load: until they
    have their process group, and their models and state. first: until their first step is done.
    """

    group: str
    rank: int
    step: int
    phase: str
    what: str
    verdict: str
    began: float
    detect: float
    start: float = math.nan
    connect: float = math.nan
    load: float = math.nan
    first: float = math.nan


@dataclass
class FailureCosts:
    """Failures of a run, and its effective time. total: seconds from the first ready worker to the last event.
    intervals: for each rank, when it was effective."""

    total: float = 0.0
    recoveries: list[Recovery] = field(default_factory=list)
    intervals: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def ettr(self) -> float:
        """Return the effective share of the time of all ranks, from 0 to 1."""
        return self.ettr_between(0.0, self.total)

    def ettr_between(self, start: float, end: float) -> float:
        if end <= start or not self.intervals:
            return math.nan
        effective = sum(max(0.0, min(last, end) - max(first, start))
                        for each in self.intervals.values() for first, last in each)
        return effective / ((end - start) * len(self.intervals))

    def sliding(self, window: float) -> list[float]:
        """Return the ETTR of each window of `window` seconds, one after the other."""
        return [self.ettr_between(at * window, min((at + 1) * window, self.total))
                for at in range(max(1, math.ceil(self.total / window)))]


def account(events: Iterable[Event]) -> FailureCosts:
    """Return the costs from the events of all ranks, in any order."""
    ordered, result = sorted(events, key=lambda event: event["time"]), FailureCosts()
    ready = [event["time"] for event in ordered if event["event"] == "worker_ready"]
    origin = ready[0] if ready else ordered[0]["time"] if ordered else 0.0
    result.total = ordered[-1]["time"] - origin if ready else 0.0
    last: dict[int, float] = {}
    for index, event in enumerate(ordered):
        now, rank, kind = event["time"] - origin, event["rank"], event["event"]
        if kind == "worker_ready":
            mine = result.intervals.setdefault(rank, [])
            if mine and mine[-1][1] == math.inf:  # of a worker whose end has no event
                _close_intervals(result, [rank], last[rank])
            mine.append((now, math.inf))
        elif kind in ("worker_ended", "worker_scaled_down"):
            _close_intervals(result, [rank], now)
        elif kind == "failure":
            first, final = event["ranks"]
            group = [each for each in result.intervals if first <= each <= final or event["verdict"] != STARTS_AGAIN]
            _close_intervals(result, group, now - event["seen_after"])
            result.recoveries.append(_recovery(event, now, ordered[index + 1 :]))
        last[rank] = now
    _close_intervals(result, list(result.intervals), result.total)
    return result


def read(folder: Path) -> list[Event]:
    """Return the events of a run, by the names that they have now; torn lines are passed over."""
    return list(EventTail(folder / "events.jsonl").new())


def _close_intervals(result: FailureCosts, ranks: Iterable[int], end: float) -> None:
    for rank in ranks:
        if each := result.intervals.get(rank):
            began, ended = each[-1]
            each[-1] = (began, max(began, min(end, ended)))


def _recovery(failure: Event, now: float, later: list[Event]) -> Recovery:
    seen = failure["seen_after"]
    found = Recovery(failure["group"], failure["rank"], failure["failed_step"], failure["phase"], failure["what"],
                     failure["verdict"], now - seen, seen)
    first, last = failure["ranks"]
    mine = []
    for event in (event for event in later if first <= event["rank"] <= last):
        again = event["event"] == "worker_ready" and event["attempt"] <= failure["attempt"]
        if again or event["event"] == "failure":
            break  # later events are of another attempt, or of another start of the task
        mine += [event] if event.get("attempt") == failure["attempt"] + 1 else []
    started, ready, caught_up = ([event for event in mine if event["event"] == f"worker_{kind}"]
                              for kind in ("started", "ready", "caught_up"))
    if started:
        found.start = max(event["time"] for event in started) - failure["time"]
    if ready:
        found.connect, found.load = (max(event["seconds"][part] for event in ready) for part in ("connect", "load"))
    if caught_up and ready:
        found.first = max(event["time"] for event in caught_up) - max(event["time"] for event in ready)
    return found
