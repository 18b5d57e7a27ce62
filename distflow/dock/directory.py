"""Addresses of a dock's shards, one key for each in the run's store, where another process may take a shard's place.

    shard/N    JSON: host and port of the process that serves shard N

A process that takes a shard's place, with no rows, writes its own address. Clients that are not answered read the key,
by `ShardDirectory`, and so do shards that send each other updates.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time

from distflow.rpc.connection import Address
from distflow.store.clients import open_store
from distflow.store.interface import Deadline, Store, StoreUnavailable, poll_interval

_ANSWER, _START = 3.0, 60.0
"""Seconds within which the store must answer: whoever waits for a shard has more to look after; and at a start, when it
has much to do."""
_POLL_INTERVAL = 1.0  # seconds between two looks of a process that waits
class ShardDirectory:
    """Directory of the shards of a run's dock; all threads may use it. `clients`: how many processes look at the store.
    """

    def __init__(self, store: Store, clients: int = 1):
        self.store, self.clients = store.below("shard"), clients
        self.store.deadline = Deadline(_ANSWER)
        self.known: dict[int, Address] = {}
        self.lock, self.look_at = threading.Lock(), dict[int, float]()  # when `locate` looks again, by shard

    @classmethod
    def from_plain(cls, url: str, prefix: str, clients: int) -> ShardDirectory:
        """Return the directory that has the settings of `to_plain`."""
        store = open_store(url, _START)
        return cls(store.below(prefix.removesuffix("/")) if prefix else store, clients)

    def to_plain(self) -> dict[str, str | int]:
        return {"url": self.store.url, "prefix": self.store.prefix.removesuffix("shard/"), "clients": self.clients}

    @property
    def poll_seconds(self) -> float:
        """Seconds between two looks of a process at a shard's entry."""
        return poll_interval(_POLL_INTERVAL, self.clients)

    def locate(self, number: int) -> Address | None:
        """Return the address of a shard as it was `seconds` ago at most, or when the store answered last."""
        with self.lock:
            due = (now := time.monotonic()) >= self.look_at.get(number, 0.0)
            if due:
                self.look_at[number] = now + _ANSWER + self.poll_seconds  # no second thread looks meanwhile
        if due:
            with contextlib.suppress(StoreUnavailable):
                if text := self.store.get(str(number)):
                    self.known[number] = _address(text)
            self.look_at[number] = time.monotonic() + self.poll_seconds
        return self.known.get(number)

    def addresses(self, most: int, seconds: float) -> list[Address]:
        """Return the addresses of all shards by number, of which there are `most` at most. Raises StoreUnavailable: the
        store does not answer within `seconds`."""
        with self.store.within(seconds):
            found = self.store.get_all([str(number) for number in range(most)])
        present = {number: _address(text) for number, text in enumerate(found) if text}
        self.known |= present
        return [*present.values()]

    def take(self, number: int, address: Address) -> None:
        """Make `address` that of a shard, in place of the one before. Raises StoreUnavailable."""
        with self.store.within(_START):
            self.store.put(str(number), json.dumps(address))
        self.known[number] = address


def _address(text: str) -> Address:
    host, port = json.loads(text)
    return host, port
