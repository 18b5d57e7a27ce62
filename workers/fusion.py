"""Stage fusion: runs nodes that need no whole step on the rows that have come while others are still sampled.

The long tail of a step's generation hides the forward passes of all prompts but the last ones (Zhong et al. 2024,
inter-stage fusion; MindSpeed RL, Table 2). The planner decides which nodes these are (`Plan.early`).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgpack
import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData
from distflow.data.crossing import ArrivedRows
from distflow.data.dataloader import Dataloader
from distflow.data.exchange import gather
from distflow.data.row_filter import concat_non_empty
from distflow.dock import DockClient, TimedOut
from distflow.plan import TRAINER, Plan, Task
from distflow.telemetry.metrics import current
from workers.execution import TrainExecutor
from workers.loop import run_chain
from workers.rollout_channel import RolloutChannel, SampleTimeout


class Fusion:
    """Early computation of a draw on one rank. Collective over the trainer.

    A draw is computed in parts. A part is what has come, and at least half of the prompts that were missing: so the
    parts are few, as small forward passes waste a device, and the last one, which nothing hides, is small. The rows of
    a part are assigned to ranks by tokens; what is written of them stays there until the step's rows are assigned.
    """

    def __init__(self, plan: Plan, rank: int, loader: Dataloader, channel: RolloutChannel, limit: float,
                 executor: TrainExecutor):
        """`plan`: the trainer's, which has an `early` one; `limit`: seconds after which ranks take others for lost."""
        assert plan.early is not None
        self.rank, self.loader, self.channel, self.executor = rank, loader, channel, executor
        self.tasks = plan.early.chain(rank)
        self.step_tasks = [task for task in plan.tasks if task.layout.early]  # the same, as the step's plan has them
        self.arrived = ArrivedRows(plan.early, rank, loader, channel.rows, limit)
        self.written: dict[str, Batch] = {}  # by node, for the draw, in the order of ids
        self.seconds = 0.0  # of computing for the draw

    def run(self, dock: DockClient, draw: int, timeout: SampleTimeout) -> None:
        """Compute all rows of a draw. Raises TimedOut on rank 0: they have not come before `timeout` was over."""
        count, known = self.loader.batch * self.channel.rows, torch.empty(0, dtype=torch.int64)
        hidden, self.seconds, self.written = dict.fromkeys((task.node for task in self.tasks), 0.0), 0.0, {}
        while len(known) < count:
            missing = self.loader.batch - len(known) // self.channel.rows
            ids, tokens = self._look(dock, draw, len(known) + -(-missing // 2) * self.channel.rows, timeout)
            new = ~torch.isin(ids, known)
            known = ids
            for node, seconds in self._compute(dock, ids[new], tokens[new]).items():
                self.seconds += seconds
                hidden[node] += seconds if len(known) < count else 0.0
        for node, seconds in hidden.items():
            current().maximum(f"seconds/{node}/hidden", seconds)
        current().add_all(self.arrived.metrics.take("data/bytes"))

    def results(self) -> Iterator[tuple[Task, dict[str, ColumnData], Tensor]]:
        """Yield what was written on this rank, which need not have the same rows in the step."""
        for task in self.step_tasks:
            yield task, self.written[task.node].columns, self.written[task.node].ids

    def _look(self, dock: DockClient, draw: int, least: int, timeout: SampleTimeout) -> tuple[Tensor, Tensor]:
        """Return the ids and the tokens of all rows that have come, at least so many; on all ranks what rank 0 saw."""
        seen = b""
        while not seen:
            seen = gather(self._seen(dock, draw, least, timeout) if self.rank == 0 else b"")[0]
        ids, tokens = msgpack.unpackb(seen)
        return torch.tensor(ids), torch.tensor(tokens)

    def _seen(self, dock: DockClient, draw: int, least: int, timeout: SampleTimeout) -> bytes:
        """Return the rows that are there; nothing if they are too few so far, as the other ranks wait for an answer."""
        try:
            seen = dock.peek(TRAINER, self.loader.batch * self.channel.rows, least=least, step=draw,
                             wait=timeout.poll_seconds)
        except TimedOut as error:
            timeout.check(error)
            return b""
        return msgpack.packb([column.tolist() for column in seen]) or b""

    def _compute(self, dock: DockClient, ids: Tensor, tokens: Tensor) -> dict[str, float]:
        """Run the nodes on these rows. Return the seconds of each."""
        before = self.executor.seconds.copy()
        self.arrived.fill(dock, ids, tokens)
        run_chain(self.tasks, self.arrived.buffer, self.executor)
        for task in self.tasks:
            batch = self.arrived.buffer.step_columns[task.node, task.layout]
            batch = concat_non_empty(self.written[task.node], batch) if task.node in self.written else batch
            self.written[task.node] = batch.select(batch.ids.argsort())
        return {task.node: self.executor.seconds[task.node] - before[task.node] for task in self.tasks}
