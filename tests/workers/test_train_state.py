"""What is written to disk from the copies in memory, on real ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distflow.config.run import Checkpoint
from distflow.errors import CheckpointError
from distflow.recovery.checkpoint_files import step_of, whole
from distflow.recovery.worker_process import WorkerContext
from workers.train_state import TrainState


class Engine:
    """A weight of which each rank has a row."""

    def __init__(self, mesh) -> None:
        self.weight = distribute_tensor(torch.zeros(2, 3), mesh, [Shard(0)])

    def state_dict(self) -> dict:
        return {"weight": self.weight}


class Source:
    def state_dict(self) -> dict[str, int]:
        return {"position": 0}

    def settle(self, state: dict[str, int]) -> None: ...


def standing(folder: Path, berth: WorkerContext | None) -> TrainState:
    role = SimpleNamespace(engine=Engine(init_device_mesh("cpu", (2,))), handover=None, version=0)
    return TrainState(folder, Checkpoint(every=1, keep=2), berth, {"actor": role}, Source(), 20.0)


def lose_a_copy(folder: Path) -> list[list[int]]:
    """The whole checkpoints after a save of which rank 1 has lost its copy, and after the next."""
    at, seen = standing(folder, WorkerContext()), []
    for step in (1, 2):
        at.remember(step)
        at.before_update()
        if step == 1 and dist.get_rank() == 1:
            at.copies.newest.memory()[32] ^= 0xFF  # the first byte of the header
        at.save(step)
        at.finish()
        seen.append([step_of(path) for path in whole(folder)])
    return seen


def test_a_copy_that_has_changed_costs_no_more_than_its_checkpoint(tmp_path):
    assert run_ranks(2, lose_a_copy, tmp_path) == [[[], [2]]] * 2


def save_without_memory(folder: Path) -> tuple[list[int], int]:
    """The whole checkpoints after three saves that follow each other, and the copies in memory."""
    at = standing(folder, None)
    for step in (1, 2, 3):
        at.remember(step)
        at.before_update()
        at.save(step)
    at.finish()
    return [step_of(path) for path in whole(folder)], sum(slot.memory() is not None for slot in at.copies.slots)


def test_one_copy_is_enough_for_what_is_only_written_to_disk(tmp_path):
    assert run_ranks(2, save_without_memory, tmp_path) == [([2, 3], 1)] * 2


def restore_from_damaged(folder: Path) -> tuple[int, str, list[str]]:
    """The step of a start with nothing, what a start says when all checkpoints are torn, and what is left of them."""
    at = standing(folder, None)
    nothing = at.restore()
    for step in (1, 2):
        at.remember(step)
        at.before_update()
        at.save(step)
    at.finish()
    dist.barrier()
    if dist.get_rank() == 0:
        for checkpoint in whole(folder):
            (checkpoint / "progress.json").write_text("")
    dist.barrier()
    with pytest.raises(CheckpointError) as error:
        standing(folder, None).restore()
    return nothing, str(error.value), sorted(path.name for path in folder.iterdir())


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path):
    for nothing, error, left in run_ranks(2, restore_from_damaged, tmp_path):
        assert nothing == 0
        assert "step-00000002 is damaged: progress.json" in error
        assert left == ["step-00000001", "step-00000002"]
