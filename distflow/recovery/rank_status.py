"""Publishes each rank's activity, so that a timeout can name the ranks that are elsewhere."""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from distflow.config.run import Phase
from distflow.telemetry import heartbeat

_SHOWN = 8


class RankStatus:
    """A rank's published activity, and its view of the others'. Each change costs one message to the store."""

    def __init__(self, store: Store, rank: int, ranks: int):
        self.store, self.rank, self.ranks = store, rank, ranks
        self.activity = ""

    def set(self, activity: str, phase: Phase = "waiting") -> None:
        """Publish what this rank does from now on, such as "is in step 3, computing node `rollout`"."""
        self.activity = activity
        heartbeat.current().enter(phase)
        with contextlib.suppress(dist.DistError):  # the work may go on without the store
            self.store.set(f"status/{self.rank}", f"{time.time()} {activity}")

    def missing(self) -> str:
        """Return which ranks do something else than this one, and for how long; empty if that is unknown."""
        try:
            elsewhere = [line for rank in range(self.ranks) if (line := self._elsewhere(rank))]
        except dist.DistError:
            return ""  # the store ended with the machine that hosted it
        if not elsewhere:
            return "no rank says that it is elsewhere: all had come as far as this one when one ended or was cut off"
        more = f"; and {len(elsewhere) - _SHOWN} more" if len(elsewhere) > _SHOWN else ""
        return "; ".join(elsewhere[:_SHOWN]) + more

    def _elsewhere(self, rank: int) -> str:
        if not self.store.check([f"status/{rank}"]):
            return f"rank {rank} has not begun"
        since, _, activity = self.store.get(f"status/{rank}").decode().partition(" ")
        return f"rank {rank} {activity}, for {time.time() - float(since):.0f} s" if activity != self.activity else ""
