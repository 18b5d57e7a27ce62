"""The rollout's side: pull the newest weights from whoever has them, at any time, and serve them to others as well.

One version, out of many sources: chunk by chunk, from the next source when one is lost.

What came stays: a source that dies costs the chunk that was under way. So does one that stands still, or a link that is
cut, after the deadline without a byte.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy
import torch.distributed as dist

from distflow.dock.errors import Refused
from distflow.telemetry.events import record
from distflow.weights.buffers import HostBuffers
from distflow.weights.chunk_store import ChunkStore, IncomingChunks, Weights
from distflow.weights.directory import Directory, HeldChunks, SourceEntry
from distflow.weights.errors import WeightsError, WeightsLate, WeightsLost
from distflow.weights.manifest import Chunk, PublishedVersion, RankManifest, Run, version_of
from distflow.weights.publisher import SourceServer
from distflow.weights.shard_slice import ShardSlice
from distflow.weights.sources import LOST, SourceClient, SourceConnections, SourceGone, can_be_had, is_fed, ordered
from distflow.weights.transport import WINDOW, transports

_FRESH = 0.05
"""Seconds for which what the board said is good enough for a first choice."""
_PAUSE, _TRIES, _REFUSALS = 0.1, 5, 3
"""Seconds until everybody is asked again when nobody is free; how often one chunk may come corrupt, and how often a
holder may take us for a stranger: it may just have ended, and another run have its port."""


class ChunkGatherer:
    """Fills a holding.

    Args:
        old: another version, whole: chunks that it has too need not be moved.
        room: makes memory of this process's own, of so many bytes.
        deadline: seconds without a byte after which a source is left.
        until: when to give up (monotonic).
    """

    def __init__(self, directory: Directory, head: PublishedVersion, holding: ChunkStore, old: ChunkStore | None,
                 room: Callable[[int], numpy.ndarray], connections: SourceConnections, deadline: float, until: float):
        self.directory, self.head, self.holding, self.connections = directory, head, holding, connections
        self.old, self.room = old, room
        self.me, self.deadline, self.until = directory.mine.who, deadline, until
        self.avoided: dict[str, int] = {}
        """By name, the sign of life of those that failed: they are not asked before the next one."""
        self.corrupt: Counter[Chunk] = Counter()
        self.spoilers: set[str] = set()
        """Who sent them: to be asked last."""
        self.refusals: Counter[str] = Counter()
        self.came: Counter[str] = Counter()
        """Bytes by source."""
        self.ways: set[str] = set()
        self.gained = time.monotonic()
        """When the last chunk came."""
        self.trouble = "none failed"

    def manifests(self, add: Callable[[int, bytes], None]) -> None:
        """Have `add` called with each part's manifest that is not here.

        Raises:
            WeightsLost: nobody who lives has them.
        """
        while missing := [number for number in range(len(self.head.shares)) if number not in self.holding.parts]:
            for entry in self._candidates(missing):
                if wanted := [number for number in missing if number not in self.holding.parts]:
                    self._manifests_of(entry, wanted, add)
            if lacking := [number for number in missing if number not in self.holding.parts]:
                self._breathe(lacking)

    def chunks(self) -> None:
        """Until all that is wanted is here.

        Raises:
            WeightsLost: nobody who lives has what is missing.
            WeightsLate: the time is over.
            WeightsError: a chunk came corrupt again and again, or all take us for a stranger.
        """
        while self.holding.lacks():
            suppliers = self._leased()
            if not suppliers:
                self._breathe(self._lacking())
                continue
            self.directory.tell(source=suppliers[0].who)
            threads = [threading.Thread(target=self._drain, args=(supplier,), daemon=True)
                       for supplier in suppliers[1:]]
            for thread in threads:
                thread.start()
            self._drain(suppliers[0])
            for thread in threads:
                thread.join()
            if self.corrupt and max(self.corrupt.values()) >= _TRIES:
                raise WeightsError(f"chunk {self.corrupt.most_common(1)[0][0]} of version {self.head.version} came "
                                   f"corrupt {_TRIES} times, from {', '.join(self.came)}: see weights_corrupt in "
                                   "events.jsonl. Memory or network of one of these machines may be defective")

    def _living(self, age: float = 0.0) -> dict[str, SourceEntry]:
        return {who: entry for who, entry in self.directory.holders(age).items()
                if self.avoided.get(who) != entry.beat}

    def _candidates(self, lacking: list[int]) -> list[SourceEntry]:
        found = ordered(self._living(_FRESH), self.head.key, self.me, self.holding.count, lacking)
        return sorted(found, key=lambda entry: entry.who in self.spoilers)

    def _lacking(self) -> list[int]:
        return [number for number, wanted in self.holding.wanted.items()
                if (wanted & ~self.holding.have[number]).any()]

    def _manifests_of(self, entry: SourceEntry, wanted: list[int], add: Callable[[int, bytes], None]) -> None:
        try:
            with contextlib.ExitStack() as failed:
                supplier = self.connections.take(entry, self.head)
                failed.callback(supplier.close)
                for number in [entry.rank] if entry.rank >= 0 else wanted:
                    if (found := supplier.manifest(number)) is not None:
                        add(number, found)
                failed.pop_all()
            self.connections.keep(supplier)
        except (*LOST, SourceGone) as error:
            self._avoid(entry, error)

    def _leased(self) -> list[SourceClient]:
        """One relay, or trainer ranks: the first that is free, and after it all others that are."""
        entries, tried, taken = self._candidates(self._lacking()), set[str](), list[SourceClient]()
        for entry in entries:
            if taken and (entry.rank < 0 or taken[0].entry.rank < 0):
                continue
            following: SourceEntry | None = entry
            while following is not None and following.who not in tried:
                tried.add(following.who)
                supplier, busy = self._lease(following)
                if supplier is not None:
                    taken.append(supplier)
                    break
                following = self._successor(busy) if not taken else None
            if taken and taken[0].entry.rank < 0:
                break
        return taken

    def _successor(self, who: str) -> SourceEntry | None:
        """The puller that a busy source serves: it will have the same chunks a moment later."""
        entry = self._living().get(who) if who else None
        return entry if entry is not None and entry.of(self.head.key) is not None else None

    def _lease(self, entry: SourceEntry) -> tuple[SourceClient | None, str]:
        """A connection with the lease, if it is worth having; or the name of who has it."""
        try:
            with contextlib.ExitStack() as failed:
                supplier = self.connections.take(entry, self.head)
                failed.callback(supplier.close)
                busy = supplier.lease()
                if not busy and self._is_worthwhile(supplier):
                    failed.pop_all()
                    return supplier, ""
                self._let_go(supplier)
                failed.pop_all()
                return None, busy
        except (*LOST, SourceGone) as error:
            self._avoid(entry, error)
            return None, ""

    def _is_worthwhile(self, supplier: SourceClient) -> bool:
        """Whether it has something for us, or will have."""
        if supplier.offers(self.holding):
            return True
        living = self._living() if supplier.grows else {}
        return supplier.who in living and is_fed(living[supplier.who], self.head.key, self.me, living)

    def _let_go(self, supplier: SourceClient) -> None:
        """The next one may have it."""
        supplier.release()
        self.connections.keep(supplier)

    def _drain(self, supplier: SourceClient) -> None:
        """Take from one source until it has nothing more for us, or is lost."""
        asked: deque[Run] = deque()
        heard = time.monotonic()
        failed = contextlib.ExitStack()
        failed.callback(supplier.close)
        try:
            while self.holding.lacks():
                while len(asked) < WINDOW and (run := self._claim(supplier)) is not None:
                    asked.append(run)
                    supplier.ask(run)
                if asked:
                    self._take(supplier, asked)
                    heard = time.monotonic()
                    continue
                if not self.holding.lacks():
                    break  # the version before had the rest
                known = supplier.count, supplier.moved
                supplier.look()
                heard = time.monotonic() if known != (supplier.count, supplier.moved) else heard
                if not self._is_worthwhile(supplier):
                    break
                if time.monotonic() - heard > self.deadline:
                    raise TimeoutError(f"it has had nothing new for {self.deadline:g} s")
            self._let_go(supplier)
            failed.pop_all()
        except (*LOST, SourceGone) as error:
            self._avoid(supplier.entry, error)
        finally:
            self.ways.add(supplier.transport)
            failed.close()  # before others may fetch them: from then on nothing comes any more
            for run in asked:
                self.holding.give_up(run)

    def _claim(self, supplier: SourceClient) -> Run | None:
        """Chunks that it is to bring, and memory for them."""
        for number in self.holding.free(supplier.have):
            self._settle(number, supplier.show(number))
        return self.holding.claim(supplier.have, supplier.run)

    def _settle(self, number: int, shown: numpy.ndarray | None) -> None:
        if self.holding.settle(number, shown, self.room) and self.old is not None:
            self.holding.take_over(number, self.old)

    def _take(self, supplier: SourceClient, asked: deque[Run]) -> None:
        def bad(chunk: Chunk) -> None:
            self.corrupt[chunk] += 1
            self.spoilers.add(supplier.who)
            supplier.spoil(chunk)
            record("weights_corrupt", who=self.me, version=self.head.version, source=supplier.who, part=chunk[0],
                   chunk=chunk[1], transport=supplier.transport)

        place, (part, first, count) = self.holding.place(asked[0]), asked[0]
        arrival = IncomingChunks(self.holding, asked[0], bad)
        supplier.take(part, self.holding.parts[part].span(first, count), place, arrival.moved)
        asked.popleft()
        self.came[supplier.who] += len(place)
        self.gained = time.monotonic() if arrival.good else self.gained
        self.directory.note(held=self._held())

    def _held(self) -> tuple[HeldChunks, ...]:
        """As it is now, in place of what the board says of it."""
        return tuple(replace(held, have=self.holding.count) if held.key == self.holding.key else held
                     for held in self.directory.mine.held)

    def _avoid(self, entry: SourceEntry, error: Exception) -> None:
        self.avoided[entry.who], self.trouble = entry.beat, f"{entry.who}: {error}"
        self.refusals[entry.who] += isinstance(error, Refused)
        record("weights_source_lost", who=self.me, version=self.head.version, source=entry.who,
               why=str(error) or type(error).__name__, have=self.holding.count)

    def _breathe(self, lacking: list[int]) -> None:
        """Nobody can be asked just now: see whether anybody ever can."""
        self.directory.tell(source="")
        if time.monotonic() > self.until:
            raise WeightsLate(f"version {self.head.version} has not come in time: {self.holding.count} of "
                              f"{self.head.chunks} chunks are here. Its holders may serve others. The last that "
                              f"failed: {self.trouble}")
        if self.refusals and max(self.refusals.values()) >= _REFUSALS:
            raise WeightsError(f"{self.me} is refused again and again; give all processes of the run the same token. "
                               f"{self.trouble}")
        if not can_be_had(self._living(), self.head.key, lacking) and \
                time.monotonic() - self.gained > self.deadline:
            raise WeightsLost(f"nobody who lives has all of version {self.head.version}: {self.holding.count} of "
                              f"{self.head.chunks} chunks are here. The last that failed: {self.trouble}")
        time.sleep(_PAUSE)


_LOOK = 0.1


class Puller:
    """A process that pulls weights, and is a relay from its first chunk on. One thread calls its methods.

    Args:
        store: the board.
        token: the run's.
        who: the process's name; no two living processes of a run have the same.
        host: the address at which other rollouts reach this process.
        transport: `auto`, or the one that must be used.
        deadline: seconds without a byte after which a source is left for the next.

    Raises:
        NoTransport: the transport cannot be used here.
    """

    def __init__(self, store: dist.Store, token: bytes, who: str, *, host: str = "127.0.0.1", transport: str = "auto",
                 deadline: float = 3.0):
        self.who, self.deadline, self.buffers = who, deadline, HostBuffers()
        ways = transports(transport, self.buffers, token, host)
        self.connections = SourceConnections(lambda entry, head: SourceClient(entry, head, who, token, ways,
                                                                              transport, deadline))
        self.source = SourceServer(token, who, host, ways, deadline,
                                   lambda serving: self.directory.tell(serving=serving))
        self.directory = Directory(store, SourceEntry(who, self.source.address))
        self.whole: Weights | None = None
        self.filling: tuple[ChunkStore, Mapping[str, ShardSlice]] | None = None
        """What was begun and can be gone on with."""
        self.source.start()
        self.directory.start()

    def newest(self) -> int:
        """The version on the board, -1 if none. It may fall when a trainer goes back to a checkpoint."""
        return version_of(self.newest_key())

    def newest_key(self) -> str:
        """The same as a key, which differs where another start of the trainer has used the number again."""
        return self.directory.newest()

    def wait(self, version: int, seconds: float) -> int:
        """Until the board has at least this version; returns which.

        Raises:
            WeightsLate: it did not come within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while (newest := self.newest()) < version:
            if time.monotonic() > deadline:
                raise WeightsLate(f"version {version} was not published within {seconds:g} s; the newest is {newest}. "
                                  "The trainer may be down, or slower than this limit")
            time.sleep(_LOOK)
        return newest

    def pull(self, version: int | None = None, *, least: int = -1, wanted: Mapping[str, ShardSlice] | None = None,
             seconds: float = 600.0) -> Weights:
        """A version, whole, verified and in this process's memory.

        Without `version`: the newest that living processes have all of, which may be the one that is here already. When
        such a pull fails because the last holder of it died, the next best begins, or the next that is published. What
        was pulled of a version stays until another one is begun.

        Args:
            least: wait for a version that is no older than this.
            wanted: parts of tensors, by name, for a rank that needs no more; all others are pulled whole. Only chunks
                with something of them move.

        Raises:
            WeightsLost: `version` is not on the board, or no living process has all of it.
            WeightsLate: no version could be pulled within `seconds`.
        """
        until, trouble = time.monotonic() + seconds, ""
        while True:
            for head in self._choices(version, least):
                try:
                    return self._one(head, dict(wanted or {}), until)
                except WeightsLost as error:
                    record("weights_lost", version=head.version, why=str(error))
                    trouble = f": {error}"
                    if version is not None:
                        raise
            if time.monotonic() > until:
                raise WeightsLate(f"no version of the weights could be pulled in {seconds:g} s; the newest on the "
                                  f"board is {self.newest()}{trouble}. The trainer may be down: start it again")
            time.sleep(_LOOK)

    @property
    def sent(self) -> int:
        """Bytes of chunks that others got from here."""
        return self.source.sent

    def close(self) -> None:
        """Stop serving. What was pulled stays where it is."""
        self.connections.close()
        self.directory.close()
        self.source.close()

    def _choices(self, version: int | None, least: int) -> list[PublishedVersion]:
        """What may be pulled, the newest first."""
        heads = [head for head in self.directory.heads() if head.version >= least]
        if version is not None:
            found = [head for head in heads if head.version == version][:1]
            if not found:
                there = ", ".join(str(head.version) for head in heads) or "none"
                raise WeightsLost(f"version {version} is not on the board, which has {there}")
            return found
        mine = self.whole.version if self.whole is not None else -1
        living = self.directory.holders()
        return [head for number, head in enumerate(heads) if self._is_here(head) or
                ((not number or head.version > mine) and
                 can_be_had(living, head.key, range(len(head.shares))))]

    def _is_here(self, head: PublishedVersion) -> bool:
        return self.whole is not None and self.whole.holding.key == head.key

    def _one(self, head: PublishedVersion, wanted: dict[str, ShardSlice], until: float) -> Weights:
        if self._is_here(head) and self.whole.wanted == wanted:
            return self.whole
        begun, holding = time.monotonic(), self._holding(head, wanted)
        gather = ChunkGatherer(self.directory, head, holding, self.whole and self.whole.holding, self.buffers.take,
                               self.connections, self.deadline, until)
        gather.manifests(lambda number, packed: holding.add(number, RankManifest.unpack(packed), packed))
        holding.want(wanted)
        self.source.offer(holding)
        self._tell(holding)
        gather.chunks()
        old, self.whole, self.filling = self.whole, Weights(holding, wanted), None
        if old is not None and old.holding.key != holding.key:
            self.source.withdraw(old.holding.key)
        self.directory.tell(held=(_held(holding),), source="")
        record("weights_pulled", version=head.version, who=self.who, bytes=holding.moved,
               unchanged_bytes=holding.unchanged, seconds=round(time.monotonic() - begun, 3),
               sources=dict(gather.came), transports=sorted(gather.ways))
        return self.whole

    def _holding(self, head: PublishedVersion, wanted: dict[str, ShardSlice]) -> ChunkStore:
        """That of this version which was begun, or a new one."""
        if self.filling is not None and (self.filling[0].key, self.filling[1]) == (head.key, wanted):
            return self.filling[0]
        if self.filling is not None:
            self.source.withdraw(self.filling[0].key)
        self.filling = ChunkStore(head.version, head.key), wanted
        return self.filling[0]

    def _tell(self, holding: ChunkStore) -> None:
        whole = (_held(self.whole.holding),) if self.whole is not None else ()
        self.directory.tell(held=(*whole, _held(holding)))


def _held(holding: ChunkStore) -> HeldChunks:
    return HeldChunks(holding.version, holding.key, holding.count, holding.awaited, holding.entire)
