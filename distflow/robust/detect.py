"""When a worker that lives does not work any more: what its silence means depends on what it was doing (RobustRL §4).

A detector is a function of a `Sight` that returns what is wrong, or nothing:

    @detector
    def slow_save(sight: Sight, *, seconds: float = 900.0) -> str | None:
        if sight.phase == "saving" and sight.silent > seconds:
            return f"has been saving for {sight.silent:.0f} s"

One of the user's own stands in a module that the DAG imports, and is named in the run file, with settings or without:
detectors: {slow_save: {}}. It watches in the seat, from which workers are forked: its module must not touch CUDA or
start threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from distflow.robust.pulse import Beat, Pulse
from distflow.robust.tensor_cores import tensor_cores
from distflow.schema.robust import Phase

_ASK = 1.0
"""Seconds between two questions whether a worker still answers."""


@dataclass(frozen=True)
class Sight:
    """What a seat sees of its worker. Times are in seconds.

    unit: `trainer`, `rollout`, or in mode sync `ranks`. silent: since it last made progress, a micro-batch, some tokens
    or a new phase. mute: for how long it has left a question unanswered; a process that computes, waits for others or
    for a tool answers, one that is stopped or holds Python's lock does not. idle: for how long the tensor cores of its
    GPU were not seen at work; None where nobody can tell.
    """

    unit: str
    phase: Phase
    step: int
    in_phase: float
    silent: float
    mute: float
    idle: float | None = None


@dataclass(frozen=True)
class Finding:
    """What is wrong. symptom: the worker still answers, so that it may only be waiting for the one that is broken."""

    what: str
    symptom: bool
    silent: float


Detector = Callable[[Sight], str | None]
DETECTORS: dict[str, Callable[..., str | None]] = {}
OF_STEPS: dict[str, Callable[..., Any]] = {}
"""Those of `distflow.robust.judges`."""


def detector(function: Callable[..., Any] | None = None, *, sees: Literal["worker", "steps"] = "worker") -> Any:
    """Register a detector by its name; one of the same name is replaced. `sees="steps"`: see `judges`."""
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        (OF_STEPS if sees == "steps" else DETECTORS)[function.__name__] = function
        return function

    return register if function is None else register(function)


@detector
def stalled(sight: Sight, *, seconds: float = 300.0, busy: float = 1800.0) -> str | None:
    """No micro-batch done for this long, in a phase that only computes; `busy` if its GPU's tensor cores still work."""
    works = sight.idle is not None and sight.idle <= seconds
    if sight.phase in ("training", "inference") and sight.silent > (max(seconds, busy) if works else seconds):
        cores = "" if sight.idle is None else f", and its tensor cores have not worked for {sight.idle:.0f} s"
        return f"has made no progress for {sight.silent:.0f} s of {sight.phase}{cores} (detector `stalled`)"
    return None


@detector
def no_tokens(sight: Sight, *, seconds: float = 60.0, answer: float = 10.0, stuck: float = 600.0) -> str | None:
    """No token sampled for this long, and then no answer either; or, while it answers, none for `stuck`: ranks that
    share a model wait in a collective for one of them. Waiting for prompts, tools or weights is no silence: it is
    another phase."""
    if sight.phase != "generating" or sight.silent <= seconds:
        return None
    if sight.mute > answer:
        return (f"has sampled no token for {sight.silent:.0f} s and does not answer for {sight.mute:.0f} s "
                "(detector `no_tokens`)")
    if sight.silent > max(seconds, stuck):
        return f"has sampled no token for {sight.silent:.0f} s, though it answers (detector `no_tokens`)"
    return None


@detector
def frozen(sight: Sight, *, seconds: float = 60.0, starting: float = 300.0) -> str | None:
    """No progress and no answer in any phase: the process is stopped, or a call does not let go of Python's lock."""
    limit = starting if sight.phase == "starting" else seconds
    if min(sight.silent, sight.mute) > limit:
        return f"does not answer for {sight.mute:.0f} s, in phase {sight.phase} (detector `frozen`)"
    return None


class Watcher:
    """Asks all detectors about one worker.

    Args:
        unit: of the worker.
        settings: of detectors, by name.
    """

    def __init__(self, unit: str, settings: Mapping[str, Mapping[str, float]]):
        self.unit = unit
        self.detectors: list[Detector] = [partial(function, **settings.get(name, {}))
                                          for name, function in DETECTORS.items()]

    def begin(self, pulse: Pulse) -> None:
        """A new worker."""
        self.pulse, self.progress = pulse, -1
        self.moved = self.asked_at = self.looked = self.worked = self.sampled = time.monotonic()
        self.gpu, self.cores = "", None
        self.question = pulse.ask()

    def look(self) -> Finding | None:
        """What is wrong with the worker now."""
        sight = self._sight(time.monotonic())
        for each in self.detectors:
            if what := each(sight):
                return Finding(f"it {what}.", symptom=sight.mute < _ASK * 2, silent=sight.silent)
        return None

    def _sight(self, now: float) -> Sight:
        beat: Beat = self.pulse.read()
        late = max(0.0, now - self.looked - _ASK)  # a seat that stood still itself did not see its worker stand still
        self.moved, self.asked_at, self.looked = self.moved + late, self.asked_at + late, now
        if beat.progress != self.progress:
            self.progress, self.moved = beat.progress, now
        if self.pulse.answered >= self.question and now - self.asked_at > _ASK:
            self.question, self.asked_at = self.pulse.ask(), now
        self._look_at_gpu(now, late)
        mute = 0.0 if self.pulse.answered >= self.question else now - self.asked_at
        idle = now - self.worked if self.cores else None
        return Sight(self.unit, beat.phase, beat.step, now - beat.since, now - self.moved, mute, idle)

    def _look_at_gpu(self, now: float, late: float) -> None:
        self.worked += late
        if self.gpu != self.pulse.gpu:
            self.gpu, self.sampled = self.pulse.gpu, now
            self.cores, self.worked = tensor_cores(self.gpu), now
        elif self.cores and now - self.sampled > _ASK:
            self.sampled = now
            self.worked = now if self.cores() else self.worked
