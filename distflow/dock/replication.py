"""Copies a shard's rows to a standby on another machine, which takes the shard's place when its machine is lost.

    Standby                  Follower, in the shard's process
    {"op": "follow"}         all rows, as puts and retirements; {"complete": true}; then each change, in order
    {} for each message      a put is acknowledged once the standby has it
    {"over": true}           the standby has taken the shard's place, which must serve no more

Indexes are not copied: what is committed shows in the rows, holders of leases renew them, and a trainer begins with a
rollback. A standby that ends, or stands still, is not waited for; it gets all rows again when it comes back.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy

from distflow.dock.directory import ShardDirectory
from distflow.dock.errors import DockError
from distflow.dock.storage import Message, StorageShard, read_ids
from distflow.rpc.connection import Address, Connection, ConnectionEnded, connect
from distflow.rpc.errors import RpcError
from distflow.rpc.shared_heap import SharedHeap
from distflow.rpc.shared_payloads import ServedHeap, heap_name

_PROBE, _PAUSE = 1.0, 0.2  # seconds between two messages to a standby at most, and between its attempts to connect
PATIENCE = 10.0  # seconds for which a put waits for a standby, and after which a silent shard is connected to again


class TakenOver(Exception):
    """A standby has taken this process's place: its machine was thought to be lost."""


class Follower:
    """A standby, as its shard knows it. `backlog` is sent before all that is posted."""

    def __init__(self, connection: Connection, backlog: Iterable[Message]):
        self.connection, self.backlog = connection, backlog
        self.posted: queue.SimpleQueue[tuple[Message, threading.Event]] = queue.SimpleQueue()
        self.complete, self.heard, self.has_taken_over = False, time.monotonic(), False

    def wait(self, copied: threading.Event) -> bool:
        """Wait for an event of `post`, unless the standby has not all rows yet; break with one that answers nothing.
        Return whether it has the message: else it may serve the shard without it."""
        while self.complete and not copied.wait(_PROBE):
            if time.monotonic() - self.heard > PATIENCE:
                self.connection.shut_down()
                return False
        return self.complete

    def post(self, message: Message) -> threading.Event:
        """Send a message soon; return an event that is set when the standby has it, or has ended."""
        copied = threading.Event()
        self.posted.put((message, copied))
        return copied

    def stream(self) -> None:
        """Send messages until the connection breaks: raises `OSError` or `ConnectionEnded`. Or raises `TakenOver`."""
        for message in itertools.chain(self.backlog, [({"complete": True}, [])]):
            self._send(message)
        self.complete = True
        while True:
            try:
                message, copied = self.posted.get(timeout=_PROBE)
            except queue.Empty:
                self._send(({}, []))
                continue
            try:
                self._send(message)
            finally:
                copied.set()

    def _send(self, message: Message) -> None:
        answered = False
        try:
            self.has_taken_over = bool(self.connection.ask(*message).get("over"))
            answered = not self.has_taken_over
        finally:
            self.complete = self.complete and answered  # before any that wait for the message go on
        if self.has_taken_over:
            raise TakenOver
        self.heard = time.monotonic()

    def end(self) -> None:
        """Release all that wait for the standby. Nothing is posted any more."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.posted.get_nowait()[1].set()


class Standby(threading.Thread):
    """Copy of the shard `number` of `count`, wherever that is."""

    def __init__(self, directory: ShardDirectory, token: bytes, number: int, count: int, group_size: int):
        super().__init__(name="standby", daemon=True)
        self.directory, self.token, self.form = directory, token, (number, count, group_size)
        self.storage = self._empty()
        self.over, self.lock = threading.Event(), threading.Lock()

    def run(self) -> None:
        while not self.over.is_set():
            address = self.directory.locate(self.form[0])  # another process may have taken the shard's place
            if address and not self.over.is_set():  # once it is, the address may be of this process itself
                with contextlib.suppress(OSError, ConnectionEnded, DockError, RpcError):
                    self._follow(address)
            self.over.wait(_PAUSE)

    def _follow(self, address: Address) -> None:
        with contextlib.closing(connect(address, self.token, PATIENCE)) as connection:
            connection.ask({"op": "hello", "who": f"standby of shard {self.form[0]}", "session": ""})
            connection.send({"op": "follow"})
            self._receive(connection)

    def stop(self) -> StorageShard:
        """Stop following; return the rows."""
        with self.lock:
            self.over.set()
        return self.storage

    def _empty(self) -> StorageShard:
        return StorageShard(*self.form, SharedHeap(heap_name(self.token)))

    def _receive(self, connection: Connection) -> None:
        copy = self._empty()
        connection.memory = ServedHeap(copy.heap)
        while True:
            header, size = connection.receive()
            payload = connection.payload(size)
            with self.lock:
                if self.over.is_set():
                    connection.send({"over": True})
                    return
                if header.get("complete"):
                    self.storage = copy
                elif "op" in header:
                    _apply(copy, header, payload)
            connection.send({})


def _apply(storage: StorageShard, header: dict[str, Any], payload: numpy.ndarray) -> None:
    ids = read_ids(header["ids"])
    if header["op"] == "put":
        storage.put(ids, header["columns"], payload, read_ids(header["versions"]), header["turn"])
    else:
        storage.retire(header["consumer"], ids, frozenset(header["consumers"]))
