"""Weights between groups: the trainer publishes versions of them, and ranks that only sample pull the newest."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from distflow.plan import Plan
from distflow.telemetry import timeline
from distflow.weights.fingerprint import fingerprint_of
from distflow.weights.publisher import Publisher
from workers.engines.devices import dtype_of
from workers.engines.role_engines import RoleEngines
from workers.engines.shared_engine import SharedEngine
from workers.engines.weight_updates import WeightUpdates
from workers.rollout_channel import RolloutChannel


class WeightPublication:
    """Publishes the roles that are trained here and sampled from elsewhere. Collective over the trainer."""

    def __init__(self, channel: RolloutChannel, plan: Plan, roles: Mapping[str, RoleEngines], transport: str):
        trained = {task.role for task in plan.tasks if task.type == "MODEL_TRAIN"}
        sampled = {task.role for task in plan.tasks if task.arrives and task.samples}
        self.roles = {name: roles[name] for name in sorted(trained & sampled)}
        self.publishers = dict[str, Publisher]()
        for name in (name for name, role in self.roles.items() if role.has_engine):
            ranks = plan.layout_of(name, samples=False).active_ranks
            self.publishers[name] = Publisher(channel.weights(name), channel.token, rank=ranks.index(dist.get_rank()),
                                              ranks=len(ranks), host=channel.host, transport=transport)
        self.channel = channel
        self.published: dict[str, int] = {}  # newest version of each role

    def publish(self) -> None:
        """Publish the weights that have changed. Prompts that are enqueued from now on are sampled with them."""
        for name, role in self.roles.items():
            if role.version != self.published.get(name):  # a step may leave nothing to train on
                with timeline.current().span(timeline.WEIGHTS, "publish", role=name, version=role.version):
                    if name in self.publishers:
                        dtype = dtype_of(role.settings, role.engine.mesh.device_type)  # of the rollout
                        sums = role.engine.sums(dtype)
                        if dist.get_rank() == role.writer:
                            self.channel.add_fingerprint(name, role.version, fingerprint_of(sums))
                        self.publishers[name].publish(role.version, role.engine.shards(), dtype, sums)
                self.published[name] = role.version
        dist.barrier()  # the version is complete as soon as the last rank has its part ready
        if dist.get_rank() == 0:
            self.channel.add_version_set(self.published)

    def close(self) -> None:
        for publisher in self.publishers.values():
            publisher.close()


def load_if_newer(updates: WeightUpdates | None, engine: SharedEngine) -> None:
    """Load new weights once all ranks of the engine have them; ranks that pulled different versions pull again."""
    weights = updates.pulled_weights() if updates else None
    found = engine.rollout.candidates(weights.key if weights else "")
    if updates is None or weights is None:
        return
    if found == {weights.key}:
        with timeline.current().span(timeline.WEIGHTS, "load", version=weights.version):
            updates.load_into(engine.rollout)
        updates.mark_loaded()
    elif len(found - {""}) > 1:
        updates.drop()
