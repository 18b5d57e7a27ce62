"""Publishes each rank's activity, so that a timeout can name the ranks that are elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from distflow.config.robust import Phase
from distflow.store.interface import Store, StoreUnavailable
from distflow.telemetry import heartbeat, timeline
from distflow.telemetry.collectives import absent

COLLECTIVES = "collectives"  # first part of the keys of what each `CollectiveMonitor` publishes
_SHOWN = 8


def absent_ranks(store: Store, ranks: Iterable[int]) -> str:
    """Return which of the ranks have not entered a collective in which others wait; empty if that is unknown."""
    numbers = [*ranks]
    try:
        return absent(dict(zip(numbers, store.get_all([f"{COLLECTIVES}/{rank}" for rank in numbers]))))
    except StoreUnavailable:
        return ""


class RankStatus:
    """A rank's published activity, and its view of the others'. Each change costs one message to the store.

    Args:
        rank: torch's number of this rank; ranks: how many restart together; first: number of torch's rank 0.
    """

    def __init__(self, store: Store, rank: int, ranks: int, first: int = 0):
        self.store, self.rank, self.ranks = store, first + rank, range(first, first + ranks)
        self.activity = ""

    def set(self, doing: str, phase: Phase = "waiting", node: str = "") -> None:
        """Publish what this rank does from now on, as "computing node `rollout`". `node`: of the DAG, if any."""
        heart = heartbeat.current()
        self.activity = f"is in step {heart.page.step}, {doing}" if heart.page.step else f"is {doing}"
        heart.enter(phase)
        timeline.current().enter(doing, phase, heart.page.step, node)
        with contextlib.suppress(StoreUnavailable):  # the work may go on without the store
            self.store.post(f"status/{self.rank}", f"{time.time()} {self.activity}")

    def missing(self) -> str:
        """Return which ranks do something else than this one, and for how long; empty if that is unknown."""
        try:
            found = self.store.get_all([f"status/{rank}" for rank in self.ranks])
            elsewhere = [line for rank, status in zip(self.ranks, found) if (line := self._elsewhere(rank, status))]
        except StoreUnavailable:
            return ""  # the store ended with the machine that hosted it
        elsewhere += [text] if (text := absent_ranks(self.store, self.ranks)) else []
        if not elsewhere:
            return "no rank says that it is elsewhere: all had come as far as this one when one ended or was cut off"
        more = f"; and {len(elsewhere) - _SHOWN} more" if len(elsewhere) > _SHOWN else ""
        return "; ".join(elsewhere[:_SHOWN]) + more

    def _elsewhere(self, rank: int, status: str) -> str:
        if not status:
            return f"rank {rank} has not begun"
        since, _, activity = status.partition(" ")
        return f"rank {rank} {activity}, for {time.time() - float(since):.0f} s" if activity != self.activity else ""
