"""A worker process from fork to exit: joins its restart group, builds engines, runs the training or rollout loop."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distflow.config.load import Spec
from distflow.contracts.decorators import load_module
from distflow.contracts.signature import load_function
from distflow.plan import ROLLOUT, TRAINER, Plan
from distflow.recovery import hooks
from distflow.recovery.fault_injection import FaultInjector
from distflow.recovery.rank_status import RankStatus
from distflow.recovery.stopped import continue_stopped
from distflow.recovery.worker_process import WorkerContext
from distflow.telemetry import events, heartbeat
from distflow.telemetry.run_folder import RunFolder
from distflow.telemetry.trajectories import trajectories
from workers.context import RankContext
from workers.isolation.sandbox.processes import end_with
from workers.loop import TrainLoop, dataloader, prompted_role
from workers.roles import RoleEngines, build_roles
from workers.rollout import RolloutWorker, TPFollower
from workers.rollout_channel import RolloutChannel
from workers.sink import write_models

_STOPPED = 60.0
"""Seconds that a process without a health monitor may be stopped, unless detector `frozen` has other `seconds`."""
_PATIENCE = 1.0
"""Seconds that a process has to end by itself after SIGTERM."""


def work(context: RankContext, worker_context: WorkerContext, export: Path | None = None) -> bool:
    """Run a worker. Return False if another worker is to go on with changed settings.

    Args:
        export: where a resumed run writes its models instead of going on. Nothing else is written: the run may be
            going on elsewhere.
    """
    if worker_context.supervisor_pid:
        end_with(worker_context.supervisor_pid)
        frozen = context.spec.run.robust.detectors.get("frozen", {})
        continue_stopped(worker_context.supervisor_pid, frozen.get("seconds", _STOPPED))
    heartbeat.set_current(worker_context.heartbeat)
    worker_context.heartbeat.answer()
    stopwatch, context, done = _Stopwatch(), context.reloaded(worker_context.config_change), True
    if worker_context.attempt.number:
        context.call("before_restart", worker_context.attempt)
    groups = _AttemptGroups.of(context, worker_context.attempt.number)
    if context.spec.run.faults:
        group = TRAINER if context.group is None else context.group.name
        ranks = context.group.ranks if context.group else range(context.store.ranks)
        worker_context.heartbeat.on_phase = FaultInjector(
            context.spec.run, group, context.store.rank, ranks, context.path, worker_context.snapshots,
            elastic=context.elastic is not None)
    groups.join(context.device, context.spec.run.wait_limit)
    context = context.agreed(worker_context.config_change)
    channel = context.channel and context.channel.joined(groups.run_store)
    stopwatch.lap("connect")
    if context.group and context.group.name == ROLLOUT:
        _sample(context, worker_context, channel, stopwatch)
    else:
        done = _train(context, worker_context, groups, channel, stopwatch, export)
    dist.destroy_process_group()  # not after an error: it would wait for the others before the error is shown
    return done


@dataclass(frozen=True)
class _AttemptGroups:
    """Process groups of a restart group in one attempt. `run_store`: a connection of this process to the store."""

    run_store: dist.Store
    store: dist.Store
    rank: int
    ranks: int

    @classmethod
    def of(cls, context: RankContext, attempt: int) -> _AttemptGroups:
        run_store, group = context.store.store.clone(), context.restart_group
        return cls(run_store, dist.PrefixStore(f"{group.name}/{attempt}", run_store),
                   context.store.rank - group.ranks.start, len(group.ranks))

    def join(self, device: str, limit: float) -> None:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            heartbeat.current().set_gpu(f"GPU-{torch.cuda.get_device_properties().uuid}")
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", rank=self.rank,
                                store=dist.PrefixStore("group", self.store), world_size=self.ranks,
                                timeout=datetime.timedelta(seconds=limit))


class _Stopwatch:
    """Seconds of each part of the start."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.began = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self.began = now - self.began, now


def _train(context: RankContext, worker_context: WorkerContext, groups: _AttemptGroups, channel: RolloutChannel | None,
           stopwatch: _Stopwatch, export: Path | None) -> bool:
    """Run the training loop of this rank. Return whether it is done."""
    loop = _train_loop(context, worker_context, groups, channel, writes=not export)
    stopwatch.lap("load")
    worker_context.heartbeat.ready(**stopwatch.laps)
    context.call("after_restart" if worker_context.attempt.number else "on_join", worker_context.attempt)
    done = True
    if export:
        write_models(loop.trained, export)
    else:
        if groups.rank == 0 and context.resume and worker_context.first:
            RunFolder.describe(context.path, context.spec, context.plan)  # overrides hold for the next resume too
        if channel and groups.rank == 0:
            channel.begin(loop.first_step)
        done = loop.run()
        if channel and done:
            channel.end()
    loop.close()
    return done


def _train_loop(context: RankContext, worker_context: WorkerContext, groups: _AttemptGroups,
                channel: RolloutChannel | None, writes: bool) -> TrainLoop:
    """Return the training loop once all ranks have theirs. A start that fails on any rank leaves no new run folder."""
    spec, own, resumed = context.spec, context.own, context.resume or worker_context.attempt.number > 0
    rollout = context.plan.groups[1].plan if channel and spec.run.mode == "semi_sync" else None
    functions = _load_functions(spec, own) | (_load_functions(spec, rollout) if rollout else {})
    with contextlib.ExitStack() as starting:
        if groups.rank == 0 and not (resumed and (context.resume or RunFolder.made(context.path, context.agent))):
            # From here on the others notice at once that a rank has failed.
            undo = starting.enter_context(_ending_on_sigterm())
            search = [folder for folder in sys.path if folder]
            created = RunFolder.created(context.path, spec, context.plan, search, context.agent)
            undo.append(starting.enter_context(created))
            if context.lock and not worker_context.supervisor_pid:  # else the supervisor has it
                context.lock.hold()
        status, supervised = RankStatus(groups.store, groups.rank, groups.ranks), worker_context.supervisor_pid
        loop = TrainLoop(spec, own, functions, context.device, context.path, resumed, status, writes, channel,
                         rollout, worker_context if supervised and spec.run.robust.snapshots else None,
                         context.live_config if supervised else None, worker_context.config_change,
                         context.plan.ranks)
        dist.all_reduce(torch.zeros(1))  # all are ready; on the CPU, where one that died is noticed
        return loop


def _sample(context: RankContext, worker_context: WorkerContext, channel: RolloutChannel | None,
            stopwatch: _Stopwatch) -> None:
    """Run the rollout loop of this rank. Without a channel there is no trainer to sample for."""
    if channel is None:
        return
    events.current().open(context.path / "events.jsonl", context.store.rank)
    names = {task.role for task in context.own.tasks if task.samples}
    is_leader = context.store.rank == context.restart_group.ranks.start
    roles = build_roles(context.spec, context.own, names, names, context.device, training=False)
    who = f"rollout {context.store.rank}"
    worker = _rollout_worker(context, worker_context, channel, roles, who) if is_leader else \
        TPFollower(context.spec, roles, channel, who)
    stopwatch.lap("load")
    worker_context.heartbeat.ready(**stopwatch.laps)
    context.call("after_restart" if worker_context.attempt.number else "on_join", worker_context.attempt)
    try:
        worker.run()
    finally:
        worker.close()


def _rollout_worker(context: RankContext, worker_context: WorkerContext, channel: RolloutChannel,
                    roles: dict[str, RoleEngines], who: str) -> RolloutWorker:
    spec, plan = context.spec, context.own
    loader = dataloader(spec, roles[prompted_role(spec, plan.tasks)])
    first = channel.first if worker_context.first else None
    trajectories().open(context.path / f"trajectories/rank{context.store.rank}.jsonl", spec.run.trajectories, first)
    return RolloutWorker(spec, plan, _load_functions(spec, plan), roles, loader, channel, who,
                         channel.ranks // plan.ranks if spec.run.mode == "semi_sync" else context.group.replicas,
                         context.group.replicas)


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[list[Callable[[], None]]]:
    """End on SIGTERM, by which supervisors and torchrun end the other ranks when one has failed, by way of every
    `finally`. If this thread does not react, since it is in a call that waits for the failed rank, another thread calls
    the functions of the list and ends the process."""
    undo: list[Callable[[], None]] = []
    over = threading.Event()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would interrupt the exit
        sys.exit(128 + signal.SIGTERM)

    def end() -> None:
        while signals := os.read(read_end, 1):
            if signals[0] == signal.SIGTERM and not over.wait(_PATIENCE):
                for each in undo:
                    each()
                os._exit(128 + signal.SIGTERM)

    before, former = signal.signal(signal.SIGTERM, leave), signal.set_wakeup_fd(write_end)
    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    try:
        yield undo
    finally:
        over.set()
        signal.set_wakeup_fd(former)
        signal.signal(signal.SIGTERM, before)
        os.close(write_end)
        thread.join()
        os.close(read_end)


def _load_functions(spec: Spec, plan: Plan) -> dict[str, Callable[..., Any]]:
    """Return the function of each node. Importing the DAG's modules also registers their rewards."""
    for module in spec.dag.imports:
        load_module(module)
    heartbeat.current().page.hooks = hooks.registered_mask()
    return {task.node: load_function(task.function) for task in plan.tasks}
