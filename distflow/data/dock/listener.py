"""A port at which only those who know the run's token are heard, each connection in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from distflow.data.dock.door import Door
from distflow.data.dock.errors import DockError, Refused
from distflow.data.dock.layout import Address
from distflow.data.dock.line import Closed, Line, check_token, welcome

_PAUSE = 0.5


class Listener:
    """Listens from `start` to `close`.

    Args:
        serve: is given each line that has proved itself, and its first message; the line is closed when it returns.
        log: hears of those who are refused.

    Raises:
        DockError: the port is taken, or the token is too short.
    """

    def __init__(self, token: bytes, host: str, port: int, serve: Callable[[Line, dict[str, Any]], None],
                 log: logging.Logger):
        check_token(token)
        self.token, self.serve, self.log = token, serve, log
        self.door, self.lines, self.over = Door(), set[Line](), False
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
            line, hello = welcome(sock, peer, self.token)
        except (OSError, ValueError, Refused, Closed) as error:
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
