"""Context of a rank, which its supervisor prepares once for all its workers."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from distflow.config.load import reload
from distflow.config.spec import Spec
from distflow.contracts.decorators import load_module
from distflow.data.exchange import gather
from distflow.errors import Disagreement
from distflow.plan import INFERENCE, ROLLOUT, TRAINER, Group, Plan
from distflow.recovery.hooks import HookContext, When, call
from distflow.recovery.live_config import LiveConfig
from distflow.recovery.restarts import Attempt, RestartGroup
from distflow.recovery.scale import RolloutScale
from distflow.recovery.store import RunStore
from distflow.recovery.supervisor import SupervisedRun
from distflow.telemetry.run_folder import agent
from distflow.telemetry.run_lock import RunLock
from workers.device import choose_device
from workers.elastic import ElasticAgent
from workers.engines.collectives import choose_backend
from workers.preflight.proofs import Preflight
from workers.rollout_channel import RolloutChannel, open_channel

_LEFT_OUT = "left out/{} {}"  # key in the store: a group's replica is not started again


@dataclass(frozen=True)
class RankContext:
    """What a rank's supervisor and all its workers know of the run."""

    spec: Spec
    plan: Plan
    store: RunStore
    path: Path
    device: str
    resume: bool
    channel: RolloutChannel | None
    agent: str  # the process that has started this run's processes, and will start them again
    known_change: int  # number of the newest change of settings that `spec` has in it
    device_index: int = 0  # of this rank's GPU
    backend: str = "gloo"  # of the collectives on its device
    elastic: ElasticAgent | None = None
    lock: RunLock | None = None  # of the run folder, on rank 0
    job: str = ""  # its name, where the first rank of a trainer needs it
    preflight: Preflight | None = None  # on rank 0: what has been proved so far

    @property
    def group(self) -> Group | None:
        return self.plan.group_of(self.store.rank)[0]

    @property
    def own(self) -> Plan:
        return self.group.plan if self.group else self.plan

    @property
    def restart_group(self) -> RestartGroup:
        group, replica = self.plan.group_of(self.store.rank)
        if group is None:
            return RestartGroup("the run", range(self.store.ranks), "ranks")
        first = group.first + replica * group.plan.ranks
        name = group.name if group.kind == TRAINER else f"{group.name} {replica}"
        return RestartGroup(name, range(first, first + group.plan.ranks), group.kind)

    def call(self, when: When, attempt: Attempt) -> None:
        for module in self.spec.dag.imports:
            load_module(module)
        failure = attempt.failures[-1] if attempt.failures else None
        call(when, self.role, HookContext(self.restart_group.name, self.store.rank, attempt.number, failure))

    def should_run(self) -> bool:
        """Return whether this rank's rollout is not scaled down."""
        return self.scale is None or self.scale.should_run()

    def is_obsolete(self) -> bool:
        """Return whether this rank works for a trainer that has done its last step."""
        return bool(self.role != TRAINER and self.channel and self.channel.is_over)

    def leave_out(self) -> bool:
        """Take this rank's replica of its group out of the run. Return whether another is left: of two that leave, one
        sees it."""
        group, replica = self.plan.group_of(self.store.rank)
        if group is None or group.kind == TRAINER:
            return False
        self.store.store.put(_LEFT_OUT.format(group.name, replica), "")
        return len(self._left_out(group)) < group.replicas

    def _left_out(self, group: Group) -> list[int]:
        return [each for each in range(group.replicas) if self.store.store.has(_LEFT_OUT.format(group.name, each))]

    @property
    def role(self) -> str:
        """TRAINER, ROLLOUT or INFERENCE; in mode sync all ranks are the trainer's."""
        return self.group.kind if self.group else TRAINER

    @functools.cached_property
    def live_config(self) -> LiveConfig:
        return LiveConfig(self.path, self.role)

    def reload(self, number: int) -> RankContext:
        return self if number <= self.known_change else self._reread()

    def agree_on_settings(self, number: int) -> RankContext:
        """Return what `reload` does once the whole restart group has read the same settings, or raise Disagreement."""
        context, read, end = self, number > self.known_change, time.monotonic() + self.spec.run.wait_limit
        while True:
            mine = context.spec.run.model_dump_json() if read else "those of the job's beginning"
            read_by_rank = [json.loads(each) for each in gather(json.dumps([mine, time.monotonic() > end]).encode())]
            if len({settings for settings, _ in read_by_rank}) == 1:
                return context
            if any(late for _, late in read_by_rank):
                raise Disagreement(f"the ranks of {self.restart_group.name} read unlike settings in {self.path}. The "
                                   "folder must be on a file system that all machines share")
            context, read = context._reread(), True

    def _reread(self) -> RankContext:
        return replace(self, spec=replace(self.spec, run=reload(self.path).run))

    @functools.cached_property
    def scale(self) -> RolloutScale | None:
        group, replica = self.plan.group_of(self.store.rank)
        if group is None or group.name != ROLLOUT:
            return None
        return RolloutScale(self.path, replica, partial(self._left_out, group))

    @property
    def required_processes(self) -> dict[int, str]:
        """Processes without which there is no run: a descriptor of each, and what its end means."""
        shard = self.channel and self.channel.shard_process
        return {shard.process.ended: "the process of this machine's samples has ended; another one takes its place, "
                "and what it held is sampled again"} if shard else {}

    def view(self) -> SupervisedRun:
        """Return what this rank's supervisor asks of the run."""
        return SupervisedRun(self.path, self.spec.run.robust, self.required_processes,
                       self.restart_required_processes, self.is_obsolete,
                       self.should_run, self.leave_out, self.live_config,
                       self.call if self.spec.dag.imports else None, self.lock)

    def restart_required_processes(self) -> dict[int, str]:
        """Start the required processes again, after one of them has ended on any of the ranks."""
        if self.channel:
            self.channel.restart_shard()
        return self.required_processes

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Keep what other ranks need of this one; end it on leaving."""
        try:
            yield
        finally:
            if self.channel:
                self.channel.close()
            if self.lock:
                self.lock.release()

    def leave(self) -> None:
        """Wait until no other rank needs this one any more."""
        if self.channel:
            self.channel.leave()


def join_run(spec: Spec, plan: Plan, folder: Path | None, resume: bool, alone: bool = False,
             elastic: ElasticAgent | None = None) -> RankContext:
    """Connect to the other ranks; check that plans agree. `alone`: nothing is trained, groups need no dock."""
    limit = spec.run.wait_limit
    store = RunStore(limit, elastic.store, elastic.poll, elastic.present) if elastic else RunStore(limit)
    store.agree("plan", " ".join([plan.digest, *spec.hub_commits]),
                "Its DAG or run file, its model folder or its version of distflow differs.")
    path = Path(store.broadcast("folder", str(folder)))
    if elastic:
        elastic.announce(path)
    resume = bool(store.broadcast("resume", "yes" if resume else ""))
    lock = RunLock(path, elastic.job if elastic else "") if store.rank == 0 and not alone else None
    if lock and resume:
        lock.hold()
    device, device_index = choose_device(spec, plan, store)  # all ranks agree on the kind
    backend = choose_backend(spec.run.backend, device)
    if device == "cuda" and not store.rank:
        print(f"The ranks compute on GPUs; their collectives are {backend}'s.", flush=True)
    dock_bytes = int(spec.run.dock_gib * 2**30)
    silence, takes_shard = (elastic.silence, elastic.takes_shard) if elastic else (0.0, None)
    channel = open_channel(plan, spec.run.data.batch, store, dock_bytes, spec.run.on_stale == "wait", silence,
                           takes_shard) \
        if plan.groups and not alone else None
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) or (elastic and elastic.replaces)  # `spec` is old then
    change = 0 if again else max(LiveConfig(path, group).newest() for group in (TRAINER, ROLLOUT, INFERENCE))
    job = lock.job if lock else ""
    return RankContext(spec, plan, store, path, device, resume, channel, agent(), change, device_index, backend,
                       elastic, lock, job)
