"""The process in which users' policies decide how many rollouts there should be; see `distflow.recovery.autoscaler`."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from functools import partial

from distflow.contracts.decorators import load_module
from distflow.contracts.signature import module_file
from distflow.plan import ROLLOUT
from distflow.recovery import autoscaler
from distflow.recovery.worker_process import end_beside, start_beside
from distflow.telemetry import events
from workers.context import RankContext
from workers.isolation.sandbox.processes import end_with


@contextlib.contextmanager
def scaled(place: RankContext) -> Iterator[None]:
    """Meanwhile the policies of the DAG's modules are asked, if there are any; by the first rank's seat."""
    rollouts = next((group.replicas for group in place.plan.groups if group.name == ROLLOUT), 0)
    if place.board.rank or not rollouts or not any(map(_may_scale, place.spec.dag.imports)):
        yield
        return
    process = start_beside(partial(_attend, place, rollouts, os.getpid()))
    try:
        yield
    finally:
        end_beside(process)


def _attend(place: RankContext, rollouts: int, seat: int) -> None:
    end_with(seat)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its seat is told too, and ends it
    if place.channel:
        place.channel.joined(place.board.store)
    for module in place.spec.dag.imports:
        load_module(module)
    events.current().open(place.path / "events.jsonl", place.board.rank)
    autoscaler.autoscale(place.path, 0 if place.spec.run.mode == "semi_sync" else 1, rollouts)


def _may_scale(module: str) -> bool:
    """Whether its source has the word; what it has is known when it is loaded."""
    source = module_file(module)
    return source is not None and "scaling" in source.read_text(encoding="utf-8")
