"""What a worker does, from its place in the run to the end of its life."""

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
"""Seconds that a process which nobody else watches may stand stopped, unless detector `frozen` has other `seconds`."""
_PATIENCE = 1.0
"""Seconds that a process which is told to end has to do so by itself."""


def work(place: RankContext, berth: WorkerContext, export: Path | None = None) -> bool:
    """A worker's life. False: another worker is to go on, with other settings.

    Args:
        export: where a resumed run writes its models instead of going on. Nothing else is written: the run may be
            going on elsewhere.
    """
    if berth.seat:
        end_with(berth.seat)
        continue_stopped(berth.seat, place.spec.run.robust.detectors.get("frozen", {}).get("seconds", _STOPPED))
    heartbeat.show(berth.pulse)
    berth.pulse.answer()
    watch, place, done = _Stopwatch(), place.renewed(berth.changes), True
    if berth.life.number:
        place.call("before_restart", berth.life)
    team = _AttemptGroups.of(place, berth.life.number)
    if place.spec.run.faults:
        group = TRAINER if place.group is None else place.group.name
        ranks = place.group.ranks if place.group else range(place.board.ranks)
        berth.pulse.watching = FaultInjector(place.spec.run, group, place.board.rank, ranks, place.path,
                                             berth.snapshots,
                                             apart=place.apart is not None)
    team.join(place.device, place.spec.run.wait_limit)
    place = place.agreed(berth.changes)
    channel = place.channel and place.channel.joined(team.board)
    watch.lap("connect")
    if place.group and place.group.name == ROLLOUT:
        _sample(place, berth, channel, watch)
    else:
        done = _train(place, berth, team, channel, watch, export)
    dist.destroy_process_group()  # not after an error: the others would be waited for before it is shown
    return done


@dataclass(frozen=True)
class _AttemptGroups:
    """The ranks that have process groups together, in one life. `board`: a connection of this process to it."""

    board: dist.Store
    store: dist.Store
    rank: int
    ranks: int

    @classmethod
    def of(cls, place: RankContext, life: int) -> _AttemptGroups:
        board, unit = place.board.store.clone(), place.unit
        return cls(board, dist.PrefixStore(f"{unit.name}/{life}", board), place.board.rank - unit.ranks.start,
                   len(unit.ranks))

    def join(self, device: str, limit: float) -> None:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            heartbeat.current().computes_on(f"GPU-{torch.cuda.get_device_properties().uuid}")
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", rank=self.rank,
                                store=dist.PrefixStore("group", self.store), world_size=self.ranks,
                                timeout=datetime.timedelta(seconds=limit))


class _Stopwatch:
    """Seconds of one thing after another."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.began = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self.began = now - self.began, now


def _train(place: RankContext, berth: WorkerContext, team: _AttemptGroups, channel: RolloutChannel | None,
           watch: _Stopwatch,
           export: Path | None) -> bool:
    """Run the chain of a rank that trains, and in sync mode samples too; whether it is done."""
    worker = _worker(place, berth, team, channel, writes=not export)
    watch.lap("load")
    berth.pulse.ready(**watch.laps)
    place.call("after_restart" if berth.life.number else "on_join", berth.life)
    done = True
    if export:
        write_models(worker.trained, export)
    else:
        if team.rank == 0 and place.resume and berth.first:
            RunFolder.describe(place.path, place.spec, place.plan)  # what was overridden stays so when resumed again
        if channel and team.rank == 0:
            channel.begin(worker.first)
        done = worker.run()
        if channel and done:
            channel.end()
    worker.close()
    return done


def _worker(place: RankContext, berth: WorkerContext, team: _AttemptGroups, channel: RolloutChannel | None,
            writes: bool) -> TrainLoop:
    """The worker, once all ranks have theirs; a start that fails on any rank leaves no folder of a new run."""
    spec, own, anew = place.spec, place.own, place.resume or berth.life.number > 0
    rollout = place.plan.groups[1].plan if channel and spec.run.mode == "semi_sync" else None
    functions = _load_functions(spec, own) | (_load_functions(spec, rollout) if rollout else {})
    with contextlib.ExitStack() as starting:
        if team.rank == 0 and not (anew and (place.resume or RunFolder.made(place.path, place.agent))):
            # From here on a rank that fails is noticed by the others at once.
            undo = starting.enter_context(_leaving_when_told())
            search = [folder for folder in sys.path if folder]
            undo.append(starting.enter_context(RunFolder.created(place.path, spec, place.plan, search, place.agent)))
            if place.lock and not berth.seat:  # else the seat has it
                place.lock.hold()
        presence = RankStatus(team.store, team.rank, team.ranks)
        worker = TrainLoop(spec, own, functions, place.device, place.path, anew, presence, writes, channel, rollout,
                           berth if berth.seat and spec.run.robust.snapshots else None,
                           place.changes if berth.seat else None, berth.changes, place.plan.ranks)
        dist.all_reduce(torch.zeros(1))  # all are ready; on the CPU, where one that died is noticed
        return worker


def _sample(place: RankContext, berth: WorkerContext, channel: RolloutChannel | None, watch: _Stopwatch) -> None:
    """Run the chain of a rank that only samples. Without a channel there is nobody to sample for."""
    if channel is None:
        return
    events.current().open(place.path / "events.jsonl", place.board.rank)
    names = {task.role for task in place.own.tasks if task.samples}
    leads = place.board.rank == place.unit.ranks.start
    roles = build_roles(place.spec, place.own, names, names, place.device, training=False)
    who = f"rollout {place.board.rank}"
    worker = _sampler(place, berth, channel, roles, who) if leads else TPFollower(place.spec, roles, channel, who)
    watch.lap("load")
    berth.pulse.ready(**watch.laps)
    place.call("after_restart" if berth.life.number else "on_join", berth.life)
    try:
        worker.run()
    finally:
        worker.close()


def _sampler(place: RankContext, berth: WorkerContext, channel: RolloutChannel, roles: dict[str, RoleEngines],
             who: str) -> RolloutWorker:
    spec, plan = place.spec, place.own
    loader = dataloader(spec, roles[prompted_role(spec, plan.tasks)])
    first = channel.first if berth.first else None
    trajectories().open(place.path / f"trajectories/rank{place.board.rank}.jsonl", spec.run.trajectories, first)
    return RolloutWorker(spec, plan, _load_functions(spec, plan), roles, loader, channel, who,
                         channel.ranks // plan.ranks if spec.run.mode == "semi_sync" else place.group.replicas,
                         place.group.replicas)


@contextlib.contextmanager
def _leaving_when_told() -> Iterator[list[Callable[[], None]]]:
    """SIGTERM, by which seats and torchrun end the other ranks when one has failed, leaves by way of every `finally`.
    Where this thread hears nothing, since it waits in a call for the rank that has ended, another one does what stands
    in the list then, and ends the process."""
    undo: list[Callable[[], None]] = []
    over = threading.Event()
    heard, told = os.pipe()
    os.set_blocking(told, False)

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the next one would interrupt the leaving
        sys.exit(128 + signal.SIGTERM)

    def listen() -> None:
        while said := os.read(heard, 1):
            if said[0] == signal.SIGTERM and not over.wait(_PATIENCE):
                for each in undo:
                    each()
                os._exit(128 + signal.SIGTERM)

    before, former = signal.signal(signal.SIGTERM, leave), signal.set_wakeup_fd(told)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield undo
    finally:
        over.set()
        signal.set_wakeup_fd(former)
        signal.signal(signal.SIGTERM, before)
        os.close(told)
        listener.join()
        os.close(heard)


def _load_functions(spec: Spec, plan: Plan) -> dict[str, Callable[..., Any]]:
    """The function of each node; importing the DAG's modules also registers their rewards."""
    for module in spec.dag.imports:
        load_module(module)
    heartbeat.current().page.hooks = hooks.page()
    return {task.node: load_function(task.function) for task in plan.tasks}
