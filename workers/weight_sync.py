"""The trainer's weights, made known to those that sample with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from distflow.plan import Plan
from distflow.weights.publisher import Publisher
from workers.engines.precision import is_half
from workers.roles import RoleEngines
from workers.rollout_channel import RolloutChannel


class WeightPublication:
    """Publishes the roles that are trained here and sampled from elsewhere. Collective over the trainer."""

    def __init__(self, channel: RolloutChannel, plan: Plan, roles: Mapping[str, RoleEngines], transport: str):
        trained = {task.role for task in plan.tasks if task.type == "MODEL_TRAIN"}
        sampled = {task.role for task in plan.tasks if task.arrives and task.samples}
        self.roles = {name: roles[name] for name in sorted(trained & sampled)}
        mine = {"rank": dist.get_rank(), "ranks": dist.get_world_size(), "host": channel.host, "transport": transport}
        self.publishers = {name: Publisher(channel.weights(name), channel.token, **mine) for name in self.roles}
        self.channel, self.issue = channel, 0
        self.known: dict[str, int] = {}
        """The versions that were published last."""

    def __call__(self) -> None:
        for name, role in self.roles.items():
            if role.version != self.known.get(name):  # a step may leave nothing to train on
                self.publishers[name].publish(role.version, role.engine.shards(), _sampled_in(role))
                self.known[name] = role.version
        dist.barrier()  # it can be had as soon as the last rank has its part ready
        if dist.get_rank() == 0:
            self.issue = self.channel.issue(self.known)

    def close(self) -> None:
        for publisher in self.publishers.values():
            publisher.close()


def _sampled_in(role: RoleEngines) -> torch.dtype:
    return torch.bfloat16 if is_half(role.settings, role.engine.mesh.device_type) else torch.float32
