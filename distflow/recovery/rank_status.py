"""Who is where: each rank says on the board what it is doing, and one that waits in vain can tell whom for."""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from distflow.config.run import Phase
from distflow.telemetry import heartbeat

_SHOWN = 8


class RankStatus:
    """A rank's word on what it does, and its view of the others'. Saying it costs one message to the store."""

    def __init__(self, store: dist.Store, rank: int, ranks: int):
        self.store, self.rank, self.ranks = store, rank, ranks
        self.mine = ""

    def now(self, doing: str, phase: Phase = "waiting") -> None:
        """Say what this rank does from now on, such as "is in step 3, computing node `rollout`"."""
        self.mine = doing
        heartbeat.current().enter(phase)
        with contextlib.suppress(dist.DistError):  # without the store nobody can ask; the work may still go on
            self.store.set(f"doing/{self.rank}", f"{time.time()} {doing}")

    def missing(self) -> str:
        """The ranks that are not where this one is, what they are doing and for how long; empty if that is unknown."""
        try:
            elsewhere = [line for rank in range(self.ranks) if (line := self._elsewhere(rank))]
        except dist.DistError:
            return ""  # the store ended with the machine that hosted it
        if not elsewhere:
            return "no rank says that it is elsewhere: all had come as far as this one when one ended or was cut off"
        more = f"; and {len(elsewhere) - _SHOWN} more" if len(elsewhere) > _SHOWN else ""
        return "; ".join(elsewhere[:_SHOWN]) + more

    def _elsewhere(self, rank: int) -> str:
        if not self.store.check([f"doing/{rank}"]):
            return f"rank {rank} has not begun"
        since, _, doing = self.store.get(f"doing/{rank}").decode().partition(" ")
        return f"rank {rank} {doing}, for {time.time() - float(since):.0f} s" if doing != self.mine else ""
