"""Server of authenticated connections, a thread for each; few are in their handshake at a time, and none for long."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from distflow.rpc.connection import Address, Connection, ConnectionEnded, accept_client, check_token, turn_away
from distflow.rpc.errors import Refused, RpcError

MOST = 256  # connections in their handshake; each costs a thread
GRACE = 0.5  # seconds that a handshake has even when `MOST` are pending: it needs some milliseconds
_ABORT = struct.pack("ii", 1, 0)


class HandshakeLimiter:
    """Connections in their handshake; when there are too many, the oldest is aborted."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.pending: dict[socket.socket, float] = {}  # start of each, oldest first

    def admit(self, sock: socket.socket) -> None:
        """Add a connection; wait at most `GRACE` for others to finish."""
        with self.changed:
            while len(self.pending) >= MOST:
                oldest, since = next(iter(self.pending.items()))
                if (left := since + GRACE - time.monotonic()) > 0:
                    self.changed.wait(left)
                    continue
                del self.pending[oldest]
                _abort(oldest)
            self.pending[sock] = time.monotonic()

    def remove(self, sock: socket.socket) -> None:
        with self.changed:
            self.pending.pop(sock, None)
            self.changed.notify()

    def close(self) -> None:
        with self.changed:
            for sock in self.pending:
                _abort(sock)


def _abort(sock: socket.socket) -> None:
    """Wake the socket's thread, which closes it. The peer sees a broken connection, not a refusal: it may try again."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        sock.shutdown(socket.SHUT_RD)


_PAUSE = 0.5


class Server:
    """Listening socket from `start` to `close`. `serve` is called with each authenticated connection and its first
    message; the connection is closed when it returns. `log` gets a warning for each refused peer. Raises `RpcError`:
    the port is taken, or the token is too short."""

    def __init__(self, token: bytes, host: str, port: int, serve: Callable[[Connection, dict[str, Any]], None],
                 log: logging.Logger):
        check_token(token)
        self.token, self.serve, self.log = token, serve, log
        self.handshakes, self.connections, self.over = HandshakeLimiter(), set[Connection](), False
        self.turns_away = False  # whether a client has been turned away for want of a thread
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        try:
            self.socket = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise RpcError(f"cannot listen at {host}:{port}: {error}") from None
        self.address: Address = (host, self.socket.getsockname()[1])

    def start(self) -> Address:
        self.thread = threading.Thread(target=self._accept, name="listener", daemon=True)
        self.thread.start()
        return self.address

    def close(self) -> None:
        self.over = True
        with contextlib.suppress(OSError):  # closing alone leaves a thread in `accept`, and with it the port
            self.socket.shutdown(socket.SHUT_RDWR)
        if self.thread is not None:
            self.thread.join()
        self.socket.close()
        self.handshakes.close()
        with self.lock:
            for connection in self.connections:
                connection.shut_down()

    def _accept(self) -> None:
        while not self.over:
            try:
                sock, (host, port, *_) = self.socket.accept()
            except OSError as error:
                if not self.over:  # too many open files, perhaps: others may end
                    self.log.warning("%s:%d cannot take a connection: %s", *self.address, error)
                    time.sleep(_PAUSE)
                continue
            self.handshakes.admit(sock)
            peer = f"{host}:{port}"
            try:
                threading.Thread(target=self._handle, args=(sock, peer), name="client", daemon=True).start()
            except (RuntimeError, MemoryError) as error:
                if not self.turns_away:  # clients try again: the reason is named once
                    self.log.warning("%s:%d has no thread for %s and others: %s", *self.address, peer, error)
                self.turns_away = True
                self.handshakes.remove(sock)
                turn_away(sock)

    def _handle(self, sock: socket.socket, peer: str) -> None:
        try:
            connection, hello = accept_client(sock, peer, self.token)
        except (OSError, ValueError, Refused, ConnectionEnded) as error:
            self.log.warning("refused %s: %s", peer, str(error) or type(error).__name__)
            sock.close()
            return
        finally:
            self.handshakes.remove(sock)
        with self.lock:
            self.connections.add(connection)
        try:
            if not self.over:
                self.serve(connection, hello)
        finally:
            with self.lock:
                self.connections.discard(connection)
            connection.close()
