"""Server of one storage shard and of the consumer indexes that live with it: TCP, a thread for each connection.

Every wait has an end, and a timeout says what was missing (`timeouts.py`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy

from distflow.dock.errors import Full, TimedOut
from distflow.dock.index import ConsumerIndex
from distflow.dock.persistence import Journal, read_snapshot, write_snapshot
from distflow.dock.selection import DockLayout, Ids, RowState
from distflow.dock.shard_state import ClientSession, ShardState
from distflow.dock.storage import read_ids, unpack
from distflow.dock.timeouts import describe_rows, no_room, shortage, status
from distflow.errors import DistflowError
from distflow.rpc.connection import Address, Connection, ConnectionEnded
from distflow.rpc.errors import Refused
from distflow.rpc.server import Server
from distflow.rpc.shared_payloads import MappedSegments

_log = logging.getLogger("distflow.dock")
_WAKE = 0.5  # seconds after which a waiting request looks again: leases of others expire without a notification
_UNANSWERABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
"""Errors of a malformed request or a lack of memory: answered, or clients would retry for ever."""
_OPERATIONS = ("configure", "layout", "put", "fetch", "saved", "lease", "look", "renew", "commit", "rollback",
               "release_before", "updates", "describe_rows", "status", "snapshot")
T = TypeVar("T")
Header = dict[str, Any]
Reply = tuple[Header, list[Any]]


class ClientRequest(NamedTuple):
    """Message of a client whose payload of `size` bytes has not been taken from the connection yet."""

    connection: Connection
    session: str
    header: Header
    size: int


def locked(action: Callable[[Any, ClientRequest], Header]) -> Callable[[Any, ClientRequest], Reply]:
    """Run an operation that answers with a header alone under the lock of the shard's state."""

    def run(server: StorageShardServer, request: ClientRequest) -> Reply:
        with server.state.changed:
            return action(server, request), []

    return run


class StorageShardServer:
    """One process of the dock, listening.

    Args:
        token: the run's; at least 16 bytes. A client that does not know it is refused and logged.
        host: the address to listen at; only this machine can reach the default. Else that of a private interface.
        port: 0 lets the system choose.
        max_rows, max_bytes: what the shard stores before producers must wait.
        snapshot: a file that `DockClient.snapshot` wrote, to go on from.
        journal: a file of this process alone, for its commits. Give the same one when only this process is restored;
            a new one when the weights are set back too, since the commits after the checkpoint will be made again.

    Raises:
        CheckpointError: the snapshot is torn, or the journal cannot be read.
        RpcError: the port is taken, or the token is too short.
    """

    def __init__(self, token: bytes, host: str = "127.0.0.1", port: int = 0, *, max_rows: int = 1 << 20,
                 max_bytes: int = 16 << 30, snapshot: Path | None = None, journal: Path | None = None):
        self.token = token
        commits = Journal(journal) if journal is not None else None
        self.state = ShardState(token, 1 + secrets.randbits(30), max_rows, max_bytes, commits)
        self.writing = threading.Lock()
        self.over = self.forgets = False
        self.server = Server(token, host, port, self._serve, _log)
        self.address: Address = self.server.address
        if snapshot is not None:
            with self.state.changed:
                self.state.restore(read_snapshot(snapshot))
        if commits is not None:
            commits.begin(self.state.epoch)
        self.actions: dict[str, Callable[[ClientRequest], Reply]] = {name: getattr(self, name) for name in _OPERATIONS}

    def start(self) -> Address:
        """Serve in threads of this process; return the address."""
        return self.server.start()

    def replace(self, layout: DockLayout, number: int) -> None:
        """Replace a process that ended with its rows, before `start`; clients will not repeat their commits to it."""
        self.forgets = True
        with self.state.changed:
            self.state.configure(layout, number)

    def close(self) -> None:
        """Stop listening and end all connections; the rows are gone with the process."""
        self.over = True
        self.server.close()
        with self.state.changed:
            self.state.stop()
            self.state.changed.notify_all()
            if self.state.journal is not None:
                self.state.journal.close()

    def _serve(self, connection: Connection, hello: Header) -> None:
        """Answer the requests of one connection until it ends."""
        session, peer = str(hello.get("session", "")), connection.peer
        with self.state.changed:
            client = self.state.enter(session, str(hello.get("who", peer)))
        try:
            connection.memory = MappedSegments.of_client(hello.get("memory"), self.token)
            connection.send({"epoch": self.state.epoch, "memory": connection.memory is not None,
                             "forgets": self.forgets})
            while not self.over:
                self._answer(connection, client, session)
        except TimeoutError as error:
            _log.warning("hung up on %s (%s), which may be stopped: %s; what it alone has leased goes to others",
                         client.who, peer, error)
        except (OSError, Refused, ConnectionEnded) as error:
            _log.debug("%s (%s) hung up: %s", client.who, peer, error)
        finally:
            with self.state.changed:
                self.state.sent += connection.sent
                self.state.received += connection.received
                self.state.leave(session)

    def _answer(self, connection: Connection, client: ClientSession, session: str) -> None:
        header, size = connection.receive()
        expected = connection.received + size
        if header.get("activity") is not None:
            client.activity, client.active_at = str(header["activity"]), time.monotonic()
        try:
            reply, buffers = self.actions[header["op"]](ClientRequest(connection, session, header, size))
        except DistflowError as error:
            reply, buffers = {"error": type(error).__name__, "message": str(error),
                              "report": getattr(error, "report", {})}, []
        except _UNANSWERABLE as error:
            _log.exception("%s sent a request that cannot be answered", client.who)
            reply, buffers = {"error": "DockError", "message": f"the dock cannot answer `{header.get('op')}`: "
                              f"{error!r}; its log says where. Do all processes run the same distflow?"}, []
        connection.skip(expected - connection.received)
        connection.send(reply, buffers)

    @locked
    def configure(self, request: ClientRequest) -> Header:
        self.state.configure(DockLayout.from_plain(request.header["layout"]), request.header["number"])
        return {}

    @locked
    def layout(self, request: ClientRequest) -> Header:
        return {"layout": self.state.configured().to_plain()}

    def put(self, request: ClientRequest) -> Reply:
        """Wait for room before the payload is received; then store the rows and tell the indexes."""
        state, header, ids = self.state, request.header, read_ids(request.header["ids"])
        new = self._reserve(ids, request.size, header["wait"])
        with contextlib.ExitStack() as reserved:
            reserved.callback(self._unreserve, new, request.size)
            batch = unpack(len(ids), header["columns"], request.connection.payload(request.size))
            meta = {name: read_ids(header["meta"][name]) for name in ("version", "group") if name in header["meta"]}
            with state.changed:  # in one hold: in between, others could take the room that these rows still need
                reserved.close()
                stored = state.storage.put(batch, meta, header["turn"])
                state.announce(stored.tolist(), batch.columns if header["turn"] is None else (), new > 0)
        return {"stored": len(stored)}, []

    def _reserve(self, ids: Ids, nbytes: int, wait: float) -> int:
        """Wait for room for rows; return how many of them are new."""
        state, began = self.state, time.monotonic()
        evict_at, deadline = began, began + wait
        with state.changed:
            state.configured()
            while (new := state.storage.reserve(ids, nbytes)) is None:
                now = time.monotonic()
                if now >= evict_at:
                    if state.evict():
                        continue
                    evict_at = now + _WAKE  # rows that another process evicts take a moment to leave
                if (left := deadline - now) <= 0 or self.over:
                    raise Full(no_room(state, len(ids), nbytes, wait))
                state.changed.wait(min(left, _WAKE))
        return new

    def _unreserve(self, rows: int, nbytes: int) -> None:
        with self.state.changed:
            self.state.storage.unreserve(rows, nbytes)
            self.state.changed.notify_all()

    def fetch(self, request: ClientRequest) -> Reply:
        ids = read_ids(request.header["ids"])
        with self.state.changed:
            schema, buffers = self.state.storage.read(ids, request.header["columns"])
        return {"rows": len(ids), "columns": schema}, buffers

    def saved(self, request: ClientRequest) -> Reply:
        with self.state.changed:
            ids, turns, schema, buffers = self.state.storage.saved(read_ids(request.header["ids"]))
        return {"rows": len(ids), "columns": schema, "turns": turns.tobytes()}, buffers

    @locked
    def lease(self, request: ClientRequest) -> Header:
        header, index = request.header, self.state.index(request.header["consumer"])
        granted = self._await_rows(header, index, lambda now: index.lease(
            header["count"], now, request.session, least=header["least"], step=header["step"],
            share=header["share"], shares=header["shares"], request=header["request"]))
        rows = granted.shares[header["share"]]
        return {"lease": granted.number, "seconds": index.consumer.seconds, "all": _packed(granted.rows, "id"),
                "rows": _packed(rows, "id", "tokens", "version", "group", "turn")}

    @locked
    def look(self, request: ClientRequest) -> Header:
        header, index = request.header, self.state.index(request.header["consumer"])
        rows = self._await_rows(header, index, lambda now: index.look(header["count"], now, least=header["least"],
                                                                      step=header["step"]))
        return {name: _packed(rows, name) for name in ("id", "tokens")}

    def _await_rows(self, header: Header, index: ConsumerIndex, find: Callable[[float], T | None]) -> T:
        """Return what `find` finds, now or before the request's wait is over. The lock is released in between."""
        began = time.monotonic()
        while (found := find(time.monotonic())) is None:
            now = time.monotonic()
            if (left := began + header["wait"] - now) <= 0 or self.over:
                raise TimedOut(*shortage(self.state, index, header, now))
            self.state.changed.wait(min(left, _WAKE))
        return found

    @locked
    def renew(self, request: ClientRequest) -> Header:
        index = self.state.index(request.header["consumer"])
        return {"seconds": index.renew(request.header["lease"], time.monotonic(), request.session)}

    @locked
    def commit(self, request: ClientRequest) -> Header:
        header = request.header
        return {"new": self.state.commit(header["consumer"], header["lease"], header["step"], read_ids(header["ids"]),
                                         header.get("answered", False))}

    @locked
    def rollback(self, request: ClientRequest) -> Header:
        return {"rows": self.state.rollback(request.header["consumer"], request.header["step"])}

    @locked
    def release_before(self, request: ClientRequest) -> Header:
        self.state.release_before(request.header["consumer"], request.header["step"])
        return {}

    @locked
    def updates(self, request: ClientRequest) -> Header:
        self.state.configured()
        for update in request.header["updates"]:
            self.state.apply(update)
        return {}

    @locked
    def describe_rows(self, request: ClientRequest) -> Header:
        index = self.state.index(request.header["consumer"])
        return {"lines": describe_rows(self.state, index, request.header["ids"], time.monotonic())}

    @locked
    def status(self, request: ClientRequest) -> Header:
        return status(self.state, list(self.server.connections), time.monotonic())

    def snapshot(self, request: ClientRequest) -> Reply:
        with self.writing:  # a repeated request must not write into the first one's file
            with self.state.changed:
                messages = self.state.capture()
            path = Path(request.header["folder"]) / f"warehouse-{self.state.storage.number}.dock"
            return {"bytes": write_snapshot(messages, path)}, []


def _packed(rows: Sequence[RowState], *names: str) -> bytes:
    return numpy.array([[getattr(row, name) for row in rows] for name in names], numpy.int64).tobytes()
