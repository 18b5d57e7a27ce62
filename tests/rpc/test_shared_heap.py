"""A heap gives parts of any size, of which no two overlap, and has all of it back when they are gone."""

import gc
import random

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


def test_the_lowest_memory_that_is_free_is_used_first():
    heap = SharedHeap(size=SIZE)
    first, second = heap.take(128), heap.take(64)
    del first
    assert [heap.offset_of(each) for each in (heap.take(256), heap.take(100), second)] == [192, 0, 128]
