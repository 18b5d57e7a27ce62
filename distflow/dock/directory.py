"""Addresses of a dock's shards, one key for each in the run's store, where another process may take a shard's place.

    shard/N    JSON: generation, host and port of the process that serves shard N

A process that takes a shard's place writes the next generation. All others read the key, by `ShardDirectory`: clients
that are not answered, shards that send each other updates, standbys before they follow, and each shard, which serves no
more once the entry is not its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from copy import copy
from typing import NamedTuple

from distflow.errors import DistflowError
from distflow.rpc.connection import Address
from distflow.store.clients import open_store
from distflow.store.interface import Deadline, Store, StoreUnavailable, poll_interval

_ANSWER, _START = 3.0, 60.0
"""Seconds within which the store must answer: whoever waits for a shard has more to look after; and at a start, when it
has much to do."""
_POLL_INTERVAL = 1.0  # seconds between two looks of a process that waits
_FENCE = 6
"""A fence looks this often in the seconds after which a silent machine is replaced, or once in `_POLL_INTERVAL`. The
store has as long to answer, and a shard counts on its entry for three times as long: half of those seconds at most."""
_FAILURES = (DistflowError, OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError,
             MemoryError)
"""Errors of a look at the store that end no fence: all replies of its shard wait for it."""
_log = logging.getLogger("distflow.dock")


class ShardEntry(NamedTuple):
    """Address of the process that serves a shard. generation: how many have served it."""

    generation: int
    host: str
    port: int

    @property
    def address(self) -> Address:
        return self.host, self.port


class ShardDirectory:
    """Directory of the shards of a run's dock; all threads may use it. `clients`: how many processes look at the store.
    `silence`: seconds after which another process may take a shard's place.
    """

    def __init__(self, store: Store, clients: int = 1, silence: float = math.inf):
        self.store, self.clients, self.silence = store.below("shard"), clients, silence
        self.store.deadline = Deadline(_ANSWER)
        self.known: dict[int, ShardEntry] = {}
        self.lock, self.look_at = threading.Lock(), dict[int, float]()  # when `locate` looks again, by shard

    @classmethod
    def from_plain(cls, url: str, prefix: str, clients: int, silence: float) -> ShardDirectory:
        """Return the directory that has the settings of `to_plain`."""
        store = open_store(url, _START)
        return cls(store.below(prefix.removesuffix("/")) if prefix else store, clients, silence)

    def to_plain(self) -> dict[str, str | float]:
        return {"url": self.store.url, "prefix": self.store.prefix.removesuffix("shard/"), "clients": self.clients,
                "silence": self.silence}

    @property
    def poll_seconds(self) -> float:
        """Seconds between two looks of a process at a shard's entry."""
        return poll_interval(_POLL_INTERVAL, self.clients)

    def find(self, number: int) -> ShardEntry | None:
        """Return the present entry of a shard. Raises StoreUnavailable."""
        if found := _entry(self.store, number):
            self.known[number] = found
        return found

    def locate(self, number: int) -> Address | None:
        """Return the address of a shard as it was `seconds` ago at most, or when the store answered last."""
        with self.lock:
            due = (now := time.monotonic()) >= self.look_at.get(number, 0.0)
            if due:
                self.look_at[number] = now + _ANSWER + self.poll_seconds  # no second thread looks meanwhile
        if due:
            with contextlib.suppress(StoreUnavailable):
                self.find(number)
            self.look_at[number] = time.monotonic() + self.poll_seconds
        found = self.known.get(number)
        return found and found.address

    def addresses(self, most: int, seconds: float) -> list[Address]:
        """Return the addresses of all shards by number, of which there are `most` at most. Raises StoreUnavailable: the
        store does not answer within `seconds`."""
        with self.store.within(seconds):
            found = self.store.get_all([str(number) for number in range(most)])
        self.known |= {number: ShardEntry(*json.loads(text)) for number, text in enumerate(found) if text}
        return [self.known[number].address for number, text in enumerate(found) if text]

    def take(self, number: int, address: Address) -> ShardEntry:
        """Make `address` that of a shard, in place of the one before. Raises StoreUnavailable."""
        with self.store.within(_START):
            while True:
                before = self.store.get(str(number))
                entry = ShardEntry(1 + (ShardEntry(*json.loads(before)).generation if before else 0), *address)
                if self.store.put_if(str(number), text := json.dumps(entry), before or None) == text:
                    self.known[number] = entry
                    return entry


def _entry(store: Store, number: int) -> ShardEntry | None:
    text = store.get(str(number))
    return ShardEntry(*json.loads(text)) if text else None


class Fence(threading.Thread):
    """Thread that calls `on_replaced` once if a shard's entry is no longer `entry`: another process has its place.

    A process that was stopped does not know what has happened meanwhile: `is_current` waits for a look that is not too
    old. While the store does not answer nothing is decided, and the shard goes on.
    """

    def __init__(self, directory: ShardDirectory, number: int, entry: ShardEntry, on_replaced: Callable[[], None]):
        super().__init__(name="fence", daemon=True)
        self.number, self.entry, self.on_replaced = number, entry, on_replaced
        self.pause = min(_POLL_INTERVAL, directory.silence / _FENCE)
        self.fresh, self.store = 3 * self.pause, copy(directory.store)
        self.store.deadline = Deadline(self.pause)  # its own: other threads may wait longer
        self.looked, self.recheck_since, self.replaced = time.monotonic(), 0.0, False
        self.over = self.warned = False
        self.due, self.changed = threading.Event(), threading.Condition()

    def run(self) -> None:
        try:
            while not (self.over or self.replaced):
                self._look()
                self.due.wait(self.pause)
                self.due.clear()
        finally:
            self._note(math.inf, self.replaced)  # nobody waits for a look that does not come

    def stop(self) -> None:
        self.over = True
        self.due.set()

    def is_current(self) -> bool:
        """Return whether the shard is served here; waits for an answer if the last one is old."""
        if not self._is_fresh():
            with self.changed:
                self.due.set()
                self.changed.wait_for(lambda: self.replaced or self._is_fresh())
        return not self.replaced

    def recheck(self) -> None:
        """Have the next `is_current` wait for a look that begins now or later."""
        self.recheck_since = time.monotonic()

    def _is_fresh(self) -> bool:
        return self.looked >= self.recheck_since and time.monotonic() - self.looked < self.fresh

    def _look(self) -> None:
        began, found = time.monotonic(), None
        try:
            found = self._read()
        except _FAILURES as error:
            self._warn(error)
            if (now := time.monotonic()) - began < self.fresh:  # else it was this process that was stopped
                began = now
        replaced = found is not None and found.generation > self.entry.generation
        self._note(began, replaced)
        if replaced:
            self.on_replaced()

    def _read(self) -> ShardEntry | None:
        try:
            return _entry(self.store, self.number)
        except StoreUnavailable as error:
            if not error.gone:
                raise
            return _entry(self.store, self.number)  # by another connection: one of a stopped process may have ended

    def _note(self, looked: float, replaced: bool) -> None:
        with self.changed:
            self.looked, self.replaced = looked, replaced
            self.changed.notify_all()

    def _warn(self, error: Exception) -> None:
        late = isinstance(error, StoreUnavailable) and not error.gone  # others say so
        if not (late or self.warned):
            self.warned = True
            _log.warning("shard %d of the dock cannot look whether another process has its place, and goes on: %r",
                         self.number, error)
