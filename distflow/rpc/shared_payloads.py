"""Payloads through shared memory, for a line whose two ends are on one machine.

The memory is the client's: files without names (memfd) that cannot shrink, which the service opens through /proc, as
neighbours do in `distflow.rpc.shared_memory`. A payload lies in one of them, and its message on the line says where. A
client writes what it puts, and offers a segment for the answer, as large as those that came of late; the service
writes rows right there, and the client uses them where they lie. Headers travel on the line as ever, and so does
what is small or does not fit.

Segments belong to one connection and are never used by the next: a service that was stopped may still write into
them. That both ends share a machine is proved, not believed: the service must find in the client's memory what only
a process with the run's token can have written there.
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

from distflow.dock.errors import Refused
from distflow.rpc.shared_memory import machine_name

LEAST = 256 << 10
"""Bytes of a payload from which on memory costs less than the line: at 200 kB both cost alike, at 3 MB a third less."""
_SLACK, _SMALLEST, _SPARE, _WINDOWS = 1.25, 1 << 20, 4, 8
"""A segment is a quarter larger than asked for, and never tiny; segments kept for later; those kept open."""
_NAME = "distflow-dock"
Header = dict[str, Any]
Place = list[int]
"""A segment as its owner announces it: number, descriptor, size."""


class Segment(NamedTuple):
    """Memory of a client; `bytes` [size] uint8."""

    place: Place
    bytes: numpy.ndarray


class Segments:
    """The client's end: it owns the memory."""

    def __init__(self) -> None:
        self.spare: list[Segment] = []
        self.made = self.largest = 0
        self.sent: Segment | None = None
        self.offered: Segment | None = None

    def claim(self, token: bytes) -> Header | None:
        """What the first message says, so that the service can see for itself; None where memory cannot be shared."""
        machine = machine_name()
        if not machine:
            return None
        segment, nonce = self._take(_SMALLEST), secrets.token_bytes(16)
        proof = _proof(token, nonce)
        segment.bytes[: len(proof)] = numpy.frombuffer(proof, numpy.uint8)
        self._give_back(segment)
        return {"machine": machine, "process": os.getpid(), "place": segment.place, "nonce": nonce}

    def carry(self, header: Header, parts: list[Any], size: int) -> tuple[Header, list[Any]]:
        """The message and what is left of its payload for the line."""
        if size >= LEAST:
            self.sent = self._take(size)
            _fill(self.sent.bytes, parts)
            header, parts = header | {"lies": [self.sent.place, size]}, []
        if self.largest >= LEAST:
            self.offered = self._take(self.largest)
            header = header | {"into": self.offered.place}
        return header, parts

    def arrived(self, header: Header, on_line: int) -> int:
        """Bytes of an answer's payload that lie in memory; what was sent with its request has been read."""
        size = header.pop("lies", 0)
        if size + on_line >= LEAST:
            self.largest = max(size + on_line, self.largest * 3 // 4)
        if self.sent is not None:
            self._give_back(self.sent)
        if self.offered is not None and not size:
            self._give_back(self.offered)
        self.sent = None
        return size

    def payload(self, size: int) -> Tensor:
        """[size] uint8 where they lie; the segment is used again when the last view of it is gone."""
        part = self.offered.bytes[:size]
        weakref.finalize(part, self._give_back, self.offered).atexit = False
        return torch.from_numpy(part)

    def _take(self, size: int) -> Segment:
        fitting = [segment for segment in self.spare if segment.place[2] >= size]
        if fitting:
            best = min(fitting, key=lambda segment: segment.place[2])
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

    def _give_back(self, segment: Segment) -> None:
        self.spare = [*self.spare, segment][-_SPARE:]


class MappedSegments:
    """The service's end: what it has opened of a client's memory."""

    def __init__(self, process: int):
        self.process = process
        self.opened: dict[int, numpy.ndarray] = {}
        self.lying = numpy.empty(0, numpy.uint8)
        self.into: Place | None = None

    @classmethod
    def onto(cls, claim: Header | None, token: bytes) -> MappedSegments | None:
        """The memory of a client that claims to be on this machine; None if it is not, or may not be looked into."""
        if claim is None or claim["machine"] != machine_name():
            return None
        windows = cls(int(claim["process"]))
        try:
            found = windows._open(claim["place"])
        except (OSError, Refused):
            return None
        proof = _proof(token, claim["nonce"])
        return windows if hmac.compare_digest(found[: len(proof)].tobytes(), proof) else None

    def carry(self, header: Header, parts: list[Any], size: int) -> tuple[Header, list[Any]]:
        """The answer and what is left of its payload for the line."""
        if self.into is None or not LEAST <= size <= self.into[2]:
            return header, parts
        _fill(self._open(self.into), parts)
        return header | {"lies": size}, []

    def arrived(self, header: Header, on_line: int) -> int:
        """Bytes of a request's payload that lie in memory."""
        self.into = header.pop("into", None)
        place, size = header.pop("lies", (None, 0))
        if place is not None:
            self.lying = self._open(place)[:size]
        return size

    def payload(self, size: int) -> Tensor:
        """[size] uint8: a copy, for the client uses its memory again."""
        result = torch.empty(size, dtype=torch.uint8)
        result.numpy()[:] = self.lying
        return result

    def _open(self, place: Sequence[int]) -> numpy.ndarray:
        number, descriptor, size = map(int, place)
        if number not in self.opened:
            path = f"/proc/{self.process}/fd/{descriptor}"
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # opening something else could have consequences
                raise Refused(f"process {self.process} offers something that is not a dock's memory")
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(file).st_size < size:
                    raise Refused(f"process {self.process} offers memory that is not as large as it says")
                self.opened[number] = numpy.frombuffer(mmap.mmap(file, size), numpy.uint8)
            finally:
                os.close(file)
            while len(self.opened) > _WINDOWS:
                self.opened.pop(next(iter(self.opened)))
        return self.opened[number]


def _fill(memory: numpy.ndarray, parts: Sequence[Any]) -> None:
    view, position = memoryview(memory), 0
    for part in parts:
        view[position : position + len(part)] = part
        position += len(part)


def _proof(token: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token, b"distflow dock memory " + nonce, "sha256")
