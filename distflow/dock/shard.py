"""Server of one storage shard and of the consumer indexes that live with it: TCP, a thread for each connection.

Every wait has an end, and a timeout says what was missing (`timeouts.py`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy

from distflow.dock.directory import ShardDirectory
from distflow.dock.errors import DockError, DockFull, LeaseLost
from distflow.dock.index import SHOWN, ConsumerIndex
from distflow.dock.selection import DockLayout
from distflow.dock.shard_state import ClientSession, RowRequest, ShardState
from distflow.dock.slots import Ids
from distflow.dock.storage import Columns, pack, read_ids
from distflow.dock.timeouts import describe_rows, shortage, status
from distflow.errors import DistflowError
from distflow.rpc.connection import Address, Connection, ConnectionEnded
from distflow.rpc.errors import Refused
from distflow.rpc.server import Server
from distflow.rpc.shared_payloads import LEAST, ServedHeap

_log = logging.getLogger("distflow.dock")
_WAKE = 0.5  # seconds after which a request that found no room looks again
_UNANSWERABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""Errors of a malformed request: answered, or clients would retry for ever."""
_OPERATIONS = ("configure", "layout", "reserve", "put", "fetch", "fetch_saved", "lease", "peek", "shortage", "require",
               "renew", "commit", "rollback", "release_before", "remove", "updates", "describe_rows", "status")
T = TypeVar("T")
Header = dict[str, Any]
Reply = tuple[Header, list[Any]]


class ClientRequest(NamedTuple):
    """Message of a client whose payload of `size` bytes has not been taken from the connection yet."""

    connection: Connection
    memory: ServedHeap
    session: str
    header: Header
    size: int


def locked(action: Callable[[Any, ClientRequest], Header]) -> Callable[[Any, ClientRequest], Reply]:
    """Run an operation that answers with a header alone under the lock of the shard's state."""

    def run(server: StorageShardServer, request: ClientRequest) -> Reply:
        with server.state.lock:
            return action(server, request), []

    return run


class StorageShardServer:
    """One process of the dock, listening.

    Args:
        token: the run's; at least 16 bytes. A client that does not know it is refused and logged.
        host: the address to listen at; only this machine can reach the default. Else that of a private interface.
        port: 0 lets the system choose.
        directory: of the dock's shards; default: they stay where the layout has them.

    Raises `RpcError`: the port is taken, or the token is too short.
    """

    def __init__(self, token: bytes, host: str = "127.0.0.1", port: int = 0, directory: ShardDirectory | None = None):
        self.token = token
        self.state = ShardState(token, 1 + secrets.randbits(30), directory)
        self.over = self.was_full = False
        self.server = Server(token, host, port, self._serve, _log)
        self.address: Address = self.server.address
        self.actions: dict[str, Callable[[ClientRequest], Reply]] = {name: getattr(self, name) for name in _OPERATIONS}

    def start(self, number: int = 0) -> Address:
        """Serve in threads of this process, as shard `number` of the directory if there is one; return the address."""
        if directory := self.state.directory:
            directory.take(number, self.address)
        return self.server.start()

    def close(self) -> None:
        """Stop listening and end all connections; the rows are gone with the process."""
        self.over = True
        self.server.close()
        with self.state.lock:
            self.state.stop()
            for condition in self.state.waiting.values():
                condition.notify_all()

    def _serve(self, connection: Connection, hello: Header) -> None:
        session, peer = str(hello.get("session", "")), connection.peer
        with self.state.lock:
            client = self.state.enter(session, str(hello.get("who", peer)))
        try:
            connection.memory = memory = ServedHeap(self.state.storage.heap)
            connection.send({"memory": memory.offer()})
            while not self.over:
                self._answer(connection, memory, client, session)
        except TimeoutError as error:
            _log.warning("hung up on %s (%s), which may be stopped: %s; what it alone has leased goes to others",
                         client.who, peer, error)
        except (OSError, Refused, ConnectionEnded) as error:
            _log.debug("%s (%s) hung up: %s", client.who, peer, error)
        finally:
            with self.state.lock:
                self.state.sent += connection.sent
                self.state.received += connection.received
                self.state.leave(session)

    def _answer(self, connection: Connection, memory: ServedHeap, client: ClientSession, session: str) -> None:
        header, size = connection.receive()
        expected = connection.received + size
        if header.get("op") == "release":  # what it has read is not held any more
            return
        if header.get("activity") is not None:
            client.activity, client.active_at = str(header["activity"]), time.monotonic()
        try:
            reply, buffers = self.actions[header["op"]](ClientRequest(connection, memory, session, header, size))
        except DistflowError as error:
            reply, buffers = {"error": type(error).__name__, "message": str(error)}, []
        except MemoryError as error:
            reply, buffers = {"error": DockFull.__name__, "message": self._full(header, size, client, error)}, []
        except _UNANSWERABLE as error:
            _log.exception("%s sent a request that cannot be answered", client.who)
            reply, buffers = {"error": "DockError", "message": f"the dock cannot answer `{header.get('op')}`: "
                              f"{error!r}; its log says where. Do all processes run the same distflow?"}, []
        connection.skip(expected - connection.received)
        if self.over:
            raise ConnectionEnded
        connection.send(reply, buffers)
        if "in_place" not in reply:
            memory.held = []

    def _full(self, header: Header, size: int, client: ClientSession, error: MemoryError) -> str:
        """Return why a request has not been answered, and log the first one."""
        host, port = self.address
        why = f"the dock's process at {host}:{port} has no memory left for `{header.get('op')}` of {size:,} bytes " \
              f"({error or 'MemoryError'}). Give its machine or control group more, or the dock " \
              "less:  dock_gib  in the run file"
        if not self.was_full:
            _log.error("%s, asked by %s", why, client.who)
        self.was_full = True
        return why

    @locked
    def configure(self, request: ClientRequest) -> Header:
        self.state.configure(DockLayout.from_plain(request.header["layout"]), request.header["number"])
        return {}

    @locked
    def layout(self, request: ClientRequest) -> Header:
        return {"layout": self.state.configured().to_plain()}

    def put(self, request: ClientRequest) -> Reply:
        """Store rows, whatever room there is: they are what others wait for. Leases keep to the room
        (`StorageBudget`)."""
        header, ids = request.header, read_ids(request.header["ids"])
        payload = request.connection.payload(request.size)
        with self.state.lock:
            self.state.configured()
            if header.get("epoch") not in (None, self.state.epoch):
                raise LeaseLost("these columns were computed from rows of an earlier process of shard "
                                f"{self.state.storage.number}, which has ended with them: rows {ids[:SHOWN].tolist()} "
                                "may have been sampled again since. Throw away what was made of them")
            known = len(self.state.storage.rows)
            stored = self.state.storage.put(ids, header["columns"], payload, read_ids(header["versions"]),
                                            header["turn"])
            names = [name for name, *_ in header["columns"]] if header["turn"] is None else []
            self.state.announce(stored, names, len(self.state.storage.rows) > known)
        return {"stored": len(stored)}, []

    @locked
    def reserve(self, request: ClientRequest) -> Header:
        return {"at": request.memory.reserve(request.header["size"])}

    def fetch(self, request: ClientRequest) -> Reply:
        ids = read_ids(request.header["ids"])
        with self.state.lock:
            columns, memories = self.state.storage.read(ids, request.header["columns"])
            return self._rows(request, ids, columns, memories, {"epoch": self.state.epoch})

    def fetch_saved(self, request: ClientRequest) -> Reply:
        with self.state.lock:
            ids, turns, columns, memories = self.state.storage.read_saved(read_ids(request.header["ids"]))
            return self._rows(request, ids, columns, memories, {"ids": ids.tobytes(), "turns": turns.tobytes()})

    def _rows(self, request: ClientRequest, ids: Ids, columns: Columns, memories: list[numpy.ndarray],
              header: Header) -> Reply:
        """Return a reply with rows, or with where a client of this machine finds them. They are held until it has been
        sent, or the client has read them."""
        heap, size = request.memory, sum(extents.nbytes for extents in columns.values())
        heap.held = memories
        if not (request.header.get("in_place") and size >= LEAST):
            schema, parts = pack(columns, heap.heap.memory)
            return header | {"columns": schema}, parts
        request.connection.sent += size
        forms = [[name, extents.form] for name, extents in columns.items()]
        return header | {"in_place": forms}, [part for _, begin, count in columns.values()
                                              for part in (begin.tobytes(), count.tobytes())]

    def lease(self, request: ClientRequest) -> Reply:
        if request.header.get("shares") != 1:
            import distflow.data.assignment  # noqa: F401 - deals rows; to load it with torch must not hold up others
        return self._lease(request)

    @locked
    def _lease(self, request: ClientRequest) -> Header:
        """Reply with the leased rows; without any if they do not come in time, which `shortage` explains."""
        header, index, number = request.header, self._index(request), request.header.get("near")
        shard_of = self.state.configured().shard_of
        granted = self._await_rows(header, index, lambda now: index.lease(
            header["count"], now, request.session, least=header["least"], step=header["step"], share=header["share"],
            shares=header["shares"], request=header["request"], attempt=header["attempt"],
            near=None if number is None else lambda rows: shard_of(rows) == number))
        if granted is None:
            return {"rows": None}
        self.state.wake()  # those that wait for the same step with another share
        rows = index.describe(granted.shares[header["share"]], "ids", "tokens", "version", "turn")
        return {"lease": granted.number, "seconds": index.consumer.seconds, "all": granted.packed,
                "rows": rows.tobytes()}

    @locked
    def peek(self, request: ClientRequest) -> Header:
        header, index = request.header, self._index(request)
        rows = self._await_rows(header, index, lambda now: index.peek(
            header["count"], now, least=header["least"], step=header["step"], attempt=header["attempt"]))
        return {"rows": None if rows is None else index.describe(rows, "ids", "tokens").tobytes()}

    def _await_rows(self, header: Header, index: ConsumerIndex, find: Callable[[float], T | None]) -> T | None:
        """Return what `find` finds, now or before the request's wait is over. The lock is released in between."""
        began = time.monotonic()
        wanted = RowRequest(index.consumer.name, header["step"], header["least"], header["attempt"])
        while (found := find(now := time.monotonic())) is None:
            lacks_room = index.lacks_room(header["step"])
            if lacks_room and self.state.evict(now):
                continue
            if (left := began + header["wait"] - now) <= 0 or self.over:
                return None
            self.state.wait(wanted, min(left, index.next_expiry - now, _WAKE if lacks_room else left))
        return found

    @locked
    def require(self, request: ClientRequest) -> Header:
        self._index(request).required = request.header["step"]
        self.state.wake()
        return {}

    @locked
    def shortage(self, request: ClientRequest) -> Header:
        message, report = shortage(self.state, self.state.index(request.header["consumer"]), request.header,
                                   time.monotonic())
        return {"message": message, "report": report}

    @locked
    def renew(self, request: ClientRequest) -> Header:
        return {"seconds": self._index(request).renew(request.header["lease"], time.monotonic(), request.session)}

    @locked
    def commit(self, request: ClientRequest) -> Header:
        header = request.header
        return {"new": self.state.commit(self._index(request), header["lease"], header["step"],
                                         read_ids(header["ids"]))}

    @locked
    def rollback(self, request: ClientRequest) -> Header:
        return {"rows": self.state.rollback(self._index(request), request.header["step"], request.header["attempt"])}

    @locked
    def release_before(self, request: ClientRequest) -> Header:
        self.state.release_before(self._index(request).consumer.name, request.header["step"])
        return {}

    @locked
    def remove(self, request: ClientRequest) -> Header:
        if consumers := self.state.configured().consumers:
            raise DockError(f"rows leave when {', '.join(each.name for each in consumers)} have committed them")
        self.state.storage.remove(read_ids(request.header["ids"]))
        return {}

    def _index(self, request: ClientRequest) -> ConsumerIndex:
        """Return the index that a request is about. Raises `LeaseLost` for a process of an earlier attempt."""
        index = self.state.index(request.header["consumer"])
        self.state.await_listings(index)
        index.check_attempt(request.header["attempt"])
        return index

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
