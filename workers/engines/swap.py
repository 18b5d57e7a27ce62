"""Between the two engines of a role that share a device: weights one way, memory both ways (MindSpeed RL §3.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distflow.telemetry.metrics import current
from distflow.weights.offload import HostOffload
from workers.engines.rollout import Rollout
from workers.engines.trainer import Trainer


class EngineSwap:
    """Lets the rollout sample with the trainer's newest weights.

    With `swap` only one of the two has its memory at a time, except while weights are handed over: then there are the
    shards, a bucket, and the rollout's weights. The optimizer's state leaves for host memory before that, the shards
    after it; when the rollout is done it sleeps and both come back, while other roles may compute.
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
        """The rollout, awake and with the newest weights. Collective to enter; whatever happens inside, the trainer has
        its memory again afterwards."""
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
        """The trainer may compute from here on."""
        self.everything.ready()
        self.optimizer.ready()

    def _load(self) -> None:
        if self.rollout.version != self.trainer.version:  # always so when it has slept
            weights = self.trainer.export(self.rollout.dtype, self.rollout.places())
            current().maximum("weights/bytes", self.rollout.load(weights, self.trainer.version))
