"""Receives the copies of another machine's rank, in a process that writes them into its supervisor's memory.

It is a process of its own, since a supervisor has no threads, and the worker may die.

    client                                  server
    {shard, head, retained}                 {stored: true}: has it already; {stored: false, why}; {}: send the rest
    {} and the rest of the shard            {stored, why}
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from functools import partial
from typing import Any

from distflow.recovery.snapshots import HEAD, Slot, Snapshots, StateShard, end_of
from distflow.rpc.connection import Connection, ConnectionEnded
from distflow.rpc.errors import Refused, RpcError
from distflow.rpc.server import Server
from distflow.store.interface import Store
from distflow.telemetry.processes import Child, spawn

_log = logging.getLogger("distflow.recovery")
_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds before a server process that has ended is started again; doubled each time


class ReplicaServer:
    """Replica server of one supervisor in one round.

    Args:
        replicas: the memory; two slots, of which one is complete while the other is written.
        host: the address to listen at.
        token: authenticates clients.
        store: gets the server's address at `key`, or why there is none.
    """

    def __init__(self, replicas: Snapshots, token: bytes, host: str, store: Store, key: str):
        self.supervisor, self.pause = os.getpid(), _PAUSE
        self.serve = partial(_serve, replicas, token, host, store, key, store.deadline.seconds)
        self.process: Child | None = spawn(self.serve)
        self.again = 0.0

    def poll(self) -> None:
        """Start the process again if it has ended, as when memory was full. Does nothing in a worker."""
        if os.getpid() != self.supervisor:
            return
        if self.process and self.process.poll() is not None:
            self.process, self.again = None, time.monotonic() + self.pause
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        if not self.process and time.monotonic() >= self.again:
            self.process = spawn(self.serve)

    def end(self) -> None:
        if self.process:
            self.process.end()


def _serve(replicas: Snapshots, token: bytes, host: str, store: Store, key: str, deadline: float) -> None:
    try:
        address = Server(token, host, 0, ReplicaReceiver(replicas).serve, _log).start()
    except RpcError as error:
        address = f"{error}. Is DISTFLOW_HOST an address of that machine?"
    with store.within(deadline):  # a supervisor may fork this process while it gives the store less time
        store.put(key, json.dumps(address))
    if not isinstance(address, str):
        threading.Event().wait()


class ReplicaReceiver:
    """Receives one copy at a time. A new connection ends the one before: its worker has died, or given up."""

    def __init__(self, replicas: Snapshots):
        self.replicas, self.lock = replicas, threading.Lock()
        self.replicas.complete()  # from here on each slot has its `shard`
        self.connection: Connection | None = None

    def serve(self, connection: Connection, hello: dict[str, Any]) -> None:
        before, self.connection = self.connection, connection
        if before is not None:
            before.shut_down()
        with self.lock:
            if self.connection is not connection:
                return
            try:
                connection.send(self._take(connection, hello))
            except (Refused, ConnectionEnded, OSError) as error:
                _log.debug("%s hung up: %s", connection.peer, error)

    def _take(self, connection: Connection, hello: dict[str, Any]) -> dict[str, Any]:
        shard, head = StateShard(*hello["shard"]), hello["head"]
        if any(slot.shard == shard and slot.read() for slot in self.replicas.slots):
            return {"stored": True}
        if len(head) != HEAD or (size := end_of(head) - HEAD) < 0:
            return {"stored": False, "why": "it was announced there by something that is no head of a shard"}
        slot = self._slot(hello["retained"])
        try:
            slot.reserve(end_of(head))
        except OSError as error:
            return {"stored": False, "why": f"there is no memory for it there: {error}"}
        connection.send({})
        if connection.receive(most=size)[1] < size:
            return {"stored": False, "why": f"it came there with fewer bytes than the {size} that were announced"}
        return {"stored": slot.paste(head, connection.take), "why": "it came there with another checksum"}

    def _slot(self, retained: list[int] | None) -> Slot:
        """Return the slot to write to: an empty or the older one, but not that of the retained shard."""
        free = [slot for slot in self.replicas.slots
                if slot.shard is None or retained is None or slot.shard != StateShard(*retained)]
        return min(free or self.replicas.slots, key=lambda slot: slot.shard or ())
