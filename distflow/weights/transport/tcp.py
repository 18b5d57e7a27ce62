"""Chunks on the line itself: no copies but those of the kernel."""

from __future__ import annotations

from typing import Any

import numpy

from distflow.rpc.connection import Connection
from distflow.weights.transport.ends import Moved, PullerEnd, SourceEnd

_BLOCK = 256 << 10
"""Bytes that are taken at once: still in the core's own cache when their checksum is made."""


class Tcp:
    """The transport that is always there."""

    name = "tcp"

    def offer(self) -> dict[str, Any]:
        return {}

    def outlet(self, said: dict[str, Any]) -> TcpSource:
        return TcpSource()

    def inlet(self, offer: dict[str, Any], deadline: float) -> TcpPuller:
        return TcpPuller()


class TcpSource(SourceEnd):
    def give(self, line: Connection, header: dict[str, Any], chunks: numpy.ndarray, moved: Moved) -> None:
        line.send(header, [memoryview(chunks)])


class TcpPuller(PullerEnd):
    def take(self, line: Connection, size: int, part: int, span: slice, into: numpy.ndarray, moved: Moved) -> None:
        if size != len(into):
            raise ConnectionError(f"{line.peer} sent {size} bytes for chunks of {len(into)}")
        line.received += size
        view, filled = memoryview(into), 0
        while filled < size:
            count = line.sock.recv_into(view[filled : filled + _BLOCK])
            if not count:
                raise ConnectionResetError("the connection ended within a chunk")
            filled += count
            moved(count)
