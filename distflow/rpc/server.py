"""A port at which only those who know the run's token are heard, each connection in a thread of its own.

Connections that have not proved themselves yet: few at a time, and none for long.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from distflow.dock.errors import DockError, Refused
from distflow.dock.selection import Address
from distflow.rpc.connection import Connection, ConnectionEnded, accept_client, check_token

MOST = 256
"""Connections before their proof; each costs a thread."""
GRACE = 0.5
"""Seconds that a connection has for its proof even if all places are taken: it needs some milliseconds."""
_ABORT = struct.pack("ii", 1, 0)


class HandshakeLimiter:
    """Who stands before it. When all places are taken, whoever has stood there longest must go."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.outside: dict[socket.socket, float] = {}
        """Since when, oldest first."""

    def arrive(self, sock: socket.socket) -> None:
        """Take a place; waits at most `GRACE` for one."""
        with self.changed:
            while len(self.outside) >= MOST:
                oldest, since = next(iter(self.outside.items()))
                if (left := since + GRACE - time.monotonic()) > 0:
                    self.changed.wait(left)
                    continue
                del self.outside[oldest]
                _turn_away(oldest)
            self.outside[sock] = time.monotonic()

    def leave(self, sock: socket.socket) -> None:
        """It is inside now, or gone."""
        with self.changed:
            self.outside.pop(sock, None)
            self.changed.notify()

    def close(self) -> None:
        """Turn all away."""
        with self.changed:
            for sock in self.outside:
                _turn_away(sock)


def _turn_away(sock: socket.socket) -> None:
    """Wake its thread, which closes it. The other side sees a broken connection, not a refusal: it may try again."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        sock.shutdown(socket.SHUT_RD)


_PAUSE = 0.5


class Server:
    """Listens from `start` to `close`.

    Args:
        serve: is given each line that has proved itself, and its first message; the line is closed when it returns.
        log: hears of those who are refused.

    Raises:
        DockError: the port is taken, or the token is too short.
    """

    def __init__(self, token: bytes, host: str, port: int, serve: Callable[[Connection, dict[str, Any]], None],
                 log: logging.Logger):
        check_token(token)
        self.token, self.serve, self.log = token, serve, log
        self.door, self.lines, self.over = HandshakeLimiter(), set[Connection](), False
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        try:
            self.socket = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise DockError(f"cannot listen at {host}:{port}: {error}") from None
        self.address: Address = (host, self.socket.getsockname()[1])

    def start(self) -> Address:
        """Serve in threads of this process; returns where."""
        self.thread = threading.Thread(target=self._accept, name="listener", daemon=True)
        self.thread.start()
        return self.address

    def close(self) -> None:
        """Stop listening and hang up."""
        self.over = True
        with contextlib.suppress(OSError):  # closing alone leaves a thread in `accept`, and with it the port
            self.socket.shutdown(socket.SHUT_RDWR)
        if self.thread is not None:
            self.thread.join()
        self.socket.close()
        self.door.close()
        with self.lock:
            for line in self.lines:
                line.hang_up()

    def _accept(self) -> None:
        while not self.over:
            try:
                sock, (host, port, *_) = self.socket.accept()
            except OSError as error:
                if not self.over:  # too many open files, perhaps: others may end
                    self.log.warning("%s:%d cannot take a connection: %s", *self.address, error)
                    time.sleep(_PAUSE)
                continue
            self.door.arrive(sock)
            peer = f"{host}:{port}"
            try:
                threading.Thread(target=self._meet, args=(sock, peer), name="client", daemon=True).start()
            except RuntimeError as error:
                self.log.warning("%s:%d has no thread for %s: %s", *self.address, peer, error)
                self.door.leave(sock)
                sock.close()

    def _meet(self, sock: socket.socket, peer: str) -> None:
        """One connection: its proof, then whatever it is about."""
        try:
            line, hello = accept_client(sock, peer, self.token)
        except (OSError, ValueError, Refused, ConnectionEnded) as error:
            self.log.warning("refused %s: %s", peer, str(error) or type(error).__name__)
            sock.close()
            return
        finally:
            self.door.leave(sock)
        with self.lock:
            self.lines.add(line)
        try:
            if not self.over:
                self.serve(line, hello)
        finally:
            with self.lock:
                self.lines.discard(line)
            line.close()
