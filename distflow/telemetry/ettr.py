"""What failures have cost a run, from its events (RobustRL §7.2).

A rank is effective from the moment when its worker is ready until it does nothing useful any more: until a worker of
its unit dies, or has made its last progress before it hangs. ETTR is the effective share of the time of all ranks, so
that while the trainer starts again the rollouts count, as #rollout / (#rollout + #trainer). Work that is done twice
counts as effective, as it does in the paper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTS_AGAIN = "starts again"
Event = dict[str, Any]


@dataclass
class Recovery:
    """One failure and what came after it. Times are seconds: `began` since the run's first worker was ready; nan is
    what has not happened.

    detect: from the last sign of work to the decision. start: until the new workers live. connect, load: until they
    have found each other, and have their models and state. first: until their first step is done.
    """

    unit: str
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
    """A run's failures, and how much of its time was effective.

    intervals: for each rank, when it was effective. `total` seconds are those from the first ready worker to the last
    event.
    """

    total: float = 0.0
    recoveries: list[Recovery] = field(default_factory=list)
    intervals: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def ettr(self) -> float:
        """Between 0 and 1; of all ranks, over the whole run."""
        return self.ettr_between(0.0, self.total)

    def ettr_between(self, start: float, end: float) -> float:
        """Of a window of the run's time, in seconds."""
        if end <= start or not self.intervals:
            return math.nan
        effective = sum(max(0.0, min(last, end) - max(first, start))
                        for each in self.intervals.values() for first, last in each)
        return effective / ((end - start) * len(self.intervals))

    def sliding(self, window: float) -> list[float]:
        """That of each window of `window` seconds, one after the other."""
        return [self.ettr_between(at * window, min((at + 1) * window, self.total))
                for at in range(max(1, math.ceil(self.total / window)))]


def account(events: Iterable[Event]) -> FailureCosts:
    """From the events of all ranks, in any order."""
    ordered, result = sorted(events, key=lambda event: event["time"]), FailureCosts()
    ready = [event["time"] for event in ordered if event["event"] == "worker ready"]
    origin = ready[0] if ready else ordered[0]["time"] if ordered else 0.0
    result.total = ordered[-1]["time"] - origin if ready else 0.0
    last: dict[int, float] = {}
    for place, event in enumerate(ordered):
        now, rank, kind = event["time"] - origin, event["rank"], event["event"]
        if kind == "worker ready":
            mine = result.intervals.setdefault(rank, [])
            if mine and mine[-1][1] == math.inf:  # of a worker whose end nobody saw
                _close(result, [rank], last[rank])
            mine.append((now, math.inf))
        elif kind in ("worker ended", "worker rests"):
            _close(result, [rank], now)
        elif kind == "failure":
            first, final = event["ranks"]
            unit = range(first, final + 1) if event["verdict"] == STARTS_AGAIN else list(result.intervals)
            _close(result, unit, now - event["seen_after"])
            result.recoveries.append(_recovery(event, now, ordered[place + 1 :]))
        last[rank] = now
    _close(result, list(result.intervals), result.total)
    return result


def read(folder: Path) -> list[Event]:
    """The events of a run; a torn line is passed over."""
    found = []
    for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _close(result: FailureCosts, ranks: Iterable[int], end: float) -> None:
    """These ranks' last intervals end there, if they do not end before."""
    for rank in ranks:
        if each := result.intervals.get(rank):
            began, ended = each[-1]
            each[-1] = (began, max(began, min(end, ended)))


def _recovery(failure: Event, now: float, later: list[Event]) -> Recovery:
    """The failure, with what its unit's next workers have said."""
    seen = failure["seen_after"]
    found = Recovery(failure["unit"], failure["rank"], failure["failed_step"], failure["phase"], failure["what"],
                     failure["verdict"], now - seen, seen)
    first, last = failure["ranks"]
    mine = []
    for event in (event for event in later if first <= event["rank"] <= last):
        if event["event"] == "failure" or (event["event"] == "worker ready" and not event["life"] > failure["life"]):
            break  # what comes now is of another life, or of another start of the task
        mine += [event] if event.get("life") == failure["life"] + 1 else []
    started, ready, useful = ([event for event in mine if event["event"] == f"worker {kind}"]
                              for kind in ("started", "ready", "useful"))
    if started:
        found.start = max(event["time"] for event in started) - failure["time"]
    if ready:
        found.connect, found.load = (max(event["seconds"][part] for event in ready) for part in ("connect", "load"))
    if useful and ready:
        found.first = max(event["time"] for event in useful) - max(event["time"] for event in ready)
    return found
