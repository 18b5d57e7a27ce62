"""How long this rank itself takes for what it computes: what the others need to know to see who holds them up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from distflow.config.run import PHASES, Phase
from distflow.recovery.detectors import StepReport
from distflow.telemetry.metrics import Metrics, current


class RankTimer:
    """The seconds of one task.

    Where a model computes, ranks wait for each other's weights and gradients again and again; so only what this thread
    computes counts as its own there, since it waits without computing. A GPU computes its collectives too: one that is
    slow shows while it samples, and when it trains all ranks look alike. An engine with processes of its own shows
    nothing.
    """

    def __init__(self, phase: Phase, rows: int):
        self.phase, self.rows, self.began = phase, rows, time.perf_counter()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """The task's function; what came before it since the task began counts in any case."""
        clock = time.perf_counter if self.phase == "computing" else time.thread_time
        before, since = time.perf_counter() - self.began, clock()
        yield
        current().apart(self.phase, before + clock() - since, self.rows)


def step_of(number: int, values: dict[str, float], metrics: Metrics) -> StepReport:
    """What detectors see of a step whose numbers, `values`, were collected from `metrics`; nothing that ranks measure
    each for itself, so that they agree."""
    phases = [phase for phase in PHASES if any(phase in rank for rank in metrics.of_ranks)]
    values = {name: value for name, value in values.items() if name not in ("seconds", "tokens_per_second")}
    return StepReport(number, values, {phase: [rank.get(phase, (0.0, 0.0)) for rank in metrics.of_ranks]
                                       for phase in phases})
