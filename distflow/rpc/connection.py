"""Authenticated connection: both ends prove that they know the run's token, then exchange messages (`messages.py`).

Each end answers the other's random challenge (HMAC-SHA256); the token is never sent. What follows is neither encrypted
nor signed: servers belong on loopback or on a private interface. Within a machine, payloads may go through shared
memory (`shared_payloads.py`).
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence

import numpy

from distflow.rpc.errors import NoThread, Refused, RpcError, Unreachable
from distflow.rpc.messages import (
    HEAD_SIZE,
    MACHINE_MEMORY,
    Buffer,
    Header,
    Part,
    frame,
    read_header,
    read_lengths,
    write_parts,
)
from distflow.rpc.shared_payloads import MappedHeap, ServedHeap

_NONCE, _PROOF = 32, 32
_SEGMENTS = 1024  # buffers in one sendmsg, at most (IOV_MAX of Linux)
_BLOCK = 256 << 10  # bytes received at once where each block is used at once
_SMALL = 16 << 10  # buffers that are smaller on average are joined first: a copy costs less than a segment
_MIN_TOKEN = 16
_PIECE = 1 << 20
_NO_THREAD = b"distflow: no thread left".ljust(_NONCE)  # in place of a server's challenge
_INSTANT = 0.001
HANDSHAKE_LIMIT = 5.0  # seconds for all of it, however slowly the peer sends
STALL_LIMIT = 60.0
"""Seconds without a byte within a message after which a client's connection ends: it is stopped, or unreachable."""
Address = tuple[str, int]  # host and port


class ConnectionEnded(Exception):
    """End of the connection between two messages, by the other side; not an error."""


class Connection:
    """One end of a connection, used by one thread at a time. Methods raise `OSError` if it broke or stalled."""

    def __init__(self, sock: socket.socket, peer: str):
        self.sock, self.peer = sock, peer
        self.sent = self.received = 0  # bytes
        self.memory: MappedHeap | ServedHeap | None = None
        self.in_shared_memory = 0  # bytes of the next payload that are there
        self.deadline: float | None = None  # of the handshake; None once the peer is authenticated
        self.timeout, self.on_silence = 0.0, keep_waiting  # of a client; see `set_timeout`

    def send(self, header: Header, buffers: Iterable[Part] = (), moved: Callable[[int], None] | None = None) -> None:
        """Send a message. Parts that are small on average are joined first; else only scattered ones are copied.
        `moved`: called with the bytes of each piece that the kernel has taken, which are at most `_PIECE`."""
        parts = list(buffers)
        total = size = sum(map(len, parts))
        if isinstance(self.memory, MappedHeap):
            header, parts = self.memory.write(self.ask, header, parts, total)
            size = total if parts else 0
        if len(parts) > 8 and size < _SMALL * len(parts):
            buffers = [_join(parts)]
        else:
            buffers = [part if isinstance(part, Buffer) else _join([part]) for part in parts]
        head = frame(header, size)
        self.sent += len(head) + total
        self._send_all([head, *buffers], moved)

    def receive(self, most: int = MACHINE_MEMORY) -> tuple[Header, int]:
        """Return the next header, and the length (at most `most`) of its payload, to be taken before another message.

        Raises:
            ConnectionEnded: the other side has closed.
            Refused: the bytes are not a message, or the payload is longer.
        """
        head = self._receive_exactly(HEAD_SIZE, closing=True)
        try:
            length, payload = read_lengths(head, most)
            header = read_header(self._receive_exactly(length))
        except ValueError as error:
            raise Refused(f"{self.peer} sent {error}") from None
        if isinstance(self.memory, ServedHeap):
            self.in_shared_memory = self.memory.locate(header)
        return header, payload + self.in_shared_memory

    def ask(self, header: Header, buffers: Iterable[Part] = ()) -> Header:
        """Send a request and return the header of its reply, which has no payload."""
        self.send(header, buffers)
        return self.receive(most=0)[0]

    def payload(self, size: int) -> numpy.ndarray:
        """Take a payload; returns [size] uint8, in the heap if this end has one."""
        heap = self.memory if isinstance(self.memory, ServedHeap) else None
        if self.in_shared_memory and heap is not None:
            self.received += size
            self.in_shared_memory = 0
            return heap.payload()
        result = numpy.empty(size, numpy.uint8) if heap is None else heap.heap.take(size)
        self.take(result.data)
        return result

    def take(self, buffer: memoryview, moved: Callable[[int], None] | None = None) -> None:
        """Receive a payload, which must not be in shared memory, into `buffer`. `moved`: called with the bytes of each
        block, while they are in the core's own cache."""
        self._receive_into(buffer, False, moved)

    def skip(self, size: int) -> None:
        self.received += self.in_shared_memory
        size, self.in_shared_memory = size - self.in_shared_memory, 0
        scratch = memoryview(bytearray(min(size, 1 << 20)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self._receive_into(part)
            size -= len(part)

    def set_timeout(self, timeout: float, look: float, on_silence: Callable[[], None]) -> None:
        """Let a client wait `timeout` seconds for each next byte. Meanwhile `on_silence` is called every `look`
        seconds; an `OSError` that it raises ends the wait."""
        self.timeout, self.on_silence = timeout, on_silence
        self.sock.settimeout(min(timeout, look))

    def is_open(self) -> bool:
        """Return whether the other side has not ended the connection. No message of it may be on its way."""
        ended = select.poll()
        ended.register(self.sock, select.POLLIN)
        return not ended.poll(0)

    def shut_down(self) -> None:
        """End the connection from another thread; its own closes it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()

    def _receive_exactly(self, size: int, closing: bool = False) -> bytearray:
        data = bytearray(size)
        self._receive_into(memoryview(data), closing)
        return data

    def _receive_into(self, view: memoryview, closing: bool = False,
                      moved: Callable[[int], None] | None = None) -> None:
        self.received += len(view)
        filled, since = 0, time.monotonic()
        while filled < len(view):
            if self.deadline is not None:
                self.sock.settimeout(_time_left(self.deadline))
            try:
                count = self.sock.recv_into(view[filled : filled + _BLOCK] if moved else view[filled:])
            except BlockingIOError:  # SO_RCVTIMEO
                if closing and not filled:  # silence between two messages is no stall
                    continue
                raise TimeoutError("no byte came in time") from None
            except TimeoutError:
                self._raise_if_stalled(since)
                continue
            if not count:
                if closing and not filled:
                    raise ConnectionEnded
                raise ConnectionResetError("the connection ended within a message")
            filled, since = filled + count, time.monotonic()
            if moved:
                moved(count)

    def _send_all(self, buffers: Sequence[Buffer], moved: Callable[[int], None] | None = None) -> None:
        views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        if moved:  # a call that blocks returns once it has sent all that it was given
            views = [view[at : at + _PIECE] for view in views for at in range(0, len(view), _PIECE)]
        first, since = 0, time.monotonic()
        while first < len(views):
            try:
                sent = self.sock.sendmsg(views[first : first + (1 if moved else _SEGMENTS)])
            except BlockingIOError:  # SO_SNDTIMEO
                raise TimeoutError("it took no byte in time") from None
            except TimeoutError:
                self._raise_if_stalled(since)
                continue
            since = time.monotonic()
            if moved:
                moved(sent)
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def _raise_if_stalled(self, since: float) -> None:
        if self.deadline is not None or time.monotonic() - since >= self.timeout:
            raise TimeoutError("no byte was sent or taken in time")
        self.on_silence()


def _join(parts: Sequence[Part]) -> bytearray:
    result = bytearray(sum(map(len, parts)))
    write_parts(memoryview(result), parts)
    return result


def keep_waiting() -> None:
    """Let a wait go on, as `on_silence`."""


def connect(address: Address, token: bytes, limit: float, look: float = math.inf,
            on_silence: Callable[[], None] = keep_waiting) -> Connection:
    """Connect and authenticate both ends. `limit`: seconds to connect, and without a byte later on; meanwhile
    `on_silence` is called every `look` seconds, as by `Connection.set_timeout`. Raises Unreachable: no process listens
    there, or it does not answer; NoThread: it has no thread for this client. Refused: the other side does not know the
    token."""
    host, port = address
    check_token(token)
    try:
        sock = _open_socket(address, limit, look, on_silence)
    except OSError as error:
        raise Unreachable(f"no process answers at {host}:{port}: {error}") from None
    connection = Connection(sock, f"{host}:{port}")
    with contextlib.ExitStack() as failed:
        failed.callback(sock.close)
        try:
            _set_up(connection, min(limit, HANDSHAKE_LIMIT))
            theirs, ours = bytes(connection._receive_exactly(_NONCE)), secrets.token_bytes(_NONCE)
            if theirs == _NO_THREAD:
                raise NoThread(f"the process at {connection.peer} has no thread left for another connection: its "
                               "user's limit (`ulimit -u`) or its control group's (`pids.max`) is reached, or its "
                               "memory is full")
            connection._send_all([ours + _proof(token, b"client", theirs, ours)])
            answer = connection._receive_exactly(_PROOF, closing=True)
        except ConnectionEnded:
            raise Refused(f"{connection.peer} refused this process: its token is not that of the run") from None
        except OSError as error:
            raise Unreachable(f"{connection.peer} does not answer as a server of distflow: "
                              f"{error or 'no byte came'}") from None
        if not hmac.compare_digest(answer, _proof(token, b"server", theirs, ours)):
            raise Refused(f"{connection.peer} does not know this run's token; it may belong to another run")
        connection.deadline = None
        connection.set_timeout(limit, look, on_silence)
        failed.pop_all()
    return connection


def _open_socket(address: Address, limit: float, look: float, on_silence: Callable[[], None]) -> socket.socket:
    until = time.monotonic() + limit
    while True:
        left = until - time.monotonic()
        try:
            return socket.create_connection(address, timeout=max(min(left, look), _INSTANT))
        except TimeoutError:
            if left <= look:
                raise
        on_silence()


def accept_client(sock: socket.socket, peer: str, token: bytes) -> tuple[Connection, Header]:
    """Authenticate a client and receive its first message; from then on it may be silent between two requests. Raises
    `Refused` if the peer does not know the token."""
    connection = Connection(sock, peer)
    _set_up(connection, HANDSHAKE_LIMIT)
    ours = secrets.token_bytes(_NONCE)
    connection._send_all([ours])
    answer = bytes(connection._receive_exactly(_NONCE + _PROOF))
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(token, b"client", ours, theirs)):
        raise Refused(f"{peer} does not know the token of this run")
    connection._send_all([_proof(token, b"server", ours, theirs)])
    hello, _ = connection.receive(most=0)
    connection.deadline = None
    sock.settimeout(None)
    limit = struct.pack("ll", int(STALL_LIMIT), round(STALL_LIMIT % 1 * 1e6))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # the kernel's limits cost no call, unlike settimeout
        sock.setsockopt(socket.SOL_SOCKET, option, limit)
    return connection, hello


def turn_away(sock: socket.socket) -> None:
    """Tell a client that there is no thread for it, and hang up."""
    with contextlib.suppress(OSError), sock:
        sock.setblocking(False)
        sock.send(_NO_THREAD)


def check_token(token: bytes) -> None:
    """Raise `RpcError` if the token could be guessed."""
    if len(token) < _MIN_TOKEN:
        raise RpcError(f"the run's token has {len(token)} bytes; it needs at least {_MIN_TOKEN}, as "
                        f"secrets.token_bytes(32) makes them")


def _proof(token: bytes, side: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.digest(token, b"distflow dock " + side + server + client, "sha256")


def _set_up(connection: Connection, limit: float) -> None:
    connection.deadline = time.monotonic() + limit
    connection.sock.settimeout(limit)
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _time_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake took too long")
    return left
