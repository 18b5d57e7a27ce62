"""Swaps the training and the sampling engine of a role that share a device (MindSpeed RL §3.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distflow.telemetry.metrics import current
from distflow.weights.offload import HostOffload
from workers.engines.rollout import Rollout
from workers.engines.trainer import Trainer


class EngineSwap:
    """Swap of a role's engines: with `swap` only one has its memory on the device at a time.

    The optimizer state moves to host memory, the weights are copied (shards, one bucket and the rollout's weights
    coexist), then the shards move too. After sampling the rollout sleeps, and both come back while other roles compute.
    """

    def __init__(self, trainer: Trainer, rollout: Rollout, swap: bool):
        self.trainer, self.rollout, self.swap = trainer, rollout, swap
        self.optimizer = HostOffload(lambda: trainer.resident(weights=False), trainer.scratch)
        self.everything = HostOffload(trainer.resident)
        self.asleep = False
        if swap:
            self._sleep()

    @contextlib.contextmanager
    def sampling(self) -> Iterator[Rollout]:
        """Yield the rollout with the newest weights; restore the trainer's memory. Entering is collective."""
        if not self.swap:
            self._load()
            yield self.rollout
            return
        try:
            self.ready()
            self.optimizer.out()
            if self.asleep:
                self.rollout.wake()
                self.asleep = False
            self._load()
            self.everything.out()
            current().maximum("weights/swapped_bytes", self.optimizer.bytes + self.everything.bytes)
            yield self.rollout
            self._sleep()  # not after an error: rows may be under way
        finally:
            self.everything.back()
            self.optimizer.back()

    def _sleep(self) -> None:
        self.rollout.sleep()
        self.asleep = True

    def ready(self) -> None:
        self.everything.ready()
        self.optimizer.ready()

    def _load(self) -> None:
        if self.rollout.version != self.trainer.version:  # always so when it has slept
            weights = self.trainer.export(self.rollout.dtype, self.rollout.weight_buffers())
            current().maximum("weights/bytes", self.rollout.load(weights, self.trainer.version))
