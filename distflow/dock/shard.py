"""One process of the dock: a warehouse and the controllers that live with it, served over TCP, a thread a connection.

`serve` runs it in this process; `child.py` starts one of its own. Every wait has an end, and says what it waited for.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy

from distflow.dock.errors import Full, Refused, TimedOut
from distflow.dock.index import ConsumerIndex, GrantedLease
from distflow.dock.journal import Journal
from distflow.dock.selection import Address, DockLayout, LeaseRequest
from distflow.dock.shard_state import ClientSession, ShardState, read_ids
from distflow.dock.snapshot import capture, messages, restore, write
from distflow.dock.storage import RowMeta, unpack
from distflow.dock.timeouts import crowd, fates, shortage, status
from distflow.errors import DistflowError
from distflow.rpc.connection import Connection, ConnectionEnded
from distflow.rpc.server import Server
from distflow.rpc.shared_payloads import MappedSegments

_log = logging.getLogger("distflow.dock")
_WAKE = 0.5
"""Seconds after which a waiter looks again even if nobody woke it: leases of others run out in silence."""
_NONSENSE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
"""What a malformed request, a user's rule or a lack of memory raises: answered, or the client would try for ever."""
T = TypeVar("T")
Header = dict[str, Any]
Reply = tuple[Header, list[Any]]


class StorageShardServer:
    """A process's part of the dock, listening.

    Args:
        token: the run's; at least 16 bytes. Whoever does not know it is refused and logged.
        host: the address to listen at; only this machine can reach the default. Else that of a private interface.
        port: 0 lets the system choose.
        max_rows, max_bytes: what the warehouse takes before producers must wait.
        snapshot: a file that `Dock.snapshot` wrote, to go on from.
        journal: a file of this process alone, in which it keeps commits before it answers them. Give the same one
            when only this process is restored; a new one when the weights are set back to the snapshot's checkpoint
            too, for then the commits since are to be made again.

    Raises:
        CheckpointError: the snapshot is torn, or the journal cannot be read.
        DockError: the port is taken, or the token is too short.
    """

    def __init__(self, token: bytes, host: str = "127.0.0.1", port: int = 0, *, max_rows: int = 1 << 20,
                 max_bytes: int = 16 << 30, snapshot: Path | None = None, journal: Path | None = None):
        self.token = token
        kept = Journal(journal) if journal is not None else None
        self.desk = ShardState(token, 1 + secrets.randbits(30), max_rows, max_bytes, kept)
        self.writing = threading.Lock()
        """Held while a snapshot is taken and written: a repeated request must not write into the first one's file."""
        self.over = self.forgets = False
        self.listener = Server(token, host, port, self._serve, _log)
        self.address: Address = self.listener.address
        if snapshot is not None:
            with self.desk.changed:
                restore(self.desk, snapshot)
        if kept is not None:
            kept.begin(self.desk.epoch)
        self.actions: dict[str, Callable[[Connection, ClientSession, str, Header, int], Reply]] = {
            "meet": self.meet, "layout": self.layout, "put": self.put, "fetch": self.fetch, "saved": self.saved,
            "lease": self.lease, "look": self.look, "renew": self.renew, "commit": self.commit,
            "release": self.release, "take_back": self.take_back, "settle": self.settle, "updates": self.updates,
            "where": self.where, "status": self.status, "snapshot": self.snapshot}

    def start(self) -> Address:
        """Serve in threads of this process; returns where."""
        return self.listener.start()

    def replace(self, layout: DockLayout, number: int) -> None:
        """Take the place of a process that has ended with all that it knew. Before `start`. Clients are told not to
        repeat their commits: what they committed is to be made again."""
        self.forgets = True
        with self.desk.changed:
            self.desk.meet(layout, number)

    def close(self) -> None:
        """Stop listening and hang up; the rows are gone with the process."""
        self.over = True
        self.listener.close()
        with self.desk.changed:
            self.desk.stop()
            self.desk.changed.notify_all()
            if self.desk.journal is not None:
                self.desk.journal.close()

    def _serve(self, line: Connection, hello: Header) -> None:
        """One connection: requests until it ends."""
        session, peer = str(hello.get("session", "")), line.peer
        with self.desk.changed:
            person = self.desk.enter(session, str(hello.get("who", peer)))
        try:
            line.memory = MappedSegments.onto(hello.get("memory"), self.token)
            line.send({"epoch": self.desk.epoch, "memory": line.memory is not None, "forgets": self.forgets})
            while not self.over:
                self._answer(line, person, session)
        except TimeoutError as error:
            _log.warning("hung up on %s (%s), which may be stopped: %s; what it alone has leased goes to others",
                         person.who, peer, error)
        except (OSError, Refused, ConnectionEnded) as error:
            _log.debug("%s (%s) hung up: %s", person.who, peer, error)
        finally:
            with self.desk.changed:
                self.desk.sent += line.sent
                self.desk.received += line.received
                self.desk.leave(session)

    def _answer(self, line: Connection, person: ClientSession, session: str) -> None:
        header, size = line.receive()
        expected = line.received + size
        if header.get("doing") is not None:
            person.doing, person.told = str(header["doing"]), time.monotonic()
        try:
            action = self.actions[header["op"]]
            reply, buffers = action(line, person, session, header, size)
        except DistflowError as error:
            reply, buffers = {"error": type(error).__name__, "message": str(error),
                              "report": getattr(error, "report", {})}, []
        except _NONSENSE as error:
            _log.exception("%s sent a request that cannot be answered", person.who)
            reply, buffers = {"error": "DockError", "message": f"the dock cannot answer `{header.get('op')}`: "
                              f"{error!r}; its log says where. Do all processes run the same distflow?"}, []
        line.skip(expected - line.received)
        line.send(reply, buffers)

    def meet(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        with self.desk.changed:
            self.desk.meet(DockLayout.from_plain(header["layout"]), header["number"])
        return {}, []

    def layout(self, *_: Any) -> Reply:
        with self.desk.changed:
            return {"layout": self.desk.met().to_plain(), "number": self.desk.warehouse.number}, []

    def put(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        """Wait for room before anything is received; then keep the rows and tell the controllers."""
        desk, ids = self.desk, read_ids(header["ids"])
        now = time.monotonic()
        ask, deadline = now, now + header["wait"]
        with desk.changed:
            desk.met()
            while (new := desk.warehouse.reserve(ids, size)) is None:
                now = time.monotonic()
                if now >= ask:
                    if desk.make_room():
                        continue
                    ask = now + _WAKE  # room that is made elsewhere takes a moment
                if (left := deadline - now) <= 0 or self.over:
                    raise Full(crowd(desk, len(ids), size, header["wait"]))
                desk.changed.wait(min(left, _WAKE))
        with contextlib.ExitStack() as reserved:
            reserved.callback(self._unreserve, new, size)
            batch = unpack(len(ids), header["columns"], line.payload(size))
            marks = RowMeta(**{name: read_ids(data) for name, data in header["marks"].items()})
            with desk.changed:  # in one hold: in between, others could take the room that these rows still need
                reserved.close()
                kept = desk.warehouse.put(batch, marks, header["turn"])
                desk.announce(kept.tolist(), batch.columns if header["turn"] is None else (), new > 0)
        return {"kept": len(kept), "dropped": len(ids) - len(kept)}, []

    def _unreserve(self, rows: int, nbytes: int) -> None:
        with self.desk.changed:
            self.desk.warehouse.unreserve(rows, nbytes)
            self.desk.changed.notify_all()

    def fetch(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        ids = read_ids(header["ids"])
        with self.desk.changed:
            heads, buffers = self.desk.warehouse.cut(ids, header["columns"])
        return {"rows": len(ids), "columns": heads}, buffers

    def saved(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        with self.desk.changed:
            ids, turns, heads, buffers = self.desk.warehouse.saved(read_ids(header["ids"]))
        return {"rows": len(ids), "columns": heads, "turns": turns.tobytes()}, buffers

    def lease(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:

        def grant(controller: ConsumerIndex, ask: LeaseRequest, now: float) -> GrantedLease | None:
            granted = controller.lease(ask, now, session, least=header["least"], step=header["step"],
                                       share=header["share"], shares=header["shares"], request=header["request"])
            if ask.discarded:
                self.desk.retire(controller.consumer.name, [row.id for row in ask.discarded])
            return granted

        controller, granted = self._await_rows(header, grant)
        return _granted(granted, header["share"], controller.consumer.seconds), []

    def look(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        _, rows = self._await_rows(header, lambda controller, ask, now: controller.look(ask, now, header["least"]))
        return {name: numpy.array([getattr(row, name) for row in rows], numpy.int64).tobytes()
                for name in ("id", "tokens")}, []

    def _await_rows(self, header: Header, found: Callable[[ConsumerIndex, LeaseRequest, float],
                                                          T | None]) -> tuple[ConsumerIndex, T]:
        """What is found for a request, as soon as there is something; the lock is held while it is looked for."""
        desk = self.desk
        controller = desk.controller(header["consumer"])
        now = began = time.monotonic()
        with desk.changed:
            while True:
                ask = LeaseRequest(header["count"], header["version"], header["step"])
                if (result := found(controller, ask, now)) is not None:
                    return controller, result
                now = time.monotonic()
                if (left := began + header["wait"] - now) <= 0 or self.over:
                    raise TimedOut(*shortage(desk, controller, header, now))
                desk.changed.wait(min(left, _WAKE))
                now = time.monotonic()

    def renew(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        with self.desk.changed:
            controller = self.desk.controller(header["consumer"])
            return {"seconds": controller.renew(header["lease"], time.monotonic(), session)}, []

    def commit(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        ids = read_ids(header["ids"])
        with self.desk.changed:
            new = self.desk.commit(header["consumer"], header["lease"], header["step"], ids, header.get("told", False))
        return {"new": new}, []

    def take_back(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        with self.desk.changed:
            return {"rows": self.desk.take_back(header["consumer"], header["step"])}, []

    def settle(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        with self.desk.changed:
            self.desk.settle(header["consumer"], header["before"])
            self.desk.changed.notify_all()
        return {}, []

    def release(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        with self.desk.changed:
            self.desk.controller(header["consumer"]).release(header["lease"], time.monotonic())
            self.desk.changed.notify_all()
        return {}, []

    def updates(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        with self.desk.changed:
            self.desk.met()
            for update in header["updates"]:
                self.desk.apply(update)
        return {}, []

    def where(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        """What a consumer's controller knows of rows that it owes; for messages."""
        with self.desk.changed:
            controller = self.desk.controller(header["consumer"])
            return {"fates": fates(self.desk, controller, header["ids"], time.monotonic())}, []

    def status(self, *_: Any) -> Reply:
        with self.desk.changed:
            return status(self.desk, list(self.listener.lines), time.monotonic()), []

    def snapshot(self, line: Connection, person: ClientSession, session: str, header: Header, size: int) -> Reply:
        with self.writing:
            with self.desk.changed:
                head, parcels = capture(self.desk)
            path = Path(header["folder"]) / f"warehouse-{self.desk.warehouse.number}.dock"
            return {"bytes": write(messages(head, parcels), path)}, []


def _granted(granted: GrantedLease, share: int, seconds: float) -> Header:
    rows = granted.shares[share]
    marks = {name: numpy.array([getattr(row, name) for row in rows], numpy.int64).tobytes()
             for name in ("id", "tokens", "version", "group", "turn")}
    return {"lease": granted.number, "marks": marks, "seconds": seconds,
            "all": numpy.array([row.id for row in granted.rows], numpy.int64).tobytes()}
