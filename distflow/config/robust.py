"""Recovery section of a run file: phases of a worker, faults to inject, restarts and detectors."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from distflow.config.yaml_source import Document

Phase = Literal["starting", "waiting", "generating", "tools", "computing", "inference", "training", "saving",
                "publishing", "pulling", "validating", "ending"]
"""Activity that a worker reports to its supervisor. waiting: for samples, prompts or weights of others; tools: for the
environments of unfinished rows; computing: nodes without a model; inference: nodes that only read a model; pulling: a
rollout fetches weights while it samples."""
PHASES: tuple[Phase, ...] = get_args(Phase)


class Fault(Document):
    """Fault to inject once into one worker (`faults:` in the run file)."""

    kind: Literal["kill", "stop", "raise", "slow", "corrupt", "cut", "fill", "memory", "oom", "machine"]
    """kill: SIGKILL, as by a machine or the kernel. stop: SIGSTOP, the process hangs. raise: an exception. slow: the
    process sleeps for `seconds`. corrupt: the newest copy in memory changes. cut: its connections are shut down once,
    but for those to the store. fill: for `seconds` none of its files grows beyond 64 KiB (a limit of the process:
    EFBIG). memory: it takes memory until a limit of the process refuses (MemoryError). oom: it takes memory until the
    kernel ends it, in a control group that has a limit. machine: SIGKILL of all that its torchrun has started, where
    machines start apart."""
    group: Literal["trainer", "rollout", "inference"] = "trainer"
    """Group of the worker; in mode sync all ranks are the trainer's. One that trains one role is named by its rank."""
    rank: NonNegativeInt | None = None
    """Rank of the run; default: one of the group, drawn by the seed."""
    step: PositiveInt | None = None
    """Step in which it happens; or give `share`."""
    phase: Phase | None = None
    """Phase at whose beginning in that step it happens; default: a moment drawn by the seed."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Share of all steps but the first in which it happens, drawn by the seed, instead of one `step`."""
    seconds: PositiveFloat = 5.0
    """Duration of `slow` and `fill`."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Fault:
        if (self.step is None) == (self.share is None):
            raise ValueError("say in which `step`, or in which `share` of the steps")
        return self


class Robust(Document):
    """Recovery: what is restarted and how often, snapshots, detectors."""

    restart: Literal["role", "task"] = "role"
    """role: what has failed starts again, the trainer with all its ranks, a rollout by itself. task: the run ends, and
    torchrun starts all of it again from the newest checkpoint on disk, if it has `--max-restarts` left."""
    restarts: NonNegativeInt = 20
    """How often each of them may start again."""
    snapshots: bool = True
    """Whether the state after each step is copied to host memory, and in mode sync what was sampled in the step under
    way, so that a restart repeats one finished step at most. It takes the memory of weights and optimizer state twice,
    and three times where writing a checkpoint lasts longer than a step. Without it there is one copy, for
    writing checkpoints, and a trainer goes on from the newest on disk; in modes async and semi_sync the dock keeps what
    was trained on since."""
    peer_replica: bool = True
    """Whether, where machines start by themselves (--store), what `snapshots` copies goes on to the memory of a second
    machine, so that the run goes on from there when the first is lost. It takes the memory of weights and optimizer
    state twice there, and up to twice more on the first while that lasts longer than a step."""
    shutdown_timeout: PositiveFloat = 25.0
    """Seconds in which a run that SIGTERM or Ctrl-C ends may finish the step under way and write a checkpoint.
    Kubernetes and torchrun kill after 30 s."""
    machine_silence: float = Field(default=30.0, ge=3)
    """Seconds without a heartbeat, of which there is one a second, after which a machine counts as lost, where machines
    start by themselves (--store)."""
    detectors: dict[str, Literal["stop", "note", "off"] | dict[str, bool | NonNegativeFloat]] = {}
    """Detectors of learning (docs/learning_faults.md) by name, as {entropy_collapse: stop}: `note`, the default, says
    so; `stop` ends the run and keeps the checkpoint before the first step of the fault; `off` ignores it. Of the other
    detectors the settings, as {stalled: {seconds: 600}}. `straggler`, `loss_spike` and `all_dropped` warn. With
    {restart: true} `loss_spike` has the step done again by workers that start from the state before it. They start to
    observe again: a step that spikes again is taken as it is, unless its loss is no number."""

    @field_validator("detectors", mode="before")
    @classmethod
    def _named_off(cls, value: Any) -> Any:
        """YAML may read `off` as false."""
        return {name: "off" if each is False else each for name, each in value.items()} \
            if isinstance(value, dict) else value

    @property
    def replicates(self) -> bool:
        return self.snapshots and self.peer_replica
