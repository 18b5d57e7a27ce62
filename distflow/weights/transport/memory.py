"""Transport of chunks within a machine: nothing is transferred. The puller maps the source's buffer, verifies the
chunks in place, and uses that memory as its own; others can map it in turn. Rollouts on one machine thus share one
copy of a version: the trainer's, or that of the one which pulls it for all (`directory.py`). Any number of pullers may
use a source so at once.

Memory that was verified must never change. So the puller first locks the file (a shared `flock`, on a descriptor of its
own), and then requests chunks. If the source still sends them, with the address that is locked, the buffer was in use
when the lock was taken; and the owner of a buffer does not reuse it while a process has it locked
(`SharedMemoryPool`). Either may die at any time: the kernel drops the lock of a puller, and keeps memory that a
process maps. A source that is filling itself writes each chunk before it offers it, and not again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy

from distflow.rpc.connection import Connection
from distflow.rpc.shared_memory import (
    MappedMemory,
    MemoryAddress,
    SharedMemoryPool,
    machine_name,
    open_memory,
    view_of,
)
from distflow.weights.transport.ends import Moved, PullerEnd, SourceEnd

_BLOCK = 512 << 10
"""Bytes that are copied at once, where that is needed: still in the core's own cache when their checksum is made."""


class SharedMemoryTransport:
    """Transport between processes of one machine. That they share it is proved by opening memory of the source."""

    name = "memory"

    def __init__(self, buffers: SharedMemoryPool):
        self.buffers, self.locked = buffers, LockedMemory(buffers)
        self.sample = numpy.empty(0, numpy.uint8)

    def offer(self) -> dict[str, Any] | None:
        """Return the address of some memory of this process; None where memory cannot be shared."""
        if not machine_name():
            return None
        if not len(self.sample):
            self.sample = self.buffers.take(1)
        return {"machine": machine_name(), "address": self.buffers.address_of(self.sample)}

    def source_end(self, hello: dict[str, Any]) -> SharedMemorySource:
        return SharedMemorySource(self.buffers)

    def puller_end(self, offer: dict[str, Any], deadline: float) -> SharedMemoryPuller | None:
        """Return None if the source is on another machine, or its memory may not be opened."""
        if offer["machine"] != machine_name():
            return None
        try:
            self.locked.open(MemoryAddress.of(offer["address"]))
        except OSError:
            return None
        return SharedMemoryPuller(self.locked)


class LockedMemory:
    """Mapped memory of other processes, locked while it is used, and open to others as this process's own is."""

    def __init__(self, buffers: SharedMemoryPool):
        self.buffers, self.mapped = buffers, MappedMemory(buffers.name, writable=False)
        self.mapping = threading.Lock()

    def open(self, address: MemoryAddress) -> numpy.ndarray:
        """Return a buffer of another process, [bytes] uint8, locked until the last view of it is gone. Raises `OSError`
        if it is not there, is not what it should be, or is about to be reused."""
        file = open_memory(address, self.buffers.name, os.O_RDONLY)
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with self.mapping:
                whole = self.mapped.map(address, file)
                if whole.ctypes.data not in self.buffers.used:
                    self._relay(address, whole, os.dup(file))
            failed.pop_all()
        return view_of(whole, address.size, _unlock, file)

    def _relay(self, address: MemoryAddress, whole: numpy.ndarray, file: int) -> None:
        begin = whole.ctypes.data
        self.buffers.used[begin] = address._replace(process=os.getpid(), descriptor=file)
        weakref.finalize(whole, self._close, begin, file).atexit = False

    def _close(self, begin: int, file: int) -> None:
        self.buffers.used.pop(begin, None)
        os.close(file)


class SharedMemorySource(SourceEnd):
    shared = True

    def __init__(self, buffers: SharedMemoryPool):
        self.buffers = buffers

    def describe(self, memory: Mapping[int, numpy.ndarray]) -> dict[str, Any]:
        return {"addresses": {part: self.buffers.address_of(each) for part, each in memory.items()}}

    def send(self, connection: Connection, header: dict[str, Any], chunks: numpy.ndarray, moved: Moved) -> None:
        connection.send(header)


class SharedMemoryPuller(PullerEnd):
    run = 1 << 30

    def __init__(self, locked: LockedMemory):
        self.locked = locked
        self.addresses: dict[int, MemoryAddress] = {}
        self.mapped: dict[int, numpy.ndarray] = {}

    def on_reply(self, answer: dict[str, Any]) -> None:
        addresses = {part: MemoryAddress.of(packed) for part, packed in answer["addresses"].items()}
        if any(addresses.get(part) != self.addresses[part] for part in self.mapped):
            raise ConnectionError("the source has its weights elsewhere now")
        self.addresses = addresses

    def map(self, part: int) -> numpy.ndarray:
        if part not in self.mapped:
            self.mapped[part] = self.locked.open(self.addresses[part])
        return self.mapped[part]

    def take(self, connection: Connection, size: int, part: int, span: slice, into: numpy.ndarray,
             moved: Moved) -> None:
        source = self.mapped[part][span]
        if source.ctypes.data == into.ctypes.data:
            moved(len(into))
            return
        for begin in range(0, len(into), _BLOCK):
            block = source[begin : begin + _BLOCK]
            into[begin : begin + _BLOCK] = block
            moved(len(block))

    def pause(self) -> None:
        self.addresses, self.mapped = {}, {}


def _unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # the mapping may keep it open
    os.close(file)
