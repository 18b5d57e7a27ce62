"""Memory shared within a machine: one pool of it, and one proof of what another process may be asked to open.

    SharedMemoryPool    memory of this process: a buffer is spare again when the last view of it is gone; for parts of
                        any size within one file see `shared_heap.py`
    MappedMemory        memory of other processes, mapped here
    open_memory         the only way to memory of another process; open_verified: to any other descriptor

All of it is files without a place in the file system (memfd), which others open through /proc: so a killed run leaves
nothing behind, and the small /dev/shm of a container does not matter. The proof is a file's name: it is derived from a
secret of those who share, so only they can have made the file, and only for that purpose. A process that names any
other (process, descriptor) is refused before that is opened. No such file can shrink under those who have mapped it.
"""

from __future__ import annotations

import fcntl
import functools
import hmac
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy

_NAME_BYTES = 16


class MemoryAddress(NamedTuple):
    """Address of a memory file: a process that has it open, its descriptor there, the file's inode, bytes."""

    process: int
    descriptor: int
    inode: int
    size: int

    @classmethod
    def of(cls, packed: Sequence[int]) -> MemoryAddress:
        """Return an address as a message has it."""
        return cls(*map(int, packed))


def machine_name() -> str:
    """Return a name that is equal for two processes if they can share memory; empty where that is not possible. Each
    agent of torchrun counts as a machine; `DISTFLOW_MACHINE` overrides the name, or, empty, forbids shared memory."""
    if "DISTFLOW_MACHINE" in os.environ:
        return os.environ["DISTFLOW_MACHINE"]
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return ""
    try:
        return f"{_boot_id()}/{os.readlink('/proc/self/ns/pid')}/{os.geteuid()}/{os.environ.get('GROUP_RANK', '0')}"
    except OSError:
        return ""  # a sandbox that shows less of /proc


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def memory_name(purpose: str, secret: bytes) -> str:
    """Return the name of the memory that the processes with this secret share for one purpose."""
    return f"distflow-{purpose}-{hmac.digest(secret, purpose.encode(), 'sha256')[:_NAME_BYTES].hex()}"


def create_memory(name: str, size: int) -> MemoryAddress:
    """Make a file of `size` bytes, which may grow; the caller closes its descriptor. Raises `OSError`: the process may
    not have a file of that size."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return MemoryAddress(os.getpid(), descriptor, os.fstat(descriptor).st_ino, size)


def open_memory(address: MemoryAddress, name: str, mode: int) -> int:
    """Open another process' memory that was made under this name; return a descriptor. Raises `ConnectionError` if it
    is something else, smaller or could shrink, `OSError` if it is not there any more or may not be opened."""
    file = open_verified(address.process, address.descriptor, address.inode, f"/memfd:{name} (deleted)", mode)
    fits = 0 <= address.size <= os.fstat(file).st_size
    if not fits or not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        os.close(file)
        raise ConnectionError(f"process {address.process} offers memory that is not as large as it says")
    return file


def open_verified(process: int, descriptor: int, inode: int, name: str, mode: int) -> int:
    """Open what another process of this user has open, if /proc gives it this name and inode; raises as `open_memory`.
    It is looked at through a handle that opens nothing, since to open something else could have consequences."""
    handle = os.open(f"/proc/{process}/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
    try:
        path, facts = f"/proc/self/fd/{handle}", os.fstat(handle)
        if (os.readlink(path), facts.st_ino, facts.st_uid) != (name, inode, os.geteuid()):
            raise ConnectionError(f"process {process} offers something that is not its shared memory")
        return os.open(path, mode | os.O_CLOEXEC)
    finally:
        os.close(handle)


class SharedMemoryPool:
    """Buffers of this process that others can open; private memory on a machine that shares none.

    Fresh pages cost six times what warm ones do, so buffers are used again; but not while another process has one
    locked (`flock`). The kernel drops the lock of a process that dies, and memory with the last process that has it.
    """

    def __init__(self, name: str):
        self.name = name
        self.spare: dict[MemoryAddress, numpy.ndarray] = {}
        """In the order in which they were given back."""
        self.used: dict[int, MemoryAddress] = {}
        """Memory in use here that others can open, mapped memory of others included, by where it begins."""
        self.lock = threading.Lock()

    def take(self, size: int, whole: bool = False) -> numpy.ndarray:
        """Return [size] uint8 with any contents, or all of a buffer of at least that size (`whole`). It is spare again
        when the last view of it is gone."""
        with self.lock:
            address = next((each for each in self._fitting(size) if _is_free(each)), None)
            address = address or self.add(size)
            part = self.lease(address, address.size if whole else size)
            for surplus in list(self.spare)[: max(0, len(self.spare) - len(self.used))]:
                self.spare.pop(surplus, None)  # views of a removed buffer keep its memory
        return part

    def add(self, size: int) -> MemoryAddress:
        size = max(size, mmap.PAGESIZE)
        if not machine_name():
            address, memory = MemoryAddress(os.getpid(), -1, next(_private), size), mmap.mmap(-1, size)
        else:
            address = create_memory(self.name, size)
            memory = mmap.mmap(address.descriptor, size)
            weakref.finalize(memory, os.close, address.descriptor).atexit = False
        self.spare[address] = numpy.frombuffer(memory, numpy.uint8)
        return address

    def lease(self, address: MemoryAddress, size: int) -> numpy.ndarray:
        """Return the beginning of a spare buffer, [size] uint8, as `take`."""
        whole = self.spare.pop(address)
        self.used[whole.ctypes.data] = address
        return view_of(whole, size, self._give_back, address, whole)

    def address_of(self, memory: numpy.ndarray) -> MemoryAddress:
        return self.used[memory.ctypes.data]

    def _fitting(self, size: int) -> list[MemoryAddress]:
        found = [each for each in list(self.spare) if size <= each.size <= 2 * size + mmap.PAGESIZE]
        return sorted(found, key=lambda address: address.size)

    def _give_back(self, address: MemoryAddress, whole: numpy.ndarray) -> None:
        """Make a buffer spare: during garbage collection, in the middle of anything, so it must not wait for a lock."""
        self.used.pop(whole.ctypes.data, None)
        self.spare[address] = whole


class MappedMemory:
    """Mapped memory of other processes; without `writable`, who writes into it writes into a copy of its own. To map
    pages costs as much as to copy them, so a mapping is kept as long as the process that owns the file has it."""

    def __init__(self, name: str, writable: bool):
        self.name, self.writable = name, writable
        self.mapped: dict[int, tuple[MemoryAddress, numpy.ndarray]] = {}
        """By inode: where it was found, and all of it."""

    def open(self, address: MemoryAddress) -> numpy.ndarray:
        """Return [address.size] uint8; raises as `open_memory`."""
        found = self.mapped.get(address.inode)
        if found is not None and found[0] == address:
            return found[1]
        file = open_memory(address, self.name, os.O_RDWR if self.writable else os.O_RDONLY)
        try:
            return self.map(address, file)[: address.size]
        finally:
            os.close(file)

    def map(self, address: MemoryAddress, file: int) -> numpy.ndarray:
        if address.inode not in self.mapped or len(self.mapped[address.inode][1]) < address.size:
            self.mapped = {inode: pair for inode, pair in self.mapped.items() if _still_exists(pair[0])}
            memory = mmap.mmap(file, address.size, access=mmap.ACCESS_WRITE if self.writable else mmap.ACCESS_COPY)
            self.mapped[address.inode] = address, numpy.frombuffer(memory, numpy.uint8)
        return self.mapped[address.inode][1]


def view_of(whole: numpy.ndarray, size: int, gone: Callable[..., None], *arguments: object) -> numpy.ndarray:
    """Return the beginning of a buffer, [size] uint8; `gone(*arguments)` is called when the last view of it is gone."""
    part = numpy.frombuffer(whole[:size].data, numpy.uint8)  # of its own: views keep this, not the whole
    weakref.finalize(part, gone, *arguments).atexit = False
    return part


_private = itertools.count(-1, -1)


def _is_free(address: MemoryAddress) -> bool:
    """Return whether no other process has the buffer locked. One that locks it later finds that it is another then."""
    if address.descriptor < 0:
        return True
    try:
        fcntl.flock(address.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(address.descriptor, fcntl.LOCK_UN)
    return True


def _still_exists(address: MemoryAddress) -> bool:
    try:
        return os.stat(f"/proc/{address.process}/fd/{address.descriptor}").st_ino == address.inode
    except OSError:
        return False
