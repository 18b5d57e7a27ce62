"""Between the two engines of a role that share a device: weights one way, memory both ways (MindSpeed RL §3.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distflow.observe.metrics import current
from distflow.weights.attic import Attic
from workers.engines.rollout import Rollout
from workers.engines.trainer import Trainer


class Handover:
    """Lets the rollout sample with the trainer's newest weights.

    With `swap` only one of the two has its memory at a time: before the weights are gathered the optimizer's state
    leaves for host memory, and after it the shards themselves; when the rollout is done it sleeps and both come back,
    while other roles may compute.
    """

    def __init__(self, trainer: Trainer, rollout: Rollout, swap: bool):
        self.trainer, self.rollout, self.swap = trainer, rollout, swap
        self.optimizer = Attic(lambda: trainer.resident(weights=False), trainer.scratch)
        self.everything = Attic(trainer.resident)
        self.asleep = False

    @contextlib.contextmanager
    def sampling(self) -> Iterator[Rollout]:
        """The rollout, awake and with the newest weights. Collective to enter; whatever happens inside, the trainer has
        its memory again afterwards."""
        if self.swap:
            self.ready()
            self.optimizer.out()
            if self.asleep:
                self.rollout.wake()
                self.asleep = False
        self._load()
        if self.swap:
            self.everything.out()
            current().maximum("weights/swapped_bytes", self.optimizer.bytes + self.everything.bytes)
        try:
            yield self.rollout
        finally:
            if self.swap:
                self.rollout.sleep()
                self.asleep = True
                self.everything.back()
                self.optimizer.back()

    def ready(self) -> None:
        """The trainer may compute from here on."""
        self.everything.ready()
        self.optimizer.ready()

    def _load(self) -> None:
        if self.rollout.version != self.trainer.version:  # always so when it has slept
            weights = self.trainer.export(self.rollout.dtype, self.rollout.places())
            current().maximum("weights/bytes", self.rollout.load(weights, self.trainer.version))
