"""Checkpoints are complete or absent, whatever happens while they are written, and fit any number of ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankFailed, run_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distflow.errors import CheckpointError, Disagreement
from distflow.recovery import checkpoint, generations
from distflow.recovery.checkpoint import Checkpoints
from distflow.recovery.checkpoint_files import complete_checkpoints, read_progress, write_progress
from distflow.telemetry import events


class Engine:
    """A small model with Adam, sharded over all ranks; every rank trains on the same rows."""

    def __init__(self, seed: int, width: int = 5, layers: int = 2):
        torch.manual_seed(seed)
        modules = [torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1), torch.nn.Linear(1, 1)]
        self.model = torch.nn.Sequential(*modules[: layers + 1])
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def train(self, step: int) -> None:
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        self.model(rows).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def weights(self) -> list[list[float]]:
        return [parameter.full_tensor().flatten().tolist() for parameter in self.model.parameters()]


def states(engines: dict[str, Engine]) -> dict[str, Any]:
    return {name: engine.state_dict() for name, engine in engines.items()}


def train_and_save(folder: Path, steps: int, keep: int) -> list[list[list[float]]]:
    """The weights after each step; every step is saved."""
    engines, seen = {"actor": Engine(0), "critic": Engine(1)}, []
    for step in range(1, steps + 1):
        for engine in engines.values():
            engine.train(step)
        Checkpoints(folder, keep).save(step, states(engines), {"source": {"position": 10 * step}})
        seen.append(engines["actor"].weights() + engines["critic"].weights())
    return seen


def load(folder: Path, train_on: int | None = None) -> tuple[dict[str, Any], list[list[float]]]:
    engines = {"actor": Engine(7), "critic": Engine(8)}
    progress = Checkpoints(folder, 2).load(engines)
    if train_on is not None:
        for engine in engines.values():
            engine.train(train_on)
    return progress, engines["actor"].weights() + engines["critic"].weights()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_stay_and_load_on_as_many_ranks(tmp_path):
    states = run_ranks(2, train_and_save, tmp_path, 4, 2)[0]
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert complete_checkpoints(tmp_path) == [tmp_path / "step-00000003", tmp_path / "step-00000004"]
    for progress, weights in run_ranks(2, load, tmp_path):
        assert progress == {"step": 4, "source": {"position": 40}}
        assert weights == states[3]


def test_the_optimizer_goes_on_as_if_nothing_happened(tmp_path):
    """After the next step as well, the weights are those of a run that was never stopped."""
    states = run_ranks(2, train_and_save, tmp_path / "whole", 3, 1)[0]
    run_ranks(2, train_and_save, tmp_path / "part", 2, 1)
    assert run_ranks(2, load, tmp_path / "part", 3)[0][1] == states[2]


def test_two_ranks_save_and_other_numbers_load(tmp_path):
    states = run_ranks(2, train_and_save, tmp_path, 1, 1)[0]
    for ranks in (1, 3):
        assert all(weights == states[0] for _, weights in run_ranks(ranks, load, tmp_path))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path, place: float = 0.5) -> None:
    """One bit of a file is another."""
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def copied(saved: Path, folder: Path) -> Path:
    return shutil.copytree(saved, folder / "checkpoints")


@pytest.mark.parametrize("harm", [
    lambda newest: cut(next(newest.glob("*.distcp"))), lambda newest: next(newest.glob("*.distcp")).unlink(),
    lambda newest: cut(newest / ".metadata"), lambda newest: (newest / ".metadata").unlink(),
    lambda newest: cut(newest / "progress.json"), lambda newest: (newest / "progress.json").unlink(),
    lambda newest: (newest / "progress.json").write_text("{}"), lambda newest: newest.rename(f"{newest}.partial"),
    lambda newest: (newest / "progress.json").write_text('{"step": 2, "files": []}'),
    lambda newest: newest.rename(newest.with_name("step-abc")),
], ids=["shard cut", "shard lost", "metadata cut", "metadata lost", "progress cut", "progress lost", "foreign",
        "partial", "other form", "other name"])
def test_a_torn_checkpoint_is_passed_over(tmp_path, saved, harm):
    copy = copied(saved, tmp_path)
    assert [path.name for path in complete_checkpoints(copy)] == ["step-00000001", "step-00000002"]
    harm(copy / "step-00000002")
    assert [path.name for path in complete_checkpoints(copy)] == ["step-00000001"]
    assert run_ranks(1, load, copy)[0][0]["step"] == 1


def load_and_tell(folder: Path) -> tuple[dict[str, Any], str, list[dict[str, Any]]]:
    """Its progress, what is said on this rank's screen, and the events."""
    said, journal = io.StringIO(), folder.parent / f"events-{dist.get_rank()}.jsonl"
    journal.touch()
    events.current().open(journal, dist.get_rank())
    with contextlib.redirect_stderr(said):
        progress, _ = load(folder)
    return progress, said.getvalue(), [json.loads(line) for line in journal.read_text().splitlines()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", [0.0, 0.37, 0.5, 1.0])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "progress.json"])
def test_a_flipped_bit_is_found_and_said(tmp_path, saved, name, place, ranks):
    """Sizes are as before. Of two ranks, one reads the file."""
    copy = copied(saved, tmp_path)
    flip(copy / "step-00000002" / name, place)
    told = run_ranks(ranks, load_and_tell, copy)
    assert [progress["step"] for progress, _, _ in told] == [1] * ranks
    _, said, found = told[0]
    assert f"{copy}/step-00000002 is damaged: {name} " in said
    assert "It is passed over for the one before it." in said
    assert [(event["event"], event["of_step"]) for event in found] == [("checkpoint_damaged", 2)]


def test_without_an_undamaged_one_each_is_named(tmp_path, saved):
    copy = copied(saved, tmp_path)
    for step in (1, 2):
        flip(copy / f"step-0000000{step}" / "__0_0.distcp")
    text = run_ranks(1, refused, copy, "nothing")[0]
    for step in (1, 2):
        assert f"step-0000000{step} is damaged: __0_0.distcp is not what was written" in text


def test_one_of_an_older_version_has_no_checksums_and_loads(tmp_path, saved):
    copy = copied(saved, tmp_path)
    progress = json.loads((copy / "step-00000002/progress.json").read_text())
    for name in ("checksums", "checksum"):
        del progress[name]
    (copy / "step-00000002/progress.json").write_text(json.dumps(progress))
    assert run_ranks(1, load, copy)[0][0]["step"] == 2


class Evil:
    """Unpickled by torch's own reader, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def write_evil(checkpoint: Path, name: str, evil: Evil) -> None:
    """With the right checksums, as whoever writes there can make them."""
    if name == ".metadata":
        metadata = dcp.FileSystemReader(checkpoint).read_metadata()
        metadata.planner_data = {**metadata.planner_data, "more": evil}
        (checkpoint / name).write_bytes(pickle.dumps(metadata))
    progress = read_progress(checkpoint)
    rest = {each: value for each, value in progress.items() if each not in ("files", "checksums", "checksum")}
    (checkpoint / "progress.json").unlink()
    write_progress(checkpoint, rest, {})


def test_metadata_that_would_run_code_is_passed_over(tmp_path, saved):
    copy, made = copied(saved, tmp_path), tmp_path / "made"
    write_evil(copy / "step-00000002", ".metadata", Evil(made))
    progress, said, _ = run_ranks(1, load_and_tell, copy)[0]
    assert progress["step"] == 1
    assert "it names `io.open`, which is no metadata" in said
    assert not made.exists()
    dcp.FileSystemReader(copy / "step-00000002.damaged").read_metadata()
    assert made.exists(), "else this test proves nothing"


class Odd:
    """Its state is no tensor."""

    def __init__(self, value: Any):
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def load_odd(folder: Path, evil: bool) -> Any:
    """What comes back of a value that is no tensor."""
    value = Evil(folder / "made") if evil else [0.1, (2, "a"), True, None]
    Checkpoints(folder, 1).save(1, {"actor": Odd({"it": value}).state_dict()}, {})
    odd = Odd({"it": [] if evil else [0.0, (0, ""), False, 0]})
    if not evil:
        Checkpoints(folder, 1).load({"actor": odd})
        return odd.value
    with pytest.raises(CheckpointError) as error:
        Checkpoints(folder, 1).load({"actor": odd})
    return str(error.value)


def test_values_that_are_no_tensors_come_back_and_run_no_code(tmp_path):
    assert run_ranks(1, load_odd, tmp_path, False)[0]["it"] == [0.1, (2, "a"), True, None]
    assert "cannot be loaded into role `actor`" in run_ranks(1, load_odd, tmp_path, True)[0]
    assert not (tmp_path / "made").exists()


def go_on_after_damage(folder: Path, step: int) -> tuple[int, list[str]]:
    """Where it goes on from, and what is there after it has saved another; two stay."""
    progress, _ = load(folder)
    Checkpoints(folder, 2).save(step, states({"actor": Engine(0)}), {})
    return progress["step"], names(folder)


@pytest.mark.parametrize("following", [2, 4])
def test_a_damaged_one_does_not_count_among_those_that_stay(tmp_path, saved, following):
    copy = copied(saved, tmp_path)
    flip(copy / "step-00000002/__0_0.distcp")
    left = ["step-00000001", f"step-0000000{following}"]
    assert run_ranks(1, go_on_after_damage, copy, following) == [(1, left)]


def unreadable(path: Path) -> None:
    """A link to itself: opened, it is an error of the system, as of a network file system that is away."""
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "progress.json"])
def test_what_cannot_be_read_is_not_passed_over(tmp_path, saved, name):
    copy = copied(saved, tmp_path)
    unreadable(copy / "step-00000002" / name)
    for error in run_ranks(2, refused, copy, "nothing"):
        assert f"{copy}/step-00000002 cannot be read: " in error
        assert "move it away, and the run goes on from the checkpoint before it" in error
    assert names(copy) == ["step-00000001", "step-00000002"]


def test_what_one_rank_sees_otherwise_is_not_passed_over(tmp_path, saved):
    """The folder of each rank is one of its own, and one of them is damaged."""
    for rank in range(2):
        shutil.copytree(saved, tmp_path / str(rank))
    cut(tmp_path / "1/step-00000002/progress.json")
    for rank, error in enumerate(run_ranks(2, refused, tmp_path, "another place")):
        assert f"the ranks see different contents of {tmp_path}/{rank}/step-00000002/progress.json" in error


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(1, train_and_save, folder, 2, 2)
    return folder


def test_what_other_runs_left_is_cleared_and_names_are_taken_again(tmp_path):
    """A partial folder of a killed save, half-removed old ones, and a torn one under the name that is due."""
    for name in ("step-00000009.partial", "step-00000001.partial", "step-00000001.old", "step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_text("half")
    run_ranks(1, train_and_save, tmp_path, 1, 1)
    assert names(tmp_path) == ["step-00000001"]
    assert read_progress(tmp_path / "step-00000001")["step"] == 1


def die_while_saving(folder: Path, where: str) -> None:
    """Save once; in the second save, the rank that gets to `where` kills itself as the system would: SIGKILL."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    train_and_save(folder, 1, 1)
    engines = {"actor": Engine(0), "critic": Engine(1)}
    if where == "shards" and dist.get_rank() == 1:
        dcp.FileSystemWriter.write_data = die
    elif where == "metadata":
        dcp.FileSystemWriter.finish = die
    elif where == "progress":
        checkpoint.write_progress = die
    elif where == "name":
        generations.commit = die
    Checkpoints(folder, 1).save(2, states(engines), {"source": {}})
    dist.barrier()


@pytest.mark.parametrize(("where", "ranks"), [("shards", 2), ("metadata", 1), ("progress", 1), ("name", 1)])
def test_a_kill_while_saving_leaves_the_older_one_complete(tmp_path, where, ranks):
    with pytest.raises(RankFailed, match=r"died with exit code -9|Connection closed|Connection reset"):
        run_ranks(ranks, die_while_saving, tmp_path, where)
    assert names(tmp_path) == ["step-00000001", "step-00000002.0-0-0-.partial"]
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000001"]
    assert run_ranks(1, load, tmp_path)[0][0]["step"] == 1


def refused(folder: Path, kind: str) -> str:
    shapes = {"shape": {"width": 6}, "shallower": {"layers": 1}, "deeper": {"layers": 3}}
    engines: dict[str, Any] = {"other" if kind == "role" else "actor": Engine(0, **shapes.get(kind, {}))}
    if kind == "another place":
        folder = folder / str(dist.get_rank())
    with pytest.raises((CheckpointError, Disagreement)) as error:
        Checkpoints(folder, 1).load(engines, frozen=["reference", "critic"] if kind == "frozen" else [])
    return str(error.value)


def test_what_cannot_be_loaded_says_why(tmp_path, saved):
    assert run_ranks(1, refused, tmp_path, "none")[0].startswith(f"there is no whole checkpoint in {tmp_path}")
    for ranks in (1, 2):
        shape = run_ranks(ranks, refused, saved, "shape")[0]
        assert "cannot be loaded into role `actor`" in shape
        assert "Was the model, its engine or `freeze`, or the DAG changed since, as `trained` and `follow` of" in shape
        frozen = run_ranks(ranks, refused, saved, "frozen")[-1]
        assert f"{saved}/step-00000002 has weights of role `critic`, which changed in training" in frozen
    assert "cannot be loaded into role `other`" in run_ranks(1, refused, saved, "role")[0]
    (tmp_path / "1").symlink_to(saved)
    for error in run_ranks(2, refused, tmp_path, "another place"):
        assert "rank 0: none, rank 1: step-00000002" in error


@pytest.mark.parametrize(("kind", "side"), [("shallower", "the checkpoint"), ("deeper", "the run")])
def test_a_model_of_another_depth_is_refused_by_name(saved, kind, side):
    """A shallower one too, though the checkpoint has all that it asks for."""
    bias = {"shallower": "actor.model.2.bias", "deeper": "actor.model.3.bias"}[kind]
    for error in run_ranks(2, refused, saved, kind):
        assert f"cannot be loaded into role `actor`: only {side} has `{bias}`" in error
        assert "more. Was the model" in error


def write_where_it_cannot(folder: Path) -> str:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    whole_writer = dcp.FileSystemWriter.write_data
    if dist.get_rank() == 1:
        dcp.FileSystemWriter.write_data = full
    try:
        with pytest.raises(CheckpointError) as error:
            Checkpoints(folder, 1).save(5, states({"actor": Engine(0)}), {})
    finally:
        dcp.FileSystemWriter.write_data = whole_writer
    return str(error.value)


def test_a_full_disk_is_said_on_every_rank(tmp_path):
    for error in run_ranks(2, write_where_it_cannot, tmp_path):
        assert "step-00000005 could not be written" in error
        assert "MiB were free there" in error
        assert "No space left on device" in error
        assert "rank 1" in error
    assert complete_checkpoints(tmp_path) == []
