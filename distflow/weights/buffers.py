"""Host memory for whole parts: kept, used again, and open to other processes of the machine.

Pages that are new cost six times what warm ones do, so a buffer is given back when the last view of it is gone, and
the next version is written into it. Other processes of the machine use it where it lies (`transport/memory.py`), each
with a shared lock on the file for as long as it does: such a buffer is not written to, even if nobody here looks at it.
The kernel drops the lock of a process that dies, and the memory itself with the last process that has it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from typing import NamedTuple

import numpy

from distflow.rpc.shared_memory import machine_name

NAME = "distflow-weights"
"""What such a file is called in /proc."""


class BufferAddress(NamedTuple):
    """Where a buffer lies, as a process tells it that has it: the file's number (inode), the process's descriptor of
    it, bytes."""

    number: int
    descriptor: int
    size: int


class HostBuffers:
    """One process's buffers."""

    def __init__(self) -> None:
        self.spare: dict[int, tuple[BufferAddress, numpy.ndarray]] = {}
        """Those that nobody here looks at, by the address at which they begin; what was given back last comes last."""
        self.places: dict[int, BufferAddress] = {}
        """By the address at which it begins, of all memory that is in use here and that others can open: also what is
        mapped of other processes'."""
        self.choosing = threading.Lock()

    def take(self, size: int) -> numpy.ndarray:
        """[size] uint8, with anything in it. It is spare again when the last view of it is gone."""
        size = max(size, 1)
        with self.choosing:
            place, whole = self._chosen(size) or _new(size)
            self.places[whole.ctypes.data] = place
            surplus = max(0, len(self.spare) - len(self.places))
            for address in list(self.spare)[:surplus]:  # whoever still looks at one keeps its memory
                self.spare.pop(address, None)
        part = numpy.frombuffer(memoryview(whole)[:size], numpy.uint8)  # of its own: views keep this, not the whole
        weakref.finalize(part, self._give_back, place, whole).atexit = False
        return part

    def place(self, memory: numpy.ndarray) -> BufferAddress:
        """Where others find a buffer."""
        return self.places[memory.ctypes.data]

    def trim(self) -> None:
        """Give spare memory back to the system."""
        self.spare.clear()

    def _chosen(self, size: int) -> tuple[BufferAddress, numpy.ndarray] | None:
        fitting = [pair for pair in list(self.spare.values()) if size <= pair[0].size <= 2 * size + mmap.PAGESIZE]
        found = next((pair for pair in sorted(fitting, key=lambda pair: pair[0].size) if _is_free(pair[0])), None)
        return None if found is None else self.spare.pop(found[1].ctypes.data)

    def _give_back(self, place: BufferAddress, whole: numpy.ndarray) -> None:
        """Called when the garbage is collected, in the middle of anything: it must not wait for a lock."""
        self.places.pop(whole.ctypes.data, None)
        self.spare[whole.ctypes.data] = place, whole


def _new(size: int) -> tuple[BufferAddress, numpy.ndarray]:
    size = max(size, mmap.PAGESIZE)
    if not machine_name():
        return BufferAddress(-1, -1, size), numpy.frombuffer(mmap.mmap(-1, size), numpy.uint8)
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    memory = mmap.mmap(descriptor, size)
    weakref.finalize(memory, os.close, descriptor).atexit = False
    return BufferAddress(os.fstat(descriptor).st_ino, descriptor, size), numpy.frombuffer(memory, numpy.uint8)


def _is_free(place: BufferAddress) -> bool:
    """Whether no other process has it locked. One that locks it later asks afterwards whether it still is what it was,
    and is told that it is not: so the lock need not be kept."""
    if place.descriptor < 0:
        return True
    try:
        fcntl.flock(place.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(place.descriptor, fcntl.LOCK_UN)
    return True
