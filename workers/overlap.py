"""What ranks that train do until all samples of a step are there.

    ColocatedSampling   samples, too, before they take the step's prompts (mode semi_sync, RobustRL §2.1)
    Fusion              runs nodes on rows that have come, while others are still sampled
"""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.data.batch import Batch, ColumnData
from distflow.data.crossing import ArrivedRows
from distflow.data.exchange import gather_values
from distflow.data.row_filter import concat_non_empty
from distflow.dock import DockClient, TimedOut
from distflow.errors import RankMissing
from distflow.plan import ROLLOUT, TRAINER, Task
from distflow.telemetry.metrics import current
from workers.engines.rollout import Rollout
from workers.engines.shared_engine import SharedEngine
from workers.engines.swap import EngineSwap
from workers.engines.tp_leader import TPFollowerEngine, TPLeader
from workers.isolation.env_service import begin_phase
from workers.loop import rollout, run_chain
from workers.rollout import RolloutContext
from workers.rollout_channel import RolloutChannel, SampleTimeout
from workers.train_context import TrainContext


class ColocatedSampling:
    """Rollout loop on a trainer rank, before it takes prompts from the dock. Collective over the trainer. `loop` is
    None on a rank that follows the first of its `tp_group`. The rank stops at `enough` rows in the dock, of whichever
    draws, or after `limit` seconds without new rows if none are under way here. Without ranks that only sample
    (`alone`) it stops when all rows that the trainer will lease are there: what is under way then is left over for the
    next call (partial rollouts, Kimi k1.5 2025)."""

    def __init__(self, swaps: Mapping[str, EngineSwap], loop: RolloutContext | None,
                 tp_group: dist.ProcessGroup | None, enough: int, limit: float, alone: bool = False):
        self.swaps, self.loop, self.tp_group = swaps, loop, tp_group
        self.enough, self.limit, self.alone = enough, limit, alone
        self.engines: Mapping[str, SharedEngine] = {}

    @classmethod
    def of(cls, ctx: TrainContext, channel: RolloutChannel,
           functions: Mapping[str, Callable[..., Any]]) -> ColocatedSampling:
        """Return what samples on this rank, by the chain of the ranks that only sample. Collective."""
        spec, roles, plan = ctx.spec, ctx.roles, ctx.context.plan.groups[1].plan
        width, loop, tp_group, alone = plan.ranks, None, None, spec.run.trainer_samples_alone
        if width > 1:
            limit = datetime.timedelta(seconds=spec.run.wait_limit)
            tp_group, _ = dist.new_subgroups(width, backend="gloo", timeout=limit)
            assert isinstance(tp_group, dist.ProcessGroup)
        if ctx.rank % width == 0:
            loop = RolloutContext(ctx.context, plan, functions, roles, ctx.loader, channel)
        names = {task.role for task in plan.tasks if task.samples}
        swaps = {name: swap for name, role in roles.items() if name in names and (swap := role.engine_swap)}
        enough = math.ceil(spec.run.data.batch / 2) * channel.rows
        return cls(swaps, loop, tp_group, enough, spec.run.wait_limit, alone)

    def run(self, draws: int, complete: Callable[[], bool]) -> None:
        """Sample with this rank's weights. `draws`: those of the step that the trainer has received already.
        `complete`: whether all rows are there that it will lease next."""
        self.draws, self.complete, self.ready, self.changed = draws, complete, 0, time.monotonic()
        with contextlib.ExitStack() as stack:
            engines = {name: stack.enter_context(swap.sampling()) for name, swap in self.swaps.items()}
            if self.loop is None:
                self._follow(*engines.values())
                return
            if self.tp_group is not None:
                engines = {name: TPLeader(engine, self.tp_group) for name, engine in engines.items()}
            self.engines = {name: SharedEngine(engine, _keep_followers) for name, engine in engines.items()}
            if self.alone:
                begin_phase()
            rollout(self.loop, self.engines, self._have_enough)
            for engine in engines.values():
                engine.release_followers()

    def _follow(self, engine: Rollout) -> None:
        try:
            TPFollowerEngine(engine, None, self.tp_group).run()
        except RankMissing as error:
            error.add_note(f"rank {dist.get_process_group_ranks(self.tp_group)[0]} takes prompts for this one, which "
                           "samples with it, and says nothing any more")
            raise

    def _have_enough(self, dock: DockClient) -> bool:
        """Return whether to stop: there is enough, another trainer rank has leased its share, or no more rows come."""
        indexes = dock.index_status()["indexes"]
        if not {ROLLOUT, TRAINER} <= indexes.keys():  # a process that has taken another's place is not configured yet
            return False
        trainer, now = indexes[TRAINER], time.monotonic()
        ready = indexes[ROLLOUT]["committed"] - trainer["committed"] - trainer["leased"]  # not what groups infer on
        if ready != self.ready or any(engine.was_busy for engine in self.engines.values()):
            self.ready, self.changed = ready, now
        return (self.complete() if self.alone else ready >= self.enough) or \
            trainer["leases"] > self.draws or now - self.changed > self.limit


def _keep_followers(engine: SharedEngine) -> None:
    """Show followers that this rank is alive. No weights come while it samples."""
    engine.rollout.candidates("")


class Fusion:
    """Stage fusion: early computation, on one rank, of nodes that need no whole step. Collective over the trainer.

    The long tail of a step's generation hides the forward passes of all prompts but the last ones (Zhong et al. 2024,
    inter-stage fusion; MindSpeed RL, Table 2). The planner decides which nodes these are (`Plan.early`).

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
