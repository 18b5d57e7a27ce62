"""Shared memory: used again, never under a reader, given up where it no longer serves; and nothing else is opened."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distflow.data.batch import Batch, Ragged
from distflow.data.databuffer import Databuffer
from distflow.data.exchange import gather
from distflow.data.redistribute import RowMemory
from distflow.plan import SOURCE, Column, Layout, Plan, Task, Transfer
from distflow.rpc.shared_memory import MappedMemory, MemoryAddress, memory_name
from distflow.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]


def address(number: int, size: int) -> MemoryAddress:
    return MemoryAddress(1, number, number, size)


def test_a_buffer_is_spare_when_its_last_view_is_gone():
    memory = RowMemory(b"secret")
    memory.add(1000)
    mine, = memory.notice().spare
    tensor = memory.lease(mine, 800)
    view = tensor.view(torch.int64)[3:5]
    del tensor
    assert not memory.notice().spare
    del view
    gc.collect()
    assert memory.notice().spare == (mine,)


def test_memory_of_another_process_is_written_and_read_in_place():
    owner, other = RowMemory(b"secret"), RowMemory(b"secret")
    owner.add(1000)
    mine, = owner.notice().spare
    other.open(mine)[:3] = np.arange(3)
    tensor = other.lease(mine, 3)
    assert (owner.open(mine)[:3].tolist(), tensor.tolist()) == ([0, 1, 2], [0, 1, 2])
    assert other.notice().reads == (mine,)
    del tensor
    gc.collect()
    assert other.notice().reads == ()


def test_no_file_of_another_process_is_opened_for_rows(forged):
    memory = RowMemory(b"secret")
    for wrong in forged(memory.mapped.name):
        with pytest.raises(ConnectionError, match="not its shared memory|not as large as it says"):
            memory.open(wrong)[:10] = 1
    other = RowMemory(b"another group")
    other.add(10)
    with pytest.raises(ConnectionError, match="not its shared memory"):
        memory.open(other.notice().spare[0])


@pytest.mark.parametrize("writable", [True, False])
def test_forged_addresses_are_refused(forged, writable):
    name = memory_name("anything", b"secret")
    mapped = MappedMemory(name, writable)
    for wrong in forged(name):
        with pytest.raises(ConnectionError, match="not its shared memory|not as large as it says"):
            mapped.open(wrong)
    for gone in (address(10**6, 10), MemoryAddress(2**22, 0, 0, 10)):
        with pytest.raises(FileNotFoundError):
            mapped.open(gone)


def test_memory_of_other_processes_is_opened_in_one_place():
    found = [path.name for path in sorted((ROOT / "distflow").rglob("*.py"))
             if re.search(r"/fd/\{|pidfd_getfd", path.read_text())]
    assert found == ["shared_memory.py"]


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
            pool = buffer.redistributor.memory.pool
            sizes.append(len(pool.spare) + len(pool.used))
    return descriptors, sizes


@pytest.mark.run
def test_neither_descriptors_nor_segments_grow():
    for descriptors, sizes in run_ranks(3, grow):
        assert max(descriptors) == descriptors[0]
        assert max(sizes) <= 3


def test_memory_without_a_name(monkeypatch):
    """A pool that shares nothing works for its own rank."""
    monkeypatch.setenv("DISTFLOW_MACHINE", "")
    memory = RowMemory(b"secret")
    memory.add(10)
    mine, = memory.notice().spare
    memory.open(mine)[:3] = np.arange(3)
    assert memory.lease(mine, 3).tolist() == [0, 1, 2]
