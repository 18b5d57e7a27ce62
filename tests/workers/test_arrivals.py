"""What a trainer takes from a real dock, and what one that has died there left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from distflow.data.batch import Batch
from distflow.data.dock import Consumer, Dock, Service
from distflow.schema.plan import TRAINER
from workers.arrivals import Arrivals
from workers.channel import REPORT, Channel

ROWS, PROMPTS, TOKEN = 4, 2, bytes(32)


class Loader:
    """Two prompts a step; `position` of those that were drawn."""

    batch = PROMPTS

    def __init__(self, steps: int):
        self.position = steps * PROMPTS

    @property
    def drawn_before(self) -> int:
        return self.position // PROMPTS

    def at(self, prompts: torch.Tensor) -> torch.Tensor:
        return prompts


@pytest.fixture
def channel():
    """A dock that has the samples of three steps."""
    service = Service(TOKEN)
    address = service.start()
    channel = Channel(None, TOKEN, [address], "127.0.0.1", ROWS, PROMPTS, 2)
    step_of = {"whole_groups": {"size": ROWS}, "of_step": {"rows": ROWS * PROMPTS}}
    with channel.dock("trainer 0") as dock:
        dock.meet([Consumer(TRAINER, (REPORT,), (), step_of, seconds=3600.0, recalls=True)])
        ids = channel.rows_of(torch.arange(3 * PROMPTS))
        dock.put(Batch(ids, {REPORT: torch.zeros(len(ids), dtype=torch.uint8)}), group=ids // ROWS)
    yield channel
    service.close()


def ready(dock: Dock) -> int:
    return sum(each["controllers"][TRAINER]["ready"] for each in dock.status() if TRAINER in each["controllers"])


def trainer(channel: Channel, steps: int) -> Arrivals:
    plan = SimpleNamespace(tasks=(), source=None, ranks=1)
    return Arrivals(Loader(steps), channel, plan, 0, 0, 3, 1.0, publish=lambda: None)


def test_what_is_remembered_but_was_not_committed_leaves_the_dock(channel):
    """A trainer died between the two: only the rows of steps to come are left."""
    with channel.dock("somebody") as dock:
        first = dock.lease(TRAINER, ROWS * PROMPTS, step=0)
        dock.commit(first)
        assert ready(dock) == 2 * ROWS * PROMPTS
        again = trainer(channel, steps=2)
        again._reconcile()
        assert ready(dock) == ROWS * PROMPTS
        again._reconcile()
        assert ready(dock) == ROWS * PROMPTS
        again.dock.close()


def test_what_came_after_the_state_is_taken_back(channel):
    """The trainer has lost its newest state; the rows of the steps since are trained on again."""
    first = trainer(channel, steps=0)
    count = ROWS * PROMPTS
    for step in range(3):
        first.dock.commit(first.dock.lease(TRAINER, count, step=step))
    first.settle({"position": PROMPTS})
    first.dock.close()
    again = trainer(channel, steps=1)
    again._reconcile()
    assert ready(again.dock) == 2 * count
    again.dock.close()


def test_a_dock_that_never_had_those_steps_is_left_alone(channel):
    """That of a resumed run."""
    made = trainer(channel, steps=40)
    made._reconcile()
    with channel.dock("somebody") as dock:
        assert ready(dock) == 3 * ROWS * PROMPTS
    made.dock.close()
