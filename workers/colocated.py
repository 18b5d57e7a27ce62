"""Ranks that train, and sample too until there is something to train on (mode semi_sync, RobustRL §2.1)."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from distflow.config.load import Spec
from distflow.data.dataloader import Dataloader
from distflow.dock import DockClient
from distflow.errors import RankMissing
from distflow.plan import TRAINER, Plan
from workers.engines.rollout import Rollout
from workers.engines.shared_engine import SharedEngine
from workers.engines.tp_leader import TPFollowerEngine, TPLeader
from workers.roles import RoleEngines
from workers.rollout import RolloutLoop
from workers.rollout_channel import RolloutChannel


class ColocatedSource:
    """Samples beside those that only sample. Every rank of the trainer has one and calls it alike.

    Args:
        roles: that sample; one, if a model is split over several ranks.
        crew: takes prompts; None on a rank that helps the first of those with which it shares a model.
        share: these ranks; None: this one alone.
        enough: as many rows being there, of whichever draws, this rank samples no more.
        limit: nor if there were no more of them for as many seconds, and none on the way here.
    """

    def __init__(self, roles: Mapping[str, RoleEngines], crew: RolloutLoop | None, share: dist.ProcessGroup | None,
                 enough: int,
                 limit: float):
        self.roles, self.crew, self.share, self.enough, self.limit = roles, crew, share, enough, limit
        self.streams: Mapping[str, SharedEngine] = {}

    @classmethod
    def of(cls, spec: Spec, rollout: Plan, functions: Mapping[str, Callable[..., Any]], roles: dict[str, RoleEngines],
           loader: Dataloader, channel: RolloutChannel) -> ColocatedSource:
        """This rank's. `rollout`: the plan of those that only sample. Collective."""
        rank, width, crew, share = dist.get_rank(), rollout.ranks, None, None
        if width > 1:
            limit = datetime.timedelta(seconds=spec.run.wait_limit)
            share, _ = dist.new_subgroups(width, backend="gloo", timeout=limit)
        if rank % width == 0:
            crew = RolloutLoop(spec, rollout, functions, roles, loader, channel, f"trainer {rank}, which samples",
                               channel.ranks // width)
        sampling = {task.role: roles[task.role] for task in rollout.tasks if task.samples}
        return cls(sampling, crew, share, math.ceil(spec.run.switch_at * spec.run.data.batch) * channel.rows,
                   spec.run.wait_limit)

    def sample(self, draws: int) -> None:
        """With the weights that this rank has; `draws`: of this step that the trainer has already. Collective."""
        self.draws, self.ready, self.changed = draws, 0, time.monotonic()
        with contextlib.ExitStack() as stack:
            engines = {name: stack.enter_context(role.handover.sampling()) for name, role in self.roles.items()}
            if self.crew is None:
                self._follow(*engines.values())
                return
            if self.share is not None:
                engines = {name: TPLeader(engine, self.share) for name, engine in engines.items()}
            self.streams = {name: SharedEngine(engine, _stay_in_touch) for name, engine in engines.items()}
            self.crew.work(self.streams, self._have_enough)
            for engine in engines.values():
                engine.part()

    def _follow(self, engine: Rollout) -> None:
        try:
            TPFollowerEngine(engine, None, self.share).run()
        except RankMissing as error:
            error.add_note(f"rank {dist.get_process_group_ranks(self.share)[0]} takes prompts for this one, which "
                           "samples with it, and says nothing any more")
            raise

    def _have_enough(self, dock: DockClient) -> bool:
        """Another rank of the trainer may have seen it before, and taken its share. Where nothing comes any more, the
        trainer's wait for these rows says who has them."""
        consumers = [each["controllers"][TRAINER] for each in dock.status() if TRAINER in each["controllers"]]
        ready, now = sum(each["ready"] for each in consumers), time.monotonic()
        if ready != self.ready or any(stream.was_busy for stream in self.streams.values()):
            self.ready, self.changed = ready, now
        return ready >= self.enough or sum(each["leases"] for each in consumers) > self.draws or \
            now - self.changed > self.limit


def _stay_in_touch(stream: SharedEngine) -> None:
    """No weights come while this rank samples; but those that help it are to hear of it."""
    stream.rollout.candidates("")
