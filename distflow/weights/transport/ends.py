"""The two ends of a transfer, with the behaviour that most transports share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy

from distflow.rpc.connection import Connection

Header = dict[str, Any]
Moved = Callable[[int], None]
"""Called with the number of bytes received, in their order."""


class SourceEnd:
    """Source's end of one connection. `reply`: its answer to the puller's `hello`."""

    reply: Header = {}
    shared = False  # whether to serve one puller takes nothing from another

    def send(self, connection: Connection, header: Header, chunks: numpy.ndarray, moved: Moved) -> None:
        """Answer a request, with this header. `moved`: called with bytes that are on their way, as they are."""
        raise NotImplementedError

    def describe(self, memory: Mapping[int, numpy.ndarray]) -> Header:
        """Return what is added to every answer about a version whose parts lie in `memory`."""
        return {}

    def close(self) -> None:
        ...


class PullerEnd:
    """Puller's end of one connection. `hello`: what the source must know of it; `run`: bytes of chunks per request if
    they lie together: few requests, and still one chunk lost at most."""

    hello: Header = {}
    run = 16 << 20

    def connect(self, reply: Header) -> None:
        ...

    def on_reply(self, answer: Header) -> None:
        """Handle an answer about a version. Raises `OSError` if what was announced before is no longer true."""

    def map(self, part: int) -> numpy.ndarray | None:
        """Return the source's own memory of a part, which stays unchanged until the last view of it is gone, and in
        which chunks requested from now on may be used. None: they must be transferred. Raises `OSError` if there is
        such memory, but it cannot be opened."""
        return None

    def take(self, connection: Connection, size: int, part: int, span: slice, into: numpy.ndarray,
             moved: Moved) -> None:
        """Write the bytes `span` of a part, as requested, into `into`; `size` of them are on the connection."""
        raise NotImplementedError

    def pause(self) -> None:
        """Release what only requests need; there will be none for a while."""

    def close(self) -> None:
        self.pause()
