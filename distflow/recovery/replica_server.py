"""Where the copies of another machine's rank arrive: a process that writes them into its seat's memory.

It is a process of its own, since a seat has no threads, and the worker beside it may die.

    sender                                  keeper
    {piece, head, stays}                    {whole: true}: it is there; {whole: false, why}; or {}: the rest is to come
    {} and the rest of the piece            {whole, why}
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import threading
import time
from functools import partial
from typing import Any

import torch.distributed as dist

from distflow.dock.errors import DockError, Refused
from distflow.recovery.snapshots import Piece, Slot, Snapshots, end_of
from distflow.recovery.worker_process import SIGNALS, end_beside, start_beside
from distflow.rpc.connection import Connection, ConnectionEnded
from distflow.rpc.server import Server

_log = logging.getLogger("distflow.recovery")
_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
"""Seconds before a process that has ended is followed by another; twice as many each time."""


class ReplicaServer:
    """Of one seat, in one era. It ends with the process that has set it out, at the latest.

    Args:
        kept: the memory; two slots, of which one is whole while the other is written.
        host: the address to listen at, which only those who know the token can use.
        store: where it says at `key` where it listens, or why it does not.
    """

    def __init__(self, kept: Snapshots, token: bytes, host: str, store: dist.Store, key: str):
        self.seat, self.pause = os.getpid(), _PAUSE
        self.keep = partial(_keep, kept, token, host, store, key, self.seat)
        self.process, self.again = start_beside(self.keep), 0.0

    def look(self) -> None:
        """Start another process if this one has ended, as where memory had. In a worker nothing happens."""
        if os.getpid() != self.seat:
            return
        if self.process and os.waitpid(self.process, os.WNOHANG)[0]:
            self.process, self.again, self.pause = 0, time.monotonic() + self.pause, min(2 * self.pause, _LONGEST_PAUSE)
        if not self.process and time.monotonic() >= self.again:
            self.process = start_beside(self.keep)

    def end(self) -> None:
        if self.process:
            end_beside(self.process)


def _keep(kept: Snapshots, token: bytes, host: str, store: dist.Store, key: str, seat: int) -> None:
    ended = os.pidfd_open(seat)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        said = Server(token, host, 0, ReplicaStore(kept).serve, _log).start()
    except DockError as error:
        said = f"{error}. Is DISTFLOW_HOST an address of that machine?"
    store.clone().set(key, json.dumps(said))
    if not isinstance(said, str):
        select.select([ended], [], [])


class ReplicaStore:
    """Takes one copy at a time. A new connection ends the one before: its worker has died, or given up."""

    def __init__(self, kept: Snapshots):
        self.kept, self.lock = kept, threading.Lock()
        self.kept.whole()  # from here on its slots know what is in them
        self.line: Connection | None = None

    def serve(self, line: Connection, hello: dict[str, Any]) -> None:
        before, self.line = self.line, line
        if before is not None:
            before.hang_up()
        with self.lock:
            if self.line is not line:
                return
            try:
                line.send(self._take(line, hello))
            except (Refused, ConnectionEnded, OSError) as error:
                _log.debug("%s hung up: %s", line.peer, error)

    def _take(self, line: Connection, hello: dict[str, Any]) -> dict[str, Any]:
        """What is to be replied in the end."""
        try:
            if any(slot.piece == Piece(*hello["piece"]) and slot.read() for slot in self.kept.slots):
                return {"whole": True}
            slot = self._room(hello["stays"])
            slot.memory(end_of(hello["head"]))
        except OSError as error:
            return {"whole": False, "why": f"there is no memory for it there: {error}"}
        line.send({})
        line.receive()
        return {"whole": slot.paste(hello["head"], line.take), "why": "it came there with another checksum"}

    def _room(self, stays: list[int] | None) -> Slot:
        """The one to write to: not that of the piece that stays, and else an empty or the older one."""
        free = [slot for slot in self.kept.slots
                if slot.piece is None or stays is None or slot.piece != Piece(*stays)]
        return min(free or self.kept.slots, key=lambda slot: slot.piece or ())
