"""What one process of the dock knows: its warehouse, its controllers, who is connected, and what others must be told.

Everything here runs under one lock, `changed`, which also wakes those who wait for rows or for room.

State updates between processes of the dock: from warehouses to controllers, and back when rows are committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from distflow.dock import index
from distflow.dock.errors import DockError
from distflow.dock.index import ConsumerIndex, Intervals
from distflow.dock.journal import Journal
from distflow.dock.selection import Address, Consumer, DockLayout, Ids
from distflow.dock.storage import StorageShard
from distflow.rpc.connection import Connection, ConnectionEnded, connect

_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two attempts to reach a peer, doubled each time."""
_BEAT = 1.0
"""Seconds after which a silent connection is tried: a peer that was replaced must be told everything again."""
_LIMIT = 10.0
_log = logging.getLogger("distflow.dock")

Update = dict[str, Any]


class Outbox(threading.Thread):
    """Updates for one peer, in order. Each new connection begins with `everything`, so none can be lost.

    `tell` and `everything` run under the lock of the service, which `changed` holds.
    """

    def __init__(self, address: Address, token: bytes, who: str, changed: threading.Condition,
                 everything: Callable[[], list[Update]]):
        super().__init__(name=f"dock updates for {address[0]}:{address[1]}", daemon=True)
        self.address, self.token, self.who = address, token, who
        self.changed, self.everything = changed, everything
        self.waiting: deque[Update] = deque()
        self.trouble = ""
        """Why the peer is out of reach; empty if it is not."""
        self.since, self.warned = 0.0, False
        self.news, self.over = threading.Event(), threading.Event()

    def tell(self, update: Update) -> None:
        if not self.trouble:  # a peer that comes back is told everything
            self.waiting.append(update)
            self.news.set()

    def stop(self) -> None:
        self.over.set()
        self.news.set()

    def run(self) -> None:
        pause = _PAUSE
        while not self.over.is_set():
            line = None
            try:
                line = connect(self.address, self.token, _LIMIT)
                self._ask(line, {"op": "hello", "who": self.who, "session": ""})
                pause = _PAUSE
                self._stream(line)
            except (OSError, ConnectionEnded, DockError) as error:
                self._cut_off(str(error) or type(error).__name__)
            finally:
                if line is not None:
                    line.close()
            self.over.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _stream(self, line: Connection) -> None:
        with self.changed:
            self.waiting.clear()
            self.trouble, self.warned = "", False
            updates = self.everything()
        while not self.over.is_set():
            self._ask(line, {"op": "updates", "updates": updates})
            self.news.wait(_BEAT)
            self.news.clear()
            updates = [self.waiting.popleft() for _ in range(len(self.waiting))]

    def _cut_off(self, trouble: str) -> None:
        with self.changed:
            now = time.monotonic()
            self.since = self.since if self.trouble else now
            if now - self.since > _LONGEST_PAUSE and not self.warned:
                self.warned = True
                _log.warning("%s cannot tell %s:%d of new rows: %s", self.who, *self.address, trouble)
            self.trouble = trouble
            self.waiting.clear()

    def _ask(self, line: Connection, message: dict[str, Any]) -> None:
        line.send(message)
        reply, size = line.receive()
        line.skip(size)
        if "error" in reply:
            raise DockError(reply["message"])


_GONE_KEPT = 1024


@dataclass
class ClientSession:
    """A client process: who it is, and what it last said that it is doing."""

    who: str
    doing: str = ""
    told: float = 0.0
    lines: int = 0
    """Its open connections."""


class ShardState:
    """One process's part of the dock. It can hold rows as soon as `meet` has told it the layout."""

    def __init__(self, token: bytes, epoch: int, max_rows: int, max_bytes: int, journal: Journal | None = None):
        self.token, self.epoch, self.journal = token, epoch, journal
        self.changed = threading.Condition()
        self.warehouse = StorageShard(0, 1, max_rows, max_bytes)
        self.controllers: dict[str, ConsumerIndex] = {}
        self.layout: DockLayout | None = None
        self.outboxes: dict[int, Outbox] = {}
        self.epochs: dict[tuple[str, int], int] = {}
        """Of the process that last listed a warehouse's rows for a consumer here."""
        self.persons: dict[str, ClientSession] = {}
        self.sent = self.received = 0
        """Bytes on connections that have ended."""

    def meet(self, layout: DockLayout, number: int) -> None:
        """Take a place in the layout: be its warehouse `number` and the home of those consumers' controllers.

        Raises:
            DockError: this process has another place already.
        """
        if layout == self.layout and number == self.warehouse.number:
            return
        house = self.warehouse
        if self.layout is not None and (house.number, house.count) != (number, len(layout.addresses)):
            raise DockError(f"this process is warehouse {house.number} of {house.count}; it cannot become {number} of "
                            f"{len(layout.addresses)}: its rows would be looked for elsewhere")
        house.number, house.count, self.layout = number, len(layout.addresses), layout
        for consumer in layout.consumers:
            if consumer.home == number:
                known = self.controllers.get(consumer.name) or self.take_up(consumer)
                known.consumer, known.reads = consumer, set(consumer.reads)
        self.stop()
        self.outboxes = {other: self._outbox(other) for other in range(house.count) if other != number}
        for update in self._everything(number):
            self.apply(update)
        for outbox in self.outboxes.values():
            outbox.start()

    def take_up(self, consumer: Consumer, state: Mapping[str, Any] | None = None) -> ConsumerIndex:
        """A consumer's controller, with what a snapshot and the journal know of its commits."""
        made = ConsumerIndex(consumer, self.epoch, self.journal.lives if self.journal else ())
        if state is not None:
            made.restore(state)
        if self.journal is not None:
            made.replay(self.journal.commits(consumer.name))
        self.controllers[consumer.name] = made
        return made

    def commit(self, consumer: str, number: int, step: int | None, ids: Ids, told: bool) -> bool:
        """A commit at one of the controllers here, kept before it counts; see `ConsumerIndex.commit`."""

        def keep() -> None:
            if self.journal is not None:
                self.journal.commit(consumer, number, step, ids)

        controller = self.controller(consumer)
        new = controller.commit(number, step, ids.tolist(), time.monotonic(), told=told, keep=keep)
        if new and step not in controller.kept:
            self.retire(consumer, ids)
        return new

    def take_back(self, consumer: str, step: int) -> int:
        """See `recall.take_back`; kept before it counts."""
        controller = self.controller(consumer)
        index.check(controller, step)
        if self.journal is not None:
            self.journal.take_back(consumer, step)
        self.changed.notify_all()
        return index.take_back(controller, step)

    def settle(self, consumer: str, before: int) -> None:
        """Let go of the rows of a consumer's steps before this one."""
        self.retire(consumer, index.settle(self.controller(consumer), before))

    def make_room(self) -> bool:
        """Ask for the rows of a step that is only kept in case somebody goes back; whether any have left at once."""
        before = len(self.warehouse.rows)
        for home in {consumer.home for consumer in self.met().consumers if consumer.recalls}:
            self._tell(home, {"kind": "crowded"})
        return len(self.warehouse.rows) < before

    def stop(self) -> None:
        for outbox in self.outboxes.values():
            outbox.stop()

    def met(self) -> DockLayout:
        if self.layout is None:
            raise DockError("this warehouse has no place in a dock yet; call Dock.meet with all addresses first")
        return self.layout

    def controller(self, consumer: str) -> ConsumerIndex:
        layout = self.met()
        if consumer not in self.controllers:
            home = layout.consumer(consumer).home
            raise DockError(f"the controller of `{consumer}` lives with warehouse {home}, not {self.warehouse.number}")
        return self.controllers[consumer]

    def announce(self, ids: Iterable[int], columns: Iterable[str], new: bool) -> None:
        """Tell all controllers that rows have got columns. `new`: some of them were not here before."""
        table = self.warehouse.table(ids)
        update = {"kind": "rows", "columns": sorted(columns), "table": table.tobytes(), "new": new}
        for home in {consumer.home for consumer in self.met().consumers}:
            self._tell(home, update)

    def retire(self, consumer: str, ids: Iterable[int]) -> None:
        """Tell the warehouses that a consumer has committed rows."""
        numbers = numpy.fromiter(ids, numpy.int64)
        for home, places in self.met().split(numbers):
            self._tell(home, {"kind": "retire", "consumer": consumer, "ids": numbers[places].tobytes()})

    def apply(self, update: Update) -> None:
        """An update from a warehouse or a controller, here or elsewhere."""
        if update["kind"] == "rows":
            for name, controller in self.controllers.items():
                committed = controller.learn(read_table(update["table"]), update["columns"])
                if committed and update["new"]:  # a lost warehouse has forgotten it, and a late producer put it again
                    self.retire(name, index.settled(controller, committed))
        elif update["kind"] == "retire":
            self.warehouse.retire(update["consumer"], read_ids(update["ids"]).tolist(), self._all())
        elif update["kind"] == "listing" and update["consumer"] in self.controllers:
            self._relearn(self.controllers[update["consumer"]], update)
        elif update["kind"] == "committed":
            done = Intervals(map(tuple, update["ranges"]))
            self.warehouse.retire(update["consumer"], [row for row in self.warehouse.rows if row in done], self._all())
        elif update["kind"] == "crowded":
            for name, controller in self.controllers.items():
                self.retire(name, index.settle_oldest(controller))
            return  # who is waked for nothing would ask again, and wake the others
        self.changed.notify_all()

    def enter(self, session: str, who: str) -> ClientSession:
        person = self.persons.setdefault(session, ClientSession(who, told=time.monotonic()))
        person.lines += 1
        return person

    def leave(self, session: str) -> None:
        """A connection is gone; with a process's last one its leases end."""
        person = self.persons[session]
        person.lines -= 1
        if person.lines:
            return
        ended = [controller.dropped(session, time.monotonic()) for controller in self.controllers.values()]
        absent = [name for name, other in self.persons.items() if not other.lines]
        for name in absent[: max(0, len(absent) - _GONE_KEPT)]:
            del self.persons[name]
        if any(ended):
            self.changed.notify_all()

    def _all(self) -> frozenset[str]:
        return frozenset(consumer.name for consumer in self.met().consumers)

    def _tell(self, home: int, update: Update) -> None:
        if home == self.warehouse.number:
            self.apply(update)
        else:
            self.outboxes[home].tell(update)

    def _outbox(self, other: int) -> Outbox:
        return Outbox(self.met().addresses[other], self.token, f"warehouse {self.warehouse.number}", self.changed,
                      lambda: self._everything(other))

    def _everything(self, other: int) -> list[Update]:
        """All that process `other` must know of this one."""
        updates: list[Update] = [{"kind": "committed", "consumer": name, "ranges": index.settled_ranges(controller)}
                                 for name, controller in self.controllers.items()]
        return updates + [self._listing(consumer.name) for consumer in self.met().consumers if consumer.home == other]

    def _listing(self, consumer: str) -> Update:
        forms: dict[frozenset[str], list[int]] = {}
        done = []
        for row, kept in self.warehouse.rows.items():
            if consumer in kept.consumed:
                done.append(row)
            else:
                forms.setdefault(kept.columns, []).append(row)
        parts = [[sorted(columns), self.warehouse.table(rows).tobytes()] for columns, rows in forms.items()]
        return {"kind": "listing", "consumer": consumer, "warehouse": self.warehouse.number, "parts": parts,
                "epoch": self.epoch, "done": numpy.array(done, numpy.int64).tobytes()}

    def _relearn(self, controller: ConsumerIndex, update: Update) -> None:
        parts = [(columns, read_table(table)) for columns, table in update["parts"]]
        listed = {row: columns for columns, table in parts for row in table[0].tolist()}
        controller.finish(read_ids(update["done"]).tolist())
        source = controller.consumer.name, update["warehouse"]
        replaced = self.epochs.get(source) != update["epoch"]
        self.epochs[source] = update["epoch"]
        controller.relearn(listed, update["warehouse"], self.warehouse.count, replaced)
        self.retire(controller.consumer.name,
                    index.lose(controller, listed, update["warehouse"], self.warehouse.count))
        for columns, table in parts:
            controller.learn(table, columns)


def read_ids(data: bytes) -> Ids:
    return numpy.frombuffer(data, numpy.int64)


def read_table(data: bytes) -> Ids:
    """[6, rows], see `StorageShard.table`."""
    return numpy.frombuffer(data, numpy.int64).reshape(6, -1)
