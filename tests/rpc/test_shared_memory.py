"""Segments of shared memory: used again, never under a reader, and given up where they no longer do."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distflow.data.batch import Batch, Ragged
from distflow.data.databuffer import Databuffer
from distflow.data.exchange import gather
from distflow.plan import SOURCE, Column, Layout, Plan, Task, Transfer
from distflow.rpc.shared_memory import PoolNotice, SharedMemoryPool, SharedSegment, choose
from distflow.telemetry.metrics import Metrics


def test_the_smallest_that_holds_it_is_chosen_unless_it_is_read():
    segments = (SharedSegment(0, -1, 100, True), SharedSegment(1, -1, 400, True), SharedSegment(2, -1, 200, False),
               SharedSegment(3, -1, 300, True))
    notices = [PoolNotice(1, segments, ()), PoolNotice(2, (), ((0, 3),))]
    assert choose(notices, {0: 50}) == {0: 0}
    assert choose(notices, {0: 150}) == {0: 1}  # 2 is used by its owner, 3 by another rank
    assert choose(notices, {0: 500, 1: 0}) == {0: None, 1: -1}


def test_a_segment_is_free_when_its_last_view_is_gone():
    pool = SharedMemoryPool(0)
    pool.add(1000)
    notice = pool.notice()
    tensor = pool.lease(pool.open([notice], 0, 0), 0, 0, 800)
    view = tensor.view(torch.int64)[3:5]
    del tensor
    assert not pool.notice().segments[0].free
    del view
    gc.collect()
    assert pool.notice().segments[0].free


def buffer_of(reader: Layout) -> tuple[Databuffer, Task]:
    task = Task("b", "role", "COMPUTE", "function", {}, (Column("x", "x", SOURCE, "Ragged"),), (), reader,
                (Transfer(SOURCE, ("x",), "all_to_all"),))
    return Databuffer(Plan("test", "sync", 3, (task,), Layout(1, 2)), dist.get_rank(), Metrics()), task


def step(buffer: Databuffer, task: Task, number: int) -> Batch:
    """Rank 2 has rows of another size in each step."""
    length = 2000 + 997 * (number % 7)
    ids = torch.arange(8 if dist.get_rank() == 2 else 0)
    column = Ragged(torch.arange(len(ids) * length) + number, torch.full((len(ids),), length))
    buffer.start(Batch(ids, {"x": column} if len(ids) else {}))
    return buffer.take(task)


def hold(tp: int) -> None:
    """Rank 1 keeps what it took in two steps while ten more go on."""
    buffer, task = buffer_of(Layout(2 // tp, 0, tp))
    kept = {}
    for number in range(12):
        taken = step(buffer, task, number)
        if dist.get_rank() == 1 and number in (0, 3):
            kept[number] = taken, taken["x"].values.clone()
        del taken
    for taken, values in kept.values():
        assert len(values)
        assert torch.equal(taken["x"].values, values)


def test_what_is_held_stays_as_it_was():
    run_ranks(3, hold, 1)


def test_what_a_tensor_parallel_neighbour_holds_stays_as_it_was():
    """The segment belongs to rank 0, which has long let go of it."""
    run_ranks(3, hold, 2)


def grow() -> tuple[list[int], list[int]]:
    buffer, task = buffer_of(Layout(2))
    descriptors, sizes = [], []
    for number in range(40):
        step(buffer, task, number)
        gather(b"")
        gc.collect()  # what earlier tests left in this process
        if number >= 14:
            descriptors.append(len(os.listdir("/proc/self/fd")))
            sizes.append(len(buffer.redistributor.pool.notice().segments))
    return descriptors, sizes


@pytest.mark.run
def test_neither_descriptors_nor_segments_grow():
    for descriptors, sizes in run_ranks(3, grow):
        assert max(descriptors) == descriptors[0]
        assert max(sizes) <= 3


def test_memory_without_a_name():
    """A pool that shares nothing works for its own rank."""
    os.environ["DISTFLOW_MACHINE"] = ""
    try:
        pool = SharedMemoryPool(0)
        pool.add(10)
    finally:
        del os.environ["DISTFLOW_MACHINE"]
    memory = pool.open([pool.notice()], 0, 0)
    memory[:3] = np.arange(3)
    assert pool.lease(memory, 0, 0, 3).tolist() == [0, 1, 2]
