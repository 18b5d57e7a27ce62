"""Stage fusion: runs nodes that need no whole step on the rows that have come while others are still sampled.

The long tail of a step's generation hides the forward passes of all prompts but the last ones (Zhong et al. 2024,
inter-stage fusion; MindSpeed RL, Table 2). The planner decides which nodes these are (`Plan.early`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData
from distflow.data.crossing import ArrivedRows
from distflow.data.exchange import gather_values
from distflow.data.row_filter import concat_non_empty
from distflow.dock import DockClient, TimedOut
from distflow.plan import TRAINER, Task
from distflow.telemetry.metrics import current
from workers.loop import run_chain
from workers.rollout_channel import RolloutChannel, SampleTimeout
from workers.train_context import TrainContext


class Fusion:
    """Early computation of a draw on one rank. Collective over the trainer.

    A draw is computed in parts. A part is what has come, and at least half of the prompts that were missing: so the
    parts are few, as small forward passes waste a device, and the last one, which nothing hides, is small. The rows of
    a part are assigned to ranks by tokens; what is written of them stays there until the step's rows are assigned.
    """

    def __init__(self, ctx: TrainContext, channel: RolloutChannel):
        """`ctx`: has a plan with an `early` one."""
        assert ctx.plan.early is not None
        self.rank, self.executor, self.prompts, self.rows = ctx.rank, ctx.executor, ctx.loader.batch, channel.rows
        self.tasks = ctx.plan.early.chain(ctx.rank)
        self.step_tasks = [task for task in ctx.plan.tasks if task.layout.early]  # the same in the step's plan
        self.arrived = ArrivedRows(ctx.plan.early, ctx.rank, ctx.loader, channel.rows, ctx.spec.run.wait_limit)

    def run(self, dock: DockClient, draw: int, timeout: SampleTimeout) \
            -> tuple[float, list[tuple[Task, dict[str, ColumnData], Tensor]]]:
        """Compute all rows of a draw. Return the seconds that it took, and what was written on this rank, which need
        not have the same rows in the step. Raises TimedOut on rank 0: they have not come before `timeout` was over."""
        seconds, written = self.executor.seconds, dict[str, Batch]()
        known, before, hidden = torch.empty(0, dtype=torch.int64), seconds.copy(), seconds.copy()
        while (missing := self.prompts - len(known) // self.rows) > 0:
            hidden = seconds.copy()  # with those of all parts but the last one
            ids, tokens = self._look(dock, draw, len(known) + -(-missing // 2) * self.rows, timeout)
            new = ~torch.isin(ids, known)
            known = ids
            self.arrived.fill(dock, ids[new], tokens[new])
            run_chain(self.tasks, self.arrived.buffer, self.executor)
            for task in self.tasks:
                batch = self.arrived.buffer.step_columns[task.node, task.layout]
                written[task.node] = concat_non_empty(written[task.node], batch) if task.node in written else batch
        for node in written:
            current().maximum(f"seconds/{node}/hidden", hidden[node] - before[node])
        current().add_all(self.arrived.metrics.take("data/bytes"))
        ordered = {node: batch.select(batch.ids.argsort()) for node, batch in written.items()}
        return sum(seconds[node] - before[node] for node in written), [
            (task, ordered[task.node].columns, ordered[task.node].ids) for task in self.step_tasks]

    def _look(self, dock: DockClient, draw: int, least: int, timeout: SampleTimeout) -> tuple[Tensor, Tensor]:
        """Return the ids and the tokens of all rows that have come, at least so many; on all ranks what rank 0 saw."""
        seen = None
        while seen is None:  # rank 0 says so too while rows are too few: the others wait for an answer
            try:
                found = [column.tolist() for column in dock.peek(
                    TRAINER, self.prompts * self.rows, least=least, step=draw, wait=timeout.poll_seconds)] \
                    if self.rank == 0 else None
            except TimedOut as error:
                timeout.check(error)
                found = None
            seen = gather_values(found)[0]
        ids, tokens = seen
        return torch.tensor(ids), torch.tensor(tokens)
