"""When the steps of a run go wrong though every worker works: a rank that holds up the others, a loss that leaps.

A detector of steps is a function of the last `Step`s, the newest last, that returns an `Alarm` or nothing. All ranks of
the trainer ask it after each step, of the same numbers, and it must answer alike on all:

    @detector(sees="steps")
    def endless(steps: Sequence[Step], *, tokens: float = 1000.0, restart: bool = False) -> Alarm | None:
        if steps[-1].metrics.get("response/length", 0.0) > tokens:
            return Alarm("responses have become endless", restart=restart)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from distflow.robust.detect import OF_STEPS, detector
from distflow.schema.robust import Phase

_REMEMBERED = 200
"""Steps that detectors are shown."""
_OF_NORMAL = 1.4826
"""Standard deviations in the median distance from the median, where values are normal."""


@dataclass(frozen=True)
class Step:
    """A step that is done, as all ranks know it. metrics: as in metrics.jsonl, but for the step's seconds. pace: for
    each phase and rank, its own seconds in the phase and how many rows it had there; see `workers.pace`."""

    number: int
    metrics: Mapping[str, float]
    pace: Mapping[Phase, Sequence[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Alarm:
    """What is wrong with the last steps. facts: for the event. about: an alarm about the same thing as in the step
    before is not told again. restart: the step has failed, and its ranks go back to the state before it."""

    what: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    restart: bool = False


Judge = Callable[[Sequence[Step]], Alarm | None]


@detector(sees="steps")
def straggler(steps: Sequence[Step], *, factor: float = 2.0, during: float = 5.0, share: float = 0.1) -> Alarm | None:
    """A rank that takes `factor` times as long for a phase as the others do on the median, for as many rows too, in
    each of the last `during` steps; if that costs at least this share of the step. It only warns: a slow machine stays
    slow when its worker starts again."""
    recent = steps[-max(1, math.ceil(during)):]
    if len(recent) < during:
        return None
    slowest, phase, rank = max(((min(_slower(step, phase, rank, share) for step in recent), phase, rank)
                                for phase, ranks in recent[-1].pace.items() for rank in range(len(ranks))),
                               default=(0.0, "waiting", 0))
    if slowest < factor:
        return None
    return Alarm(f"rank {rank} is slow: {phase} takes it at least {slowest:.1f} times as long as the others, "
                 f"{len(recent)} steps in a row",
                 {"rank": rank, "phase": phase, "factor": round(slowest, 2), "steps": len(recent)},
                 f"{rank} {phase}")


def _slower(step: Step, phase: Phase, rank: int, share: float) -> float:
    """How many times as long as its peers a rank takes, whether rows are counted or not."""
    ranks = step.pace.get(phase, ())
    peers = [each for other, each in enumerate(ranks) if other != rank and each[1]]
    if rank >= len(ranks) or not ranks[rank][1] or not peers:
        return 0.0
    mine, rows = ranks[rank]
    theirs, each_row = median(seconds for seconds, _ in peers), median(seconds / rows for seconds, rows in peers)
    if mine - theirs < share * sum(max(seconds for seconds, _ in each) for each in step.pace.values()):
        return 0.0
    return min(mine / max(theirs, 1e-9), mine / rows / max(each_row, 1e-9))


@detector(sees="steps")
def loss_spike(steps: Sequence[Step], *, deviations: float = 15.0, window: float = 50.0, least: float = 20.0,
               restart: bool = False) -> Alarm | None:
    """A loss or a gradient norm that is no number, or far from what it was: by more than so many deviations from the
    median of a window of steps that trained, if there were at least so many. With `restart` the step is done again,
    and the window begins anew: in its first `least` steps, so in this one too, only what is no number is seen."""
    *before, last = steps
    for name, value in last.metrics.items():
        if name.rpartition("/")[2] not in ("loss", "grad_norm"):
            continue
        usual = [each for step in before[-int(window):] if (each := step.metrics.get(name)) and math.isfinite(each)]
        if not math.isfinite(value):
            return Alarm(f"{name} is {value}", {"metric": name}, name, restart)
        if len(usual) < max(least, 1):
            continue
        middle = median(usual)
        # Values that hardly differ, as the loss where each step makes one update, are not told apart by their rounding.
        spread = max(_OF_NORMAL * median(abs(each - middle) for each in usual), abs(middle) / 20, 1e-3)
        if (far := abs(value - middle) / spread) > deviations:
            facts = {"metric": name, "value": value, "median": middle, "deviations": round(far, 1)}
            return Alarm(f"{name} is {value:.4g}, {far:.0f} deviations from the median of {len(usual)} steps, "
                         f"{middle:.4g}", facts, name, restart)
    return None


@detector(sees="steps")
def no_gradient(steps: Sequence[Step], *, during: float = 10.0) -> Alarm | None:
    """Warn of a gradient norm of exactly 0 in each of the last `during` steps: nothing is learnt. Usually all samples
    of each prompt earn the same."""
    recent = steps[-max(1, math.ceil(during)):]
    for name in recent[-1].metrics if len(recent) >= during else ():
        if name.rpartition("/")[2] == "grad_norm" and all(step.metrics.get(name) == 0 for step in recent):
            return Alarm(f"{name} has been 0 for {len(recent)} steps, so that nothing is learnt. Do the samples of a "
                         "prompt earn different rewards? samples.jsonl shows them",
                         {"metric": name, "steps": len(recent)}, name)
    return None


@detector(sees="steps")
def all_dropped(steps: Sequence[Step]) -> Alarm | None:
    """Warn of a step in which a node has dropped every row: nothing is left to learn from."""
    values = steps[-1].metrics
    for name in values:
        kind, _, rest = name.partition("/")
        node, _, what = rest.rpartition("/")
        if (kind, what) == ("filter", "dropped") and values[name] > 0 and values.get(f"filter/{node}/kept") == 0:
            return Alarm(f"node `{node}` has dropped all {values[name]:.0f} rows, so that the step trains nothing",
                         {"node": node, "rows": values[name]}, node)
    return None


class Judges:
    """Asks all detectors of steps, after each step."""

    def __init__(self, settings: Mapping[str, Mapping[str, float]]):
        """`settings`: of detectors, by name."""
        self.judges: dict[str, Judge] = {name: partial(function, **settings.get(name, {}))
                                         for name, function in OF_STEPS.items()}
        self.steps: deque[Step] = deque(maxlen=_REMEMBERED)
        self.told: dict[str, str] = {}

    def look(self, step: Step) -> Iterator[tuple[str, Alarm]]:
        """What is wrong now and was not in the step before, with the detector's name."""
        self.steps.append(step)
        for name, judge in self.judges.items():
            alarm = judge(list(self.steps))
            if alarm and self.told.get(name) != alarm.about:
                yield name, alarm
            self.told.pop(name, None)
            if alarm:
                self.told[name] = alarm.about
