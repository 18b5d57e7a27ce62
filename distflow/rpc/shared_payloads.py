"""Payloads through shared memory, for a connection whose two ends are on one machine.

The memory is the client's: files without names (memfd) that cannot shrink, which the server opens through /proc. A
request's header says in which segment its payload is, and offers one for the reply, as large as recent replies; the
client uses the reply in place. Headers go over the socket, and so do payloads that are small or do not fit.

Segments belong to one connection: a server that was stopped may still write into them. The server checks that both
ends share a machine: it must find in the client's memory what only a process with the run's token can have written.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from distflow.rpc.errors import Refused
from distflow.rpc.shared_memory import machine_name

LEAST = 256 << 10
"""Bytes from which on shared memory costs less than the socket: as much at 200 kB, a third less at 3 MB."""
_SLACK, _SMALLEST, _SPARE, _MAPPED = 1.25, 1 << 20, 4, 8
"""A segment is a quarter larger than asked for, and never tiny; spare segments kept; mapped segments kept."""
_NAME = "distflow-dock"
Header = dict[str, Any]
SegmentAddress = list[int]
"""Segment as its owner announces it: number, descriptor, size."""


class Segment(NamedTuple):
    """Shared memory of a client; `bytes` [size] uint8."""

    address: SegmentAddress
    bytes: numpy.ndarray


class Segments:
    """Client's end: the owner of the memory."""

    def __init__(self) -> None:
        self.spare: list[Segment] = []
        self.made = self.largest = 0
        self.sent: Segment | None = None
        self.offered: Segment | None = None

    def offer(self, token: bytes) -> Header | None:
        """Return what the first message offers the server as proof; None where memory cannot be shared."""
        machine = machine_name()
        if not machine:
            return None
        segment, nonce = self._acquire(_SMALLEST), secrets.token_bytes(16)
        proof = _proof(token, nonce)
        segment.bytes[: len(proof)] = numpy.frombuffer(proof, numpy.uint8)
        self._release(segment)
        return {"machine": machine, "process": os.getpid(), "address": segment.address, "nonce": nonce}

    def write(self, header: Header, parts: list[Any], size: int) -> tuple[Header, list[Any]]:
        """Write a request's payload into memory if it is large; return the header and the parts for the socket."""
        if size >= LEAST:
            self.sent = self._acquire(size)
            _fill(self.sent.bytes, parts)
            header, parts = header | {"payload_at": [self.sent.address, size]}, []
        if self.largest >= LEAST:
            self.offered = self._acquire(self.largest)
            header = header | {"reply_at": self.offered.address}
        return header, parts

    def locate(self, header: Header, on_wire: int) -> int:
        """Return the bytes of a reply's payload that are in memory; the server has read the request's."""
        size = header.pop("payload_size", 0)
        if size + on_wire >= LEAST:
            self.largest = max(size + on_wire, self.largest * 3 // 4)
        if self.sent is not None:
            self._release(self.sent)
        if self.offered is not None and not size:
            self._release(self.offered)
        self.sent = None
        return size

    def payload(self, size: int) -> Tensor:
        """Return the payload in place, [size] uint8; the segment is reused when the last view of it is gone."""
        part = self.offered.bytes[:size]
        weakref.finalize(part, self._release, self.offered).atexit = False
        return torch.from_numpy(part)

    def _acquire(self, size: int) -> Segment:
        fitting = [segment for segment in self.spare if segment.address[2] >= size]
        if fitting:
            best = min(fitting, key=lambda segment: segment.address[2])
            self.spare = [each for each in self.spare if each is not best]  # a finalizer may change it meanwhile
            return best
        self.made += 1
        size = max(int(size * _SLACK), _SMALLEST)
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        memory = mmap.mmap(descriptor, size)
        weakref.finalize(memory, os.close, descriptor).atexit = False
        return Segment([self.made, descriptor, size], numpy.frombuffer(memory, numpy.uint8))

    def _release(self, segment: Segment) -> None:
        self.spare = [*self.spare, segment][-_SPARE:]


class MappedSegments:
    """Server's end: the segments of a client that it has mapped."""

    def __init__(self, process: int):
        self.process = process
        self.segments: dict[int, numpy.ndarray] = {}
        self.payload_bytes = numpy.empty(0, numpy.uint8)
        self.reply_at: SegmentAddress | None = None

    @classmethod
    def of_client(cls, offer: Header | None, token: bytes) -> MappedSegments | None:
        """Map the memory that a client offers; None if it is on another machine, or cannot be opened."""
        if offer is None or offer["machine"] != machine_name():
            return None
        mapped = cls(int(offer["process"]))
        try:
            found = mapped._map(offer["address"])
        except (OSError, Refused):
            return None
        proof = _proof(token, offer["nonce"])
        return mapped if hmac.compare_digest(found[: len(proof)].tobytes(), proof) else None

    def write(self, header: Header, parts: list[Any], size: int) -> tuple[Header, list[Any]]:
        """Write a reply's payload into the offered segment if it fits; return header and parts for the socket."""
        if self.reply_at is None or not LEAST <= size <= self.reply_at[2]:
            return header, parts
        _fill(self._map(self.reply_at), parts)
        return header | {"payload_size": size}, []

    def locate(self, header: Header, on_wire: int) -> int:
        """Return the bytes of a request's payload that are in memory."""
        self.reply_at = header.pop("reply_at", None)
        address, size = header.pop("payload_at", (None, 0))
        if address is not None:
            self.payload_bytes = self._map(address)[:size]
        return size

    def payload(self, size: int) -> Tensor:
        """Return a copy of the payload, [size] uint8: the client reuses its memory."""
        result = torch.empty(size, dtype=torch.uint8)
        result.numpy()[:] = self.payload_bytes
        return result

    def _map(self, address: Sequence[int]) -> numpy.ndarray:
        number, descriptor, size = map(int, address)
        if number not in self.segments:
            path = f"/proc/{self.process}/fd/{descriptor}"
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # opening something else could have consequences
                raise Refused(f"process {self.process} offers something that is not its shared memory")
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(file).st_size < size:
                    raise Refused(f"process {self.process} offers memory that is not as large as it says")
                self.segments[number] = numpy.frombuffer(mmap.mmap(file, size), numpy.uint8)
            finally:
                os.close(file)
            while len(self.segments) > _MAPPED:
                self.segments.pop(next(iter(self.segments)))
        return self.segments[number]


def _fill(memory: numpy.ndarray, parts: Sequence[Any]) -> None:
    view, position = memoryview(memory), 0
    for part in parts:
        view[position : position + len(part)] = part
        position += len(part)


def _proof(token: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token, b"distflow dock memory " + nonce, "sha256")
