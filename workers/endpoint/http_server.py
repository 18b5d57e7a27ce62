"""HTTP server with tokens and limits, by aiohttp, in a thread of its own; what answers a request is a subclass's.

Nothing of a request without a known token is looked at beyond its head.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from workers.endpoint.messages import RequestRefused

MAX_BODY = 1 << 20  # bytes of a request, by default
_MAX_CONNECTIONS = 512  # beyond these the one that has been idle longest is closed
_KEEPALIVE_SECONDS, _BODY_SECONDS, _DISCARD_SECONDS = 120.0, 30.0, 2.0
_KEEPS = (HTTPStatus.OK, HTTPStatus.ACCEPTED, HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT)
"""Statuses after which a connection may serve another request."""
_LOG = logging.getLogger(__name__)
_LOG.addFilter(lambda record: not record.exc_info or not isinstance(
    record.exc_info[1], HttpProcessingError | web.RequestPayloadError | ConnectionError))  # a client's fault
Reply = tuple[int, str, bytes]  # status, content type, body
ReadBody = Callable[[], Awaitable[bytes]]  # raises RequestRefused: the body is too large


class HttpServer(ABC):
    """HTTP server on `host`; `port` 0 takes a free one. Raises OSError: the port is taken."""

    max_body, body_seconds = MAX_BODY, _BODY_SECONDS

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.idle: dict[Any, None] = {}  # transports of connections that no request holds, oldest first
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="endpoint", daemon=True).start()
        try:
            self.port = asyncio.run_coroutine_threadsafe(self._open(host, port), self.loop).result()
        except OSError:
            self.call_in(self.loop.stop)
            raise

    @abstractmethod
    def sender(self, token: str) -> Any:
        """Return who sends a request, by its token; None: the token is not known."""

    @abstractmethod
    async def reply(self, sender: Any, method: str, path: str, headers: Mapping[str, str], body: ReadBody) -> Reply:
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

    async def _open(self, host: str, port: int) -> int:
        server = _Connections(self, access_log=None, logger=_LOG, auto_decompress=False, max_line_size=1 << 16,
                              max_field_size=1 << 11,  # of 128: a head without a token holds little memory
                              keepalive_timeout=_KEEPALIVE_SECONDS, lingering_time=_DISCARD_SECONDS)
        return (await self.loop.create_server(server, host, port)).sockets[0].getsockname()[1]

    async def answer(self, request: web.BaseRequest) -> web.Response:
        sender = self.sender(request.headers.get("Authorization", "").partition("Bearer ")[2].strip())
        if sender is not None:
            self.idle.pop(request.transport, None)
        body = functools.partial(self._read_body, request)
        try:
            status, kind, content = await self.reply(sender, request.method, request.path, request.headers, body)
        except RequestRefused as error:
            status, kind, content = self.refused(sender, error)
        if request.transport is not None:
            self.idle[request.transport] = None  # also while its client does not read the answer
        response = web.Response(status=status, body=content, headers={"Content-Type": kind})
        if status != HTTPStatus.OK:
            response.headers["x-should-retry"] = "false"
            if not (status in _KEEPS and self.keeps(sender)):
                response.force_close()
        return response

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        async with asyncio.timeout(self.body_seconds):
            while max(request.content_length or 0, len(body)) <= self.max_body:
                if not (part := await request.content.readany()):
                    return bytes(body)
                body += part
        raise RequestRefused(f"a body may have {self.max_body} bytes, and this one has more", "too_large", 413)


class _Connections(web.Server):

    def __init__(self, owner: HttpServer, **options: Any):
        super().__init__(owner.answer, **options)
        self.idle = owner.idle

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > _MAX_CONNECTIONS and self.idle:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.abort()
        self.idle[transport] = None

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        self.idle.pop(self._connections.get(handler), None)
        super().connection_lost(handler, exc)
