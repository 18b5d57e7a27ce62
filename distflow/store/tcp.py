"""Client of torch's TCPStore whose every call has a deadline, and the TCPStore itself.

torch's own client waits for ever in most calls when the store's process is stopped or cut off, with Python's signal
handlers blocked. This one speaks the same protocol (torch 2.11 to 2.13, `TCPStoreBackend.hpp`) by a socket of its own:

    query   a byte, then keys and values, each as length (u64) and bytes; lists and WAIT, CHECK begin with their length
    reply   SET has none, so that an empty CHECK follows; ADD, DELETE i64; CHECK, WAIT, CANCEL_WAIT a byte;
            COMPARE_SET a value; MULTI_GET values

A query that has timed out stays under way, and its reply is skipped when it comes: nothing is done twice.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from distflow.store.interface import Store, StoreUnavailable

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_VALIDATE, _SET, _COMPARE_SET, _ADD, _CHECK, _WAIT, _DELETE, _MULTI_GET, _CANCEL_WAIT, _PING, _LIST = (
    bytes([number]) for number in (0, 1, 2, 4, 5, 6, 8, 10, 12, 13, 17))
_MAGIC, _NONCE, _ROOT = 0x3C85F7CE, 0x44464C57, "/"  # torch's number of its protocol; ours to PING; its prefix of keys
_STOP, _ABSENT = 0, "\0absent"
_CHUNK, _BACKLOG = 1 << 16, 4096  # bytes read at once; connections that wait to be taken: all ranks come together
T = TypeVar("T")


class _Incomplete(Exception):
    """More bytes must come before a reply can be read."""


class _Reply:
    """Reads a reply from the bytes that have come."""

    def __init__(self, data: bytearray):
        self.data, self.used = data, 0

    def take(self, count: int) -> bytes:
        if len(self.data) < self.used + count:
            raise _Incomplete
        self.used += count
        return bytes(self.data[self.used - count : self.used])

    def nothing(self) -> None: ...

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        return struct.unpack("<q", self.take(8))[0]

    def text(self) -> str:
        return self.take(self.number()).decode()

    def cancelled(self) -> bool:
        """Read the reply of CANCEL_WAIT; return whether that of WAIT had come before."""
        return self.byte() == _STOP and self.byte() != _STOP

    def texts(self) -> list[str]:
        return [self.text() for _ in range(self.number())]


Reader = Callable[[_Reply], T]


class _Connection:
    """A connection of one thread of one process."""

    def __init__(self, host: str, port: int, seconds: float):
        self.address, self.pid = f"{host}:{port}", os.getpid()
        self.outgoing, self.incoming = bytearray(), bytearray()
        self.owed: deque[Reader] = deque()  # readers of replies that have not come
        self.busy = False
        try:
            self.socket = socket.create_connection((host, port), seconds)
            self.socket.setblocking(False)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except TimeoutError:
            raise StoreUnavailable(self.address, seconds) from None
        except OSError as error:
            raise StoreUnavailable(self.address, 0.0, str(error), gone=True) from None
        hello = _VALIDATE + struct.pack("<I", _MAGIC) + _PING + struct.pack("<I", _NONCE)
        if self.call(hello, lambda reply: reply.take(4), seconds) != struct.pack("<I", _NONCE):
            raise StoreUnavailable(self.address, 0.0, "it is no TCPStore of torch 2.11 to 2.13", gone=True)

    @property
    def usable(self) -> bool:
        """Whether this process made it, and no signal handler has broken off a call."""
        return self.pid == os.getpid() and not self.busy

    def call(self, query: bytes, read: Reader[T], seconds: float) -> T:
        """Send a query and return its reply. Raises StoreUnavailable: it has not come within `seconds`."""
        with self._errors():
            until = time.monotonic() + seconds
            self._send(query, read, until)
            return self._receive(until)

    def wait(self, query: bytes, seconds: float, deadline: float) -> bool:
        """Send a WAIT, and cancel it after `seconds`; return whether it was answered. Raises StoreUnavailable: the
        other queries were not within `deadline`."""
        with self._errors():
            self._send(query, _Reply.byte, time.monotonic() + deadline)
            with contextlib.suppress(TimeoutError):
                return self._receive(time.monotonic() + seconds) == _STOP
            self.owed[0] = _Reply.cancelled
            self.outgoing += _CANCEL_WAIT
            return self._receive(time.monotonic() + deadline)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        self.busy, began = True, time.monotonic()
        try:
            yield
        except TimeoutError:
            self.busy = False
            raise StoreUnavailable(self.address, time.monotonic() - began) from None
        except OSError as error:
            raise StoreUnavailable(self.address, 0.0, str(error), gone=True) from None
        self.busy = False

    def _send(self, query: bytes, read: Reader, until: float) -> None:
        """Begin a query once those before it are done: a store that does not answer gets one more and no second."""
        while self.owed:
            self._receive(until)
        self.outgoing += query
        self.owed.append(read)

    def _receive(self, until: float) -> Any:
        """Return the reply that is owed first."""
        while True:
            with contextlib.suppress(_Incomplete):
                result = self.owed[0](reply := _Reply(self.incoming))
                if not self.outgoing:
                    del self.incoming[: reply.used]
                    self.owed.popleft()
                    return result
            self._transfer(until)

    def _transfer(self, until: float) -> None:
        """Wait for bytes, and send those that are to be sent. Raises TimeoutError."""
        ready = select.poll()
        ready.register(self.socket, select.POLLIN | (select.POLLOUT if self.outgoing else 0))
        found = ready.poll(max(0.0, until - time.monotonic()) * 1000)
        if not found:
            raise TimeoutError
        if found[0][1] & select.POLLOUT:
            del self.outgoing[: self.socket.send(self.outgoing)]
        elif not (received := self.socket.recv(_CHUNK)):
            raise ConnectionResetError("it has closed the connection")
        else:
            self.incoming += received


class TCPStoreClient(Store):
    """Client of the TCPStore at an address. Raises StoreUnavailable: it is not reached within `deadline` seconds."""

    for_another_run = "each run needs a store of its own:  distflow store --port …"

    def __init__(self, host: str, port: int, deadline: float):
        super().__init__(f"{host}:{port}", deadline)
        self.host, self.port, self.server = host, port, None
        self.connections = threading.local()
        self._connection()

    @classmethod
    def hosting(cls, server: TCPStore, deadline: float) -> TCPStoreClient:
        """Return a client of a TCPStore of this process, which it keeps."""
        client = cls(server.host, server.port, deadline)
        client.server = server
        return client

    def get(self, key: str) -> str | None:
        found = self.put_if(key, _ABSENT, _ABSENT)
        return None if found == _ABSENT else found

    def get_all(self, keys: Sequence[str]) -> list[str]:
        return self._call(_MULTI_GET + self._keys(keys), lambda reply: [reply.text() for _ in keys])

    def put(self, key: str, value: str) -> None:
        self.put_all({key: value})

    def put_all(self, values: Mapping[str, str]) -> None:
        queries = [_SET + self._key(key) + _text(value) for key, value in values.items()]
        self._call(b"".join(queries) + _CHECK + self._keys(()), _Reply.byte)

    def post(self, key: str, value: str) -> None:
        self._call(_SET + self._key(key) + _text(value), _Reply.nothing)

    def put_if(self, key: str, value: str, before: str | None) -> str:
        return self._call(_COMPARE_SET + self._key(key) + _text(before or "") + _text(value), _Reply.text)

    def add(self, key: str, number: int = 1) -> int:
        return self._call(_ADD + self._key(key) + struct.pack("<q", number), _Reply.number)

    def delete(self, *keys: str) -> None:
        self._call(b"".join(_DELETE + self._key(key) for key in keys), lambda reply: [reply.number() for _ in keys])

    def has(self, *keys: str) -> bool:
        return self._call(_CHECK + self._keys(keys), _Reply.byte) == 0

    def list(self, prefix: str) -> dict[str, str]:
        start = _ROOT + self.prefix
        keys = [key.removeprefix(start) for key in self._call(_LIST, _Reply.texts) if key.startswith(start + prefix)]
        values = self.get_all(keys) if keys else []
        return {key: value for key, value in zip(keys, values) if value}  # the others were deleted meanwhile

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._connection().wait(_WAIT + self._keys(keys), until - time.monotonic(), self.deadline.seconds):
            if self.has(*keys):  # torch wakes those that wait for a key at each of its COMPARE_SETs, which `get` is too
                return True
        return False

    def _call(self, query: bytes, read: Reader[T]) -> T:
        return self._connection().call(query, read, self.deadline.seconds)

    def _connection(self) -> _Connection:
        found = getattr(self.connections, "own", None)
        if found is None or not found.usable:
            found = self.connections.own = _Connection(self.host, self.port, self.deadline.seconds)
        return found

    def _key(self, key: str) -> bytes:
        return _text(f"{_ROOT}{self.prefix}{key}")

    def _keys(self, keys: Sequence[str]) -> bytes:
        return struct.pack("<Q", len(keys)) + b"".join(map(self._key, keys))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def store_on(host: str, port: int = 0) -> TCPStore:
    """Host a TCPStore at one address of the machine. `port` 0: the system chooses. Raises OSError: it cannot listen."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - clients do without torch

    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address, family=family, backlog=_BACKLOG) as listening:
        port = listening.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True,
                        master_listen_fd=listening.detach())
