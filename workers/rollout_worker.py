"""A rank that only samples, with weights that it pulls; and those that help it, where a model is split over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from distflow.data.dataloader import Dataloader
from distflow.schema.plan import Plan
from distflow.schema.spec import Spec
from distflow.weights.pull import Puller
from workers.channel import Channel
from workers.crew import Crew
from workers.engines.leading import Following, Leading
from workers.engines.stream import Stream
from workers.engines.updates import Updates
from workers.roles import Role


class RolloutWorker:
    """Holds a rank's sampling engines, and keeps a crew at work until the trainer says that it is over."""

    def __init__(self, spec: Spec, plan: Plan, functions: Mapping[str, Callable[..., Any]], roles: dict[str, Role],
                 loader: Dataloader, channel: Channel, who: str, shares: int, alone: int):
        """`shares`: how many crews the run has; `alone`: those whose ranks do nothing else."""
        self.channel = channel
        self.crew = Crew(spec, plan, functions, roles, loader, channel, who, shares, alone)
        self.updates = _updates(spec, self.crew.sampling, channel, who)
        self.streams = {name: Stream(role.rollout if plan.ranks == 1 else Leading(role.rollout),
                                     partial(_renew, self.updates.get(name), spec.run.on_new_weights))
                        for name, role in self.crew.sampling.items()}

    def run(self) -> None:
        """Until the trainer says that it is over."""
        self.crew.work(self.streams, lambda dock: self.channel.over)
        for stream in self.streams.values():
            stream.rollout.part()

    def close(self) -> None:
        for updates in self.updates.values():
            updates.close()
        for stream in self.streams.values():
            stream.rollout.close()


class RolloutHelper:
    """One of the ranks over which a rollout's model is split, but for the first: it takes no prompts of its own."""

    def __init__(self, spec: Spec, roles: dict[str, Role], channel: Channel, who: str):
        (name, role), = roles.items()
        self.rollout, self.updates = role.rollout, _updates(spec, roles, channel, who)
        self.following = Following(role.rollout, self.updates.get(name))

    def run(self) -> None:
        """Until the first rank says that it is over."""
        self.following.run()

    def close(self) -> None:
        for updates in self.updates.values():
            updates.close()
        self.rollout.close()


def _updates(spec: Spec, sampling: Mapping[str, Role], channel: Channel, who: str) -> dict[str, Updates]:
    """Of the roles that are trained elsewhere."""
    return {name: Updates(Puller(channel.weights(name), channel.token, who, host=channel.host,
                                 transport=spec.run.transport), role.rollout.version)
            for name, role in sampling.items() if spec.dag.roles[name].trained}


def _renew(updates: Updates | None, on_new_weights: str, stream: Stream) -> None:
    """Take new weights once all ranks of the engine have them. Where two have unlike ones, all pull the newest."""
    weights = updates.arrived() if updates else None
    found = stream.rollout.candidates(weights.key if weights else "")
    if weights is None:
        return
    if found == {weights.key}:
        stream.rollout.load(weights.tensors(), weights.version)
        if on_new_weights == "restart":
            stream.restart()
        updates.loaded()
    elif len(found - {""}) > 1:
        updates.drop()
