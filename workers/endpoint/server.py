"""HTTP server of the endpoint: one per process, on the loopback address, in a thread of its own.

    agent ── request with its row's token ──▶ EndpointServer ── Ask ──▶ the thread that samples
                                                    ◀── Sampled, by `Ask.answer` ──

    EndpointServer   reads requests, looks up the row by its token, writes answers
    ServedRow        one row with its dialogue: a request at a time, and none is answered twice unless it is a retry
    Ask              a turn to be sampled

Nothing of a request without the token of a row is looked at beyond its head. A row of which too many requests are
refused loses its token, and is not kept; fewer are the agent's own affair.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from workers.endpoint.dialogue import Addition, Dialogue, Sampled
from workers.endpoint.messages import (
    ChatRequest,
    CompletionRequest,
    RequestRefused,
    ServedTurn,
    answer_of,
    chunks_of,
    read_request,
)

MAX_BODY = 1 << 20  # bytes of a request
MAX_REFUSED = 64  # requests of a row that are refused before it loses its token
_MAX_HEAD = 1 << 16  # bytes of a request before its body
_MAX_CONNECTIONS = 512  # beyond these the one that has been idle longest is closed
_HEAD_SECONDS, _BODY_SECONDS, _WRITE_SECONDS, _DISCARD_SECONDS = 120.0, 30.0, 30.0, 2.0
_KINDS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
_GONE = (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
Reply = tuple[int, str, bytes]  # status, content type, body


class Ask:
    """A turn to be sampled for row `row`, after `addition`. `answer` may be called from any thread, once."""

    def __init__(self, row: int, addition: Addition, answer: Callable[[Sampled], None]):
        self.row, self.addition, self.answer = row, addition, answer


class ServedRow:
    """Row that an agent may ask for turns. `ask` is called in the server's thread; `lost`: why it has no token any
    more."""

    def __init__(self, id: int, dialogue: Dialogue, ask: Callable[[Ask], None]):
        self.id, self.dialogue, self.ask = id, dialogue, ask
        self.token = secrets.token_urlsafe(32)
        self.refused, self.lost, self.ended = 0, "", False
        self.digest = b""  # of the newest request that was taken up
        self.turn: asyncio.Future[ServedTurn] | None = None

    async def serve(self, request: ChatRequest | CompletionRequest, digest: bytes, is_retry: bool) -> ServedTurn:
        """Return the turn that a request asks for. A retry of the newest request gets the turn of that one."""
        if self.ended:  # while the body came
            raise RequestRefused("the row has ended", "invalid_api_key", 401)
        if not (is_retry and self.turn is not None and digest == self.digest):
            if self.turn is not None and not self.turn.done():
                raise RequestRefused("another request of this row is being answered, and a row is one trajectory: send "
                                     "one at a time", "not_extended")
            addition = self.dialogue.addition(request)
            loop = asyncio.get_running_loop()
            self.digest, self.turn = digest, loop.create_future()
            take_up = functools.partial(self._take_up, self.turn, request, addition)
            self.ask(Ask(self.id, addition, lambda turn: _call_in(loop, take_up, turn)))
        assert self.turn is not None
        return await asyncio.shield(self.turn)

    def end(self) -> None:
        """Answer no request any more."""
        self.ended = True
        if self.turn is not None:
            self.turn.cancel()

    def _take_up(self, answered: asyncio.Future[ServedTurn], request: ChatRequest | CompletionRequest,
                 addition: Addition, turn: Sampled) -> None:
        if answered.done():  # the row has ended
            return
        try:
            answered.set_result(self.dialogue.sampled(request, addition, turn))
        finally:
            if not answered.done():  # an error ends the request too
                answered.cancel()


class EndpointServer:

    def __init__(self) -> None:
        self.rows: dict[str, ServedRow] = {}  # by token
        self.idle: dict[asyncio.StreamWriter, None] = {}  # connections between two requests, oldest first
        self.connections = 0
        self.port = 0
        self.loop = asyncio.new_event_loop()
        opened = threading.Event()
        threading.Thread(target=self._run, args=(opened,), name="endpoint", daemon=True).start()
        opened.wait()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def add(self, row: ServedRow) -> None:
        self.rows[row.token] = row

    def remove(self, row: ServedRow) -> None:
        """Refuse the row's token from now on, and leave its request under way without an answer. Thread-safe."""
        self.rows.pop(row.token, None)
        _call_in(self.loop, row.end)

    def _run(self, opened: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_MAX_HEAD))
        self.port = server.sockets[0].getsockname()[1]
        opened.set()
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
        row = self.rows.get(headers.get("authorization", "").partition("Bearer ")[2].strip())
        if row is not None:
            self.idle.pop(writer, None)
        status, kind, body = await self._reply(reader, writer, method, path, headers, row)
        keeps = status == HTTPStatus.OK or (row is not None and not row.lost and status == HTTPStatus.BAD_REQUEST)
        keeps = keeps and headers.get("connection", "").lower() != "close"
        writer.write(_head_of(status, kind, len(body), keeps) + body)
        async with asyncio.timeout(_WRITE_SECONDS):
            await writer.drain()
        if not keeps and status != HTTPStatus.OK:
            await _discard(reader, writer)
        return keeps

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str,
                     headers: dict[str, str], row: ServedRow | None) -> Reply:
        try:
            if row is None:
                raise RequestRefused("the token is of no row that is being sampled: send the one of the environment "
                                     "variable OPENAI_API_KEY, as  Authorization: Bearer TOKEN", "invalid_api_key", 401)
            if row.lost:
                raise RequestRefused(row.lost, "too_many_refused", 403)
            body = await _read_body(reader, writer, headers)
            if (method, path) == ("GET", "/v1/models"):
                model = {"id": "policy", "object": "model", "created": 0, "owned_by": "distflow"}
                return _json(HTTPStatus.OK, {"object": "list", "data": [model]})
            if method != "POST" or path not in _KINDS:
                raise RequestRefused(f"there is no {method} {path[:100]} here, only POST {' and '.join(_KINDS)}",
                                     "not_found", 404)
            request = read_request(_KINDS[path], body)
            retry = headers.get("x-stainless-retry-count", "0") != "0"
            turn = await row.serve(request, hashlib.sha256(path.encode() + body).digest(), retry)
            return _success(request, turn, row.dialogue)
        except RequestRefused as error:
            if row is not None:
                row.refused += 1
                if row.refused >= MAX_REFUSED:
                    row.lost = row.lost or f"its agent sent {row.refused} requests that were refused; the last: {error}"
            return _json(error.status, error.body())


_started = threading.Lock()
_server = functools.cache(EndpointServer)


def endpoint() -> EndpointServer:
    """Return the server of this process, started when it is first needed. Thread-safe."""
    with _started:
        return _server()


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    loop.call_soon_threadsafe(function, *arguments)


def _read_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Return the method, the path without its query, and the headers, their names in lower case."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    pairs = (line.partition(":") for line in lines)
    return method, rest.partition(" ")[0].partition("?")[0], {name.strip().lower(): value.strip()
                                                              for name, _, value in pairs}


async def _read_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]) -> bytes:
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdigit()):
        raise RequestRefused("a body needs a Content-Length", "length_required", 411)
    if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
        raise RequestRefused(f"a body may have {MAX_BODY} bytes, and this one has {length[:20]}", "too_large", 413)
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    async with asyncio.timeout(_BODY_SECONDS):
        return await reader.readexactly(int(length))


async def _discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read what is left of a refused request: to close before would reset the connection, and its sender might not see
    the reason."""
    writer.write_eof()
    left = MAX_BODY
    async with asyncio.timeout(_DISCARD_SECONDS):
        while left > 0 and (data := await reader.read(_MAX_HEAD)):
            left -= len(data)


def _head_of(status: int, kind: str, length: int, keeps: bool) -> bytes:
    more = "" if keeps else "Connection: close\r\n"
    retry = "" if status == HTTPStatus.OK else "x-should-retry: false\r\n"
    return (f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n"
            f"{more}{retry}\r\n").encode()


def _json(status: int, body: dict[str, Any]) -> Reply:
    return status, "application/json", json.dumps(body).encode()


def _success(request: ChatRequest | CompletionRequest, turn: ServedTurn, dialogue: Dialogue) -> Reply:
    created, decode = int(time.time()), lambda token: str(dialogue.tokenizer.decode([token]))
    if not request.stream:
        return _json(HTTPStatus.OK, answer_of(request, turn, created, decode))
    return HTTPStatus.OK, "text/event-stream", _events(chunks_of(request, turn, created, decode))


def _events(chunks: Iterable[dict[str, Any]]) -> bytes:
    return "".join(f"data: {text}\n\n" for text in [*map(json.dumps, chunks), "[DONE]"]).encode()
