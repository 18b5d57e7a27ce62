"""Ranks that train, and sample too until there is something to train on (mode semi_sync, RobustRL §2.1)."""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from distflow.data.dataloader import Dataloader
from distflow.data.dock import Dock
from distflow.schema.errors import RankMissing
from distflow.schema.plan import TRAINER, Plan
from distflow.schema.spec import Spec
from workers.channel import Channel
from workers.crew import Crew
from workers.engines.leading import Following, Leading
from workers.engines.rollout import Rollout
from workers.engines.stream import Stream
from workers.roles import Role


class Hybrid:
    """Samples beside those that only sample. Every rank of the trainer has one and calls it alike.

    Args:
        roles: that sample; one, if a model is split over several ranks.
        crew: takes prompts; None on a rank that helps the first of those with which it shares a model.
        share: these ranks; None: this one alone.
        enough: as many rows being there, of whichever draws, this rank samples no more.
    """

    def __init__(self, roles: Mapping[str, Role], crew: Crew | None, share: dist.ProcessGroup | None, enough: int):
        self.roles, self.crew, self.share, self.enough = roles, crew, share, enough

    @classmethod
    def of(cls, spec: Spec, rollout: Plan, functions: Mapping[str, Callable[..., Any]], roles: dict[str, Role],
           loader: Dataloader, channel: Channel) -> Hybrid:
        """This rank's. `rollout`: the plan of those that only sample. Collective."""
        rank, width, crew, share = dist.get_rank(), rollout.ranks, None, None
        if width > 1:
            limit = datetime.timedelta(seconds=spec.run.wait_limit)
            share, _ = dist.new_subgroups(width, backend="gloo", timeout=limit)
        if rank % width == 0:
            crew = Crew(spec, rollout, functions, roles, loader, channel, f"trainer {rank}, which samples",
                        channel.ranks // width)
        sampling = {task.role: roles[task.role] for task in rollout.tasks if task.samples}
        return cls(sampling, crew, share, math.ceil(spec.run.switch_at * spec.run.data.batch) * channel.rows)

    def sample(self) -> None:
        """With the weights that this rank has. Collective."""
        with contextlib.ExitStack() as stack:
            engines = {name: stack.enter_context(role.handover.sampling()) for name, role in self.roles.items()}
            if self.crew is None:
                self._follow(*engines.values())
                return
            if self.share is not None:
                engines = {name: Leading(engine, self.share) for name, engine in engines.items()}
            streams = {name: Stream(engine, _stay_in_touch) for name, engine in engines.items()}
            self.crew.work(streams, self._have_enough)
            for engine in engines.values():
                engine.part()

    def _follow(self, engine: Rollout) -> None:
        try:
            Following(engine, None, self.share).run()
        except RankMissing as error:
            error.add_note(f"rank {dist.get_process_group_ranks(self.share)[0]} takes prompts for this one, which "
                           "samples with it, and says nothing any more")
            raise

    def _have_enough(self, dock: Dock) -> bool:
        """Another rank of the trainer may have seen it before, and taken its share."""
        consumers = [each["controllers"][TRAINER] for each in dock.status() if TRAINER in each["controllers"]]
        return any(each["leases"] or each["ready"] >= self.enough for each in consumers)


def _stay_in_touch(stream: Stream) -> None:
    """No weights come while this rank samples; but those that help it are to hear of it."""
    stream.rollout.candidates("")
