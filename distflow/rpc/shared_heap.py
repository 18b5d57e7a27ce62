"""Heap of shared memory: parts of any size within one file, which other processes of the machine map as a whole.

A `SharedMemoryPool` has a file for each buffer, which suits few and large ones; a heap suits rows: thousands of parts,
at one address. The file is as large as the machine's memory, and takes as much as its parts have taken at most: pages
that were used stay for the parts to come, since fresh ones cost many times what a copy does.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections import deque

import numpy

from distflow.rpc.messages import MACHINE_MEMORY
from distflow.rpc.shared_memory import create_memory, machine_name, view_of

_ALIGNMENT = 64  # bytes: a line of the cache, and more than any element needs


class SharedHeap:
    """Memory in which parts are taken, and free again when their last view is gone; all threads may use it."""

    def __init__(self, name: str = "distflow-heap", size: int = MACHINE_MEMORY):
        if machine_name():
            self.address = create_memory(name, size)
            memory = mmap.mmap(self.address.descriptor, size)
            weakref.finalize(memory, os.close, self.address.descriptor).atexit = False
        else:
            self.address, memory = None, mmap.mmap(-1, size)
        self.memory = numpy.frombuffer(memory, numpy.uint8)
        self.starts, self.ends = [0], [size]  # of the free ranges, ascending; no two of them touch
        self.given_back: deque[tuple[int, int]] = deque()
        self.lock = threading.Lock()

    def take(self, size: int) -> numpy.ndarray:
        """Return [size] uint8 with any contents, at the lowest address that is free: its pages were used before.
        Raises `MemoryError`."""
        if not size:
            return self.memory[:0]
        needed = size + -size % _ALIGNMENT
        with self.lock:
            self._take_back()
            at = next((at for at, (start, end) in enumerate(zip(self.starts, self.ends)) if end - start >= needed), -1)
            if at < 0:
                raise MemoryError(f"{size} bytes are not free in memory of {len(self.memory)} bytes")
            start = self.starts[at]
            self.starts[at] += needed
            if self.starts[at] == self.ends[at]:
                del self.starts[at], self.ends[at]
        # Given back during garbage collection, in the middle of anything: that must not wait for a lock.
        return view_of(self.memory[start : start + size], size, self.given_back.append, (start, start + needed))

    def offset_of(self, part: numpy.ndarray) -> int:
        """Return where a part begins."""
        return part.ctypes.data - self.memory.ctypes.data

    def taken(self) -> int:
        """Return the bytes of all parts of which there are views."""
        with self.lock:
            self._take_back()
            return len(self.memory) - sum(self.ends) + sum(self.starts)

    def _take_back(self) -> None:
        for _ in range(len(self.given_back)):
            self._free(*self.given_back.popleft())

    def _free(self, start: int, end: int) -> None:
        at = bisect_left(self.starts, start)
        if at < len(self.starts) and self.starts[at] == end:
            end = self.ends[at]
            del self.starts[at], self.ends[at]
        if at and self.ends[at - 1] == start:
            self.ends[at - 1] = end
        else:
            self.starts.insert(at, start)
            self.ends.insert(at, end)
