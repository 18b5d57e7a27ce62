"""HTTP server with tokens and limits, in a thread of its own; what answers a request is a subclass's.

Nothing of a request without a known token is looked at beyond its head.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any

from workers.endpoint.messages import RequestRefused

MAX_BODY = 1 << 20  # bytes of a request, by default
_MAX_HEAD = 1 << 16  # bytes of a request before its body
_MAX_CONNECTIONS = 512  # beyond these the one that has been idle longest is closed
_HEAD_SECONDS, _BODY_SECONDS, _WRITE_SECONDS, _DISCARD_SECONDS = 120.0, 30.0, 30.0, 2.0
_GONE = (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
_KEEPS = (HTTPStatus.OK, HTTPStatus.ACCEPTED, HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT)
"""Statuses after which a connection may serve another request."""
Reply = tuple[int, str, bytes]  # status, content type, body
ReadBody = Callable[[], Awaitable[bytes]]  # raises RequestRefused: the body is too large, or has no length


class HttpServer(ABC):
    """HTTP server on `host`; `port` 0 takes a free one. Raises OSError: the port is taken."""

    max_body, body_seconds = MAX_BODY, _BODY_SECONDS

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.idle: dict[asyncio.StreamWriter, None] = {}  # connections between two requests, oldest first
        self.connections = 0
        self.loop = asyncio.new_event_loop()
        opened: Future[int] = Future()
        threading.Thread(target=self._run, args=(host, port, opened), name="endpoint", daemon=True).start()
        self.port = opened.result()

    @abstractmethod
    def sender(self, token: str) -> Any:
        """Return who sends a request, by its token; None: the token is not known."""

    @abstractmethod
    async def reply(self, sender: Any, method: str, path: str, headers: dict[str, str], body: ReadBody) -> Reply:
        """Return the answer to a request. Raises RequestRefused."""

    @abstractmethod
    def refused(self, sender: Any, error: RequestRefused) -> Reply:
        """Return the answer to a request that is refused, also for want of a sender."""

    def keeps(self, sender: Any) -> bool:
        """Return whether a sender may send more on its connection."""
        return sender is not None

    def call_in(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the server's thread. Thread-safe."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def _run(self, host: str, port: int, opened: Future[int]) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            server = self.loop.run_until_complete(asyncio.start_server(self._connected, host, port, limit=_MAX_HEAD))
        except OSError as error:
            opened.set_exception(error)
            return
        opened.set_result(server.sockets[0].getsockname()[1])
        self.loop.run_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.connections > _MAX_CONNECTIONS and self.idle:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.transport.abort()
        try:
            while await self._exchange(reader, writer):
                pass
        except _GONE:
            pass
        finally:
            self.connections -= 1
            self.idle.pop(writer, None)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether another may follow on the connection."""
        self.idle[writer] = None
        async with asyncio.timeout(_HEAD_SECONDS):
            method, path, headers = _read_head(await reader.readuntil(b"\r\n\r\n"))
        sender = self.sender(headers.get("authorization", "").partition("Bearer ")[2].strip())
        if sender is not None:
            self.idle.pop(writer, None)
        body = functools.partial(self._read_body, reader, writer, headers)
        try:
            status, kind, content = await self.reply(sender, method, path, headers, body)
        except RequestRefused as error:
            status, kind, content = self.refused(sender, error)
        keeps = status == HTTPStatus.OK or (status in _KEEPS and self.keeps(sender))
        keeps = keeps and headers.get("connection", "").lower() != "close"
        writer.write(_head_of(status, kind, len(content), keeps) + content)
        async with asyncio.timeout(_WRITE_SECONDS):
            await writer.drain()
        if not keeps and status != HTTPStatus.OK:
            await _discard(reader, writer, self.max_body)
        return keeps

    async def _read_body(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                         headers: dict[str, str]) -> bytes:
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not (length.isascii() and length.isdigit()):
            raise RequestRefused("a body needs a Content-Length", "length_required", 411)
        if len(length) > len(str(self.max_body)) or int(length) > self.max_body:
            raise RequestRefused(f"a body may have {self.max_body} bytes, and this one has {length[:20]}", "too_large",
                                 413)
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        async with asyncio.timeout(self.body_seconds):
            return await reader.readexactly(int(length))


def _read_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Return the method, the path without its query, and the headers, their names in lower case."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    pairs = (line.partition(":") for line in lines)
    return method, rest.partition(" ")[0].partition("?")[0], {name.strip().lower(): value.strip()
                                                              for name, _, value in pairs}


async def _discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int) -> None:
    """Read what is left of a refused request: to close before would reset the connection, and its sender might not see
    the reason."""
    writer.write_eof()
    async with asyncio.timeout(_DISCARD_SECONDS):
        while left > 0 and (data := await reader.read(_MAX_HEAD)):
            left -= len(data)


def _head_of(status: int, kind: str, length: int, keeps: bool) -> bytes:
    more = "" if keeps else "Connection: close\r\n"
    retry = "" if status == HTTPStatus.OK else "x-should-retry: false\r\n"
    return (f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n"
            f"{more}{retry}\r\n").encode()
