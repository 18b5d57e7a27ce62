"""Chunks within a machine: nothing moves. The puller maps the source's buffer, which it opens through /proc, verifies
the chunks where they lie, and uses that memory as its own; it can let others map it in turn. Rollouts on the trainer's
machine thus share one copy of a version. Elsewhere each may have its own, since no source is preferred for its machine.

That both ends share a machine is proved, not believed: the puller must find in the source's memory what only a process
with the run's token can have written there, as the dock does (`distflow.rpc.shared_payloads`) the other way round.

Memory that was verified must never change. So the puller first locks the file (a shared `flock`, on a descriptor of its
own), and then asks for chunks. If the source still gives them, and says that they lie where the lock is, the buffer was
in use when the lock was there already; and the owner of a buffer does not use it again while somebody has it locked
(`HostBuffers.take`). It does not matter who of them dies when: the kernel drops the lock of a puller, and keeps
memory that somebody maps. A source that is filling itself writes each chunk before it offers it, and not again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy

from distflow.rpc.connection import Connection
from distflow.rpc.shared_memory import machine_name
from distflow.weights.buffers import NAME, BufferAddress, HostBuffers
from distflow.weights.transport.ends import Moved, PullerEnd, SourceEnd

_PROOF = 32
"""Bytes of a proof."""
_BLOCK = 512 << 10
"""Bytes that are copied at once, where that is needed: still in the core's own cache when their checksum is made."""


class SharedMemoryTransport:
    """The transport of a machine's processes."""

    name = "memory"

    def __init__(self, buffers: HostBuffers, token: bytes):
        self.buffers, self.token, self.windows = buffers, token, MappedBuffers(buffers)
        self.shown: tuple[numpy.ndarray, dict[str, Any]] | None = None

    def offer(self) -> dict[str, Any] | None:
        """Where this process's proof lies; None where memory cannot be shared."""
        if not machine_name():
            return None
        if self.shown is None:
            page, nonce = self.buffers.take(_PROOF), secrets.token_bytes(16)
            page[:] = numpy.frombuffer(_proof(self.token, nonce), numpy.uint8)
            self.shown = page, {"machine": machine_name(), "process": os.getpid(), "nonce": nonce,
                                "place": list(self.buffers.place(page))}
        return self.shown[1]

    def outlet(self, said: dict[str, Any]) -> SharedMemorySource:
        return SharedMemorySource(self.buffers)

    def inlet(self, offer: dict[str, Any], deadline: float) -> SharedMemoryPuller | None:
        """None: the source is on another machine, or may not be looked into."""
        if offer["machine"] != machine_name():
            return None
        inlet = SharedMemoryPuller(int(offer["process"]), self.windows)
        try:
            found = self.windows.open(inlet.process, BufferAddress(*map(int, offer["place"])))[:_PROOF].tobytes()
        except OSError:
            return None
        return inlet if hmac.compare_digest(found, _proof(self.token, bytes(offer["nonce"]))) else None


class MappedBuffers:
    """What is mapped of other processes' memory. To map pages costs as much as to copy them, so a window is kept for
    the next version, as long as the process that showed the file has it."""

    def __init__(self, buffers: HostBuffers):
        self.buffers = buffers
        self.there: dict[int, tuple[str, numpy.ndarray]] = {}
        """By the file's number: where it was found, and all of it."""
        self.opening = threading.Lock()

    def open(self, process: int, place: BufferAddress) -> numpy.ndarray:
        """[bytes] uint8: a buffer of the process, locked until the last view of it is gone.

        Raises:
            OSError: it is not there, is not what it should be, or is about to be used for something else.
        """
        path = f"/proc/{process}/fd/{place.descriptor}"
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # opening something else could have consequences
            raise ConnectionError(f"process {process} offers something that is not memory with weights")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, file)
            facts = os.fstat(file)
            if (facts.st_ino, facts.st_size) != (place.number, place.size) or \
                    not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ConnectionError(f"process {process} offers memory that is not what it says")
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            part = numpy.frombuffer(memoryview(self._mapped(path, file, place)), numpy.uint8)  # of its own, as a buffer
            failed.pop_all()
        weakref.finalize(part, _let_go, file).atexit = False
        return part

    def _mapped(self, path: str, file: int, place: BufferAddress) -> numpy.ndarray:
        with self.opening:
            if place.number not in self.there:
                self.there = {number: pair for number, pair in self.there.items() if _is_at(pair[0], number)}
                memory = mmap.mmap(file, place.size, access=mmap.ACCESS_COPY)  # who writes, writes into its own copy
                window = numpy.frombuffer(memory, numpy.uint8)
                ours = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
                self.buffers.places[window.ctypes.data] = place._replace(descriptor=ours)
                weakref.finalize(memory, self._close, window.ctypes.data, ours).atexit = False
                self.there[place.number] = path, window
            return self.there[place.number][1]

    def _close(self, address: int, descriptor: int) -> None:
        self.buffers.places.pop(address, None)
        os.close(descriptor)


class SharedMemorySource(SourceEnd):
    def __init__(self, buffers: HostBuffers):
        self.buffers = buffers

    def tell(self, memory: Mapping[int, numpy.ndarray]) -> dict[str, Any]:
        return {"lies": {part: self.buffers.place(each) for part, each in memory.items()}}

    def give(self, line: Connection, header: dict[str, Any], chunks: numpy.ndarray, moved: Moved) -> None:
        line.send(header)


class SharedMemoryPuller(PullerEnd):
    """A puller's way into one source's memory."""

    run = 1 << 30

    def __init__(self, process: int, windows: MappedBuffers):
        self.process, self.windows = process, windows
        self.told: dict[int, BufferAddress] = {}
        self.shown: dict[int, numpy.ndarray] = {}

    def hear(self, answer: dict[str, Any]) -> None:
        told = {part: BufferAddress(*map(int, place)) for part, place in answer["lies"].items()}
        if any(told.get(part) != self.told[part] for part in self.shown):
            raise ConnectionError(f"process {self.process} has its weights elsewhere now")
        self.told = told

    def show(self, part: int) -> numpy.ndarray:
        if part not in self.shown:
            self.shown[part] = self.windows.open(self.process, self.told[part])
        return self.shown[part]

    def take(self, line: Connection, size: int, part: int, span: slice, into: numpy.ndarray, moved: Moved) -> None:
        source = self.shown[part][span]
        if source.ctypes.data == into.ctypes.data:
            moved(len(into))
            return
        for begin in range(0, len(into), _BLOCK):
            block = source[begin : begin + _BLOCK]
            into[begin : begin + _BLOCK] = block
            moved(len(block))

    def rest(self) -> None:
        self.told, self.shown = {}, {}


def _let_go(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # the mapping may keep it open
    os.close(file)


def _is_at(path: str, number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino == number
    return False


def _proof(token: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token, b"distflow weights memory " + nonce, "sha256")
