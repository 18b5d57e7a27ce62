"""Trainer ranks that sample until there is enough to train on (mode semi_sync, RobustRL §2.1)."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from distflow.data.dataloader import Dataloader
from distflow.data.exchange import gather_values
from distflow.dock import DockClient
from distflow.errors import RankMissing
from distflow.plan import ROLLOUT, TRAINER
from distflow.telemetry.metrics import current
from workers.engines.rollout import Rollout
from workers.engines.shared_engine import SharedEngine
from workers.engines.swap import EngineSwap
from workers.engines.tp_leader import TPFollowerEngine, TPLeader
from workers.isolation.env_service import begin_phase
from workers.loop import rollout
from workers.rollout import RolloutContext
from workers.rollout_channel import RolloutChannel
from workers.train_context import TrainContext


class AdaptiveShare:
    """Share of a step's prompts at which trainer ranks stop sampling (`switch_at: auto`), by what each step took.

    Model: beside the trainer ranks a step's samples take A seconds, and without them W > A. Stopping at share s they
    wait (1 - s) W for the rest, and have fused work of F seconds for that time. A step takes s A + max((1 - s) W, F),
    and what does not depend on s. That is shortest where the wait is F: the share moves half of the way there.
    """

    def __init__(self, value: float = 0.5):
        self.value = value

    def record(self, waited: float, fused: float) -> None:
        """Take up the seconds from the switch to the last sample of a step, and those of the fused work."""
        if self.value < 1 and waited > 0:
            best = 1 - fused * (1 - self.value) / waited
        else:  # nothing was missing, or nothing shows how long it would take
            best = self.value - (_LOWER if fused > 0 else 0.0)
        self.value = min(max((self.value + best) / 2, _LEAST), 1.0)


_LOWER, _LEAST = 0.1, 0.1  # a step towards less where there is no wait; the least share


class ColocatedSource:
    """Rollout loop on a trainer rank. Collective over the trainer. `loop` is None on a rank that follows the first of
    its `tp_group`. The rank stops at `enough` rows in the dock, of whichever draws, or after `limit` seconds without
    new rows if none are under way here. Where there is a `share`, enough is that of `step_rows`. Without ranks that
    only sample (`alone`) it stops when all rows that the trainer will lease are there: what is under way then is left
    over for the next call (partial rollouts, Kimi k1.5 2025)."""

    def __init__(self, swaps: Mapping[str, EngineSwap], loop: RolloutContext | None,
                 tp_group: dist.ProcessGroup | None, enough: float, limit: float, share: AdaptiveShare | None = None,
                 step_rows: int = 0, alone: bool = False):
        self.share, self.step_rows, self.alone = share, step_rows, alone
        self.swaps, self.loop, self.tp_group, self.enough, self.limit = swaps, loop, tp_group, enough, limit
        self.engines: Mapping[str, SharedEngine] = {}

    @classmethod
    def of(cls, ctx: TrainContext, channel: RolloutChannel, loader: Dataloader) -> ColocatedSource:
        """Return the source of this rank, which runs the chain of the ranks that only sample. Collective."""
        spec, roles, plan = ctx.spec, ctx.roles, ctx.context.plan.groups[1].plan
        width, loop, tp_group, alone = plan.ranks, None, None, spec.run.trainer_samples_alone
        if width > 1:
            limit = datetime.timedelta(seconds=spec.run.wait_limit)
            tp_group, _ = dist.new_subgroups(width, backend="gloo", timeout=limit)
            assert isinstance(tp_group, dist.ProcessGroup)
        if ctx.rank % width == 0:
            loops = ctx.context.plan.sampling_ranks // width
            loop = RolloutContext(spec, plan, ctx.functions, roles, loader, channel,
                                  f"trainer {ctx.rank}, which samples", loops, loops if alone else 0)
        names = {task.role for task in plan.tasks if task.samples}
        swaps = {name: swap for name, role in roles.items() if name in names and (swap := role.engine_swap)}
        switch_at, prompts = spec.run.switch_at, spec.run.data.batch
        share = AdaptiveShare() if switch_at == "auto" and not alone else None
        enough = 0 if switch_at == "auto" else math.ceil(switch_at * prompts) * channel.rows
        return cls(swaps, loop, tp_group, enough, spec.run.wait_limit, share, prompts * channel.rows, alone)

    def sample(self, draws: int, complete: Callable[[], bool]) -> None:
        """Sample with this rank's weights. `draws`: those of the step that the trainer has received already.
        `complete`: whether all rows are there that it will lease next."""
        self.draws, self.complete, self.ready, self.changed = draws, complete, 0, time.monotonic()
        if self.share is not None:
            self.enough = self.share.value * self.step_rows
            current().maximum("switch_at", self.share.value)
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

    def record(self, waited: float, fused: float) -> None:
        """Take up what a draw took after the switch, on the mean of the ranks: all of them decide alike. Collective."""
        if self.share is not None:
            everyone = gather_values((waited, fused)) if dist.get_world_size() > 1 else [(waited, fused)]
            self.share.record(*(sum(seconds) / len(everyone) for seconds in zip(*everyone)))

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
        if ROLLOUT not in indexes:  # of a process that has taken another's place, and is not configured yet
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
