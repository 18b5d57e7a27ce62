"""When the steps of a run go wrong though every worker works: a rank that holds up the others, a loss that leaps.

A detector of steps is a function of the last `StepReport`s, the newest last, that returns an `Alert` or nothing. All
ranks of the trainer ask it after each step, of the same numbers, and it must answer alike on all:

    @detector(sees="steps")
    def endless(steps: Sequence[Step], *, tokens: float = 1000.0, restart: bool = False) -> Alarm | None:
        if steps[-1].metrics.get("response/length", 0.0) > tokens:
            return Alarm("responses have become endless", restart=restart)

Whether a worker's GPU computes, as its seat sees it (RobustRL §4: no TensorCore activity for a window of time).

NVML tells it from Hopper on, as a share of the time between two samples (GPM). That a GPU is not idle means nothing: a
collective that waits for a rank that has died keeps it busy, and no tensor core works. A seat may ask NVML, but never
CUDA, or it could not fork workers that use it. Package nvidia-ml-py, extra `gpu`.

When a worker that lives does not work any more: what its silence means depends on what it was doing (RobustRL §4).

A detector is a function of a `Observation` that returns what is wrong, or nothing:

    @detector
    def slow_save(sight: Sight, *, seconds: float = 900.0) -> str | None:
        if sight.phase == "saving" and sight.silent > seconds:
            return f"has been saving for {sight.silent:.0f} s"

One of the user's own stands in a module that the DAG imports, and is named in the run file, with settings or without:
detectors: {slow_save: {}}. It watches in the seat, from which workers are forked: its module must not touch CUDA or
start threads.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

from distflow.config.run import Phase
from distflow.telemetry.heartbeat import Heartbeat, HeartbeatReading

_WORKS = 0.1
"""Percent of the time; what is less is noise."""


@functools.cache
def tensor_cores(uuid: str) -> Callable[[], bool] | None:
    """A function that tells whether those of a GPU were seen at work since it was last called; None if nobody can tell.

    Args:
        uuid: of the GPU, as NVML calls it: GPU-….
    """
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
            return None
        old, new = (nvml.nvmlGpmSampleGet(device, nvml.nvmlGpmSampleAlloc()) for _ in range(2))
    except (nvml.NVMLError, AttributeError):  # no driver, a part of a GPU, or an older package
        return None

    def worked() -> bool:
        nonlocal old, new
        try:
            old, new = new, nvml.nvmlGpmSampleGet(device, old)
            asked = nvml.c_nvmlGpmMetricsGet_t(version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=1, sample1=old,
                                               sample2=new)
            asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
            found = nvml.nvmlGpmMetricsGet(asked).metrics[0]
        except nvml.NVMLError:  # as of a GPU that is lost, which does not work any more
            return False
        return found.nvmlReturn == nvml.NVML_SUCCESS and found.value > _WORKS

    return worked


_ASK = 1.0
"""Seconds between two questions whether a worker still answers."""


@dataclass(frozen=True)
class Observation:
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


Detector = Callable[[Observation], str | None]
DETECTORS: dict[str, Callable[..., str | None]] = {}
OF_STEPS: dict[str, Callable[..., Any]] = {}
"""Those of `distflow.recovery.detectors`."""


def detector(function: Callable[..., Any] | None = None, *, sees: Literal["worker", "steps"] = "worker") -> Any:
    """Register a detector by its name; one of the same name is replaced. `sees="steps"`: see `judges`."""
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        (OF_STEPS if sees == "steps" else DETECTORS)[function.__name__] = function
        return function

    return register if function is None else register(function)


@detector
def stalled(sight: Observation, *, seconds: float = 300.0, busy: float = 1800.0) -> str | None:
    """No micro-batch done for this long, in a phase that only computes; `busy` if its GPU's tensor cores still work."""
    works = sight.idle is not None and sight.idle <= seconds
    if sight.phase in ("training", "inference") and sight.silent > (max(seconds, busy) if works else seconds):
        cores = "" if sight.idle is None else f", and its tensor cores have not worked for {sight.idle:.0f} s"
        return f"has made no progress for {sight.silent:.0f} s of {sight.phase}{cores} (detector `stalled`)"
    return None


@detector
def no_tokens(sight: Observation, *, seconds: float = 60.0, answer: float = 10.0, stuck: float = 600.0) -> str | None:
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
def frozen(sight: Observation, *, seconds: float = 60.0, starting: float = 300.0) -> str | None:
    """No progress and no answer in any phase: the process is stopped, or a call does not let go of Python's lock."""
    limit = starting if sight.phase == "starting" else seconds
    if min(sight.silent, sight.mute) > limit:
        return f"does not answer for {sight.mute:.0f} s, in phase {sight.phase} (detector `frozen`)"
    return None


class HealthMonitor:
    """Asks all detectors about one worker.

    Args:
        unit: of the worker.
        settings: of detectors, by name.
    """

    def __init__(self, unit: str, settings: Mapping[str, Mapping[str, float]]):
        self.unit = unit
        self.detectors: list[Detector] = [partial(function, **settings.get(name, {}))
                                          for name, function in DETECTORS.items()]

    def begin(self, pulse: Heartbeat) -> None:
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

    def _sight(self, now: float) -> Observation:
        beat: HeartbeatReading = self.pulse.read()
        late = max(0.0, now - self.looked - _ASK)  # a seat that stood still itself did not see its worker stand still
        self.moved, self.asked_at, self.looked = self.moved + late, self.asked_at + late, now
        if beat.progress != self.progress:
            self.progress, self.moved = beat.progress, now
        if self.pulse.answered >= self.question and now - self.asked_at > _ASK:
            self.question, self.asked_at = self.pulse.ask(), now
        self._look_at_gpu(now, late)
        mute = 0.0 if self.pulse.answered >= self.question else now - self.asked_at
        idle = now - self.worked if self.cores else None
        return Observation(self.unit, beat.phase, beat.step, now - beat.since, now - self.moved, mute, idle)

    def _look_at_gpu(self, now: float, late: float) -> None:
        self.worked += late
        if self.gpu != self.pulse.gpu:
            self.gpu, self.sampled = self.pulse.gpu, now
            self.cores, self.worked = tensor_cores(self.gpu), now
        elif self.cores and now - self.sampled > _ASK:
            self.sampled = now
            self.worked = now if self.cores() else self.worked


_REMEMBERED = 200
"""Steps that detectors are shown."""
_OF_NORMAL = 1.4826
"""Standard deviations in the median distance from the median, where values are normal."""


@dataclass(frozen=True)
class StepReport:
    """A step that is done, as all ranks know it. metrics: as in metrics.jsonl, but for the step's seconds. pace: for
    each phase and rank, its own seconds in the phase and how many rows it had there; see `workers.rank_timer`."""

    number: int
    metrics: Mapping[str, float]
    pace: Mapping[Phase, Sequence[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Alert:
    """What is wrong with the last steps. facts: for the event. about: an alarm about the same thing as in the step
    before is not told again. restart: the step has failed, and its ranks go back to the state before it."""

    what: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    restart: bool = False


Judge = Callable[[Sequence[StepReport]], Alert | None]


@detector(sees="steps")
def straggler(steps: Sequence[StepReport], *, factor: float = 2.0, during: float = 5.0,
              share: float = 0.1) -> Alert | None:
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
    return Alert(f"rank {rank} is slow: {phase} takes it at least {slowest:.1f} times as long as the others, "
                 f"{len(recent)} steps in a row",
                 {"rank": rank, "phase": phase, "factor": round(slowest, 2), "steps": len(recent)},
                 f"{rank} {phase}")


def _slower(step: StepReport, phase: Phase, rank: int, share: float) -> float:
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
def loss_spike(steps: Sequence[StepReport], *, deviations: float = 15.0, window: float = 50.0, least: float = 20.0,
               restart: bool = False) -> Alert | None:
    """A loss or a gradient norm that is no number, or far from what it was: by more than so many deviations from the
    median of a window of steps that trained, if there were at least so many. With `restart` the step is done again,
    and the window begins anew: in its first `least` steps, so in this one too, only what is no number is seen."""
    *before, last = steps
    for name, value in last.metrics.items():
        if name.rpartition("/")[2] not in ("loss", "grad_norm"):
            continue
        usual = [each for step in before[-int(window):] if (each := step.metrics.get(name)) and math.isfinite(each)]
        if not math.isfinite(value):
            return Alert(f"{name} is {value}", {"metric": name}, name, restart)
        if len(usual) < max(least, 1):
            continue
        middle = median(usual)
        # Values that hardly differ, as the loss where each step makes one update, are not told apart by their rounding.
        spread = max(_OF_NORMAL * median(abs(each - middle) for each in usual), abs(middle) / 20, 1e-3)
        if (far := abs(value - middle) / spread) > deviations:
            facts = {"metric": name, "value": value, "median": middle, "deviations": round(far, 1)}
            return Alert(f"{name} is {value:.4g}, {far:.0f} deviations from the median of {len(usual)} steps, "
                         f"{middle:.4g}", facts, name, restart)
    return None


@detector(sees="steps")
def no_gradient(steps: Sequence[StepReport], *, during: float = 10.0) -> Alert | None:
    """Warn of a gradient norm of exactly 0 in each of the last `during` steps: nothing is learnt. Usually all samples
    of each prompt earn the same."""
    recent = steps[-max(1, math.ceil(during)):]
    for name in recent[-1].metrics if len(recent) >= during else ():
        if name.rpartition("/")[2] == "grad_norm" and all(step.metrics.get(name) == 0 for step in recent):
            return Alert(f"{name} has been 0 for {len(recent)} steps, so that nothing is learnt. Do the samples of a "
                         "prompt earn different rewards? samples.jsonl shows them",
                         {"metric": name, "steps": len(recent)}, name)
    return None


@detector(sees="steps")
def all_dropped(steps: Sequence[StepReport]) -> Alert | None:
    """Warn of a step in which a node has dropped every row: nothing is left to learn from."""
    values = steps[-1].metrics
    for name in values:
        kind, _, rest = name.partition("/")
        node, _, what = rest.rpartition("/")
        if (kind, what) == ("filter", "dropped") and values[name] > 0 and values.get(f"filter/{node}/kept") == 0:
            return Alert(f"node `{node}` has dropped all {values[name]:.0f} rows, so that the step trains nothing",
                         {"node": node, "rows": values[name]}, node)
    return None


class StepMonitor:
    """Asks all detectors of steps, after each step."""

    def __init__(self, settings: Mapping[str, Mapping[str, float]]):
        """`settings`: of detectors, by name."""
        self.judges: dict[str, Judge] = {name: partial(function, **settings.get(name, {}))
                                         for name, function in OF_STEPS.items()}
        self.steps: deque[StepReport] = deque(maxlen=_REMEMBERED)
        self.told: dict[str, str] = {}

    def look(self, step: StepReport) -> Iterator[tuple[str, Alert]]:
        """What is wrong now and was not in the step before, with the detector's name."""
        self.steps.append(step)
        for name, judge in self.judges.items():
            alarm = judge(list(self.steps))
            if alarm and self.told.get(name) != alarm.about:
                yield name, alarm
            self.told.pop(name, None)
            if alarm:
                self.told[name] = alarm.about
