"""A link that can be cut: a TCP proxy which then forwards nothing, and closes nothing."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards connections to `port` of this machine."""

    def __init__(self, port: int):
        self.target, self.left = port, 1 << 60
        self.cut, self.healthy = threading.Event(), threading.Event()
        self.healthy.set()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, size: int) -> None:
        """Forward so many more bytes to the side that connected."""
        self.left = size

    def heal(self) -> None:
        """Connections that were cut stay so; new ones are forwarded."""
        self.left = 1 << 60
        self.healthy.set()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        self.healthy.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.server.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                for pair in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counted:
                    self.left -= len(data)
                    if self.left <= 0:
                        self.healthy.clear()
                        self.cut.set()
                if not self.healthy.is_set():
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
