"""State of one process of the dock, and the updates between processes.

    storage    the rows of its shard                   indexes    of the consumers whose `home` it is
    clients    sessions, with their activity           outboxes   updates for the other processes, one for each

    rows, listing           from a shard to the indexes: rows have got columns; all rows that it holds
    stored                  from a shard to the indexes: bytes that it stores
    retire, committed       from an index to the shards: rows were committed for good; all rows that were
    marks                   from an index to the shards: leases and commits, to be written to the rows
    evict                   to the indexes: a lease has no room; let the oldest step that can be rolled back leave

An index is beside its consumer's first rank. It holds nothing that the shards do not have: one that takes the place of
a lost one first waits for the listings of all shards that can be reached. Marks are sent after the reply, so those of a
machine's last moments may be missing. A lease like that is lost, and a trainer leaves out rows that its snapshot names.

All methods run under one `lock`. Requests that wait for rows are woken when theirs have come (`wake`), and not by those
of others: a step's rows come in thousands of puts, and hundreds of ranks wait for all of them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from distflow.dock.directory import ShardDirectory
from distflow.dock.errors import DockError
from distflow.dock.index import ConsumerIndex
from distflow.dock.intervals import Intervals
from distflow.dock.selection import DockLayout, StorageBudget
from distflow.dock.slots import Ids
from distflow.dock.storage import StorageShard, read_ids, read_table
from distflow.rpc.connection import Address, Connection, ConnectionEnded, connect
from distflow.rpc.errors import RpcError
from distflow.rpc.shared_heap import SharedHeap
from distflow.rpc.shared_payloads import heap_name

_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds between two attempts to reach a peer, doubled each time
_PROBE_INTERVAL = 1.0  # seconds of silence: a peer that was replaced needs the full updates again
_TIMEOUT = 10.0
_EVICTION_PAUSE = 0.5
_LISTING = 3.0  # seconds that a new index waits for the listings of shards, less than a client waits for an answer
_ENDED_KEPT = 1024  # sessions without connections that are remembered, for messages
_log = logging.getLogger("distflow.dock")

Update = dict[str, Any]


class Outbox(threading.Thread):
    """Thread that sends updates to one peer, in order. Each connection begins with `full_updates`: none can be lost.

    `post` and `full_updates` run under the `lock` of the shard's state.
    """

    def __init__(self, locate: Callable[[], Address], token: bytes, who: str, lock: threading.RLock,
                 full_updates: Callable[[], list[Update]]):
        super().__init__(name="dock updates", daemon=True)
        self.locate, self.address, self.token, self.who = locate, ("", 0), token, who
        self.lock, self.full_updates = lock, full_updates
        self.waiting: deque[Update] = deque()
        self.failure = ""  # why the peer is unreachable; empty if it is not
        self.since, self.warned = 0.0, False
        self.pending, self.over = threading.Event(), threading.Event()

    def post(self, update: Update) -> None:
        if not self.failure:  # a peer that comes back gets the full updates
            self.waiting.append(update)
            self.pending.set()

    def stop(self) -> None:
        self.over.set()
        self.pending.set()

    def run(self) -> None:
        pause = _PAUSE
        while not self.over.is_set():
            self.address = self.locate()
            try:
                with contextlib.closing(connect(self.address, self.token, _TIMEOUT)) as connection:
                    self._ask(connection, {"op": "hello", "who": self.who, "session": ""})
                    pause = _PAUSE
                    self._stream(connection)
            except (OSError, ConnectionEnded, DockError, RpcError) as error:
                self._note_failure(str(error) or type(error).__name__)
            self.over.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _stream(self, connection: Connection) -> None:
        with self.lock:
            self.waiting.clear()
            self.failure, self.warned = "", False
            updates = self.full_updates()
        while not self.over.is_set():
            self._ask(connection, {"op": "updates", "updates": updates})
            self.pending.wait(_PROBE_INTERVAL)
            self.pending.clear()
            updates = [self.waiting.popleft() for _ in range(len(self.waiting))]

    def _note_failure(self, failure: str) -> None:
        with self.lock:
            now = time.monotonic()
            self.since = self.since if self.failure else now
            if now - self.since > _LONGEST_PAUSE and not self.warned:
                self.warned = True
                _log.warning("%s cannot send %s:%d its updates: %s", self.who, *self.address, failure)
            self.failure = failure
            self.waiting.clear()

    def _ask(self, connection: Connection, message: dict[str, Any]) -> None:
        reply = connection.ask(message)
        if "error" in reply:
            raise DockError(reply["message"])


@dataclass
class ClientSession:
    """Client process: its name, and the activity that it reported last."""

    who: str
    activity: str = ""
    active_at: float = 0.0
    connections: int = 0


class RowRequest(NamedTuple):
    """What a request for rows waits for; those that want the same wait together."""

    consumer: str
    step: int | None
    least: int
    attempt: int


class ShardState:
    """Shard, indexes and clients of one process. It can hold rows as soon as `configure` has given it the layout."""

    def __init__(self, token: bytes, epoch: int, directory: ShardDirectory | None = None):
        self.token, self.epoch, self.directory = token, epoch, directory
        self.lock = threading.RLock()
        self.waiting: dict[RowRequest, threading.Condition] = {}
        self.storage = StorageShard(heap=SharedHeap(heap_name(token)))
        self.room, self.evict_at = StorageBudget(), 0.0
        self.indexes: dict[str, ConsumerIndex] = {}
        self.layout: DockLayout | None = None
        self.outboxes: dict[int, Outbox] = {}
        self.epochs: dict[tuple[str, int], int] = {}  # of the process that last listed a shard's rows to a consumer
        self.listed, self.complete = threading.Condition(self.lock), set[str]()  # indexes that know all shards' rows
        self.clients: dict[str, ClientSession] = {}
        self.sent = self.received = 0  # bytes on connections that have ended

    def configure(self, layout: DockLayout, number: int) -> None:
        """Become shard `number` of the layout, and keep the indexes of the consumers whose `home` that is."""
        if layout == self.layout and number == self.storage.number:
            return
        storage = self.storage
        if self.layout is not None and (storage.number, storage.count) != (number, len(layout.addresses)):
            raise DockError(f"this process is shard {storage.number} of {storage.count}; it cannot become {number} of "
                            f"{len(layout.addresses)}: its rows would be looked for elsewhere")
        self._set_layout(layout, number)
        for consumer in layout.consumers:
            if number == layout.home_of(consumer.name):
                index = self.indexes.setdefault(consumer.name, ConsumerIndex(consumer, self.epoch, self.room))
                index.consumer, index.rows.reads = consumer, frozenset(consumer.reads)
        self.stop()
        others = range(storage.count) if self.indexes else layout.homes()
        self.outboxes = {other: self._outbox(other) for other in others if other != number}
        for update in self._full_updates(number):
            self.apply(update)
        for outbox in self.outboxes.values():
            outbox.start()

    def _set_layout(self, layout: DockLayout, number: int) -> None:
        self.layout, storage = layout, self.storage
        storage.number, storage.count, storage.group_size = number, len(layout.addresses), layout.group_size
        self.room.limit = math.inf if layout.max_bytes is None else layout.max_bytes * storage.count

    def commit(self, index: ConsumerIndex, number: int, step: int | None, ids: Ids) -> bool:
        """Commit at one of the indexes here; see `ConsumerIndex.commit`."""
        new = index.commit(number, step, ids, time.monotonic())
        if new and step not in index.retained:
            self.retire(index.consumer.name, ids)
        self.wake()
        return new

    def rollback(self, index: ConsumerIndex, step: int, attempt: int) -> int:
        """Undo commits at one of the indexes here; see `ConsumerIndex.rollback`."""
        index.check_rollback(step)
        rows = index.rollback(step, attempt)
        self.wake()
        return rows

    def release_before(self, consumer: str, step: int) -> None:
        self.retire(consumer, self.index(consumer).release_before(step))

    def evict(self, now: float) -> bool:
        """Have all indexes release a retained step, unless they did so just before: rows in other processes take a
        moment to leave. Return whether any rows here have left."""
        before = len(self.storage.rows)
        if now < self.evict_at:
            return False
        self.evict_at = now + _EVICTION_PAUSE
        for home in self.configured().homes():
            self._post(home, {"kind": "evict"})
        return len(self.storage.rows) < before

    def stop(self) -> None:
        for outbox in self.outboxes.values():
            outbox.stop()

    def configured(self) -> DockLayout:
        if self.layout is None:
            raise DockError("this shard has no place in a dock yet; call `DockClient.configure` first")
        return self.layout

    def index(self, consumer: str) -> ConsumerIndex:
        layout = self.configured()
        layout.consumer(consumer)
        if consumer not in self.indexes:
            raise DockError(f"the index of `{consumer}` lives with shard {layout.home_of(consumer)}, not "
                            f"{self.storage.number}")
        return self.indexes[consumer]

    def announce(self, ids: Ids, columns: Iterable[str], new: bool) -> None:
        """Report to all indexes that rows have got columns. `new`: some of the rows were not here before."""
        table = self.storage.table(ids)
        update = {"kind": "rows", "columns": sorted(columns), "table": table.tobytes(), "new": new}
        for home in self.configured().homes():
            self._post(home, update)
        self._post_stored()

    def retire(self, consumer: str, ids: Ids) -> None:
        """Report to the shards that a consumer's commits of rows are final."""
        for shard, positions in self.configured().split(ids):
            self._post(shard, {"kind": "retire", "consumer": consumer, "ids": ids[positions].tobytes()})

    def await_listings(self, index: ConsumerIndex) -> None:
        """Wait until all shards have listed their rows to an index, but no longer than `_LISTING` for those that are
        out of reach. The lock is released meanwhile."""
        name, until = index.consumer.name, time.monotonic() + _LISTING
        while name not in self.complete:
            lacking = [shard for shard in range(self.storage.count) if (name, shard) not in self.epochs]
            if not lacking or (left := until - time.monotonic()) <= 0:
                self.complete.add(name)
            else:
                self.listed.wait(left)

    def apply(self, update: Update) -> None:
        if update["kind"] == "marks":
            self.storage.mark(update["consumer"], read_ids(update["marks"]).reshape(3, -1), update["attempt"])
            return
        if update["kind"] == "rows":
            for name, index in self.indexes.items():
                committed = index.add_rows(read_table(update["table"]), update["columns"], update["new"])
                if len(committed) and update["new"]:  # a lost shard has forgotten it, and a late producer put it again
                    self.retire(name, index.final_rows(committed))
        elif update["kind"] == "retire":
            self._retire(update["consumer"], read_ids(update["ids"]))
        elif update["kind"] == "evict":
            for name, index in self.indexes.items():
                self.retire(name, index.release_oldest())
        elif update["kind"] == "stored":
            self.room.record(update["shard"], update["bytes"], update["rows"])
        elif update["kind"] == "listing" and update["consumer"] in self.indexes:
            self._rebuild(self.indexes[update["consumer"]], update)
        elif update["kind"] == "committed":
            ids = self.storage.rows["ids"][self.storage.rows.all()]
            self._retire(update["consumer"], ids[Intervals(update["ranges"]).contains_each(ids)])
        self.wake()

    def _retire(self, consumer: str, ids: Ids) -> None:
        self.storage.retire(consumer, ids, self._consumers_of_same_rows(consumer))
        self._post_stored()

    def enter(self, session: str, who: str) -> ClientSession:
        client = self.clients.setdefault(session, ClientSession(who, active_at=time.monotonic()))
        client.connections += 1
        return client

    def leave(self, session: str) -> None:
        """Note the end of a connection; with a session's last one its leases end."""
        client = self.clients[session]
        client.connections -= 1
        if client.connections:
            return
        for index in self.indexes.values():
            index.end_session(session, time.monotonic())
        absent = [name for name, other in self.clients.items() if not other.connections]
        for name in absent[: max(0, len(absent) - _ENDED_KEPT)]:
            del self.clients[name]
        self.wake()

    def wait(self, request: RowRequest, seconds: float) -> None:
        """Wait until `wake` finds rows for a request, or until the time is over. The lock is released meanwhile."""
        condition = self.waiting.get(request) or self.waiting.setdefault(request, threading.Condition(self.lock))
        condition.wait(seconds)

    def wake(self) -> None:
        """Write changes of the indexes to the shards, and wake the requests that may have rows now. Without a step each
        needs rows of its own."""
        for index in self.indexes.values() if self.layout else ():
            if index.changes:
                self._post_marks(index, index.take_changes())
        for request, condition in list(self.waiting.items()):
            index = self.indexes[request.consumer]
            if not index.has_rows(request.least, request.step, request.attempt):
                continue
            if request.step is None:
                condition.notify(index.ready.count(None) // max(request.least, 1))
            else:
                condition.notify_all()
                del self.waiting[request]

    def _post_stored(self) -> None:
        if self.room.limit < math.inf:
            layout = self.configured()
            for home in layout.homes([each for each in layout.consumers if each.row_bytes]):
                self._post(home, self._stored_update())

    def _post_marks(self, index: ConsumerIndex, marks: Ids) -> None:
        for shard, positions in self.configured().split(marks[0]):
            self._post(shard, self._marks_update(index, marks[:, positions]))

    def _marks_update(self, index: ConsumerIndex, marks: Ids) -> Update:
        return {"kind": "marks", "consumer": index.consumer.name, "marks": marks.tobytes(), "attempt": index.attempt}

    def _stored_update(self) -> Update:
        columns = [column for consumer in self.configured().consumers if consumer.row_bytes
                   for column in consumer.writes]
        tables = self.storage.columns
        written = min((tables[column].rows if column in tables else 0 for column in columns), default=0)
        return {"kind": "stored", "shard": self.storage.number, "bytes": self.storage.nbytes, "rows": written}

    def _consumers_of_same_rows(self, consumer: str) -> frozenset[str]:
        """Return the consumers that take the same rows."""
        layout = self.configured()
        return frozenset(each.name for each in layout.consumers if each.ids == layout.consumer(consumer).ids)

    def _post(self, shard: int, update: Update) -> None:
        if shard == self.storage.number:
            self.apply(update)
        else:
            self.outboxes[shard].post(update)

    def _outbox(self, other: int) -> Outbox:
        return Outbox(lambda: self._locate(other), self.token, f"shard {self.storage.number}", self.lock,
                      lambda: self._full_updates(other))

    def _locate(self, other: int) -> Address:
        return (self.directory and self.directory.locate(other)) or self.configured().addresses[other]

    def _full_updates(self, other: int) -> list[Update]:
        """Return all that process `other` must know of this one."""
        updates: list[Update] = [{"kind": "committed", "consumer": name, "ranges": index.final_ranges()}
                                 for name, index in self.indexes.items()]
        layout = self.configured()
        for index in self.indexes.values():
            marks = index.marks()
            updates.append(self._marks_update(index, marks[:, layout.shard_of(marks[0]) == other]))
        updates += [self._listing_update(each.name) for each in layout.consumers if layout.home_of(each.name) == other]
        return [*updates, self._stored_update()]

    def _listing_update(self, consumer: str) -> Update:
        storage, slots = self.storage, self.storage.rows.all()
        ids, done = storage.rows["ids"][slots], storage.rows.consumed_by(consumer)[slots] > 0
        parts = [[columns, storage.table(alike).tobytes()] for columns, alike in storage.forms(ids[~done])]
        return {"kind": "listing", "consumer": consumer, "shard": self.storage.number, "parts": parts,
                "epoch": self.epoch, "done": ids[done].tobytes(), "attempt": storage.attempts.get(consumer, 0),
                "marks": storage.marks(consumer, ids[~done]).tobytes()}

    def _rebuild(self, index: ConsumerIndex, update: Update) -> None:
        parts = [(columns, read_table(table)) for columns, table in update["parts"]]
        index.mark_committed(read_ids(update["done"]))
        source = index.consumer.name, update["shard"]
        first, replaced = source not in self.epochs, self.epochs.get(source) != update["epoch"]
        self.epochs[source] = update["epoch"]
        layout = self.configured()

        def stored_there(ids: Ids) -> numpy.ndarray:
            return layout.shard_of(ids) == update["shard"]

        index.rebuild([(columns, table[0]) for columns, table in parts], stored_there, replaced)
        listed = numpy.concatenate([numpy.empty(0, numpy.int64), *(table[0] for _, table in parts)])
        self.retire(index.consumer.name, index.release_incomplete(listed, stored_there))
        # Rows that were put again into a shard that had lost them, while it could not reach this index.
        for columns, table in parts:
            self.retire(index.consumer.name, index.final_rows(index.add_rows(table, columns)))
        if first:
            index.attempt = max(index.attempt, update["attempt"])
            index.restore(read_ids(update["marks"]).reshape(3, -1), time.monotonic())
            self.listed.notify_all()
