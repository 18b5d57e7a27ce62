"""Weights between groups: the trainer publishes versions of them, and ranks that only sample pull the newest."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist

from distflow.data.exchange import gather_values
from distflow.plan import Plan
from distflow.rpc.shared_memory import machine_name
from distflow.telemetry import timeline
from distflow.weights.fingerprint import fingerprint_of
from distflow.weights.publisher import Publisher
from distflow.weights.shard_slice import Reads, Split
from workers.engines.devices import dtype_of
from workers.engines.role_engines import RoleEngines
from workers.engines.rollout import Rollout
from workers.engines.shared_engine import SharedEngine
from workers.engines.tensor_parallel import ROW_PARALLEL
from workers.engines.weight_updates import WeightUpdates
from workers.rollout_channel import RolloutChannel


class WeightPublication:
    """Publishes the roles that are trained here and sampled from elsewhere. Collective over the trainer."""

    def __init__(self, channel: RolloutChannel, plan: Plan, roles: Mapping[str, RoleEngines], transport: str,
                 split: int = 1):
        """`split`: ranks of an engine that samples; those of one machine have the whole weights together."""
        trained = {task.role for task in plan.tasks if task.type == "MODEL_TRAIN"}
        sampled = {task.role for task in plan.tasks if task.arrives and task.samples}
        self.roles = {name: roles[name] for name in sorted(trained & sampled)}
        self.publishers = dict[str, Publisher]()
        for name in (name for name, role in self.roles.items() if role.has_engine):
            ranks = plan.layout_of(name, samples=False).active_ranks
            self.publishers[name] = Publisher(channel.weights(name), channel.token, rank=ranks.index(dist.get_rank()),
                                              ranks=len(ranks), host=channel.host, transport=transport)
        self.channel, self.split = channel, Split(split if split > int(os.environ.get("LOCAL_WORLD_SIZE", 1)) else 1,
                                                  ROW_PARALLEL)
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
                        self.publishers[name].publish(role.version, role.engine.shards(), dtype, sums,
                                                      self.split)
                self.published[name] = role.version
        dist.barrier()  # the version is complete as soon as the last rank has its part ready
        if dist.get_rank() == 0:
            self.channel.add_version_set(self.published)

    def close(self) -> None:
        for publisher in self.publishers.values():
            publisher.close()


def reads_here(engine: Rollout) -> Reads:
    """Return what the ranks of an engine that are on this machine read of its weights. Collective over the engine."""
    here = machine_name() or dist.get_rank()
    return Reads.on_machine(here, gather_values([here, engine.reads]), engine.dtype)


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
