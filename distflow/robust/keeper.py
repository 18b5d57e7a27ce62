"""Where the copies of another machine's rank arrive: a process that writes them into its seat's memory.

It is a process of its own, since a seat has no threads, and the worker beside it may die.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import threading
from functools import partial
from typing import Any

import torch.distributed as dist

from distflow.data.dock.errors import Refused
from distflow.data.dock.line import Closed, Line
from distflow.data.dock.listener import Listener
from distflow.robust.berth import SIGNALS, end_beside, start_beside
from distflow.robust.snapshots import Slot, Snapshots

_log = logging.getLogger("distflow.robust")


class Keeper:
    """Of one seat, in one era. It ends with the process that has set it out, at the latest.

    Args:
        kept: the memory; two slots, of which one is whole while the other is written.
        host: the address to listen at, which only those who know the token can use.
        store: where it says at `key` where it listens.
    """

    def __init__(self, kept: Snapshots, token: bytes, host: str, store: dist.Store, key: str):
        self.process = start_beside(partial(_keep, kept, token, host, store, key, os.getpid()))

    def end(self) -> None:
        end_beside(self.process)


def _keep(kept: Snapshots, token: bytes, host: str, store: dist.Store, key: str, seat: int) -> None:
    ended = os.pidfd_open(seat)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    listener = Listener(token, host, 0, Shelf(kept).serve, _log)
    store.clone().set(key, json.dumps(listener.start()))
    select.select([ended], [], [])


class Shelf:
    """Takes one copy at a time. A new connection ends the one before: its worker has died, or given up."""

    def __init__(self, kept: Snapshots):
        self.kept, self.lock = kept, threading.Lock()
        self.kept.whole()  # from here on its slots know what is in them
        self.line: Line | None = None

    def serve(self, line: Line, hello: dict[str, Any]) -> None:
        before, self.line = self.line, line
        if before is not None:
            before.hang_up()
        with self.lock:
            try:
                line.receive()
                whole = self._room(hello["stays"]).paste(hello["head"], line.take)
                line.send({"whole": whole})
            except (Refused, Closed, OSError) as error:
                _log.debug("%s hung up: %s", line.peer, error)

    def _room(self, stays: list[int] | None) -> Slot:
        """The one to write to: not that of the moment that stays, and else an empty or the older one."""
        free = [slot for slot in self.kept.slots
                if slot.piece is None or stays is None or slot.piece.moment != tuple(stays)]
        return min(free, key=lambda slot: slot.piece or ())
