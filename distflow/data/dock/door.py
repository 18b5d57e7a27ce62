"""Connections that have not proved themselves yet: few at a time, and none for long."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

MOST = 256
"""Connections before their proof; each costs a thread."""
GRACE = 0.5
"""Seconds that a connection has for its proof even if all places are taken: it needs some milliseconds."""
_ABORT = struct.pack("ii", 1, 0)


class Door:
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
