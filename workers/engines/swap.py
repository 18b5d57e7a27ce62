"""Swaps the training and the sampling engine of a role that share a device (MindSpeed RL §3.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from distflow.telemetry.metrics import current
from distflow.weights.fingerprint import Sums
from distflow.weights.offload import HostOffload
from workers.engines.rollout import Rollout
from workers.engines.trainer import Trainer
from workers.engines.weight_route import WeightRoute


class EngineSwap:
    """Swap of a role's engines: with `swap` only one has its memory on the device at a time.

    The optimizer state moves to host memory, the weights are copied (shards, one bucket and the rollout's weights
    coexist), then the shards move too. After sampling the rollout sleeps, and both come back while other roles compute.
    A rank with one engine alone swaps nothing, and takes its part in bringing the weights from one to the other.
    """

    def __init__(self, trainer: Trainer | None, rollout: Rollout, swap: bool, route: WeightRoute | None = None,
                 device: torch.device | None = None, role: str = ""):
        """`route`: of the weights, where the engines are not on the same ranks; `device`: where they arrive; `role`:
        whose engines they are, in errors."""
        self.trainer, self.rollout, self.route, self.device, self.role = trainer, rollout, route, device, role
        self.swap = swap and trainer is not None and not rollout.absent
        self.optimizer = HostOffload(lambda: trainer.resident(weights=False) if trainer else (),
                                     trainer.scratch if trainer else tuple)
        self.everything = HostOffload(trainer.resident if trainer else tuple)
        self.asleep = False
        if self.swap:
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
            self.optimizer.offload()
            if self.asleep:
                self.rollout.wake()
                self.asleep = False
            self._load()
            self.everything.offload()
            current().maximum("weights/swapped_bytes", self.optimizer.bytes + self.everything.bytes)
            yield self.rollout
            self._sleep()  # not after an error: rows may be under way
        finally:
            self.everything.reload()
            self.optimizer.reload()

    def _sleep(self) -> None:
        self.rollout.sleep()
        self.asleep = True

    def ready(self) -> None:
        self.everything.wait()
        self.optimizer.wait()

    def _load(self) -> None:
        newer = self._version_to_load()
        if newer is not None:  # always so when it has slept
            current().maximum("weights/bytes", self.rollout.load(self._weights(), newer))
            self.rollout.prove(self.role, self._published())

    def _version_to_load(self) -> int | None:
        """Return the version to load; None if it is loaded."""
        trained = self.trainer.version if self.trainer else None
        if self.route:
            return self.route.newer_version(trained, None if self.rollout.absent else self.rollout.version)
        return None if self.rollout.version == trained else trained

    def _published(self) -> Sums:
        sums = self.trainer.sums(self.rollout.dtype) if self.trainer else None
        return self.route.first_of(sums) if self.route else sums or {}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.trainer:
            weights = self.trainer.export(self.rollout.dtype, self.rollout.weight_buffers())
            return self.route.send_and_yield(weights) if self.route else weights
        assert self.route, "a rank without a trainer gets weights from those that have it"
        assert self.device
        return self.route.receive(self.device)
