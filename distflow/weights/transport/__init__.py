"""How chunks get from one process to another. A line (`distflow.data.dock.line`) comes first in every case: it proves
both ends and carries requests; the transport carries the bytes.

    memory    both on one machine: the puller copies out of the source's memory
    ucx       UCX: RDMA where there is any, TCP otherwise; needs the package that the extra `ucx` installs
    tcp       the line itself; always there

`auto` takes the first of them that both ends can use, and says which. One that is asked for by name is used, or is an
error: nothing falls back in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy

from distflow.data.dock.line import Line
from distflow.data.warehouse import machine_name
from distflow.schema.errors import did_you_mean
from distflow.weights.buffers import Buffers
from distflow.weights.errors import NoTransport
from distflow.weights.transport.memory import Memory
from distflow.weights.transport.tcp import Tcp
from distflow.weights.transport.ucx import Ucx, is_installed

Header = dict[str, Any]
Moved = Callable[[int], None]
"""Called with the number of bytes that came, in their order and as they come."""
WINDOW = 2
"""Chunks that a puller asks for ahead: while one is verified, the next is under way."""


class Outlet(Protocol):
    """A source's end, for one connection. `reply`: what the puller must know of it."""

    reply: Header

    def give(self, line: Line, header: Header, chunk: numpy.ndarray) -> None:
        """Answer a request, with this header. The chunk stays as it is until `WINDOW` more were asked for, or the
        puller has left."""

    def rest(self) -> None:
        """The puller has all that it has asked for."""

    def close(self) -> None: ...


class Inlet(Protocol):
    """A puller's end, for one connection. `said`: what the source must know of it."""

    said: Header

    def met(self, reply: Header) -> None:
        """What the source replied to `said`."""

    def take(self, line: Line, header: Header, size: int, into: numpy.ndarray, moved: Moved) -> None:
        """Put what was answered (a header, and `size` bytes on the line) where it belongs.

        Raises:
            OSError: the connection broke, or moved no byte within its limit.
        """

    def close(self) -> None: ...


class Transport(Protocol):
    """A process's way to move bytes. `offer`: what its sources tell about it, None where it cannot be used."""

    name: str

    def offer(self) -> Header | None: ...

    def outlet(self, said: Header) -> Outlet: ...

    def inlet(self, offer: Header, deadline: float) -> Inlet | None:
        """None: not with this source."""


def transports(wish: str, buffers: Buffers, token: bytes, host: str = "127.0.0.1") -> dict[str, Transport]:
    """Those that this process can use, best first. `host`: the address at which others reach it.

    Raises:
        NoTransport: `wish` is none of them, or cannot be used here.
    """
    made: dict[str, Callable[[], Transport]] = {"memory": lambda: Memory(buffers, token), "ucx": lambda: Ucx(host),
                                                  "tcp": Tcp}
    if wish != "auto" and wish not in made:
        raise NoTransport(f"there is no transport `{wish}`. {did_you_mean(wish, ['auto', *made])}")
    if wish == "memory" and not machine_name():
        raise NoTransport("the transport `memory` needs memfd_create and /proc, which this system does not have, or "
                          "DISTFLOW_MACHINE is set to nothing. Set  transport: auto")
    there = {"memory": bool(machine_name()), "ucx": is_installed(), "tcp": True}
    return {name: make() for name, make in made.items() if name == wish or (wish == "auto" and there[name])}
