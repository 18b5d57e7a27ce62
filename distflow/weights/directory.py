"""Directory of weights in the store: the newest versions, and which process has how much of which one.

Each holder keeps an entry of its own, with a heartbeat counter. A reader whose clock sees a counter stand still for
too long takes the holder for dead and removes its entry; a holder that was only slow writes it again. Nothing here
grows with the model: manifests are served by the holders.

    published              JSON: the trainer's present attempt, and the keys of the newest versions
    head/KEY, next/KEY     what was published; that a newer version was
    relays, relay/NAME     how many relays there ever were, and the number of each
    holder/N, trainer/R    entry of the relay with that number, and of trainer rank R
    machine/NAME           JSON: the numbers of a machine's relays, and which of them pulls a version for all of them

A reader looks at the relays of its own machine, at some others, drawn again each time, and at the trainer ranks with
the first parts that it misses: what it asks of the store does not grow with the number of ranks.

Of the relays of a machine one is elected for each version; only that one pulls it from other machines. Its entry says
so (`pulling`), and its heartbeat keeps the lease: when the entry says otherwise, or no heartbeat comes, another relay
may take it. A relay that finds that its own heartbeat was late has lost the lease. A relay that is alone takes none.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from distflow.store.interface import Store, StoreUnavailable, poll_interval
from distflow.telemetry.events import record
from distflow.telemetry.heartbeat import Silence
from distflow.weights.manifest import PublishedVersion, version_of

HEARTBEAT_SECONDS, DEAD_SECONDS = 0.5, 3.0
"""Seconds between two heartbeats, and without one after which a holder counts as dead."""
SEEN = 64
"""Relays, and trainer ranks, that a reader looks at."""
_PUBLISHED, _RELAYS = "published", "relays"
_KEPT = 3
"""Versions that the store remembers: when no process has all of the newest, the one before may be available."""
Address = tuple[str, int]


@dataclass(frozen=True)
class HeldChunks:
    """Numbers of chunks of one version that a holder has, and expects: a relay all, a trainer rank its own part. One
    that pulls only what it reads has a key that says so (`Reads.suffix`): to others it is no source."""

    version: int
    key: str
    have: int
    expected: int


@dataclass(frozen=True)
class SourceEntry:
    """Entry of a holder. rank: that of a trainer rank, which has only its own part; -1 for a rollout. source: from
    whom it is pulling, and serving: who is pulling from it; empty if there is none. machine: whose processes can use
    this one's memory, empty if none can. pulling: the version that it has been elected to pull for its machine."""

    who: str
    address: Address
    rank: int = -1
    held: tuple[HeldChunks, ...] = ()
    source: str = ""
    serving: str = ""
    heartbeat: int = 0
    machine: str = ""
    pulling: str = ""

    def of(self, key: str) -> HeldChunks | None:
        return next((held for held in self.held if held.key in (key, key.partition("/")[0])), None)

    def pack(self) -> str:
        held = [list(astuple(each)) for each in self.held]
        return json.dumps([self.who, self.address, self.rank, held, self.source, self.serving, self.heartbeat,
                           self.machine, self.pulling])

    @classmethod
    def unpack(cls, text: str) -> SourceEntry:
        who, (host, port), rank, held, *rest = json.loads(text)
        return cls(who, (host, port), rank, tuple(HeldChunks(*each) for each in held), *rest)


@dataclass(frozen=True)
class MachineRelays:
    """Relays of one machine, by number. elected: by version, the relay that pulls it for all, and its term: so each
    election changes the text, also one that elects the same relay again."""

    numbers: tuple[int, ...] = ()
    elected: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def pack(self) -> str:
        return json.dumps([self.numbers, self.elected])

    @classmethod
    def unpack(cls, text: str | None) -> MachineRelays:
        numbers, elected = json.loads(text) if text else ((), {})
        return cls(tuple(numbers), {key: (who, term) for key, (who, term) in elected.items()})

    def with_relay(self, number: int, who: str) -> MachineRelays:
        """Add a relay; what an earlier process of its name was elected for, it is not."""
        kept = {key: pair for key, pair in self.elected.items() if pair[0] != who}
        return MachineRelays((*self.numbers, *{number} - {*self.numbers}), kept)

    def with_elected(self, key: str, who: str, known: Collection[str]) -> MachineRelays:
        """Elect a relay for a version, and forget versions that are older than all that are `known`: others may know
        newer ones."""
        oldest = min(map(version_of, {*known, key}))
        kept = {other: pair for other, pair in self.elected.items() if version_of(other) >= oldest}
        return MachineRelays(self.numbers, kept | {key: (who, self.elected.get(key, ("", 0))[1] + 1)})


class Holders(dict[str, SourceEntry]):
    """Entries by name. whole: of all holders that live, and not of some."""

    whole = True

    def only(self, keeps: Callable[[SourceEntry], bool]) -> Holders:
        found = Holders({who: entry for who, entry in self.items() if keeps(entry)})
        found.whole = self.whole
        return found


class Directory:
    """A process's view of the directory, and its own entry there."""

    def __init__(self, store: Store, entry: SourceEntry, dead: float = DEAD_SECONDS, ranks: int = 1):
        """`ranks`: of the trainer, as far as this process knows."""
        self.store, self.mine, self.dead = store.below("weights"), entry, dead
        self.own_key, self.relays, self.ranks = "", 0, ranks
        self.machine_key, self.machine_text, self.put_at = f"machine/{entry.machine}", "", 0.0
        self.silences: dict[str, Silence] = {}
        self.last, self.last_parts, self.read_at = Holders(), (), 0.0
        self.known: dict[str, PublishedVersion] = {}
        self.lock, self.over = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._send_heartbeats, name="weights heartbeat", daemon=True)

    def start(self) -> None:
        self.update()
        self.thread.start()

    def update(self, **changes: Any) -> None:
        with self.lock:
            changed = replace(self.mine, **changes)
            if self.over.is_set():  # the last pullers are being hung up on
                return
            if changed != self.mine or not self.mine.heartbeat:
                self.mine = changed
                self._put()

    def _put(self) -> None:
        self.own_key = self.own_key or self._find_key()
        now = time.monotonic()  # others count from when the store has it, which is later
        late = now - self.put_at > self._silence
        self.mine = replace(self.mine, heartbeat=self.mine.heartbeat + 1, pulling="" if late else self.mine.pulling)
        self.store.put(self.own_key, self.mine.pack())
        self.put_at = now

    def _find_key(self) -> str:
        """Return the key of this process's entry: a relay that starts again has the same one."""
        if self.mine.rank >= 0:
            return f"trainer/{self.mine.rank}"
        name = f"relay/{self.mine.who}"
        number = self.store.get(name) or self.store.put_if(name, str(self.store.add(_RELAYS)), None)
        self.relays = max(self.relays, int(number))
        if self.mine.machine:
            self._join(int(number))
        return f"holder/{number}"

    def _join(self, number: int) -> None:
        before = self.store.get(self.machine_key)
        while True:
            joined = MachineRelays.unpack(before).with_relay(number, self.mine.who).pack()
            self.machine_text = joined if joined == before else self.store.put_if(self.machine_key, joined, before)
            if self.machine_text == joined:
                return
            before = self.machine_text

    def elect(self, key: str, alive: Holders) -> bool:
        """Return whether this process is the one that pulls a version for its machine, or the only relay there; elect
        it unless one of the `alive` holders is, as of the last call of `holders`."""
        before, relays = self.machine_text, MachineRelays.unpack(self.machine_text)
        if len(relays.numbers) < 2 or self.mine.pulling == key:
            return True
        elected = alive.get(relays.elected.get(key, ("", 0))[0])
        if elected is not None and elected.pulling == key:
            return False
        self.update(pulling=key)
        relays = relays.with_elected(key, self.mine.who, self.known)
        after, (_, term) = relays.pack(), relays.elected[key]
        if self.store.put_if(self.machine_key, after, before) == after:
            self.machine_text = after
            if term > 1:
                record("weights_elected", who=self.mine.who, version=version_of(key), term=term)
        else:  # `alive` says nothing of whoever has changed the text: it stays as it was read with them
            self.update_later(pulling="")
        return self.mine.pulling == key

    def is_on_this_machine(self, entry: SourceEntry) -> bool:
        """Return whether a holder is on this process's machine, so that its memory can be used."""
        return entry.machine == self.mine.machine != ""

    def update_later(self, **changes: Any) -> None:
        """Change this process's entry with the next heartbeat."""
        with self.lock:
            self.mine = replace(self.mine, **changes)

    def newest(self) -> str:
        """Return the key of the newest version; "" if there is none."""
        return next(iter(self._published()[2]), "")

    def newest_of(self, attempt: str) -> int:
        """Return the newest version that an attempt of the trainer has published; -1 if there is none."""
        return next((version_of(key) for key in self._published()[2] if key.partition(".")[2] == attempt), -1)

    def newest_versions(self) -> list[PublishedVersion]:
        """Return the versions that were published last, the newest first."""
        keys = self._published()[2]
        if unknown := [key for key in keys if key not in self.known]:
            texts = self.store.get_all([f"head/{key}" for key in unknown])
            self.known |= {key: PublishedVersion.unpack(text) for key, text in zip(unknown, texts) if text}
        self.known = {key: self.known[key] for key in keys if key in self.known}
        return list(self.known.values())

    def wait_for_next(self, key: str) -> None:
        """Wait until a version newer than `key` is published, or a while."""
        self.store.wait([f"next/{key}"], self._interval)

    @property
    def attempt(self) -> str:
        """The trainer's present attempt, whose ranks alone can publish; "" before the first."""
        return self._published()[1]

    def begin_attempt(self, attempt: str) -> None:
        """Make `attempt` the present one. What an earlier one has published stays."""
        while True:
            before, _, keys = self._published()
            if self._publish(before, attempt, keys):
                return

    def announce_version(self, head: PublishedVersion) -> bool:
        """Make `head` the newest version, in one write; False if its attempt is not the present one."""
        self.store.put(f"head/{head.key}", head.pack())
        while True:
            before, attempt, keys = self._published()
            if attempt != head.attempt:
                self.store.delete(f"head/{head.key}")
                return False
            if self._publish(before, attempt, [head.key, *keys][:_KEPT]):
                self.store.put(f"next/{next(iter(keys), '')}", "")
                self.store.delete(*(f"{kind}/{key}" for key in keys[_KEPT - 1 :] for kind in ("head", "next")))
                return True

    def _published(self) -> tuple[str | None, str, list[str]]:
        """Return the value as it is, and what it says: the present attempt, and the newest versions' keys."""
        text = self.store.get(_PUBLISHED)
        attempt, keys = json.loads(text) if text else ("", [])
        return text, attempt, keys

    def _publish(self, before: str | None, attempt: str, keys: list[str]) -> bool:
        text = json.dumps([attempt, keys])
        return self.store.put_if(_PUBLISHED, text, before) == text

    def holders(self, parts: Sequence[int] = (), age: float = 0.0) -> Holders:
        """Return the entries of other living holders, by name, at most `age` seconds old: of relays, and of the trainer
        ranks that have `parts`; of many relays or parts only some."""
        parts = tuple(parts)
        if self.last_parts != parts or time.monotonic() - self.read_at > age:
            self.last, self.last_parts, self.read_at = self._holders(parts), parts, time.monotonic()
        return self.last

    def _holders(self, parts: Sequence[int]) -> Holders:
        self.relays, self.ranks, found = self.store.add(_RELAYS, 0), max(self.ranks, len(parts)), Holders()
        numbers = range(1, self.relays + 1)
        found.whole = len(numbers) <= SEEN and len(parts) <= SEEN
        seen = {*self._here(), *random.sample(numbers, min(SEEN, len(numbers)))}
        keys = [self.machine_key] if self.mine.machine else []
        keys += [f"holder/{number}" for number in seen] + [f"trainer/{rank}" for rank in parts[:SEEN]]
        found.update(self._living(keys))
        found.update(self._living([f"holder/{number}" for number in self._here() if number not in seen]))  # have joined
        return found

    def _here(self) -> tuple[int, ...]:
        return MachineRelays.unpack(self.machine_text).numbers

    def _living(self, keys: Sequence[str]) -> Holders:
        """Read these entries, and the machine's relays where their key is among them."""
        found = Holders()
        for key, text in zip(keys, self.store.get_all(keys) if keys else ()):
            if key == self.machine_key:
                self.machine_text = text
                continue
            if not text or key == self.own_key:
                continue
            entry = SourceEntry.unpack(text)
            if self.silences.setdefault(key, Silence()).of(entry.heartbeat) > self._silence:
                self._forget(key)
            else:
                found[entry.who] = entry
        return found

    @property
    def _interval(self) -> float:
        return poll_interval(HEARTBEAT_SECONDS, max(self.relays, self.ranks))

    @property
    def _silence(self) -> float:
        """Seconds without a heartbeat after which a holder counts as dead."""
        return self.dead / HEARTBEAT_SECONDS * self._interval

    def _forget(self, key: str) -> None:
        self.silences.pop(key, None)
        self.store.delete(key)

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        with contextlib.suppress(StoreUnavailable), self.lock:
            if self.own_key:
                self._forget(self.own_key)

    def _send_heartbeats(self) -> None:
        while not self.over.wait(self._interval):
            try:
                with self.lock:
                    self._put()
            except StoreUnavailable as error:
                if error.gone:  # and with it the run
                    return
