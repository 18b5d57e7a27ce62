"""Transport of chunks within a machine: nothing is transferred. The puller maps the source's buffer, which it opens
through /proc, verifies the chunks in place, and uses that memory as its own; others can map it in turn. Rollouts on
the trainer's machine thus share one copy of a version. Elsewhere each may have its own, since no source is preferred
for its machine.

That both ends share a machine is proved: the puller must find in the source's memory what only a process with the
run's token can have written there, as in the dock (`distflow.rpc.shared_payloads`) the other way round.

Memory that was verified must never change. So the puller first locks the file (a shared `flock`, on a descriptor of its
own), and then requests chunks. If the source still sends them, with the address that is locked, the buffer was in use
when the lock was taken; and the owner of a buffer does not reuse it while a process has it locked
(`HostBuffers.take`). Either may die at any time: the kernel drops the lock of a puller, and keeps memory that a
process maps. A source that is filling itself writes each chunk before it offers it, and not again.
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
    """Transport between processes of one machine."""

    name = "memory"

    def __init__(self, buffers: HostBuffers, token: bytes):
        self.buffers, self.token, self.mapped_buffers = buffers, token, MappedBuffers(buffers)
        self.proof: tuple[numpy.ndarray, dict[str, Any]] | None = None

    def offer(self) -> dict[str, Any] | None:
        """Return the address of this process's proof; None where memory cannot be shared."""
        if not machine_name():
            return None
        if self.proof is None:
            page, nonce = self.buffers.take(_PROOF), secrets.token_bytes(16)
            page[:] = numpy.frombuffer(_proof(self.token, nonce), numpy.uint8)
            self.proof = page, {"machine": machine_name(), "process": os.getpid(), "nonce": nonce,
                                "address": list(self.buffers.address_of(page))}
        return self.proof[1]

    def source_end(self, hello: dict[str, Any]) -> SharedMemorySource:
        return SharedMemorySource(self.buffers)

    def puller_end(self, offer: dict[str, Any], deadline: float) -> SharedMemoryPuller | None:
        """Return None if the source is on another machine, or its memory may not be opened."""
        if offer["machine"] != machine_name():
            return None
        puller_end = SharedMemoryPuller(int(offer["process"]), self.mapped_buffers)
        try:
            address = BufferAddress(*map(int, offer["address"]))
            found = self.mapped_buffers.open(puller_end.process, address)[:_PROOF].tobytes()
        except OSError:
            return None
        return puller_end if hmac.compare_digest(found, _proof(self.token, bytes(offer["nonce"]))) else None


class MappedBuffers:
    """Mapped memory of other processes. To map pages costs as much as to copy them, so a mapping is kept for the next
    version, as long as the process that owns the file has it."""

    def __init__(self, buffers: HostBuffers):
        self.buffers = buffers
        self.mapped: dict[int, tuple[str, numpy.ndarray]] = {}
        """By the file's number: where it was found, and all of it."""
        self.opening = threading.Lock()

    def open(self, process: int, address: BufferAddress) -> numpy.ndarray:
        """Return a buffer of the process, [bytes] uint8, locked until the last view of it is gone. Raises `OSError` if
        it is not there, is not what it should be, or is about to be reused."""
        path = f"/proc/{process}/fd/{address.descriptor}"
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # opening something else could have consequences
            raise ConnectionError(f"process {process} offers something that is not memory with weights")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, file)
            facts = os.fstat(file)
            if (facts.st_ino, facts.st_size) != (address.number, address.size) or \
                    not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ConnectionError(f"process {process} offers memory that is not what it says")
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            memory = memoryview(self._mapped(path, file, address))
            part = numpy.frombuffer(memory, numpy.uint8)  # an array of its own, as a buffer's
            failed.pop_all()
        weakref.finalize(part, _unlock, file).atexit = False
        return part

    def _mapped(self, path: str, file: int, address: BufferAddress) -> numpy.ndarray:
        with self.opening:
            if address.number not in self.mapped:
                self.mapped = {number: pair for number, pair in self.mapped.items() if _is_at(pair[0], number)}
                memory = mmap.mmap(file, address.size, access=mmap.ACCESS_COPY)  # who writes, writes into its own copy
                window = numpy.frombuffer(memory, numpy.uint8)
                ours = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
                self.buffers.addresses[window.ctypes.data] = address._replace(descriptor=ours)
                weakref.finalize(memory, self._close, window.ctypes.data, ours).atexit = False
                self.mapped[address.number] = path, window
            return self.mapped[address.number][1]

    def _close(self, begin: int, descriptor: int) -> None:
        self.buffers.addresses.pop(begin, None)
        os.close(descriptor)


class SharedMemorySource(SourceEnd):
    def __init__(self, buffers: HostBuffers):
        self.buffers = buffers

    def describe(self, memory: Mapping[int, numpy.ndarray]) -> dict[str, Any]:
        return {"addresses": {part: self.buffers.address_of(each) for part, each in memory.items()}}

    def send(self, connection: Connection, header: dict[str, Any], chunks: numpy.ndarray, moved: Moved) -> None:
        connection.send(header)


class SharedMemoryPuller(PullerEnd):
    """Puller's access to one source's memory."""

    run = 1 << 30

    def __init__(self, process: int, mapped_buffers: MappedBuffers):
        self.process, self.mapped_buffers = process, mapped_buffers
        self.addresses: dict[int, BufferAddress] = {}
        self.mapped: dict[int, numpy.ndarray] = {}

    def on_reply(self, answer: dict[str, Any]) -> None:
        addresses = {part: BufferAddress(*map(int, address)) for part, address in answer["addresses"].items()}
        if any(addresses.get(part) != self.addresses[part] for part in self.mapped):
            raise ConnectionError(f"process {self.process} has its weights elsewhere now")
        self.addresses = addresses

    def map(self, part: int) -> numpy.ndarray:
        if part not in self.mapped:
            self.mapped[part] = self.mapped_buffers.open(self.process, self.addresses[part])
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


def _is_at(path: str, number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino == number
    return False


def _proof(token: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token, b"distflow weights memory " + nonce, "sha256")
