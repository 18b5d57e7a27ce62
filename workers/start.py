"""From a plan to a running worker on this rank."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distflow.observe.folder import RunFolder
from distflow.robust.board import Board
from distflow.schema.contract import load_function
from distflow.schema.plan import Plan
from distflow.schema.registry import load_module
from distflow.schema.spec import Spec
from workers.dag_worker import DagWorker


def start(spec: Spec, plan: Plan, folder: Path | None, resume: bool) -> None:
    """Join the others, make sure that all have the same plan, and work.

    Args:
        folder: of the run; on rank 0 only, the others learn it from the board.

    Raises:
        Disagreement: a rank has another plan, or did not come.
    """
    board = Board(spec.run.wait_limit)
    board.agree("plan", plan.digest, "Its DAG or run file, its model folder or its version of distflow differs.")
    functions = _load_functions(spec, plan)
    path = Path(board.tell("folder", str(folder)))
    if board.rank == 0 and not resume:
        RunFolder.create(path, spec, plan, search=[place for place in sys.path if place])
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.PrefixStore("group", board.store),
                            rank=board.rank, world_size=board.ranks,
                            timeout=datetime.timedelta(seconds=spec.run.wait_limit))
    try:
        DagWorker(spec, plan, functions, path, resume).run()
    finally:
        dist.destroy_process_group()


def _load_functions(spec: Spec, plan: Plan) -> dict[str, Callable[..., Any]]:
    """The function of each node; importing the DAG's modules also registers their rewards."""
    for module in spec.dag.imports:
        load_module(module)
    return {task.node: load_function(task.function) for task in plan.tasks}
