"""Host memory for whole parts: reused, and open to other processes of the machine.

Pages that are new cost six times what warm ones do, so a buffer is spare again when the last view of it is gone, and
the next version is written into it. Other processes of the machine use it in place (`transport/memory.py`), each with
a shared lock on the file for as long as it does: such a buffer is not written to, even if this process no longer uses
it. The kernel drops the lock of a process that dies, and the memory itself with the last process that has it.
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
"""Name of such a file in /proc."""


class BufferAddress(NamedTuple):
    """Address of a buffer for other processes: the file's number (inode), the owner's descriptor of it, bytes."""

    number: int
    descriptor: int
    size: int


class HostBuffers:

    def __init__(self) -> None:
        self.spare: dict[int, tuple[BufferAddress, numpy.ndarray]] = {}
        """Unused buffers, by the address at which they begin, in the order in which they were given back."""
        self.addresses: dict[int, BufferAddress] = {}
        """By the address at which it begins, all memory in use here that others can open, mapped memory of others
        included."""
        self.lock = threading.Lock()

    def take(self, size: int) -> numpy.ndarray:
        """Return [size] uint8 with any contents. It is spare again when the last view of it is gone."""
        size = max(size, 1)
        with self.lock:
            address, whole = self._chosen(size) or _new(size)
            self.addresses[whole.ctypes.data] = address
            surplus = max(0, len(self.spare) - len(self.addresses))
            for begin in list(self.spare)[:surplus]:  # views of a removed buffer keep its memory
                self.spare.pop(begin, None)
        part = numpy.frombuffer(memoryview(whole)[:size], numpy.uint8)  # of its own: views keep this, not the whole
        weakref.finalize(part, self._give_back, address, whole).atexit = False
        return part

    def address_of(self, memory: numpy.ndarray) -> BufferAddress:
        """Return the address at which other processes find a buffer."""
        return self.addresses[memory.ctypes.data]

    def trim(self) -> None:
        self.spare.clear()

    def _chosen(self, size: int) -> tuple[BufferAddress, numpy.ndarray] | None:
        fitting = [pair for pair in list(self.spare.values()) if size <= pair[0].size <= 2 * size + mmap.PAGESIZE]
        found = next((pair for pair in sorted(fitting, key=lambda pair: pair[0].size) if _is_free(pair[0])), None)
        return None if found is None else self.spare.pop(found[1].ctypes.data)

    def _give_back(self, address: BufferAddress, whole: numpy.ndarray) -> None:
        """Make a buffer spare. Runs during garbage collection, in the middle of anything: it must not wait for a lock.
        """
        self.addresses.pop(whole.ctypes.data, None)
        self.spare[whole.ctypes.data] = address, whole


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


def _is_free(address: BufferAddress) -> bool:
    """Return whether no other process has the buffer locked. One that locks it later checks afterwards that it is still
    the same, and learns that it is not: so the lock need not be kept."""
    if address.descriptor < 0:
        return True
    try:
        fcntl.flock(address.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(address.descriptor, fcntl.LOCK_UN)
    return True
