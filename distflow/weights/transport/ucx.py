"""Transport of chunks by UCX; each connection has a worker that its thread drives: no event loop, no listening port.

UCX knows no token. So the authenticated connection carries the addresses of the two workers and a random tag; only
messages with this tag are ever matched. A peer that dies is noticed in milliseconds; one that hangs, or is cut off,
only by the deadline without a piece of a chunk.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy

from distflow.rpc.connection import Connection
from distflow.weights.errors import NoTransport
from distflow.weights.transport.ends import Moved, PullerEnd, SourceEnd

_PIECE = 1 << 20
"""Bytes of a message: what must be received within a deadline."""
_POLL = 50
"""Milliseconds of a wait for the network; the next byte ends it."""
SETTINGS = {"TCP_TX_SEG_SIZE": "512k", "TCP_RX_SEG_SIZE": "512k"}
"""Three times as fast as UCX's own over plain TCP. Variables of the environment, as UCX_TLS, come first."""
STALLED = 60.0
_set_by_ucxx: set[str] = set()
"""Variables of the environment, when it was imported."""


class Ucx:
    """UCX by the package `ucxx`. Its workers listen on all interfaces, but for those of a `host` on loopback. Raises
    NoTransport: it finds no usable device, or cannot be loaded, which takes a second; here if it was requested by name
    (`wished`), else when it is first used."""

    name = "ucx"

    def __init__(self, host: str = "127.0.0.1", wished: bool = False) -> None:
        self.devices = devices_of(host)
        if wished:
            _context(self.devices)

    def offer(self) -> dict[str, Any]:
        return {}

    def source_end(self, hello: dict[str, Any]) -> UcxSource:
        return UcxSource(hello, self.devices)

    def puller_end(self, offer: dict[str, Any], deadline: float) -> UcxPuller:
        return UcxPuller(deadline, self.devices)


def devices_of(host: str) -> dict[str, str]:
    """Return UCX's setting of network devices for a process that others reach at `host`."""
    return {"NET_DEVICES": "lo"} if host == "localhost" or host.startswith("127.") else {}


def _context(devices: dict[str, str]) -> tuple[Any, Any]:
    """Return the library, and a context of it. Raises: NoTransport."""
    before = set(os.environ)
    try:
        # its event loops would need a thread more, and time between messages
        from ucxx._lib import libucxx  # type: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        raise NoTransport(f"the transport `ucx` cannot be loaded: {error}. Reinstall `ucxx-cu12`, or set  "
                          "transport: tcp") from None
    _set_by_ucxx.update(os.environ.keys() - before)
    given = {name: value for name, value in (SETTINGS | devices).items() if f"UCX_{name}" not in os.environ}
    try:
        return libucxx, libucxx.UCXContext(given)
    except libucxx.UCXError as error:
        own = ", ".join(f"{name}={value}" for name, value in os.environ.items()
                        if name.startswith("UCX_") and name not in _set_by_ucxx) or "none"
        raise NoTransport(f"the transport `ucx` cannot start: {error}. Its variables in the environment: {own}. "
                          "Correct them, or set  transport: tcp") from None


class _UcxConnection:
    """UCX worker, with its endpoint once the other's address is known."""

    def __init__(self, tag: int, timeout: float, devices: dict[str, str]):
        self.timeout = timeout
        self.ucx, context = _context(devices)
        self.tag = self.ucx.UCXXTag(tag)
        self.worker: Any = self.ucx.UCXWorker(context)
        self.worker.init_blocking_progress_mode()
        self.endpoint: Any = None

    @property
    def address(self) -> bytes:
        return self.worker.address.tobytes()

    def connect(self, address: bytes) -> None:
        try:
            found = self.ucx.UCXAddress.create_from_buffer(address)
            self.endpoint = self.ucx.UCXEndpoint.create_from_worker_address(self.worker, found, True)
        except self.ucx.UCXError as error:
            raise ConnectionError(f"UCX: {error}") from None

    def move(self, post: Callable[[Any, Any], Any], chunk: numpy.ndarray, moved: Callable[[int], None]) -> None:
        """Send or receive a chunk in pieces. Raises `OSError`: the other end is gone, or moved no piece in time."""
        from ucxx._lib.arr import Array  # type: ignore[reportMissingImports]

        pieces = [chunk[begin : begin + _PIECE] for begin in range(0, len(chunk), _PIECE)]
        try:
            for piece, request in [(piece, post(Array(piece), self.tag)) for piece in pieces]:
                deadline = time.monotonic() + self.timeout
                while not request.completed:
                    self.worker.progress_worker_event(_POLL)
                    if not self.endpoint.alive:
                        self.endpoint.raise_on_error()
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"nothing moved for {self.timeout:g} s")
                request.check_error()
                moved(len(piece))
        except self.ucx.UCXError as error:
            raise ConnectionError(f"UCX: {error}") from None

    def close(self) -> None:
        """End all transfers, so that memory of what was under way may be used for something else."""
        if self.endpoint is not None:
            self.worker.cancel_inflight_requests()
            self.endpoint.close_blocking()
        self.endpoint = self.worker = None


class UcxSource(SourceEnd):
    def __init__(self, hello: dict[str, Any], devices: dict[str, str]):
        self.end = _UcxConnection(int(hello["tag"]), STALLED, devices)
        self.end.connect(hello["worker"])
        self.reply = {"worker": self.end.address}

    def send(self, connection: Connection, header: dict[str, Any], chunks: numpy.ndarray, moved: Moved) -> None:
        connection.send(header)
        self.end.move(self.end.endpoint.tag_send, chunks, moved)

    def close(self) -> None:
        self.end.close()


class UcxPuller(PullerEnd):
    run = 64 << 20
    """Between two of them nothing is under way: with runs of 16 MiB a pull of 512 MiB had 0.82 of the bare transport's
    rate on two cores, with these 0.96."""

    def __init__(self, deadline: float, devices: dict[str, str]):
        tag = secrets.randbits(63)
        self.end = _UcxConnection(tag, deadline, devices)
        self.hello = {"tag": tag, "worker": self.end.address}

    def connect(self, reply: dict[str, Any]) -> None:
        self.end.connect(reply["worker"])

    def take(self, connection: Connection, size: int, part: int, span: slice, into: numpy.ndarray,
             moved: Moved) -> None:
        self.end.move(self.end.endpoint.tag_recv, into, moved)

    def close(self) -> None:
        self.end.close()
