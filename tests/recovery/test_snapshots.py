"""Copies that outlive the process that made them, and are complete or absent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distflow.errors import CheckpointError
from distflow.recovery import snapshots as module
from distflow.recovery.snapshots import Snapshots, StateShard
from distflow.rpc.messages import MACHINE_MEMORY


def state(salt: float = 0.0, rows: int = 5) -> dict:
    return {"actor": {"model": {"weight": torch.arange(3.0 * rows).view(rows, 3) + salt,
                                "half": (torch.arange(7.0) + salt).bfloat16(),
                                "strided": (torch.arange(6.0) + salt).view(2, 3).t()},
                      "optimizer": {"step": torch.tensor(4.0 + salt), "none": torch.zeros(0, 3),
                                    "count": torch.tensor([2**40 + int(salt)])}},
            "mask": torch.tensor([True, False, bool(salt)])}


def zeros(rows: int = 5) -> dict:
    return _each(torch.zeros_like, state(rows=rows))


def _each(change: Callable, tree):
    return {name: _each(change, each) for name, each in tree.items()} if isinstance(tree, dict) else change(tree)


def equal(ours, theirs) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in ours)
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def save(snapshots: Snapshots, step: int, tree: dict, progress: dict) -> int:
    size = snapshots.begin(StateShard(0, 0, step, 0, 1), tree, progress)
    snapshots.wait()
    return size


def load(snapshots: Snapshots, step: int, tree: dict) -> dict:
    return snapshots.load(snapshots.complete()[StateShard(0, 0, step, 0, 1)], tree)


def steps(snapshots: Snapshots) -> list[int]:
    return [shard.step for shard in snapshots.complete()]


def in_child(work: Callable[[], None]) -> int:
    """Its exit status, negative for a signal."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_what_is_copied_comes_back():
    snapshots, back = Snapshots(), zeros()
    assert steps(snapshots) == []
    save(snapshots, 3, state(1.0), {"step": 3, "source": {"position": 12}})
    assert load(snapshots, 3, back) == {"step": 3, "source": {"position": 12}}
    assert equal(back, state(1.0))


def test_two_steps_are_kept_and_may_grow_and_shrink():
    snapshots = Snapshots()
    for step, rows in ((1, 5), (2, 400), (3, 30_000), (4, 1)):
        save(snapshots, step, state(step, rows), {"step": step})
        assert steps(snapshots) == [each for each in (step - 1, step) if each]
    for step, rows in ((3, 30_000), (4, 1)):
        back = zeros(rows)
        load(snapshots, step, back)
        assert equal(back, state(step, rows))


def test_a_process_leaves_its_copies_to_the_next():
    """Also those that have grown since the supervisor last looked."""
    snapshots = Snapshots()
    for step, rows in ((1, 5), (2, 5), (3, 4000)):
        assert in_child(lambda step=step, rows=rows: save(snapshots, step, state(step, rows), {"step": step})) == 0
        assert steps(snapshots) == [each for each in (step - 1, step) if each]
    back = zeros(4000)
    assert in_child(lambda: (load(snapshots, 3, back), os._exit(7 if equal(back, state(3, 4000)) else 1))) == 7


@pytest.mark.parametrize("torn", ["before the tensors", "before the checksum"])
def test_a_writer_that_is_killed_leaves_the_other_copy(torn, monkeypatch):
    snapshots = Snapshots()
    for step in (1, 2):
        save(snapshots, step, state(step), {"step": step})

    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def work():
        late = torn == "before the checksum"
        monkeypatch.setattr(*((module, "_checksum") if late else (torch.Tensor, "copy_")), killed)
        save(snapshots, 3, state(3), {"step": 3})

    assert in_child(work) == -signal.SIGKILL
    assert steps(snapshots) == [2]
    save(snapshots, 3, state(3), {"step": 3})
    assert steps(snapshots) == [2, 3]


def test_any_byte_that_has_changed_is_seen():
    snapshots = Snapshots()
    save(snapshots, 1, state(1), {"step": 1})
    memory = snapshots.slots[0].memory()
    end = int.from_bytes(memory[8:16], "little")
    for place in range(0, end, 7):
        before = memory[place]
        memory[place] ^= 0x10
        assert steps(snapshots) == [], place  # none is outside the sum
        memory[place] = before
    assert steps(snapshots) == [1]


@pytest.mark.parametrize(("change", "message"), [
    (lambda other: other["actor"]["model"].pop("half"), "differ in actor.model.half"),
    (lambda other: other["actor"]["model"].update(bias=torch.zeros(2)), "differ in actor.model.bias"),
    (lambda other: other["actor"]["model"].update(half=torch.zeros(7)),
     r"actor.model.half as torch.bfloat16 \[7\], the worker as torch.float32 \[7\]"),
    (lambda other: other["actor"]["model"].update(weight=torch.zeros(3, 5)),
     r"actor.model.weight as torch.float32 \[5, 3\], the worker as torch.float32 \[3, 5\]"),
], ids=["less", "more", "dtype", "shape"])
def test_another_model_is_refused_by_the_name_of_the_tensor(change, message):
    snapshots, other = Snapshots(), zeros()
    save(snapshots, 1, state(1), {"step": 1})
    change(other)
    with pytest.raises(CheckpointError, match=message):
        load(snapshots, 1, other)


def test_one_that_is_written_to_disk_stays_as_it_is():
    snapshots, last = Snapshots(), state(5)
    save(snapshots, 1, state(1), {"step": 1})
    snapshots.held.append(snapshots.newest)
    for step in range(2, 6):
        save(snapshots, step, state(step), {"step": step})
    assert steps(snapshots) == [1, 4, 5], "and the newest two are there beside it"
    assert equal(snapshots.view(snapshots.held[0], last), state(1))
    snapshots.held.clear()
    save(snapshots, 6, state(6), {"step": 6})
    assert {5, 6} <= set(steps(snapshots))


def shards() -> tuple[list[float], list[float], int]:
    """Three rows on two ranks, and on none; what comes back is this rank's own."""
    mesh, snapshots = init_device_mesh("cpu", (2,)), Snapshots()
    whole = torch.arange(9.0).view(3, 3)
    tree = {"split": distribute_tensor(whole, mesh, [Shard(0)]), "one": distribute_tensor(whole[:1], mesh, [Shard(0)]),
            "same": distribute_tensor(whole, mesh, [Replicate()])}
    size = save(snapshots, 1, tree, {"step": 1})
    back = _each(lambda each: each.clone().zero_() if each.numel() else each, tree)
    load(snapshots, 1, back)
    assert all(isinstance(each, DTensor) for each in back.values())
    return [back[name].full_tensor().flatten().tolist() for name in ("split", "one")], \
        back["same"].to_local().flatten().tolist(), size


def test_each_rank_copies_its_own_shards():
    whole = [float(each) for each in range(9)]
    found = run_ranks(2, shards)
    for parts, same, _ in found:
        assert parts == [whole, whole[:3]]
        assert same == whole
    assert found[0][2] > found[1][2], "the second rank has one row of three, and none of the other"


def test_copies_that_a_machine_cannot_hold_are_refused_before_any_is_made(monkeypatch):
    ranks, size = 4, MACHINE_MEMORY // 8 + 64
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    snapshots = Snapshots()
    with pytest.raises(CheckpointError, match=r"4 ranks, .* GiB each and 2 times, .*snapshots: false"):
        save(snapshots, 1, {"actor": torch.zeros(1, dtype=torch.uint8).expand(size)}, {})
    assert steps(snapshots) == []
    assert all(slot.memory() is None for slot in snapshots.slots)
