"""A heap gives parts of any size, of which no two overlap, and has all of it back when they are gone."""

import gc
import os
import random
import subprocess
import sys

import numpy
import pytest

from distflow.rpc.shared_heap import SharedHeap

SIZE = 1 << 16


@pytest.mark.parametrize("seed", range(5))
def test_parts_never_overlap_and_all_of_them_come_back(seed):
    draw, heap, taken = random.Random(seed), SharedHeap(size=SIZE), []
    for number in range(1, 500):
        if taken and draw.random() < 0.5:
            del taken[draw.randrange(len(taken))]
        size = draw.choice([0, 1, 64, 65, 5000])
        try:
            taken.append((number % 251, heap.take(size)))
        except MemoryError:
            taken.pop(0)
            continue
        taken[-1][1][:] = number % 251
        assert heap.offset_of(taken[-1][1]) % 64 == 0
        assert all((part == value).all() for value, part in taken), "a later part is where an earlier one is"
    taken.clear()
    gc.collect()
    assert len(heap.take(SIZE)) == SIZE


def test_a_part_is_taken_as_long_as_any_view_of_it_is_there():
    heap = SharedHeap(size=SIZE)
    part = heap.take(1000)
    view = part[8:32].view(numpy.int64)
    del part
    with pytest.raises(MemoryError, match="65536 bytes are not free"):
        heap.take(SIZE)
    del view
    assert heap.offset_of(heap.take(SIZE)) == 0


def test_a_forked_process_changes_a_copy_of_its_own():
    heap = SharedHeap(size=SIZE)
    part = heap.take(100)
    part[:] = 1
    if not (child := os.fork()):
        part[:] = 2
        os._exit(0 if (part == 2).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (part == 1).all()


LIMITED = """
import resource, secrets, sys
import torch
from distflow.data.batch import Batch
from distflow.dock import Consumer, DockClient, DockError, StorageShardServer
from distflow.rpc.messages import MACHINE_MEMORY

limit, most = getattr(resource, sys.argv[1]), int(sys.argv[2])
pages = int(open("/proc/self/statm").read().split()[0]) if limit == resource.RLIMIT_AS else 0
resource.setrlimit(limit, (pages * resource.getpagesize() + most, resource.getrlimit(limit)[1]))
server = StorageShardServer(token := secrets.token_bytes(32))
rows = Batch(torch.arange(4), {"x": torch.ones(4, 1 << 17)})
with DockClient([server.start()], token, "test") as dock:
    dock.configure((Consumer("update", ("x",)),))
    assert dock.put(rows) == 4
    assert torch.equal(dock.fetch(rows.ids, ["x"])["x"], rows["x"])
    heap = server.state.storage.heap
    assert most // 8 < len(heap.memory) <= most < MACHINE_MEMORY, len(heap.memory)
    heap.starts, heap.ends = [0], [64]
    try:
        dock.put(Batch(torch.arange(4, 8), {"x": rows["x"]}))
    except DockError as error:
        assert sys.argv[3] in str(error), error
server.close()
"""


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_under_the_limits_of_a_batch_system_it_is_smaller(limit):
    """And errors name the limit. A client maps no more either, and gets rows through the socket where it has to."""
    option = {"RLIMIT_AS": "ulimit -v", "RLIMIT_FSIZE": "ulimit -f"}[limit]
    command = [sys.executable, "-c", LIMITED, limit, str(1 << 30), option]
    subprocess.run(command, check=True, timeout=60, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.parametrize("name", [None, "distflow-heap"])
def test_a_heap_that_cannot_be_mapped_says_so(name):
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError, match=rf"a heap cannot be mapped \(.+\): it has {1 << 60} bytes"):
        SharedHeap(name, 1 << 60)
    assert len(os.listdir("/proc/self/fd")) == files
