"""Sampling that is not done twice: what a worker has sampled in a step waits in its seat's memory for the next one."""

from __future__ import annotations

import json
from collections.abc import Callable

from torch import Tensor

from distflow.data.batch import Batch, ColumnData
from distflow.data.exchange import gather
from distflow.plan import Task
from distflow.recovery.rollout_cache import RolloutCache
from distflow.telemetry import events
from distflow.telemetry.metrics import Metrics, current, recording

Written = tuple[dict[str, ColumnData], Tensor]
"""What a task's function wrote, and the ids of the rows it wrote."""


class SampledRows:
    """A rank's rows of the step under way. Sampling is collective where a model is split, so a node's rows are taken if
    all ranks have theirs.

    Args:
        kept: the seat's memory; None if nothing is to be kept.
        step: at which this worker goes on, if it does: what the one before it had sampled of it is taken.
    """

    def __init__(self, kept: RolloutCache | None, step: int | None):
        self.kept, self.found = kept, {}
        if kept is not None and step is not None:
            mine = kept.of(step)
            all_have = set.intersection(*(set(json.loads(keys)) for keys in gather(json.dumps([*mine]).encode())))
            self.found = {key: mine[key] for key in sorted(all_have)}

    def run(self, task: Task, step: int, draw: int, execute: Callable[[], Written]) -> Written:
        """The task's rows in a draw of a step: those of before, or those of `execute`, which are kept."""
        if self.kept is None or not task.samples:
            return execute()
        key = f"{draw}/{task.node}"
        if key in self.found:
            rows, report = self.found.pop(key)
            current().add_all(report)
            events.record("rows taken over", node=task.node, rows=len(rows))
            return rows.columns, rows.ids
        metrics, outer = Metrics(), current()
        with recording(metrics):
            columns, ids = execute()
        report = metrics.take()
        outer.add_all(report)
        self.kept.add(step, key, Batch(ids, columns), report)
        return columns, ids

    def clear(self) -> None:
        """The step is done."""
        self.found = {}
        if self.kept is not None:
            self.kept.clear()
