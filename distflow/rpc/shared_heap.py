"""Heap of shared memory: parts of any size within one file, which other processes of the machine map as a whole.

A `SharedMemoryPool` has a file for each buffer, which suits few and large ones; a heap suits rows: thousands of parts,
at one address. The file is as large as the machine's memory, or as the limits of the process allow, and takes as much
as its parts have taken at most: pages that were used stay for the parts to come, since fresh ones cost many times what
a copy does.
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
import weakref
from bisect import bisect_left
from collections import deque
from pathlib import Path

import numpy

from distflow.rpc.messages import MACHINE_MEMORY
from distflow.rpc.packing import aligned
from distflow.rpc.shared_memory import MemoryAddress, create_memory, machine_name, view_of

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux on x86-64 and arm64; Python has no name for it


class SharedHeap:
    """Memory in which parts are taken, and free again when their last view is gone; all threads may use it.

    Args:
        name: of the file, as `create_memory` has it. Without one, or on a machine that shares no memory, the memory is
            private: forked processes get copies of what is in it.
        size: bytes; default: `largest_heap`.

    Raises `MemoryError`: the limits of this process leave no room.
    """

    def __init__(self, name: str | None = None, size: int | None = None):
        size, self.limit = largest_heap() if size is None else (size, "")
        try:
            self.address, memory = _mapped(name, size)
        except OSError as error:
            raise MemoryError(f"a heap cannot be mapped ({error}): it has {size} bytes{self.limit}") from None
        self.memory = numpy.frombuffer(memory, numpy.uint8)
        self.starts, self.ends = [0], [size]  # of the free ranges, ascending; no two of them touch
        self.given_back: deque[tuple[int, int]] = deque()
        self.lock = threading.Lock()

    def take(self, size: int) -> numpy.ndarray:
        """Return [size] uint8 with any contents, at the lowest address that is free: its pages were used before.
        Raises `MemoryError`."""
        if not size:
            return self.memory[:0]
        needed = aligned(size)
        with self.lock:
            self._take_back()
            at = next((at for at, (start, end) in enumerate(zip(self.starts, self.ends)) if end - start >= needed), -1)
            if at < 0:
                raise MemoryError(f"{size} bytes are not free in memory of {len(self.memory)} bytes"
                                  f"{self.limit}")
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


def largest_heap() -> tuple[int, str]:
    """Return how many bytes a heap of this process may have, and what limits it, for messages: that of the machine's
    memory, of files (`ulimit -f`), and half of the addresses that are left (`ulimit -v`), since all else needs some."""
    found = [(MACHINE_MEMORY, "")]
    found.append((free_addresses() // 2, ", half of what `ulimit -v` leaves to this process: raise it"))
    if (most := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY:
        found.append((most, ", which is the limit of files (`ulimit -f`): raise it"))
    size, limit = min(found)
    return max(size - size % mmap.PAGESIZE, mmap.PAGESIZE), limit


def free_addresses() -> int:
    """Return how many bytes this process may still map, within its limit of addresses (`ulimit -v`) if it has one."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return 1 << 62
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
    return max(most - used, 0)


def _mapped(name: str | None, size: int) -> tuple[MemoryAddress | None, mmap.mmap]:
    if name is None or not machine_name():
        return None, mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    address = create_memory(name, size)
    try:
        memory = mmap.mmap(address.descriptor, size)
    except OSError:
        os.close(address.descriptor)
        raise
    weakref.finalize(memory, os.close, address.descriptor).atexit = False
    return address, memory
