"""Transport of chunks on the authenticated connection itself: no copies but those of the kernel."""

from __future__ import annotations

from typing import Any

import numpy

from distflow.rpc.connection import Connection
from distflow.weights.transport.ends import Moved, PullerEnd, SourceEnd


class Tcp:
    name = "tcp"

    def offer(self) -> dict[str, Any]:
        return {}

    def source_end(self, hello: dict[str, Any]) -> TcpSource:
        return TcpSource()

    def puller_end(self, offer: dict[str, Any], deadline: float) -> TcpPuller:
        return TcpPuller()


class TcpSource(SourceEnd):
    def send(self, connection: Connection, header: dict[str, Any], chunks: numpy.ndarray, moved: Moved) -> None:
        connection.send(header, [chunks.data], moved)


class TcpPuller(PullerEnd):
    def take(self, connection: Connection, size: int, part: int, span: slice, into: numpy.ndarray,
             moved: Moved) -> None:
        if size != len(into):
            raise ConnectionError(f"{connection.peer} sent {size} bytes for chunks of {len(into)}")
        connection.take(into.data, moved)
