"""Sources of weights: the order in which a puller asks them, and its connection to each (RobustRL §5.2.1).

Relays come before the trainer, free sources before those that serve another puller. Relays of another machine that have
or will have all of a version are as one source: all pullers ask the same of them, so that its link carries it once.
"""

from __future__ import annotations

import contextlib
import random
import select
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy

from distflow.rpc.connection import ConnectionEnded, connect
from distflow.rpc.errors import RpcError, Unreachable
from distflow.telemetry.events import record
from distflow.weights.chunk_store import ChunkMasks, unpack_masks
from distflow.weights.directory import SEEN, HeldChunks, Holders, SourceEntry
from distflow.weights.errors import NoTransport
from distflow.weights.manifest import Chunk, PublishedVersion, Run, digest
from distflow.weights.transport import Transport
from distflow.weights.transport.ends import Header, PullerEnd


def order_sources(entries: Holders, key: str, me: str, mine: int, missing: Collection[int],
                  here: str = "") -> list[SourceEntry]:
    """Return the holders of a version, in the order in which to ask them.

    A relay that is still pulling is as good as one that has everything, if it is ahead of us: its chunks arrive as fast
    as ours could. So pullers that begin together form one chain behind the trainer, whose bytes go out once. Relays
    that nothing flows to, or only chunks from us, are asked last: they may have chunks of a source that was lost.

    Args:
        mine: number of chunks that are here.
        missing: trainer ranks of whose part something is missing.
        here: our machine.
    """
    def rank(pair: tuple[SourceEntry, HeldChunks]) -> tuple[int, int, float]:
        entry, held = pair
        if entry.rank >= 0:
            return (2, entry.rank, 0.0)
        if entry.serving not in ("", me) or not is_supplied(entry, key, me, entries):
            return (3, -held.have, random.random())
        if held.have >= held.expected:
            return (0, 0, random.random())
        return (1 if held.have >= mine else 3, -held.have, random.random())

    def choice(pair: tuple[SourceEntry, HeldChunks]) -> tuple[bool, bool, bool, str]:
        entry = pair[0]
        return not is_supplied(entry, key, me, entries), not entry.serving, entry.pulling != key, entry.who

    sources = dict[str, list[tuple[SourceEntry, HeldChunks]]]()
    for entry, held in _holders(entries, key):
        if entry.rank < 0 or entry.rank in missing:
            as_one = entry.rank < 0 and entry.machine not in ("", here)
            sources.setdefault(entry.machine if as_one else entry.who, []).append((entry, held))
    return [entry for entry, _ in sorted((min(pairs, key=choice) for pairs in sources.values()), key=rank)]


def _holders(entries: Mapping[str, SourceEntry], key: str) -> list[tuple[SourceEntry, HeldChunks]]:
    return [(entry, held) for entry in entries.values() if (held := entry.of(key)) is not None]


def is_supplied(entry: SourceEntry, key: str, me: str, entries: Holders) -> bool:
    """Return whether a holder has all its chunks, or gets them from one that has, and not from us. Where not all
    holders are known, one that is not counts as supplied."""
    served = {other.serving: other for other in entries.values() if other.serving}
    passed = {me}
    while entry.who not in passed:
        held = entry.of(key)
        if held is None or entry.rank >= 0 or held.have >= held.expected:
            return held is not None
        if entry.pulling == key and not entry.source:  # elected to do so, it is looking for a source
            return True
        passed.add(entry.who)
        above = entries.get(entry.source) if entry.source != me else None
        if above is None and entry.source not in ("", me) and not entries.whole:
            return True
        entry = above or served.get(entry.who, entry)
    return False


def is_available(entries: Holders, key: str, ranks: Sequence[int]) -> bool:
    """Return whether a living relay has all of a version, or the trainer's `ranks` have their parts."""
    holders = _holders(entries, key)
    return any(entry.rank < 0 and held.have >= held.expected for entry, held in holders) or \
        {entry.rank for entry, _ in holders} >= {*ranks[: len(ranks) if entries.whole else SEEN]}


LOST = (OSError, RpcError, ConnectionEnded)
"""Errors by which a source turns out to be gone, cut off, or no source of this run."""
ENDED = ConnectionEnded, ConnectionResetError, BrokenPipeError, Unreachable
"""Those of them that say that its process has probably ended."""

_KEPT = 8


class SourceGone(Exception):
    """The source does not have the chunks any more."""


class SourceClient:
    """Client of one source; agrees with it on one of `transports`, best first, when it gets the lease. requested: the
    setting that chose these. deadline: seconds without a byte after which a source counts as lost."""

    def __init__(self, entry: SourceEntry, head: PublishedVersion, me: str, token: bytes,
                 transports: dict[str, Transport], requested: str, deadline: float):
        self.use_for(entry, head)
        self.transports, self.requested, self.deadline = transports, requested, deadline
        self.puller_end, self.transport = PullerEnd(), ""
        """Those of the transport that was agreed on; empty before."""
        self.connection = connect(entry.address, token, deadline)
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            self.theirs = self.connection.ask({"who": me})["offers"]
            failed.pop_all()

    def use_for(self, entry: SourceEntry, head: PublishedVersion) -> None:
        self.entry, self.who, self.head, self.key = entry, entry.who, head, head.key
        self.masks: ChunkMasks = {}
        self.count = self.moved = 0
        self.grows = True
        """Whether the source is still pulling itself."""
        self.corrupt: set[Chunk] = set()
        """Chunks received corrupt from this source, to be fetched elsewhere."""

    @property
    def available_chunks(self) -> ChunkMasks:
        """Chunks to fetch from this source: all that it has, but for those that came corrupt."""
        for number, index in tuple(self.corrupt):
            self.masks[number][index] = False
        return self.masks

    def lease(self, here: bool = False) -> str:
        """Take the lease and return "", or the name of the puller that has it; that of a source whose memory is used
        (`here`: on our machine) is shared. Raises `NoTransport`: none in common."""
        if here and not self.transport:
            self._agree()
        reply = self._ask({"op": "lease", "key": self.key})
        if "busy" in reply:
            return reply["busy"]
        if not self.transport:
            self._agree()
            self.list_chunks(at_once=True)
        else:
            self._learn(reply)
        return ""

    def list_chunks(self, at_once: bool = False) -> None:
        """Ask which chunks are there; unless `at_once`, wait a little for others than those that are known."""
        self._learn(self._ask({"op": "state", "key": self.key, "seen": -1 if at_once else self.count}))

    def manifest(self, part: int) -> bytes | None:
        """Return a part's manifest, if the source has it and its digest is right."""
        self.connection.send({"op": "manifest", "key": self.key, "part": part})
        header, size = self.connection.receive()
        found = self.connection.payload(size).tobytes() if size else b""
        if "error" in header:
            raise SourceGone(header["error"])
        return found if header["has"] and digest(found) == self.head.shares[part].digest else None

    def map(self, part: int) -> numpy.ndarray | None:
        """Return the source's own memory of a part, [bytes] uint8, as `PullerEnd.map`."""
        memory, size = self.puller_end.map(part), self.head.shares[part].size
        if memory is not None and len(memory) < size:
            raise ConnectionError(f"{self.who} shows {len(memory)} bytes of memory for a part of {size}")
        return memory if memory is None else memory[:size]

    @property
    def run(self) -> int:
        return self.puller_end.run

    def ask(self, run: Run) -> None:
        self.connection.send({"op": "chunks", "key": self.key, "run": run})

    def take(self, part: int, span: slice, into: numpy.ndarray, moved: Callable[[int], None]) -> None:
        """Receive requested chunks, the bytes `span` of a part, in the order of the requests, and with them the
        source's chunk masks. Raises `SourceGone` if they are not there any more, or the lease is not ours."""
        header, size = self.connection.receive(most=len(into))
        if "gone" in header or "error" in header:
            raise SourceGone(f"{self.who} does not have it any more")
        self._learn(header)
        self.puller_end.take(self.connection, size, part, span, into, moved)

    def mark_corrupt(self, chunk: Chunk) -> None:
        self.corrupt.add(chunk)

    def release(self) -> None:
        self.puller_end.pause()
        self.connection.send({"op": "release"})

    def is_usable(self) -> bool:
        """Return whether the connection is idle: one that has ended, or has unread data, cannot be used again."""
        return not select.select([self.connection.sock], [], [], 0)[0]

    def close(self) -> None:
        self.puller_end.close()
        self.connection.close()

    def _agree(self) -> None:
        for name in [name for name in self.transports if name in self.theirs]:
            try:
                end = self.transports[name].puller_end(self.theirs[name], self.deadline)
                if end is not None:
                    self.puller_end = end
                    end.connect(self._ask({"op": "transport", "name": name, "hello": end.hello}))
                    self.transport = name
                    return
            except (NoTransport, SourceGone) as error:
                if self.requested != "auto":
                    raise
                record("transport_left_out", transport=name, source=self.who, why=str(error))
        raise NoTransport(f"{self.who} and this process have no transport in common: `transport: {self.requested}` is "
                          f"asked for here, {self.who} offers {', '.join(self.theirs) or 'none'}. Set  transport: auto")

    def _learn(self, reply: Header) -> None:
        self.puller_end.on_reply(reply)
        self.count, self.moved, self.grows = reply["count"], reply["moved"], reply["grows"]
        self.masks = unpack_masks(reply["have"], self.head)

    def _ask(self, header: Header) -> Any:
        reply = self.connection.ask(header)
        if "error" in reply:
            raise SourceGone(reply["error"])
        return reply


class SourceConnections:
    """Connections of a puller; idle ones are kept: to make one may take as long as a small pull."""

    def __init__(self, connect: Callable[[SourceEntry, PublishedVersion], SourceClient]):
        self.connect = connect
        self.idle = list[SourceClient]()
        self.lock = threading.Lock()

    def take(self, entry: SourceEntry, head: PublishedVersion) -> SourceClient:
        while kept := self._pop(entry.who):
            if kept.entry.address == entry.address and kept.is_usable():
                kept.use_for(entry, head)
                return kept
            kept.close()
        return self.connect(entry, head)

    def _pop(self, who: str) -> SourceClient | None:
        with self.lock:
            found = next((at for at, client in enumerate(self.idle) if client.who == who), None)
            return self.idle.pop(found) if found is not None else None

    def keep(self, client: SourceClient) -> None:
        with self.lock:
            self.idle.append(client)
            oldest = self.idle.pop(0) if len(self.idle) > _KEPT else None
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()
