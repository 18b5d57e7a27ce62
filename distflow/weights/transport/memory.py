"""Chunks within a machine: the puller opens the source's buffer through /proc and copies each chunk out of it.

That both ends share a machine is proved, not believed: the puller must find in the source's memory what only a process
with the run's token can have written there, as the dock does (`distflow.data.dock.memory`) the other way round.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy

from distflow.data.dock.line import Line
from distflow.data.warehouse import machine_name
from distflow.weights.buffers import NAME, Buffers, Place

_PROOF, _LENT = 32, 4
"""Bytes of a proof; chunks that a source still looks at for one puller: more than are ever asked for ahead."""
_WINDOWS = 8
"""Buffers of one process that are kept open: those of its last versions, and the page with its proof."""
_BLOCK = 512 << 10
"""Bytes that are copied at once: still in the core's own cache when their checksum is made. A second thread for
that costs more than it gains."""


class Memory:
    """The transport of a machine's processes."""

    name = "memory"

    def __init__(self, buffers: Buffers, token: bytes):
        self.buffers, self.token = buffers, token
        self.opened: dict[bytes, Windows] = {}
        """By the nonce of a process's proof, which no later process with its number has."""
        self.shown: tuple[numpy.ndarray, dict[str, Any]] | None = None

    def offer(self) -> dict[str, Any] | None:
        """Where this process's proof lies; None where memory cannot be shared."""
        if not machine_name():
            return None
        if self.shown is None:
            page, nonce = self.buffers.take(_PROOF), secrets.token_bytes(16)
            page[:] = numpy.frombuffer(_proof(self.token, nonce), numpy.uint8)
            self.shown = page, {"machine": machine_name(), "process": os.getpid(), "nonce": nonce,
                                "place": list(self.buffers.locate(page)[0])}
        return self.shown[1]

    def outlet(self, said: dict[str, Any]) -> MemoryOutlet:
        return MemoryOutlet(self.buffers)

    def inlet(self, offer: dict[str, Any], deadline: float) -> MemoryInlet | None:
        """None: the source is on another machine, or may not be looked into."""
        if offer["machine"] != machine_name():
            return None
        nonce = bytes(offer["nonce"])
        inlet = MemoryInlet(int(offer["process"]), self.opened.get(nonce))
        try:
            found = inlet.windows.open(Place(*map(int, offer["place"])))[:_PROOF].tobytes()
        except OSError:
            return None
        if not hmac.compare_digest(found, _proof(self.token, nonce)):
            return None
        self.opened = {other: windows for other, windows in self.opened.items() if windows.is_alive()}
        self.opened[nonce] = inlet.windows
        return inlet


class Windows:
    """What was opened of one process's memory. To map pages costs as much as to copy them, so they are kept."""

    def __init__(self, process: int):
        self.process = process
        self.there: dict[int, numpy.ndarray] = {}

    def is_alive(self) -> bool:
        return os.path.exists(f"/proc/{self.process}")

    def open(self, place: Place) -> numpy.ndarray:
        """[bytes] uint8: a buffer of the process, which must not be written to.

        Raises:
            OSError: it is not there, or is not what it should be.
        """
        if place.number not in self.there:
            path = f"/proc/{self.process}/fd/{place.descriptor}"
            if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # opening something else could have consequences
                raise ConnectionError(f"process {self.process} offers something that is not memory with weights")
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK \
                        or os.fstat(file).st_size < place.size:
                    raise ConnectionError(f"process {self.process} offers memory that is not as large as it says")
                self.there[place.number] = numpy.frombuffer(
                    mmap.mmap(file, place.size, mmap.MAP_SHARED, mmap.PROT_READ), numpy.uint8)
            finally:
                os.close(file)
            while len(self.there) > _WINDOWS:
                self.there.pop(next(iter(self.there)))
        return self.there[place.number]


class MemoryOutlet:
    reply: dict[str, Any] = {}

    def __init__(self, buffers: Buffers):
        self.buffers = buffers
        self.lent: deque[numpy.ndarray] = deque(maxlen=_LENT)
        """Looked at, so that their buffers are not used again."""

    def give(self, line: Line, header: dict[str, Any], chunk: numpy.ndarray) -> None:
        place, offset = self.buffers.locate(chunk)
        self.lent.append(chunk)
        line.send(header | {"lies": [*place, offset, len(chunk)]})

    def rest(self) -> None:
        self.lent.clear()

    def close(self) -> None:
        self.lent.clear()


class MemoryInlet:
    """A puller's way into one source's memory."""

    said: dict[str, Any] = {}

    def __init__(self, process: int, windows: Windows | None = None):
        self.windows = windows or Windows(process)

    def met(self, reply: dict[str, Any]) -> None:
        pass

    def take(self, line: Line, header: dict[str, Any], size: int, into: numpy.ndarray,
             moved: Callable[[int], None]) -> None:
        number, descriptor, length, offset, count = map(int, header["lies"])
        memory = self.windows.open(Place(number, descriptor, length))
        if count != len(into) or not 0 <= offset <= length - count:
            raise ConnectionError(f"{line.peer} offers {count} bytes at {offset} of {length} for a chunk of "
                                  f"{len(into)}")
        source, target = memoryview(memory)[offset : offset + count], memoryview(into)
        for begin in range(0, count, _BLOCK):
            block = source[begin : begin + _BLOCK]
            target[begin : begin + len(block)] = block
            moved(len(block))

    def close(self) -> None:
        pass


def _proof(token: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token, b"distflow weights memory " + nonce, "sha256")
