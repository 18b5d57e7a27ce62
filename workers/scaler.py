"""The process in which users' policies decide how many rollouts there should be; see `distflow.robust.scaling`."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from functools import partial

from distflow.observe import events
from distflow.robust import scaling
from distflow.robust.berth import end_beside, start_beside
from distflow.schema.contract import module_file
from distflow.schema.plan import ROLLOUT
from distflow.schema.registry import load_module
from workers.jail.processes import end_with
from workers.place import Place


@contextlib.contextmanager
def scaled(place: Place) -> Iterator[None]:
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


def _attend(place: Place, rollouts: int, seat: int) -> None:
    end_with(seat)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its seat is told too, and ends it
    if place.channel:
        place.channel.joined(place.board.store)
    for module in place.spec.dag.imports:
        load_module(module)
    events.current().open(place.path / "events.jsonl", place.board.rank)
    scaling.attend(place.path, 0 if place.spec.run.mode == "semi_sync" else 1, rollouts)


def _may_scale(module: str) -> bool:
    """Whether its source has the word; what it has is known when it is loaded."""
    source = module_file(module)
    return source is not None and "scaling" in source.read_text(encoding="utf-8")
