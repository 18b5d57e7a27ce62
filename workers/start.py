"""From a plan to a running worker on this rank."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distflow.observe import events
from distflow.observe.folder import RunFolder
from distflow.observe.trajectories import trajectories
from distflow.robust.board import Board
from distflow.robust.presence import Presence
from distflow.schema.contract import ENGINE_TYPES, load_function
from distflow.schema.plan import ROLLOUT, Group, Plan
from distflow.schema.registry import load_module
from distflow.schema.spec import Spec
from workers.channel import Channel, open_channel
from workers.dag_worker import DagWorker, dataloader, prompted_role
from workers.roles import build_roles
from workers.rollout_worker import RolloutWorker
from workers.sink import write_models


def start(spec: Spec, plan: Plan, folder: Path | None, resume: bool, export: Path | None = None) -> None:
    """Join the others, make sure that all have the same plan, and work.

    Args:
        folder: of the run; on rank 0 only, the others learn it from the board.
        export: where a resumed run writes its models instead of going on. Nothing else is written: the run may be
            going on elsewhere.

    Raises:
        Disagreement: a rank has another plan, or did not come.
    """
    board = Board(spec.run.wait_limit)
    board.agree("plan", plan.digest, "Its DAG or run file, its model folder or its version of distflow differs.")
    path = Path(board.tell("folder", str(folder)))
    device = _device(board)
    group, replica = plan.group_of(board.rank)
    team = _Team.of(board, group, replica)
    team.join(device, spec.run.wait_limit)
    channel = open_channel(plan, spec.run.data.batch, board) if group and not export else None
    try:
        if group and group.name == ROLLOUT:
            _sample(spec, group, board.rank, channel, device, path)
        else:
            _train(spec, group.plan if group else plan, plan, team, channel, device, path, resume, export)
        if channel:
            channel.part()
    finally:
        if channel:
            channel.close()
    dist.destroy_process_group()  # not after an error: the others would be waited for before it is shown


@dataclass(frozen=True)
class _Team:
    """The ranks that have process groups together: all of them, or those of a group's replica."""

    store: dist.Store
    rank: int
    ranks: int

    @classmethod
    def of(cls, board: Board, group: Group | None, replica: int) -> _Team:
        if group is None:
            return cls(board.store, board.rank, board.ranks)
        ranks = group.plan.ranks
        store = dist.PrefixStore(f"{group.name}/{replica}", board.store)
        return cls(store, board.rank - group.first - replica * ranks, ranks)

    def join(self, device: str, limit: float) -> None:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", rank=self.rank,
                                store=dist.PrefixStore("group", self.store), world_size=self.ranks,
                                timeout=datetime.timedelta(seconds=limit))


def _train(spec: Spec, own: Plan, plan: Plan, team: _Team, channel: Channel | None, device: str,
           path: Path, resume: bool, export: Path | None) -> None:
    """Run the chain of a rank that trains, and in sync mode samples too."""
    worker = _worker(spec, own, plan, team, channel, device, path, resume, writes=not export)
    if export:
        write_models(worker.trained, export)
    else:
        if team.rank == 0 and resume:
            RunFolder.describe(path, spec, plan)  # what was overridden stays so when it is resumed again
        if channel and team.rank == 0:
            channel.begin(worker.first)
        worker.run()
        if channel:
            channel.end()
    worker.close()


def _worker(spec: Spec, own: Plan, plan: Plan, team: _Team, channel: Channel | None, device: str, path: Path,
            resume: bool, writes: bool) -> DagWorker:
    """The worker, once all ranks have theirs; a start that fails on any rank leaves no folder of a new run."""
    rollout = plan.groups[1].plan if channel and spec.run.mode == "semi_sync" else None
    functions = _load_functions(spec, own) | (_load_functions(spec, rollout) if rollout else {})
    with contextlib.ExitStack() as starting:
        if team.rank == 0 and not resume:  # from here on a rank that fails is noticed by the others at once
            starting.enter_context(_leaving_when_told())
            search = [place for place in sys.path if place]
            starting.enter_context(RunFolder.created(path, spec, plan, search))
        presence = Presence(team.store, team.rank, team.ranks)
        worker = DagWorker(spec, own, functions, device, path, resume, presence, writes, channel, rollout)
        dist.all_reduce(torch.zeros(1))  # all are ready; on the CPU, where one that died is noticed
        return worker


def _sample(spec: Spec, group: Group, rank: int, channel: Channel | None, device: str, path: Path) -> None:
    """Run the chain of a rank that only samples. Without a channel there is nobody to sample for."""
    if channel is None:
        return
    plan = group.plan
    functions = _load_functions(spec, plan)
    events.current().open(path / "events.jsonl", rank)
    names = {task.role for task in plan.tasks if task.type in ENGINE_TYPES}
    roles = build_roles(spec, plan, names, {task.role for task in plan.tasks if task.samples}, device, training=False)
    loader = dataloader(spec, roles[prompted_role(spec, plan.tasks)])
    trajectories().open(path / f"trajectories/rank{rank}.jsonl", spec.run.trajectories, channel.first)
    worker = RolloutWorker(spec, plan, functions, roles, loader, channel, f"rollout {rank}",
                           channel.ranks if spec.run.mode == "semi_sync" else group.replicas)
    try:
        worker.run()
    finally:
        worker.close()


@contextlib.contextmanager
def _leaving_when_told() -> Iterator[None]:
    """SIGTERM, by which torchrun ends the other ranks when one has failed, leaves by way of every `finally`."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _device(board: Board) -> str:
    """cuda if each rank of this machine has a GPU of its own, else cpu; the same on all ranks."""
    gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = "cuda" if gpus >= here else "cpu"
    board.agree("device", device, "Some machines have fewer GPUs than ranks.")
    if gpus and device == "cpu" and board.rank == 0:
        print(f"{here} ranks on {gpus} GPU: everything computes on the CPU. Start {gpus} to use it.", flush=True)
    return device


def _load_functions(spec: Spec, plan: Plan) -> dict[str, Callable[..., Any]]:
    """The function of each node; importing the DAG's modules also registers their rewards."""
    for module in spec.dag.imports:
        load_module(module)
    return {task.node: load_function(task.function) for task in plan.tasks}
