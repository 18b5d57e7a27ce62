"""Checkpoints from snapshots in memory, on real ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distflow.config.run import Checkpoint
from distflow.recovery.checkpoint_files import complete_checkpoints, step_of
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

    def release_before(self, state: dict[str, int]) -> None: ...


def train_state(folder: Path, worker_context: WorkerContext | None, to: str | None = None) -> TrainState:
    role = SimpleNamespace(engine=Engine(init_device_mesh("cpu", (2,))), engine_swap=None, has_engine=True, version=0)
    return TrainState(folder, Checkpoint(every=1, keep=2, to=to), worker_context, {"actor": role}, Source(), 20.0)


def lose_a_copy(folder: Path) -> list[list[int]]:
    """Return the complete checkpoints after a save for which rank 1 has lost its snapshot, and after the next."""
    at, seen = train_state(folder, WorkerContext()), []
    for step in (1, 2):
        at.snapshot(step)
        at.before_update()
        if step == 1 and dist.get_rank() == 1:
            at.snapshots.newest.memory()[32] ^= 0xFF  # the first byte of the header
        at.save(step)
        at.finish()
        seen.append([step_of(path) for path in complete_checkpoints(folder)])
    return seen


def test_a_damaged_snapshot_loses_only_its_checkpoint(tmp_path):
    assert run_ranks(2, lose_a_copy, tmp_path) == [[[], [2]]] * 2


def save_without_memory(folder: Path) -> tuple[list[int], int]:
    """Return the complete checkpoints after three saves in a row, and the number of snapshots in memory."""
    at = train_state(folder, None)
    for step in (1, 2, 3):
        at.snapshot(step)
        at.before_update()
        at.save(step)
    at.finish()
    saved = [step_of(path) for path in complete_checkpoints(folder)]
    return saved, sum(slot.memory() is not None for slot in at.snapshots.slots)


def test_one_snapshot_is_enough_for_checkpoints_alone(tmp_path):
    assert run_ranks(2, save_without_memory, tmp_path) == [([2, 3], 1)] * 2


def settle_after_a_restart(folder: Path, to: str) -> None:
    """Save without a store, which stands for an upload that ended with its worker; then end the run as another one."""
    before = train_state(folder, None)
    before.snapshot(1)
    before.save(1)
    before.finish()
    train_state(folder, None, to).settle_uploads()


def test_worker_that_restarts_after_the_last_checkpoint_uploads_it(tmp_path):
    run_ranks(2, settle_after_a_restart, tmp_path / "run/checkpoints", f"file://{tmp_path}/store")
    assert [path.parent.name.partition(".")[0] for path in tmp_path.glob("store/run/*/progress.json")] == [
        "step-00000001"]
