"""One version, out of many sources: chunk by chunk, from the next source when one is lost.

What came stays: a source that dies costs the chunk that was under way. So does one that stands still, or a link that is
cut, after the deadline without a byte.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import numpy

from distflow.data.dock.errors import Refused
from distflow.observe.events import record
from distflow.weights.choice import can_be_had, is_fed, ordered
from distflow.weights.directory import Directory, Entry, Held
from distflow.weights.errors import WeightsError, WeightsLate, WeightsLost
from distflow.weights.holding import Arrival, Holding
from distflow.weights.manifest import Chunk, Head, Run
from distflow.weights.supplier import LOST, Connections, Gone, Supplier
from distflow.weights.transport import WINDOW

_FRESH = 0.05
"""Seconds for which what the board said is good enough for a first choice."""
_PAUSE, _TRIES, _REFUSALS = 0.1, 5, 3
"""Seconds until everybody is asked again when nobody is free; how often one chunk may come corrupt, and how often a
holder may take us for a stranger: it may just have ended, and another run have its port."""


class Gather:
    """Fills a holding.

    Args:
        old: another version, whole: chunks that it has too need not be moved.
        room: makes memory of this process's own, of so many bytes.
        deadline: seconds without a byte after which a source is left.
        until: when to give up (monotonic).
    """

    def __init__(self, directory: Directory, head: Head, holding: Holding, old: Holding | None,
                 room: Callable[[int], numpy.ndarray], connections: Connections, deadline: float, until: float):
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

    def _living(self, age: float = 0.0) -> dict[str, Entry]:
        return {who: entry for who, entry in self.directory.holders(age).items()
                if self.avoided.get(who) != entry.beat}

    def _candidates(self, lacking: list[int]) -> list[Entry]:
        found = ordered(self._living(_FRESH), self.head.key, self.me, self.holding.count, lacking)
        return sorted(found, key=lambda entry: entry.who in self.spoilers)

    def _lacking(self) -> list[int]:
        return [number for number, wanted in self.holding.wanted.items()
                if (wanted & ~self.holding.have[number]).any()]

    def _manifests_of(self, entry: Entry, wanted: list[int], add: Callable[[int, bytes], None]) -> None:
        try:
            with contextlib.ExitStack() as failed:
                supplier = self.connections.take(entry, self.head)
                failed.callback(supplier.close)
                for number in [entry.rank] if entry.rank >= 0 else wanted:
                    if (found := supplier.manifest(number)) is not None:
                        add(number, found)
                failed.pop_all()
            self.connections.keep(supplier)
        except (*LOST, Gone) as error:
            self._avoid(entry, error)

    def _leased(self) -> list[Supplier]:
        """One relay, or trainer ranks: the first that is free, and after it all others that are."""
        entries, tried, taken = self._candidates(self._lacking()), set[str](), list[Supplier]()
        for entry in entries:
            if taken and (entry.rank < 0 or taken[0].entry.rank < 0):
                continue
            following: Entry | None = entry
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

    def _successor(self, who: str) -> Entry | None:
        """The puller that a busy source serves: it will have the same chunks a moment later."""
        entry = self._living().get(who) if who else None
        return entry if entry is not None and entry.of(self.head.key) is not None else None

    def _lease(self, entry: Entry) -> tuple[Supplier | None, str]:
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
        except (*LOST, Gone) as error:
            self._avoid(entry, error)
            return None, ""

    def _is_worthwhile(self, supplier: Supplier) -> bool:
        """Whether it has something for us, or will have."""
        if supplier.offers(self.holding):
            return True
        living = self._living() if supplier.grows else {}
        return supplier.who in living and is_fed(living[supplier.who], self.head.key, self.me, living)

    def _let_go(self, supplier: Supplier) -> None:
        """The next one may have it."""
        supplier.release()
        self.connections.keep(supplier)

    def _drain(self, supplier: Supplier) -> None:
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
        except (*LOST, Gone) as error:
            self._avoid(supplier.entry, error)
        finally:
            self.ways.add(supplier.transport)
            failed.close()  # before others may fetch them: from then on nothing comes any more
            for run in asked:
                self.holding.give_up(run)

    def _claim(self, supplier: Supplier) -> Run | None:
        """Chunks that it is to bring, and memory for them."""
        for number in self.holding.free(supplier.have):
            self._settle(number, supplier.show(number))
        return self.holding.claim(supplier.have, supplier.run)

    def _settle(self, number: int, shown: numpy.ndarray | None) -> None:
        if self.holding.settle(number, shown, self.room) and self.old is not None:
            self.holding.take_over(number, self.old)

    def _take(self, supplier: Supplier, asked: deque[Run]) -> None:
        def bad(chunk: Chunk) -> None:
            self.corrupt[chunk] += 1
            self.spoilers.add(supplier.who)
            supplier.spoil(chunk)
            record("weights_corrupt", who=self.me, version=self.head.version, source=supplier.who, part=chunk[0],
                   chunk=chunk[1], transport=supplier.transport)

        place, (part, first, count) = self.holding.place(asked[0]), asked[0]
        arrival = Arrival(self.holding, asked[0], bad)
        supplier.take(part, self.holding.parts[part].span(first, count), place, arrival.moved)
        asked.popleft()
        self.came[supplier.who] += len(place)
        self.gained = time.monotonic() if arrival.good else self.gained
        self.directory.note(held=self._held())

    def _held(self) -> tuple[Held, ...]:
        """As it is now, in place of what the board says of it."""
        return tuple(replace(held, have=self.holding.count) if held.key == self.holding.key else held
                     for held in self.directory.mine.held)

    def _avoid(self, entry: Entry, error: Exception) -> None:
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
