"""The two ends of a connection, and what most transports have in common there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy

from distflow.rpc.connection import Connection

Header = dict[str, Any]
Moved = Callable[[int], None]
"""Called with the number of bytes that came, in their order and as they come."""


class SourceEnd:
    """A source's end, for one connection. `reply`: what the puller must know of it."""

    reply: Header = {}

    def give(self, line: Connection, header: Header, chunks: numpy.ndarray, moved: Moved) -> None:
        """Answer a request, with this header. `moved`: told of what the puller has taken, where that takes long."""
        raise NotImplementedError

    def tell(self, memory: Mapping[int, numpy.ndarray]) -> Header:
        """What goes into every answer about a version whose parts lie in `memory`."""
        return {}

    def close(self) -> None:
        """The connection has ended."""


class PullerEnd:
    """A puller's end, for one connection. `said`: what the source must know of it; `run`: bytes of chunks that are
    asked for at once if they lie together: few requests, and still one chunk lost at most."""

    said: Header = {}
    run = 16 << 20

    def met(self, reply: Header) -> None:
        """What the source replied to `said`."""

    def hear(self, answer: Header) -> None:
        """Whatever it answers about a version.

        Raises:
            OSError: what it said before is true no more.
        """

    def show(self, part: int) -> numpy.ndarray | None:
        """The source's own memory of a part, which stays as it is until the last view of it is gone, and in which
        chunks need not be moved: those that are asked for from now on may be used there. None: they must come.

        Raises:
            OSError: there is such memory, but it cannot be had.
        """
        return None

    def take(self, line: Connection, size: int, part: int, span: slice, into: numpy.ndarray, moved: Moved) -> None:
        """Put the bytes `span` of a part, as they were asked for, where they belong; `size` of them are on the line.

        Raises:
            OSError: the connection broke, or moved no byte within its limit.
        """
        raise NotImplementedError

    def rest(self) -> None:
        """Nothing more is asked for, for the time being."""

    def close(self) -> None:
        """No byte comes any more."""
        self.rest()
