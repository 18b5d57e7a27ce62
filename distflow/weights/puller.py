"""Pulls the newest weights from any process that has them, and serves them to other rollouts (relay).

    Puller        chooses a version and pulls it; a relay from its first chunk on
    ChunkPuller   fills one chunk store from many sources, chunk by chunk, from the next source when one is lost

Received chunks are kept: a source that dies costs only the chunk in transfer. So does one that hangs or is cut off,
once the deadline has passed without a byte.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from distflow.rpc.errors import Refused
from distflow.rpc.shared_memory import SharedMemoryPool, memory_name
from distflow.store.interface import Store
from distflow.telemetry import timeline
from distflow.telemetry.events import record
from distflow.weights.chunk_store import ChunkMasks, ChunkStore, IncomingChunks, Weights
from distflow.weights.directory import Directory, HeldChunks, Holders, SourceEntry
from distflow.weights.errors import WeightsError, WeightsLate, WeightsLost
from distflow.weights.manifest import Chunk, PublishedVersion, RankManifest, Run, version_of
from distflow.weights.publisher import SourceServer
from distflow.weights.shard_slice import Reads
from distflow.weights.sources import (
    ENDED,
    LOST,
    SourceClient,
    SourceConnections,
    SourceGone,
    is_available,
    is_supplied,
    order_sources,
)
from distflow.weights.transport import WINDOW, machine_of, transports

_FRESH = 0.05
"""Age in seconds up to which entries of the store are good enough for a first choice."""
_PAUSE, _TRIES, _REFUSALS = 0.1, 5, 3
"""Seconds until all sources are asked again when none is free; how often one chunk may be received corrupt, and how
often a holder may refuse our token: it may just have ended, and another run have its port."""


class ChunkPuller:
    """Fills a chunk store of `puller`. old: another version, complete, whose chunks need not be transferred. until:
    when to give up (monotonic)."""

    def __init__(self, puller: Puller, head: PublishedVersion, chunks: ChunkStore, old: ChunkStore | None,
                 until: float):
        self.directory, self.connections, self.allocate = puller.directory, puller.connections, puller.buffers.take
        self.me, self.deadline, self.stopped = puller.who, puller.deadline, puller.stopped
        self.head, self.chunks, self.old, self.until = head, chunks, old, until
        self.key = chunks.held_key
        self.failed_sources: dict[str, int] = {}
        """By name, the heartbeat of sources that failed: they are not asked before the next one."""
        self.ended_sources: dict[str, int] = {}
        """Those that hung up, or could not be reached: as dead until the next one."""
        self.corrupt: Counter[Chunk] = Counter()
        self.corrupt_sources: set[str] = set()
        self.refusals: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.transports: set[str] = set()
        self.progressed_at = time.monotonic()
        self.last_error = "none failed"

    def fetch_manifests(self, add: Callable[[int, bytes], None]) -> None:
        while missing := self._missing_manifests():
            for entry in self._candidates(missing):
                self._manifests_of(entry, missing, add)
                if not (missing := self._missing_manifests()):
                    return
            self._wait_for_sources(missing)

    def _missing_manifests(self) -> list[int]:
        return [number for number in range(len(self.head.shares)) if number not in self.chunks.parts]

    def fetch_chunks(self) -> None:
        """Fetch until all wanted chunks are here. Raises `WeightsLost` if no living process has them, `WeightsLate` if
        the time is over, `WeightsError` if a chunk comes corrupt again and again, or all sources refuse our token."""
        while self.chunks.is_missing():
            clients = [] if self.stopped.is_set() else self._lease_sources()
            if not clients:
                self._wait_for_sources(self._missing_parts())
                continue
            self.directory.update(source=clients[0].who)
            with ExitStack() as others:
                for client in clients[1:]:
                    others.enter_context(_thread(self._pull_from, client))
                self._pull_from(clients[0])
            if self.corrupt and max(self.corrupt.values()) >= _TRIES:
                raise WeightsError(f"chunk {self.corrupt.most_common(1)[0][0]} of version {self.head.version} came "
                                   f"corrupt {_TRIES} times, from {', '.join(self.received)}: see weights_corrupt in "
                                   "events.jsonl. Memory or network of one of these machines may be defective")

    def _living_sources(self, missing: Sequence[int] = (), age: float = 0.0) -> Holders:
        parts = [*missing, *sorted({*range(len(self.head.shares))} - {*missing})]
        found = self.directory.holders(parts, age)
        return found.only(lambda entry: self.failed_sources.get(entry.who) != entry.heartbeat)

    def _candidates(self, missing: list[int]) -> Iterator[SourceEntry]:
        """Yield the sources to ask: those on this machine first, and others only if this process is elected to."""
        alive, key = self._living_sources(missing, _FRESH), self.key
        found = order_sources(alive, key, self.me, self.chunks.count, missing, self.directory.mine.machine)
        here = [entry for entry in found
                if self.directory.is_on_this_machine(entry) and entry.who not in self.corrupt_sources]
        yield from sorted(here, key=lambda entry: entry.pulling != key)
        if len(here) < len(found) and self._is_elected():
            yield from sorted((entry for entry in found if entry not in here),
                              key=lambda entry: entry.who in self.corrupt_sources)

    def _is_elected(self) -> bool:
        living = self.directory.last.only(lambda entry: self.ended_sources.get(entry.who) != entry.heartbeat)
        return self.directory.elect(self.key, living)

    def _missing_parts(self) -> list[int]:
        return [number for number, wanted in self.chunks.wanted.items()
                if (wanted & ~self.chunks.have[number]).any()]

    def _manifests_of(self, entry: SourceEntry, wanted: list[int], add: Callable[[int, bytes], None]) -> None:
        try:
            with ExitStack() as failed:
                client = self.connections.take(entry, self.head)
                failed.callback(client.close)
                for number in [entry.rank] if entry.rank >= 0 else wanted:
                    if (found := client.manifest(number)) is not None:
                        add(number, found)
                failed.pop_all()
            self.connections.keep(client)
        except (*LOST, SourceGone) as error:
            self._avoid(entry, error)

    def _lease_sources(self) -> list[SourceClient]:
        """Lease one relay, or trainer ranks: the first that is free, and after it all others that are."""
        tried, taken = set[str](), list[SourceClient]()
        for entry in self._candidates(self._missing_parts()):
            if taken and (entry.rank < 0 or taken[0].entry.rank < 0):
                continue
            following: SourceEntry | None = entry
            while following is not None and following.who not in tried:
                tried.add(following.who)
                client, busy = self._lease(following)
                if client is not None:
                    taken.append(client)
                    break
                following = self._successor(busy, entry) if not taken else None
            if taken and taken[0].entry.rank < 0:
                break
        return taken

    def _successor(self, who: str, busy: SourceEntry) -> SourceEntry | None:
        """Return the puller that a busy source serves, unless it leads away from this machine: it will have the same
        chunks a moment later."""
        entry, is_here = self._living_sources().get(who) if who else None, self.directory.is_on_this_machine
        if entry is None or entry.of(self.key) is None or is_here(entry) < is_here(busy):
            return None
        return entry

    def _lease(self, entry: SourceEntry) -> tuple[SourceClient | None, str]:
        try:
            with ExitStack() as failed:
                client = self.connections.take(entry, self.head)
                failed.callback(client.close)
                busy = client.lease(self.directory.is_on_this_machine(entry))
                if not busy and self._is_worthwhile(client):
                    failed.pop_all()
                    return client, ""
                self._release(client)
                failed.pop_all()
                return None, busy
        except (*LOST, SourceGone) as error:
            self._avoid(entry, error)
            return None, ""

    def _is_worthwhile(self, client: SourceClient) -> bool:
        if self.chunks.is_missing(client.available_chunks):
            return True
        alive = self._living_sources() if client.grows else Holders()
        return client.who in alive and is_supplied(alive[client.who], self.key, self.me, alive)

    def _release(self, client: SourceClient) -> None:
        client.release()
        self.connections.keep(client)

    def _pull_from(self, client: SourceClient) -> None:
        """Pull what is missing here from a leased source, which is released at the end or closed by its error."""
        pulling, asked, failed = self.directory.mine.pulling, deque[Run](), ExitStack()
        failed.callback(client.close)
        try:
            self._place(client)  # what the version before has need not come
            self._pull_over(client, asked, pulling)
            self._release(client)
            failed.pop_all()
        except (*LOST, SourceGone) as error:
            self._avoid(client.entry, error)
        finally:
            self.transports.add(client.transport)
            failed.close()  # before others may fetch them: from then on nothing comes any more
            for run in asked:
                self.chunks.unclaim(run)

    def _pull_over(self, client: SourceClient, asked: deque[Run], pulling: str) -> None:
        """Ask for chunks and take them, until nothing more is to come from this source. `asked`: what is under way.
        `pulling`: what this process was elected to pull as it began."""
        heard = time.monotonic()

        def is_over() -> bool:  # another process of this machine may have been elected meanwhile
            return self.stopped.is_set() or self.directory.mine.pulling != pulling

        while self.chunks.is_missing():
            while len(asked) < WINDOW and not is_over() and (run := self._claim(client)) is not None:
                asked.append(run)
                client.ask(run)
            if asked:
                self._take(client, asked)
                heard = time.monotonic()
                continue
            if is_over() or not self.chunks.is_missing() or not client.grows:
                break  # the version before had the rest, or others have been asked for it
            known = client.count, client.moved
            client.list_chunks()
            heard = time.monotonic() if known != (client.count, client.moved) else heard
            if not self._is_worthwhile(client):
                break
            if time.monotonic() - heard > self.deadline:
                raise TimeoutError(f"it has had nothing new for {self.deadline:g} s")

    def _claim(self, client: SourceClient) -> Run | None:
        return self.chunks.claim(self._place(client), client.run)

    def _place(self, client: SourceClient) -> ChunkMasks:
        """Decide where the parts lie of which a source has something new. Return the chunks to fetch from it."""
        offered = {**client.available_chunks}
        for number in self.chunks.unclaimed(client.available_chunks):
            mapped = client.map(number)
            if mapped is not None and client.grows and self.chunks.is_ahead(number, mapped, offered[number]):
                del offered[number]  # soon it has these chunks too, and one copy is enough for this machine
            elif self.chunks.place_part(number, mapped, offered[number], self.allocate) and self.old is not None:
                self.chunks.copy_unchanged(number, self.old)
        return offered

    def _take(self, client: SourceClient, asked: deque[Run]) -> None:
        def bad(chunk: Chunk) -> None:
            self.corrupt[chunk] += 1
            self.corrupt_sources.add(client.who)
            client.mark_corrupt(chunk)
            record("weights_corrupt", who=self.me, version=self.head.version, source=client.who, part=chunk[0],
                   chunk=chunk[1], transport=client.transport)

        target, (part, first, count) = self.chunks.view(asked[0]), asked[0]
        arrival = IncomingChunks(self.chunks, asked[0], bad)
        client.take(part, self.chunks.parts[part].span(first, count), target, arrival.advance)
        asked.popleft()
        with self.chunks.changed:
            self.received[client.who] += len(target)
        self.progressed_at = time.monotonic() if arrival.good else self.progressed_at
        self.directory.update_later(held=tuple(
            replace(held, have=self.chunks.count) if held.key == self.key else held
            for held in self.directory.mine.held))

    def _avoid(self, entry: SourceEntry, error: Exception) -> None:
        self.failed_sources[entry.who], self.last_error = entry.heartbeat, f"{entry.who}: {error}"
        self.refusals[entry.who] += isinstance(error, Refused)
        if isinstance(error, ENDED):
            self.ended_sources[entry.who] = entry.heartbeat
        record("weights_source_lost", who=self.me, version=self.head.version, source=entry.who,
               why=str(error) or type(error).__name__, have=self.chunks.count)

    def _wait_for_sources(self, missing: list[int]) -> None:
        self.directory.update(source="")
        if self.stopped.is_set() or time.monotonic() > self.until:
            raise WeightsLate(f"version {self.head.version} has not come in time: {self.chunks.count} of "
                              f"{self.head.chunks} chunks are here. Its holders may serve others. The last that "
                              f"failed: {self.last_error}")
        if self.refusals and max(self.refusals.values()) >= _REFUSALS:
            raise WeightsError(f"{self.me} is refused again and again; give all processes of the run the same token. "
                               f"{self.last_error}")
        if not is_available(self._living_sources(missing), self.key, missing) and \
                time.monotonic() - self.progressed_at > self.deadline:
            raise WeightsLost(f"no living process has all of version {self.head.version}: {self.chunks.count} of "
                              f"{self.head.chunks} chunks are here. The last that failed: {self.last_error}")
        self.stopped.wait(_PAUSE)


@contextlib.contextmanager
def _thread(work: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Run `work` in a thread of its own; wait for its end."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


_POLL_INTERVAL = 0.1


class Puller:
    """Pulls weights, and relays them from the first chunk on. One thread calls its methods; `stop` any thread may.

    Args:
        who: the process's name; no two living processes of a run have the same.
        host: the address at which other rollouts reach this process.
        transport: `auto`, or the one that must be used: `NoTransport` is raised if it cannot be.
        deadline: seconds without a byte after which a source is left for the next.
        reads: what is pulled of a version; by default, all.
    """

    def __init__(self, store: Store, token: bytes, who: str, *, host: str = "127.0.0.1", transport: str = "auto",
                 deadline: float = 3.0, reads: Reads | None = None):
        self.reads = reads or Reads()
        self.who, self.deadline, self.buffers = who, deadline, SharedMemoryPool(memory_name("weights", token))
        available = transports(transport, self.buffers, host)
        self.connections = SourceConnections(lambda entry, head: SourceClient(entry, head, who, token, available,
                                                                              transport, deadline))
        self.source = SourceServer(token, who, host, available, deadline,
                                   lambda serving: self.directory.update(serving=serving))
        self.directory = Directory(store, SourceEntry(who, self.source.address, machine=machine_of(available)))
        self.stopped = threading.Event()
        self.whole: Weights | None = None
        self.filling: ChunkStore | None = None  # incomplete version, which can be continued
        self.source.start()
        self.directory.start()

    def newest(self) -> int:
        """Return the newest published version, -1 if none. It may fall when a trainer returns to a checkpoint."""
        return version_of(self.newest_key())

    def newest_key(self) -> str:
        """Return the key of the newest version; it differs where another attempt of the trainer reused the number."""
        return self.directory.newest()

    def wait_for_newer(self, key: str) -> None:
        """Wait a moment for a version that follows the one with this key."""
        self.directory.wait_for_next(key)

    def pull(self, seconds: float = 600.0) -> Weights:
        """Return a version, complete, verified and in this process's memory: the newest that living processes have all
        of, which may be the one that is here already. When the last holder dies meanwhile, the next best begins, or the
        next that is published. Chunks of an incomplete version stay until another one is begun.

        Raises WeightsLate: no version could be pulled within `seconds`.
        """
        until, last_error = time.monotonic() + seconds, ""
        while True:
            for head in self._choices():
                try:
                    return self._pull_version(head, until)
                except WeightsLost as error:
                    record("weights_lost", version=head.version, why=str(error))
                    last_error = f": {error}"
            if self.stopped.is_set() or time.monotonic() > until:
                raise WeightsLate(f"no version of the weights could be pulled in {seconds:g} s; the newest "
                                  f"published is {self.newest()}{last_error}. The trainer may be down: start it again")
            self.stopped.wait(_POLL_INTERVAL)

    def stop(self) -> None:
        """Let the pull that is under way raise `WeightsLate`, and any other after it."""
        self.stopped.set()

    def close(self) -> None:
        self.connections.close()
        self.directory.close()
        self.source.close()

    def _choices(self) -> list[PublishedVersion]:
        heads = self.directory.newest_versions()
        mine = self.whole.version if self.whole else -1
        alive = self.directory.holders(range(max((len(head.shares) for head in heads), default=0)))
        return [head for number, head in enumerate(heads) if (self.whole is not None and self.whole.key == head.key) or
                ((not number or head.version > mine) and
                 is_available(alive, head.key + self.reads.suffix, range(len(head.shares))))]

    def _pull_version(self, head: PublishedVersion, until: float) -> Weights:
        old = self.whole
        if old is not None and old.key == head.key:
            return old
        begun, chunks = timeline.now(), self._store(head)
        fetch = ChunkPuller(self, head, chunks, old and old.chunks, until)
        try:
            fetch.fetch_manifests(lambda number, packed: chunks.add(number, RankManifest.unpack(packed), packed))
            chunks.want(self.reads)
            self.source.offer(chunks)
            self.directory.update(held=(*((_held_chunks(old.chunks),) if old else ()), _held_chunks(chunks)))
            fetch.fetch_chunks()
        finally:  # another process of this machine may be elected
            self.directory.update_later(pulling="")
        self.whole, self.filling = (pulled := Weights(chunks)), None
        if old is not None:
            self.source.withdraw(old.key)
        self.directory.update(held=(_held_chunks(chunks),), source="")
        record("weights_pulled", version=head.version, who=self.who, bytes=chunks.moved,
               unchanged_bytes=chunks.unchanged, seconds=round((timeline.now() - begun) / 1e6, 3),
               sources=dict(fetch.received), transports=sorted(fetch.transports))
        timeline.current().add(timeline.WEIGHTS, "pull", begun, version=head.version, bytes=chunks.moved,
                               sources=dict(fetch.received))
        return pulled

    def _store(self, head: PublishedVersion) -> ChunkStore:
        if self.filling is None or self.filling.key != head.key:
            if self.filling is not None:
                self.source.withdraw(self.filling.key)
            self.filling = ChunkStore(head.version, head.key, head.key + self.reads.suffix)
        return self.filling


def _held_chunks(chunks: ChunkStore) -> HeldChunks:
    return HeldChunks(chunks.version, chunks.held_key, chunks.count, chunks.expected)
