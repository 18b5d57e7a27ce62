"""Trainer ranks that sample until there is enough to train on (mode semi_sync, RobustRL §2.1)."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from distflow.dock import DockClient
from distflow.errors import RankMissing
from distflow.plan import ROLLOUT, TRAINER
from workers.encode import dataloader
from workers.engines.rollout import Rollout
from workers.engines.shared_engine import SharedEngine
from workers.engines.swap import EngineSwap
from workers.engines.tp_leader import TPFollowerEngine, TPLeader
from workers.isolation.env_service import begin_phase
from workers.loop import rollout
from workers.rollout import RolloutContext
from workers.rollout_channel import RolloutChannel
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
            loader = dataloader(spec, roles[ctx.prompted], plan=plan)
            loop = RolloutContext(ctx.context, plan, functions, roles, loader, channel)
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
