"""Client's connections by address: made when needed, and made again when they break.

A request whose connection broke is sent again, so every request must be safe to repeat.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy

from distflow.rpc.connection import Address, Connection, ConnectionEnded, connect
from distflow.rpc.errors import NoThread, Refused, Unreachable
from distflow.rpc.shared_payloads import LEAST, MappedHeap

_CONNECT = 5.0  # seconds within which a process must take a connection
_PAUSE = 0.05  # seconds between attempts to reach a process that may be starting again
Header = dict[str, Any]
Request = tuple[Address, Header, Sequence[Any]]
Reply = tuple[Header, numpy.ndarray]


class RetryPolicy:
    """Retries over broken connections, until `timeout` seconds have passed."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.since: float | None = None

    def pause_or_raise(self, address: Address, error: Exception, moved: bool) -> None:
        """Pause before the next attempt; raise `Unreachable` if there is none, or the `NoThread` that it was. `moved`:
        the process is elsewhere now, so that its silence says nothing."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        if isinstance(error, NoThread) and now - self.since >= self.timeout:
            raise error
        if isinstance(error, TimeoutError) and not moved or now - self.since >= self.timeout:
            what = "has not sent or taken a byte" if isinstance(error, TimeoutError) else "cannot be reached"
            raise Unreachable(f"the process at {address[0]}:{address[1]} {what} for {self.timeout:g} s "
                              f"({error or type(error).__name__}). It may have died, with what it held, or it is "
                              "stopped: then continue it") from None
        time.sleep(_PAUSE)


class HeldReplies:
    """Context in which what `addresses` hold is read in place; it releases them. They may have ended their connections
    meanwhile, and others' rows may have been read: then it is not `valid`, and suppresses the error that came of it."""

    def __init__(self, pool: ConnectionPool, addresses: Sequence[Address]):
        self.pool, self.addresses, self.valid = pool, addresses, False

    def __enter__(self) -> HeldReplies:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.valid = self.pool.release(self.addresses)
        return kind is not None and issubclass(kind, Exception) and not self.valid


class ConnectionPool:
    """Connections by address.

    Args:
        who: name of this process, sent in the first message of a connection.
        locate: returns where the process is now that had an address. A request that waits for it asks again every
            `look` seconds, and goes on with the process that has taken its place.
    """

    def __init__(self, token: bytes, who: str, timeout: float, error_from: Callable[[Header], Exception],
                 locate: Callable[[Address], Address], look: float):
        self.token, self.who, self.timeout, self.session = token, who, timeout, secrets.token_hex(8)
        self.error_from, self.locate, self.look = error_from, locate, look
        self.located: dict[Address, Address] = {}  # where each process was looked for last
        self.connections: dict[Address, Connection] = {}
        self.activity = ""  # what this process is doing now; sent with the next request
        self.sent_activity: dict[Address, str] = {}

    def ask(self, address: Address, header: Header, buffers: Sequence[Any] = (), wait: float = 0.0) -> Reply:
        return self.ask_all([(address, header, buffers)], wait)[0]

    def ask_all(self, requests: Iterable[Request], wait: float = 0.0) -> list[Reply]:
        """Send requests to several processes at once; return the replies in their order.

        Raises `Unreachable` if one does not reply within the timeout, and `wait` seconds that it may wait by itself
        before it replies; else what `error_from` makes of the first reply that reports an error.
        """
        requests, retry = list(requests), RetryPolicy(self.timeout)
        self._ask_for_room(requests, retry)
        replies: dict[int, Reply] = {}
        with contextlib.ExitStack() as failed:
            failed.callback(self._release_read, requests, replies)
            while len(replies) < len(requests):
                self._ask_missing(requests, replies, wait, retry)
            for index in range(len(requests)):
                if "error" in replies[index][0]:
                    raise self.error_from(replies[index][0])
            failed.pop_all()
        return [replies[index] for index in range(len(requests))]

    def memory_of(self, address: Address) -> numpy.ndarray | None:
        """Return the memory in which a process that has replied holds rows, [bytes] uint8; None if it is elsewhere."""
        memory = self.connections[address].memory
        return memory.memory if isinstance(memory, MappedHeap) else None

    def release(self, addresses: Iterable[Address]) -> bool:
        """Tell processes that what they hold has been read. Return whether they have held it until now: else one has
        ended its connection, and others' rows may have been read."""
        held = True
        for address in addresses:
            try:
                if address not in self.connections or not self.connections[address].is_open():
                    raise ConnectionEnded
                self.connections[address].send({"op": "release"})
            except (OSError, ConnectionEnded):
                self._drop(address)
                held = False
        return held

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    def _ask_missing(self, requests: Sequence[Request], replies: dict[int, Reply], wait: float,
                     retry: RetryPolicy) -> None:
        """Send the requests that have no reply yet, and add the replies of those whose connections hold."""
        awaited: list[int] = []
        try:
            for index in [index for index in range(len(requests)) if index not in replies]:
                awaited.append(index)
                if not self._try_send(requests[index], wait, retry):
                    awaited.pop()
            while awaited:
                reply = self._receive_reply(requests[awaited[0]][0], retry)
                if reply is not None:
                    replies[awaited[0]] = reply
                awaited.pop(0)
        finally:
            for index in awaited:  # a late reply must not be taken for that to another request
                self._drop(requests[index][0])

    def _release_read(self, requests: Sequence[Request], replies: dict[int, Reply]) -> None:
        self.release(requests[index][0] for index, (header, _) in replies.items() if "in_place" in header)

    def _ask_for_room(self, requests: Sequence[Request], retry: RetryPolicy) -> None:
        """Ask several processes for room for large requests at once; one that gives none is asked with its request,
        and so are all if a connection breaks and there is time for another attempt."""
        asked = dict[Address, tuple[MappedHeap, int]]()
        at: Address = "", 0  # of the process that is asked
        try:
            for at, _, buffers in requests:
                connection, size = self.connections.get(at), sum(map(len, buffers))
                if size >= LEAST and connection is not None and isinstance(connection.memory, MappedHeap):
                    asked[at] = connection.memory, size
                    connection.set_timeout(self.timeout, self.look, partial(self._raise_if_moved, at))
                    connection.send({"op": "reserve", "size": size})
            for at, (memory, size) in [*asked.items()]:
                memory.take_room(self.connections[at].receive(most=0)[0], size)
                del asked[at]
        except (OSError, ConnectionEnded) as error:
            retry.pause_or_raise(at, error, self._has_moved(at))
        except Refused:
            pass  # the request itself connects again, and says what is wrong
        finally:
            for at in asked:
                self._drop(at)

    def _try_send(self, request: Request, wait: float, retry: RetryPolicy) -> bool:
        """Send; return False if the connection broke and there is time for another attempt."""
        address, header, buffers = request
        try:
            connection = self._connection(address)
            connection.set_timeout(self.timeout + wait, self.look, partial(self._raise_if_moved, address))
            if self.sent_activity.get(address) != self.activity:
                self.sent_activity[address] = self.activity
                header = header | {"activity": self.activity}
            connection.send(header, buffers)
        except (OSError, ConnectionEnded, Unreachable) as error:
            self._drop(address)
            retry.pause_or_raise(address, error, self._has_moved(address))
            return False
        return True

    def _receive_reply(self, address: Address, retry: RetryPolicy) -> Reply | None:
        try:
            header, size = self.connections[address].receive()
            return header, self.connections[address].payload(size)
        except (OSError, ConnectionEnded) as error:
            self._drop(address)
            retry.pause_or_raise(address, error, self._has_moved(address))
            return None

    def _drop(self, address: Address) -> None:
        connection = self.connections.pop(address, None)
        self.sent_activity.pop(address, None)
        if connection is not None:
            connection.close()

    def _has_moved(self, address: Address) -> bool:
        return self.locate(address) != self.located.get(address)

    def _raise_if_moved(self, address: Address) -> None:
        if self._has_moved(address):
            raise ConnectionResetError("another process has taken its place")

    def _connection(self, address: Address) -> Connection:
        if address not in self.connections:
            at = self.located[address] = self.locate(address)
            connection = connect(at, self.token, min(self.timeout, _CONNECT), self.look,
                                 partial(self._raise_if_moved, address))
            answer = connection.ask({"op": "hello", "who": self.who, "session": self.session})
            connection.memory = MappedHeap.of_server(answer["memory"], self.token)
            self.connections[address] = connection
        return self.connections[address]
