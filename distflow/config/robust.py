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
    """kill: SIGKILL, as by a machine or the kernel. stop: SIGSTOP, the process hangs. raise: an exception. slow: sleep
    for `seconds`. corrupt: change the newest copy in memory. cut: shut down the worker's connections once, except those
    to the store. fill: for `seconds` no file grows beyond 64 KiB (EFBIG). memory: take memory up to a limit of the
    process (MemoryError). oom: take memory until the kernel kills, in a control group with a limit. machine: SIGKILL of
    everything that its torchrun has started, if machines start apart."""
    group: Literal["trainer", "rollout", "inference"] = "trainer"
    """Group of the worker. In mode sync all ranks are the trainer's. `rank` names a worker that trains one role."""
    rank: NonNegativeInt | None = None
    """Rank of the run; default: one of the group, drawn by the seed."""
    step: PositiveInt | None = None
    """Step of the fault; or give `share`."""
    phase: Phase | None = None
    """Phase at whose beginning it happens; default: a moment drawn by the seed."""
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
    """role: only the failed part restarts: the trainer with all its ranks, or one rollout. task: the run ends, and
    torchrun restarts all of it from the newest checkpoint, if it has `--max-restarts` left."""
    restarts: NonNegativeInt = 20
    """Most restarts of the trainer, and of each rollout."""
    snapshots: bool = True
    """Copy the state to host memory after each step, and in mode sync the samples of the step in progress, so that a
    restart repeats at most one finished step. It takes the memory of weights and optimizer state twice; three times
    while a checkpoint takes longer than a step. Without it there is one copy, for checkpoints, and a trainer continues
    from the newest one on disk; in modes async and semi_sync the dock keeps the rows trained on since then."""
    peer_replica: bool = True
    """Send snapshots to a second machine, so that the run continues from there if the first is lost. For machines that
    start apart (--store). It takes the memory of weights and optimizer state twice there, and up to twice more at home
    while sending takes longer than a step."""
    shutdown_timeout: PositiveFloat = 25.0
    """Seconds for the step in progress and a checkpoint after SIGTERM or Ctrl-C. Kubernetes and torchrun kill after 30
    s."""
    machine_silence: float = Field(default=30.0, ge=3)
    """Seconds without a heartbeat (one a second) until a machine counts as lost, if machines start apart (--store)."""
    detectors: dict[str, Literal["stop", "note", "off"] | dict[str, bool | NonNegativeFloat]] = {}
    """Reaction of each detector of learning (docs/learning_faults.md), such as {entropy_collapse: stop}: `note` (the
    default) reports it; `stop` ends the run and keeps the checkpoint before the fault; `off` ignores it. For other
    detectors their settings, such as {stalled: {seconds: 600}}. `straggler` and `all_dropped` warn. `loss_spike` may
    have a word or {restart: true}, which repeats the step from the state before it, once; a second spike is accepted
    unless its loss is not a number."""

    @field_validator("detectors", mode="before")
    @classmethod
    def _named_off(cls, value: Any) -> Any:
        """YAML may read `off` as false."""
        return {name: "off" if each is False else each for name, each in value.items()} \
            if isinstance(value, dict) else value

    @property
    def replicates(self) -> bool:
        return self.snapshots and self.peer_replica
