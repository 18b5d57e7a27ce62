"""Chunks on the line itself: no copies but those of the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from distflow.data.dock.line import Line


class Tcp:
    """The transport that is always there."""

    name = "tcp"

    def offer(self) -> dict[str, Any]:
        return {}

    def outlet(self, said: dict[str, Any]) -> TcpOutlet:
        return TcpOutlet()

    def inlet(self, offer: dict[str, Any], deadline: float) -> TcpInlet:
        return TcpInlet()


class TcpOutlet:
    reply: dict[str, Any] = {}

    def give(self, line: Line, header: dict[str, Any], chunk: numpy.ndarray) -> None:
        line.send(header, [memoryview(chunk)])

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


class TcpInlet:
    said: dict[str, Any] = {}

    def met(self, reply: dict[str, Any]) -> None:
        pass

    def take(self, line: Line, header: dict[str, Any], size: int, into: numpy.ndarray,
             moved: Callable[[int], None]) -> None:
        if size != len(into):
            raise ConnectionError(f"{line.peer} sent {size} bytes for a chunk of {len(into)}")
        line.received += size
        view, filled = memoryview(into), 0
        while filled < size:
            count = line.sock.recv_into(view[filled:])
            if not count:
                raise ConnectionResetError("the connection ended within a chunk")
            filled += count
            moved(count)

    def close(self) -> None:
        pass
