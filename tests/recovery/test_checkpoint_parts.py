"""The dock's snapshot in the run's checkpoint: both are there or neither, and together they train every row once."""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distflow.data.batch import Batch
from distflow.dock import Consumer, DockClient, LeaseLost
from distflow.dock.process import DockProcess, start
from distflow.errors import CheckpointError
from distflow.recovery.checkpoint import Checkpoints
from distflow.recovery.checkpoint_files import complete_checkpoints, part, read_progress

UPDATE = Consumer("update", ("tokens",))
ROWS, EACH = 24, 4


class Trainer:
    """Weights that know which rows they were trained on: how often, by row."""

    def __init__(self) -> None:
        self.times = torch.zeros(ROWS)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"times": self.times}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.times = state["times"]


def train(dock: DockClient, trainer: Trainer, step: int) -> list[int]:
    lease = dock.lease("update", EACH, step=step, wait=10)
    rows = dock.fetch(lease)["tokens"].tolist()
    trainer.times[rows] += 1
    assert dock.commit(lease)
    return rows


def save_in_the_middle(folder: Path, address: tuple[str, int], token: bytes) -> list[int]:
    """Two steps, a checkpoint while another holds a lease, and two more steps, which the kill undoes."""
    trainer = Trainer()
    with DockClient([address], token, "trainer", patience=20) as dock, DockClient([address], token, "other") as other:
        for step in range(2):
            train(dock, trainer, step)
        other.lease("update", 3)
        Checkpoints(folder, 2).save(2, {"actor": trainer.state_dict()}, {"source": {}}, {"dock": dock.snapshot})
        return train(dock, trainer, 2) + train(dock, trainer, 3)


def go_on(folder: Path, address: tuple[str, int], token: bytes) -> list[float]:
    trainer = Trainer()
    step = Checkpoints(folder, 2).load({"actor": trainer})["step"]
    with DockClient([address], token, "trainer", patience=20) as dock:
        assert trainer.times.sum() == 2 * EACH
        for later in range(step, ROWS // EACH):
            train(dock, trainer, later)
        assert dock.status()[0]["indexes"]["update"]["committed"] == ROWS
    return trainer.times.tolist()


@pytest.fixture
def child():
    """`child(**arguments)`: a process of the dock, ended with the test."""
    started: list[DockProcess] = []

    def make(token: bytes, **arguments) -> DockProcess:
        started.append(start(token, **arguments))
        return started[-1]

    yield make
    for one in started:
        if not one.process.stdin.closed:
            one.stop()


def test_a_killed_dock_and_a_killed_trainer_train_every_row_once(tmp_path, child):
    token = secrets.token_bytes(32)
    first = child(token, journal=tmp_path / "journal-1")
    with DockClient([first.address], token, "rollout") as dock:
        dock.configure((UPDATE,))
        dock.put(Batch(torch.arange(ROWS), {"tokens": torch.arange(ROWS)}))
    undone, = run_ranks(1, save_in_the_middle, tmp_path / "checkpoints", first.address, token)
    assert len(set(undone)) == 2 * EACH
    first.kill()
    found = part(tmp_path / "checkpoints", "dock") / "shard-0.dock"
    second = child(token, port=first.address[1], snapshot=found, journal=tmp_path / "journal-2")
    times, = run_ranks(1, go_on, tmp_path / "checkpoints", second.address, token)
    assert Counter(times) == {1.0: ROWS}


def test_a_dock_that_is_killed_alone_forgets_no_commit(tmp_path, child):
    """The weights are not set back, and another trains before its trainer can tell again what was answered: the
    journal has it."""
    token, folder, journal = secrets.token_bytes(32), tmp_path / "snapshot", tmp_path / "journal"
    folder.mkdir()
    dead, trainer = child(token, journal=journal), Trainer()
    with DockClient([dead.address], token, "trainer", patience=20) as dock:
        dock.configure((UPDATE,))
        dock.put(Batch(torch.arange(ROWS), {"tokens": torch.arange(ROWS)}))
        train(dock, trainer, 0)
        dock.snapshot(folder)
        train(dock, trainer, 1)
        held = dock.lease("update", EACH, step=2)
        dead.kill()
        alive = child(token, port=dead.address[1], snapshot=folder / "shard-0.dock", journal=journal)
        assert alive.address == dead.address
        with DockClient([alive.address], token, "another trainer", patience=20) as other:
            for step in range(3, ROWS // EACH):
                train(other, trainer, step)
        with pytest.raises(LeaseLost, match="committed by another"):
            dock.commit(held)
        train(dock, trainer, 2)
    assert Counter(trainer.times.tolist()) == {1.0: ROWS}


def test_one_that_takes_the_place_of_another_begins_with_nothing(child):
    """A client does not tell it again what was committed before, and can produce those rows once more."""
    token = secrets.token_bytes(32)
    dead, trainer = child(token), Trainer()
    rows = Batch(torch.arange(EACH), {"tokens": torch.arange(EACH)})
    with DockClient([dead.address], token, "trainer", patience=60) as dock:
        dock.configure((UPDATE,))
        dock.put(rows)
        train(dock, trainer, 0)
        dead.kill()
        child(token, port=dead.address[1], layout=dock.layout, number=0)
        assert dock.put(rows) == EACH
        train(dock, trainer, 0)
    assert Counter(trainer.times.tolist()) == {2.0: EACH, 0.0: ROWS - EACH}


def fail(folder: Path, where: str) -> str:
    """The second part cannot be written; the error on this rank."""

    def full(inner: Path) -> None:
        (inner / "half").write_text("half of it")
        raise OSError(28, "No space left on device")

    parts = {"dock": lambda inner: (inner / "file").write_text("whole"), "more": full}
    if where == "nowhere":
        return str(Checkpoints(folder, 2).save(1, {}, {}, {"dock": parts["dock"]}) or "")
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(folder, 2).save(2, {}, {}, parts)
    dist.barrier()
    return str(caught.value)


def test_a_part_that_cannot_be_written_is_said_on_every_rank_and_leaves_the_older_one(tmp_path):
    assert run_ranks(2, fail, tmp_path, "nowhere") == ["", ""]
    for error in run_ranks(2, fail, tmp_path, "second part"):
        assert "more could not be written" in error
        assert "No space left on device" in error
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000001"]
    assert (part(tmp_path, "dock") / "file").read_text() == "whole"


def test_a_torn_part_is_a_torn_checkpoint(tmp_path):
    run_ranks(1, fail, tmp_path, "nowhere")
    file = part(tmp_path, "dock") / "file"
    assert read_progress(file.parents[1])["files"]["dock/file"] == 5
    file.write_text("who")
    assert complete_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        part(tmp_path, "dock")


def test_a_checkpoint_without_the_part_says_so(tmp_path):
    run_ranks(1, fail, tmp_path, "nowhere")
    with pytest.raises(CheckpointError, match="has no part `warehouse`: the run that wrote it had none"):
        part(tmp_path, "warehouse")
