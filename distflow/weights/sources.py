"""A puller's connection to one source.

From whom to pull: relays before the trainer, whoever is free before whoever serves another (RobustRL §5.2.1).
"""

from __future__ import annotations

import contextlib
import random
import select
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy

from distflow.dock.errors import DockError
from distflow.rpc.connection import ConnectionEnded, connect
from distflow.telemetry.events import record
from distflow.weights.chunk_store import ChunkStore, Marks, unpacked
from distflow.weights.directory import SourceEntry
from distflow.weights.errors import NoTransport
from distflow.weights.manifest import Chunk, PublishedVersion, Run, digest
from distflow.weights.transport import Transport
from distflow.weights.transport.ends import Header, PullerEnd


def ordered(entries: Mapping[str, SourceEntry], key: str, me: str, mine: int,
            lacking: Collection[int]) -> list[SourceEntry]:
    """The holders of a version, those to ask first first.

    A relay that is still pulling is as good as one that has everything, if it is ahead of us: its chunks come as fast
    as ours could. So pullers that begin together form one row behind the trainer, whose bytes go out once. Relays that
    nothing flows to, or only what comes from us, are asked last: they may have what another that was lost had.

    Args:
        entries: all that live.
        mine: chunks that are here.
        lacking: trainer ranks of whose part something is not here.
    """
    def rank(entry: SourceEntry) -> tuple[int, int, float]:
        held = entry.of(key)
        if entry.rank >= 0:
            return (2, entry.rank, 0.0)
        if entry.serving not in ("", me) or not is_fed(entry, key, me, entries):
            return (3, -held.have, random.random())
        if held.have >= held.awaited:
            return (0, 0, random.random())
        return (1 if held.have >= mine else 3, -held.have, random.random())

    return sorted((entry for entry in entries.values() if entry.of(key) is not None and
                   (entry.rank < 0 or entry.rank in lacking)), key=rank)


def is_fed(entry: SourceEntry, key: str, me: str, entries: Mapping[str, SourceEntry]) -> bool:
    """Whether a holder has all that it will have, or gets it from one of which this is true, and not from us."""
    served = {other.serving: other for other in entries.values() if other.serving}
    passed = {me}
    while entry.who not in passed:
        held = entry.of(key)
        if held is None or entry.rank >= 0 or held.have >= held.awaited:
            return held is not None
        passed.add(entry.who)
        above = entries.get(entry.source) if entry.source != me else None
        entry = above or served.get(entry.who, entry)
    return False


def can_be_had(entries: Mapping[str, SourceEntry], key: str, ranks: Collection[int]) -> bool:
    """Whether living holders have all of a version as far as the board shows: a relay everything, or the trainer's
    `ranks` their parts."""
    holders = [(entry, held) for entry in entries.values() if (held := entry.of(key)) is not None]
    return any(entry.rank < 0 and held.entire and held.have >= held.awaited for entry, held in holders) or \
        {entry.rank for entry, _ in holders} >= set(ranks)


LOST = (OSError, DockError, ConnectionEnded)
"""What says that a source is gone, cut off, or no source of this run."""

_KEPT = 8


class SourceGone(Exception):
    """The source does not have it any more."""


class SourceClient:
    """Dials a source; agrees with it on a transport when it gives the lease.

    Args:
        transports: the ways that may be used, best first.
        wish: how they were asked for, for the error.
        deadline: seconds without a byte after which a source counts as lost.

    Raises:
        OSError, DockError: it does not answer.
    """

    def __init__(self, entry: SourceEntry, head: PublishedVersion, me: str, token: bytes,
                 transports: dict[str, Transport], wish: str,
                 deadline: float):
        self.turn_to(entry, head)
        self.transports, self.wish, self.deadline = transports, wish, deadline
        self.inlet: PullerEnd | None = None
        self.line = connect(entry.address, token, deadline)
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            self.line.send({"who": me})
            self.theirs = self.line.receive()[0]["offers"]
            failed.pop_all()

    def turn_to(self, entry: SourceEntry, head: PublishedVersion) -> None:
        """Use the connection for this version."""
        self.entry, self.who, self.head, self.key = entry, entry.who, head, head.key
        self.have: Marks = {}
        self.count = self.moved = 0
        self.grows = True
        """Whether it is still pulling itself."""
        self.spoilt: set[Chunk] = set()
        """What came corrupt from here; to be had elsewhere."""

    def lease(self) -> str:
        """Empty if this process has the lease now; else who has it.

        Raises:
            NoTransport: none of the transports can be used with this source.
        """
        reply = self._ask({"op": "lease", "key": self.key})
        if "busy" in reply:
            return reply["busy"]
        if self.inlet is None:
            self._agree()
            self.look(at_once=True)
        else:
            self._learn(reply)
        return ""

    def look(self, at_once: bool = False) -> None:
        """Ask which chunks are there; unless `at_once`, wait a little for others than those that are known."""
        self._learn(self._ask({"op": "state", "key": self.key, "seen": -1 if at_once else self.count}))

    def manifest(self, part: int) -> bytes | None:
        """A part's manifest, if the source has it and it is the right one."""
        self.line.send({"op": "manifest", "key": self.key, "part": part})
        header, size = self.line.receive()
        found = self.line.payload(size).numpy().tobytes() if size else b""
        if "error" in header:
            raise SourceGone(header["error"])
        return found if header["has"] and digest(found) == self.head.shares[part].digest else None

    def show(self, part: int) -> numpy.ndarray | None:
        """[bytes] uint8: the source's own memory of a part, in which chunks that are asked for from now on may be used;
        it stays as it is until the last view of it is gone. None: they must be moved.

        Raises:
            OSError: there is such memory, but it cannot be had.
        """
        memory, size = self.inlet.show(part), self.head.shares[part].size
        if memory is not None and len(memory) < size:
            raise ConnectionError(f"{self.who} shows {len(memory)} bytes of memory for a part of {size}")
        return memory if memory is None else memory[:size]

    @property
    def run(self) -> int:
        """Bytes of chunks that are asked for at once."""
        return self.inlet.run

    def ask(self, run: Run) -> None:
        """Have chunks sent; `take` them later, in the order of asking."""
        self.line.send({"op": "chunks", "key": self.key, "run": run})

    def take(self, part: int, span: slice, into: numpy.ndarray, moved: Callable[[int], None]) -> None:
        """What was asked for, the bytes `span` of a part; and the source says with it what else it has by now.

        Raises:
            Gone: it is not there any more, or the lease is not ours.
            OSError: the source is lost.
        """
        header, size = self.line.receive()
        if "gone" in header or "error" in header:
            raise SourceGone(f"{self.who} does not have it any more")
        self._learn(header)
        self.inlet.take(self.line, size, part, span, into, moved)

    def spoil(self, chunk: Chunk) -> None:
        """Not to be asked of this source again."""
        self.spoilt.add(chunk)
        self.have[chunk[0]][chunk[1]] = False

    def offers(self, holding: ChunkStore) -> bool:
        """Whether it has something that is wanted and not here."""
        return holding.lacks(self.have)

    def release(self) -> None:
        """End the lease; the connection stays."""
        if self.inlet is not None:
            self.inlet.rest()
        self.line.send({"op": "release"})

    def is_quiet(self) -> bool:
        """Whether it can still be used: one that has ended, or has something to say unasked, cannot."""
        return not select.select([self.line.sock], [], [], 0)[0]

    def close(self) -> None:
        """Hang up; that ends the lease."""
        if self.inlet is not None:
            self.inlet.close()
        self.line.close()

    def _agree(self) -> None:
        for name in [name for name in self.transports if name in self.theirs]:
            try:
                self.inlet = self.transports[name].inlet(self.theirs[name], self.deadline)
                if self.inlet is not None:
                    self.transport = name
                    self.inlet.met(self._ask({"op": "by", "transport": name, "said": self.inlet.said}))
                    return
            except (NoTransport, SourceGone) as error:
                if self.wish != "auto":
                    raise
                self.inlet = None
                record("transport_left_out", transport=name, source=self.who, why=str(error))
        raise NoTransport(f"{self.who} and this process have no transport in common: `transport: {self.wish}` is asked "
                          f"for here, {self.who} offers {', '.join(self.theirs) or 'none'}. Set  transport: auto")

    def _learn(self, reply: Header) -> None:
        self.inlet.hear(reply)
        self.count, self.moved, self.grows = reply["count"], reply["moved"], reply["grows"]
        self.have = unpacked(reply["have"], self.head)
        for number, index in self.spoilt:
            self.have[number][index] = False

    def _ask(self, header: Header) -> Any:
        self.line.send(header)
        reply, size = self.line.receive()
        self.line.skip(size)
        if "error" in reply:
            raise SourceGone(reply["error"])
        return reply


class SourceConnections:
    """A puller's connections. Those that are not in use are kept: to make one may take as long as a small pull.

    dial: makes a new one.
    """

    def __init__(self, connect: Callable[[SourceEntry, PublishedVersion], SourceClient]):
        self.dial = connect
        self.idle: dict[str, SourceClient] = {}

    def take(self, entry: SourceEntry, head: PublishedVersion) -> SourceClient:
        """One to this holder. Raises what `SourceClient` raises."""
        kept = self.idle.pop(entry.who, None)
        if kept is not None and kept.entry.address == entry.address and kept.is_quiet():
            kept.turn_to(entry, head)
            return kept
        if kept is not None:
            kept.close()
        return self.dial(entry, head)

    def keep(self, supplier: SourceClient) -> None:
        self.idle[supplier.who] = supplier
        while len(self.idle) > _KEPT:
            self.idle.pop(next(iter(self.idle))).close()

    def close(self) -> None:
        while self.idle:
            self.idle.popitem()[1].close()
