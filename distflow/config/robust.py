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
)

from distflow.config.yaml_source import Document

Phase = Literal["starting", "waiting", "generating", "tools", "computing", "inference", "training", "saving",
                "publishing", "pulling", "validating", "ending"]
"""Activity that a worker reports to its supervisor. waiting: for samples, prompts or weights of others; tools: for the
environments of unfinished rows; computing: nodes without a model; inference: nodes that only read a model; pulling: a
rollout fetches weights while it samples."""
PHASES: tuple[Phase, ...] = get_args(Phase)


class Fault(Document):
    """Fault to inject once into one worker."""

    kind: Literal["kill", "stop", "raise", "slow", "corrupt", "cut", "fill", "memory", "oom", "machine"]
    """kill: SIGKILL. stop: SIGSTOP. raise: an exception. slow: sleep for `seconds`. corrupt: change the newest copy in
    memory. cut: shut down the worker's connections once. fill: for `seconds` no file grows beyond 64 KiB (EFBIG).
    memory: MemoryError. oom: the kernel's out-of-memory kill, in a control group. machine: SIGKILL of everything that
    its torchrun started."""
    group: Literal["trainer", "rollout", "inference"] = "trainer"
    """Group of the worker; in mode sync all ranks are the trainer's."""
    rank: NonNegativeInt | None = None
    """Rank of the run; default: one of the group, drawn by the seed."""
    step: PositiveInt
    """Step of the fault."""
    phase: Phase | None = None
    """Phase at whose beginning it happens; default: a moment drawn by the seed."""
    seconds: PositiveFloat = 5.0
    """Duration of `slow` and `fill`."""


class Robust(Document):
    """Recovery: restarts, snapshots, detectors."""

    restarts: NonNegativeInt = 20
    """Most restarts of the trainer, and of each rollout; others go on meanwhile. With 0 torchrun restarts everything
    from the newest checkpoint, if it has `--max-restarts` left."""
    snapshots: Literal[True, False, "local"] = True
    """Copy the state to host memory after each step, so that a restart repeats at most one finished step. Takes twice
    the memory of weights and optimizer state, three times during a slow checkpoint. With `--store` a second machine
    gets them too, and takes over if the first is lost; local: it does not."""
    shutdown_timeout: PositiveFloat = 25.0
    """Seconds for the step in progress and a checkpoint after SIGTERM or Ctrl-C. Kubernetes and torchrun kill after 30
    s."""
    machine_silence: float = Field(default=30.0, ge=3)
    """Seconds without a heartbeat until a machine counts as lost (with `--store`)."""
    detectors: dict[str, Literal["stop", "note", "off", "restart"] | dict[str, bool | NonNegativeFloat]] = {}
    """Reaction to each fault of learning (docs/learning_faults.md), such as {entropy_collapse: stop}. note: report it.
    stop: end the run and keep the checkpoint before. off: ignore it. restart: repeat the step once. Other detectors
    take settings: {stalled: {seconds: 600}}."""

    @field_validator("detectors", mode="before")
    @classmethod
    def _named_off(cls, value: Any) -> Any:
        """YAML may read `off` as false."""
        return {name: "off" if each is False else each for name, each in value.items()} \
            if isinstance(value, dict) else value

    @property
    def replicates(self) -> bool:
        return self.snapshots is True
