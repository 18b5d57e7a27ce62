"""A rank that only samples, with weights that it pulls."""

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
from workers.engines.stream import Stream
from workers.roles import Role
from workers.updates import Updates


class RolloutWorker:
    """Holds a rank's sampling engines, and keeps a crew at work until the trainer says that it is over."""

    def __init__(self, spec: Spec, plan: Plan, functions: Mapping[str, Callable[..., Any]], roles: dict[str, Role],
                 loader: Dataloader, channel: Channel, who: str, shares: int):
        """`shares`: how many crews the run has."""
        self.channel = channel
        self.crew = Crew(spec, plan, functions, roles, loader, channel, who, shares, leads=True)
        self.updates = {name: Updates(Puller(channel.weights(name), channel.token, who, host=channel.host,
                                             transport=spec.run.transport), role.rollout.version)
                        for name, role in self.crew.sampling.items() if spec.dag.roles[name].trained}
        self.streams = {name: Stream(role.rollout, partial(_renew, self.updates.get(name), spec.run.on_new_weights))
                        for name, role in self.crew.sampling.items()}

    def run(self) -> None:
        """Until the trainer says that it is over."""
        self.crew.work(self.streams, lambda dock: self.channel.over)

    def close(self) -> None:
        for updates in self.updates.values():
            updates.close()
        for stream in self.streams.values():
            stream.rollout.close()


def _renew(updates: Updates | None, on_new_weights: str, stream: Stream) -> None:
    """Take new weights if they have come."""
    if updates is None:
        return
    with updates.taken() as weights:
        if weights is not None:
            stream.rollout.load(weights.tensors(), weights.version)
            if on_new_weights == "restart":
                stream.restart()
