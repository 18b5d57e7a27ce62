"""Anomaly detectors: of one worker that makes no progress (RobustRL §4), and of steps that go wrong on all ranks.

    detector of   is a function of           is asked by       returns
    a worker      an `Observation`           `HealthMonitor`   what is wrong, or None
    steps         the last `StepReport`s     `StepMonitor`     an `Alert`, or None

A supervisor asks detectors of a worker, by the phase that the worker is in:

    @detector
    def slow_save(observation: Observation, *, seconds: float = 900.0) -> str | None:
        if observation.phase == "saving" and observation.silent > seconds:
            return f"has been saving for {observation.silent:.0f} s"

All ranks of the trainer ask detectors of steps after each step, about the same numbers, and get the same answer:

    @detector(sees="steps")
    def endless(steps: Sequence[StepReport], *, tokens: float = 1000.0, restart: bool = False) -> Alert | None:
        if steps[-1].metrics.get("response/length", 0.0) > tokens:
            return Alert("responses have become endless", restart=restart)

A user's detector stands in a module that the DAG imports, and is named in the run file, with settings or without:
detectors: {slow_save: {}}. The supervisor loads the module too and forks workers from there, so the module must not
touch CUDA or start threads.
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
from typing import Any, Literal, TypeVar, overload

from distflow.config.robust import Phase
from distflow.telemetry.heartbeat import Heartbeat, Silence

_ACTIVE = 0.1  # percent of the time; less is noise


@functools.cache
def tensor_cores(uuid: str) -> Callable[[], bool] | None:
    """Return a function that says whether a GPU's tensor cores have worked since its last call; None if unsupported.

    A GPU that is busy proves nothing: a collective that waits for a dead rank keeps it busy, but no tensor core
    (RobustRL §4). NVML (package nvidia-ml-py, extra `gpu`) measures tensor cores from Hopper on. A supervisor may use
    NVML, but never CUDA, or it could not fork workers that use it. `uuid`: NVML's name of the GPU.
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
            asked: Any = nvml.c_nvmlGpmMetricsGet_t(version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=1,
                                                    sample1=old, sample2=new)
            asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
            answer: Any = nvml.nvmlGpmMetricsGet(asked)
            found = answer.metrics[0]
        except nvml.NVMLError:  # as for a GPU that is lost
            return False
        return found.nvmlReturn == nvml.NVML_SUCCESS and found.value > _ACTIVE

    return worked


_POLL_INTERVAL = 1.0  # seconds between two looks at a GPU, and beyond which a look at a worker is late


@dataclass(frozen=True)
class Observation:
    """State of a worker as its supervisor observes it. Times are in seconds.

    group: `trainer`, `rollout`, `inference`, or in mode sync `ranks`. silent: since its last progress: a micro-batch,
    some tokens or a new phase. mute: since its last heartbeat; a process that computes, waits for others or for a tool
    has one, one that is stopped or holds Python's lock does not. idle: since its GPU's tensor cores last worked; None
    where that is not measured.
    """

    group: str
    phase: Phase
    step: int
    in_phase: float
    silent: float
    mute: float
    idle: float | None = None


@dataclass(frozen=True)
class Finding:
    """What is wrong with a worker. symptom: it still answers, so that it may only be waiting for a broken one."""

    what: str
    symptom: bool
    silent: float


Detector = Callable[[Observation], str | None]
DETECTORS: dict[str, Callable[..., str | None]] = {}
STEP_DETECTORS: dict[str, Callable[..., Any]] = {}
F = TypeVar("F", bound=Callable[..., Any])


@overload
def detector(function: F, /) -> F: ...


@overload
def detector(*, sees: Literal["worker", "steps"] = "worker") -> Callable[[F], F]: ...


def detector(function: F | None = None, *, sees: Literal["worker", "steps"] = "worker") -> Any:
    """Register a detector by its function's name; one of the same name is replaced."""
    def register(function: F) -> F:
        (STEP_DETECTORS if sees == "steps" else DETECTORS)[function.__name__] = function
        return function

    return register if function is None else register(function)


@detector
def stalled(observation: Observation, *, seconds: float = 300.0, busy: float = 1800.0) -> str | None:
    """Detect that no micro-batch was done for `seconds` in a phase that only computes; for `busy` seconds if the GPU's
    tensor cores still work."""
    silent, idle = observation.silent, observation.idle
    limit = seconds if idle is None or idle > seconds else max(seconds, busy)
    if observation.phase not in ("training", "inference") or silent <= limit:
        return None
    cores = "" if idle is None else f", and its tensor cores have not worked for {idle:.0f} s"
    return f"has made no progress for {silent:.0f} s of {observation.phase}{cores} (detector `stalled`)"


@detector
def no_tokens(observation: Observation, *, seconds: float = 60.0, answer: float = 10.0,
              stuck: float = 600.0) -> str | None:
    """Detect that no token was sampled for `seconds` by a worker that does not answer, or for `stuck` seconds by one
    that does: ranks that share a model wait in a collective for one. Waiting for prompts or tools is another phase."""
    if observation.phase != "generating" or observation.silent <= seconds:
        return None
    if observation.mute > answer:
        return (f"has sampled no token for {observation.silent:.0f} s and does not answer for {observation.mute:.0f} s "
                "(detector `no_tokens`)")
    if observation.silent > max(seconds, stuck):
        return f"has sampled no token for {observation.silent:.0f} s, though it answers (detector `no_tokens`)"
    return None


@detector
def frozen(observation: Observation, *, seconds: float = 60.0, starting: float = 300.0) -> str | None:
    """Detect no progress and no answer in any phase: the process is stopped, or a call holds Python's lock."""
    limit = starting if observation.phase == "starting" else seconds
    if min(observation.silent, observation.mute) > limit:
        return f"does not answer for {observation.mute:.0f} s, in phase {observation.phase} (detector `frozen`)"
    return None


class HealthMonitor:
    """Asks all detectors about one worker of a group. `settings`: of detectors, by name; those of learning
    have a word, and are asked by `telemetry.learning`."""

    def __init__(self, group: str, settings: Mapping[str, Any]):
        self.group = group
        self.detectors: list[Detector] = [partial(function, **settings.get(name, {}))
                                          for name, function in DETECTORS.items()]

    def begin(self, heartbeat: Heartbeat) -> None:
        self.heartbeat, self.gpu = heartbeat, ""
        self.progress, self.heartbeats = Silence(_POLL_INTERVAL), Silence(_POLL_INTERVAL)
        self.cores: TensorCores | None = None

    def look(self) -> Finding | None:
        observation = self._observe()
        for each in self.detectors:
            if what := each(observation):
                return Finding(f"it {what}.", symptom=observation.mute < _POLL_INTERVAL * 2, silent=observation.silent)
        return None

    def _observe(self) -> Observation:
        reading = self.heartbeat.read()
        if self.gpu != self.heartbeat.gpu:
            self.gpu = self.heartbeat.gpu
            have_worked = tensor_cores(self.gpu)
            self.cores = have_worked and TensorCores(have_worked)
        return Observation(self.group, reading.phase, reading.step, time.monotonic() - reading.since,
                           self.progress.of(reading.progress), self.heartbeats.of(self.heartbeat.page.heartbeats),
                           self.cores and self.cores.idle_seconds())


class TensorCores:
    """Tensor cores of a worker's GPU. `have_worked`: whether they have since it was last called."""

    def __init__(self, have_worked: Callable[[], bool]):
        self.have_worked, self.silence = have_worked, Silence(_POLL_INTERVAL)
        self.active_looks, self.looked = 0, time.monotonic()

    def idle_seconds(self) -> float:
        """Return the seconds since they last worked, by a look once a second."""
        if time.monotonic() - self.looked > _POLL_INTERVAL:
            self.looked = time.monotonic()
            self.active_looks += self.have_worked()
        return self.silence.of(self.active_looks)


_REMEMBERED = 200  # steps that detectors see


@dataclass(frozen=True)
class StepReport:
    """A step that is done, as all ranks know it. metrics: as in metrics.jsonl, but for the step's seconds.
    compute_seconds: for each phase, by rank, its own seconds in the phase and how many rows it had there."""

    number: int
    metrics: Mapping[str, float]
    compute_seconds: Mapping[Phase, Sequence[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Alert:
    """What is wrong with the last steps. facts: for the event. about: an alert about the same thing as in the step
    before is not reported again. restart: the step has failed, and its ranks go back to the state before it."""

    what: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    restart: bool = False


StepDetector = Callable[[Sequence[StepReport]], Alert | None]


@detector(sees="steps")
def straggler(steps: Sequence[StepReport], *, factor: float = 2.0, during: float = 5.0,
              share: float = 0.1) -> Alert | None:
    """Warn of a rank that takes `factor` times as long for a phase as the median of the others, also per row, in each
    of the last `during` steps, if that costs at least this share of the step. A restart would not help."""
    recent = steps[-max(1, math.ceil(during)):]
    if len(recent) < during:
        return None
    slowest, phase, rank = max(((min(_slowdown(step, phase, rank, share) for step in recent), phase, rank)
                                for phase, ranks in recent[-1].compute_seconds.items() for rank in range(len(ranks))),
                               default=(0.0, "waiting", 0))
    if slowest < factor:
        return None
    return Alert(f"rank {rank} is slow: {phase} takes it at least {slowest:.1f} times as long as the others, "
                 f"{len(recent)} steps in a row",
                 {"rank": rank, "phase": phase, "factor": round(slowest, 2), "steps": len(recent)},
                 f"{rank} {phase}")


def _slowdown(step: StepReport, phase: Phase, rank: int, share: float) -> float:
    """Return how many times as long as its peers a rank takes, in total and per row: the lesser of the two."""
    ranks = step.compute_seconds.get(phase, ())
    peers = [each for other, each in enumerate(ranks) if other != rank and each[1]]
    if rank >= len(ranks) or not ranks[rank][1] or not peers:
        return 0.0
    mine, rows = ranks[rank]
    theirs, each_row = median(seconds for seconds, _ in peers), median(seconds / rows for seconds, rows in peers)
    if mine - theirs < share * sum(max(seconds for seconds, _ in each) for each in step.compute_seconds.values()):
        return 0.0
    return min(mine / max(theirs, 1e-9), mine / rows / max(each_row, 1e-9))


@detector(sees="steps")
def all_dropped(steps: Sequence[StepReport]) -> Alert | None:
    """Warn of a step in which a node has dropped every row."""
    values = steps[-1].metrics
    for name in values:
        kind, _, rest = name.partition("/")
        node, _, what = rest.rpartition("/")
        if (kind, what) == ("filter", "dropped") and values[name] > 0 and values.get(f"filter/{node}/kept") == 0:
            return Alert(f"node `{node}` has dropped all {values[name]:.0f} rows, so that the step trains nothing",
                         {"node": node, "rows": values[name]}, node)
    return None


class StepMonitor:
    """Asks all detectors of steps, after each step. `settings`: of detectors, by name."""

    def __init__(self, settings: Mapping[str, Any]):
        self.detectors: dict[str, StepDetector] = {
            name: partial(function, **(given if isinstance(given := settings.get(name), Mapping) else {}))
            for name, function in STEP_DETECTORS.items()}
        self.steps: deque[StepReport] = deque(maxlen=_REMEMBERED)
        self.reported: dict[str, str] = {}

    def look(self, step: StepReport) -> Iterator[tuple[str, Alert]]:
        """Yield what is wrong now and was not in the step before, with the detector's name."""
        self.steps.append(step)
        for name, detect in self.detectors.items():
            alert = detect(list(self.steps))
            if alert and self.reported.get(name) != alert.about:
                yield name, alert
            self.reported.pop(name, None)
            if alert:
                self.reported[name] = alert.about
