"""Directory of weights in the store: the newest versions, and which process has how much of which one.

Each holder keeps an entry of its own, with a heartbeat counter. A reader whose clock sees a counter stand still for
too long takes the holder for dead and removes its entry; a holder that was only slow writes it again. Nothing here
grows with the model: manifests are served by the holders.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import astuple, dataclass, replace
from typing import Any

from distflow.store.interface import Store, StoreUnavailable
from distflow.telemetry.heartbeat import Silence
from distflow.weights.manifest import PublishedVersion

HEARTBEAT_SECONDS, DEAD_SECONDS = 0.5, 3.0
"""Seconds between two heartbeats, and without one after which a holder counts as dead."""
_PUBLISHED = "published"
_KEPT = 3
"""Versions that the store remembers: when no process has all of the newest, the one before may be available."""
Address = tuple[str, int]


@dataclass(frozen=True)
class HeldChunks:
    """Chunks of one version that a holder has, and expects. complete: the expected ones are all that was published."""

    version: int
    key: str
    have: int
    expected: int
    complete: bool = False


@dataclass(frozen=True)
class SourceEntry:
    """Entry of a holder. rank: that of a trainer rank, which has only its own part; -1 for a rollout. source: from
    whom it is pulling, and serving: who is pulling from it; empty if there is none."""

    who: str
    address: Address
    rank: int = -1
    held: tuple[HeldChunks, ...] = ()
    source: str = ""
    serving: str = ""
    heartbeat: int = 0

    def of(self, key: str) -> HeldChunks | None:
        return next((held for held in self.held if held.key == key), None)

    def pack(self) -> str:
        held = [list(astuple(each)) for each in self.held]
        return json.dumps([self.address, self.rank, held, self.source, self.serving, self.heartbeat])

    @classmethod
    def unpack(cls, who: str, text: str) -> SourceEntry:
        (host, port), rank, held, source, serving, heartbeat = json.loads(text)
        return cls(who, (host, port), rank, tuple(HeldChunks(*each) for each in held), source, serving, heartbeat)


class Directory:
    """A process's view of the directory, and its own entry there."""

    def __init__(self, store: Store, entry: SourceEntry, dead: float = DEAD_SECONDS):
        self.store, self.mine, self.dead = store.below("weights"), entry, dead
        self.silences: dict[str, Silence] = {}
        self.last: dict[str, SourceEntry] = {}
        self.read_at = 0.0
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
                self.mine = replace(changed, heartbeat=self.mine.heartbeat + 1)
                self.store.put(f"holder/{self.mine.who}", self.mine.pack())

    def update_later(self, **changes: Any) -> None:
        """Change this process's entry with the next heartbeat."""
        with self.lock:
            self.mine = replace(self.mine, **changes)

    def newest(self) -> str:
        """Return the key of the newest version; "" if there is none."""
        return next(iter(self._published()[2]), "")

    def heads(self) -> list[PublishedVersion]:
        """Return the versions that were published last, the newest first."""
        keys = self._published()[2]
        return [PublishedVersion.unpack(text) for text in self.store.get_all([f"head/{key}" for key in keys]) if text]

    @property
    def attempt(self) -> str:
        """The trainer's present attempt, whose ranks alone can publish; "" before the first."""
        return self._published()[1]

    def begin(self, attempt: str) -> None:
        """Make `attempt` the present one. What an earlier one has published stays."""
        while True:
            before, _, keys = self._published()
            if self._publish(before, attempt, keys):
                return

    def reveal(self, head: PublishedVersion) -> bool:
        """Make `head` the newest version, in one write; False if its attempt is not the present one."""
        self.store.put(f"head/{head.key}", head.pack())
        while True:
            before, attempt, keys = self._published()
            if attempt != head.attempt:
                self.store.delete(f"head/{head.key}")
                return False
            if self._publish(before, attempt, [head.key, *keys][:_KEPT]):
                for forgotten in keys[_KEPT - 1 :]:
                    self.store.delete(f"head/{forgotten}")
                return True

    def _published(self) -> tuple[str | None, str, list[str]]:
        """Return the value as it is, and what it says: the present attempt, and the newest versions' keys."""
        text = self.store.get(_PUBLISHED)
        attempt, keys = json.loads(text) if text else ("", [])
        return text, attempt, keys

    def _publish(self, before: str | None, attempt: str, keys: list[str]) -> bool:
        text = json.dumps([attempt, keys])
        return self.store.put_if(_PUBLISHED, text, before) == text

    def holders(self, age: float = 0.0) -> dict[str, SourceEntry]:
        """Return the entries of the other living holders, by name, at most `age` seconds old."""
        if time.monotonic() - self.read_at > age:
            self.last, self.read_at = self._holders(), time.monotonic()
        return self.last

    def _holders(self) -> dict[str, SourceEntry]:
        found: dict[str, SourceEntry] = {}
        for key, text in self.store.list("holder/").items():
            if (who := key.removeprefix("holder/")) == self.mine.who:
                continue
            entry = SourceEntry.unpack(who, text)
            if self.silences.setdefault(who, Silence()).of(entry.heartbeat) > self.dead:
                self.forget(who)
                continue
            found[who] = entry
        return found

    def forget(self, who: str) -> None:
        self.silences.pop(who, None)
        self.store.delete(f"holder/{who}")

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        with contextlib.suppress(StoreUnavailable), self.lock:
            self.forget(self.mine.who)

    def _send_heartbeats(self) -> None:
        while not self.over.wait(HEARTBEAT_SECONDS):
            try:
                with self.lock:
                    self.mine = replace(self.mine, heartbeat=self.mine.heartbeat + 1)
                    self.store.put(f"holder/{self.mine.who}", self.mine.pack())
            except StoreUnavailable as error:
                if error.gone:  # and with it the run
                    return
