"""A puller's connection to one source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from distflow.data.dock.errors import DockError
from distflow.data.dock.line import Closed, dial
from distflow.weights.directory import Entry
from distflow.weights.errors import NoTransport
from distflow.weights.holding import Holding, Marks, unpacked
from distflow.weights.manifest import Chunk, Head, digest
from distflow.weights.transport import Header, Inlet, Transport

LOST = (OSError, DockError, Closed)
"""What says that a source is gone, cut off, or no source of this run."""


class Gone(Exception):
    """The source does not have it any more."""


class Supplier:
    """Dials a source and agrees with it on a transport.

    Args:
        transports: the ways that may be used, best first.
        wish: how they were asked for, for the error.
        deadline: seconds without a byte after which a source counts as lost.

    Raises:
        OSError, DockError: it does not answer.
        NoTransport: none of the transports can be used with it.
    """

    def __init__(self, entry: Entry, head: Head, me: str, token: bytes, transports: dict[str, Transport], wish: str,
                 deadline: float):
        self.entry, self.who, self.head, self.key = entry, entry.who, head, head.key
        self.have: Marks = {}
        self.grows = True
        """Whether it is still pulling itself."""
        self.spoilt: set[Chunk] = set()
        """What came corrupt from here; to be had elsewhere."""
        self.count = self.moved = self.bytes = 0
        self.line = dial(entry.address, token, deadline)
        self.inlet: Inlet | None = None
        try:
            self.line.send({"who": me})
            self._agree(self.line.receive()[0]["offers"], transports, wish, deadline)
        except BaseException:
            self.close()
            raise

    def _agree(self, offers: dict[str, Header], transports: dict[str, Transport], wish: str, deadline: float) -> None:
        for name, way in transports.items():
            inlet = way.inlet(offers[name], self.entry.address[0], deadline) if name in offers else None
            if inlet is not None:
                self.inlet, self.transport = inlet, name
                self._ask({"op": "by", "transport": name, "said": inlet.said})
                return
        raise NoTransport(f"{self.who} and this process have no transport in common: `transport: {wish}` is asked for "
                          f"here, {self.who} offers {', '.join(offers) or 'none'}. Set  transport: auto")

    def lease(self) -> str:
        """Empty if this process has the lease now; else who has it."""
        reply = self._ask({"op": "lease", "key": self.key})
        return reply["busy"] if "busy" in reply else self._learn(reply)

    def look(self) -> None:
        """Ask which chunks are there; waits a little for others than those that are known."""
        self._learn(self._ask({"op": "state", "key": self.key, "seen": self.count}))

    def manifest(self, part: int) -> bytes | None:
        """A part's manifest, if the source has it and it is the right one."""
        self.line.send({"op": "manifest", "key": self.key, "part": part})
        header, size = self.line.receive()
        found = self.line.payload(size).numpy().tobytes() if size else b""
        if "error" in header:
            raise Gone(header["error"])
        return found if header["has"] and digest(found) == self.head.shares[part].digest else None

    def ask(self, chunk: Chunk) -> None:
        """Have a chunk sent; `take` it later, in the order of asking."""
        self.line.send({"op": "chunk", "key": self.key, "part": chunk[0], "index": chunk[1]})

    def take(self, into: numpy.ndarray, moved: Callable[[int], None]) -> None:
        """Raises:
            Gone: it is not there any more, or the lease is not ours.
            OSError: the source is lost.
        """
        header, size = self.line.receive()
        if "gone" in header:
            raise Gone(f"{self.who} does not have it any more")
        self.inlet.take(self.line, header, size, into, moved)
        self.bytes += len(into)

    def spoil(self, chunk: Chunk) -> None:
        """Not to be asked of this source again."""
        self.spoilt.add(chunk)
        self.have[chunk[0]][chunk[1]] = False

    def offers(self, holding: Holding) -> bool:
        """Whether it has something that is wanted and not here."""
        return holding.lacks(self.have)

    def close(self) -> None:
        """Hang up; that ends the lease."""
        if self.inlet is not None:
            self.inlet.close()
        self.line.close()

    def _learn(self, reply: Header) -> str:
        self.count, self.moved, self.grows = reply["count"], reply["moved"], reply["grows"]
        self.have = unpacked(reply["have"], self.head)
        for number, index in self.spoilt:
            self.have[number][index] = False
        return ""

    def _ask(self, header: Header) -> Any:
        self.line.send(header)
        reply, size = self.line.receive()
        self.line.skip(size)
        if "error" in reply:
            raise Gone(reply["error"])
        return reply
