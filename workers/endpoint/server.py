"""Server of the endpoint: one per process, on the loopback address.

    agent ── request with its row's token ──▶ EndpointServer ── TurnRequest ──▶ the thread that samples
                                                    ◀── AnsweredTurn, by `TurnRequest.answer` ──

    EndpointServer   reads requests, looks up the row by its token, writes answers
    ServedRow        one row with its dialogue: a request at a time, and none is answered twice unless it is a retry
    TurnRequest      a turn to be sampled

A row of which too many requests are refused loses its token, and is not kept; fewer are the agent's own affair.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from distflow.telemetry.run_folder import finite
from workers.endpoint.dialogue import Addition, AnsweredTurn, Dialogue
from workers.endpoint.http_server import HttpServer, ReadBody, Reply
from workers.endpoint.messages import (
    ChatRequest,
    CompletionRequest,
    RequestRefused,
    ServedTurn,
    read_request,
    response_body,
    stream_chunks,
)

MAX_REFUSED = 64  # requests of a row that are refused before it loses its token
_KINDS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}


class TurnRequest:
    """A turn to be sampled for row `row`, after `addition`. `answer` may be called from any thread, once."""

    def __init__(self, row: int, addition: Addition, answer: Callable[[AnsweredTurn], object]):
        self.row, self.addition, self.answer = row, addition, answer


class ServedRow:
    """Row that an agent may ask for turns. `ask` is called in the server's thread; `lost`: why it has no token any
    more."""

    def __init__(self, id: int, dialogue: Dialogue, ask: Callable[[TurnRequest], None]):
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
            self.ask(TurnRequest(self.id, addition, lambda turn: loop.call_soon_threadsafe(take_up, turn)))
        assert self.turn is not None
        return await asyncio.shield(self.turn)

    def end(self) -> None:
        """Answer no request any more."""
        self.ended = True
        if self.turn is not None:
            self.turn.cancel()

    def _take_up(self, answered: asyncio.Future[ServedTurn], request: ChatRequest | CompletionRequest,
                 addition: Addition, turn: AnsweredTurn) -> None:
        if answered.done():  # the row has ended
            return
        try:
            answered.set_result(self.dialogue.sampled(request, addition, turn))
        finally:
            if not answered.done():  # an error ends the request too
                answered.cancel()


class EndpointServer(HttpServer):

    def __init__(self) -> None:
        self.rows: dict[str, ServedRow] = {}  # by token
        super().__init__()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def add(self, row: ServedRow) -> None:
        self.rows[row.token] = row

    def remove(self, row: ServedRow) -> None:
        """Refuse the row's token from now on, and leave its request under way without an answer. Thread-safe."""
        self.rows.pop(row.token, None)
        self.call_in(row.end)

    def sender(self, token: str) -> ServedRow | None:
        return self.rows.get(token)

    def keeps(self, sender: ServedRow | None) -> bool:
        return sender is not None and not sender.lost

    async def reply(self, sender: ServedRow | None, method: str, path: str, headers: Mapping[str, str],
                    body: ReadBody) -> Reply:
        if sender is None:
            raise RequestRefused("the token is of no row that is being sampled: send the one of the environment "
                                 "variable OPENAI_API_KEY, as  Authorization: Bearer TOKEN", "invalid_api_key", 401)
        if sender.lost:
            raise RequestRefused(sender.lost, "too_many_refused", 403)
        content = await body()
        if (method, path) == ("GET", "/v1/models"):
            model = {"id": "policy", "object": "model", "created": 0, "owned_by": "distflow"}
            return _json(HTTPStatus.OK, {"object": "list", "data": [model]})
        if method != "POST" or path not in _KINDS:
            raise RequestRefused(f"there is no {method} {path[:100]} here, only POST {' and '.join(_KINDS)}",
                                 "not_found", 404)
        request = read_request(_KINDS[path], content)
        retry = headers.get("X-Stainless-retry-count", "0") != "0"
        turn = await sender.serve(request, hashlib.sha256(path.encode() + content).digest(), retry)
        return _turn_reply(request, turn, sender.dialogue)

    def refused(self, sender: ServedRow | None, error: RequestRefused) -> Reply:
        if sender is not None:
            sender.refused += 1
            if sender.refused >= MAX_REFUSED:
                sender.lost = sender.lost or f"its agent sent {sender.refused} requests that were refused; the last: " \
                                             f"{error}"
        return _json(error.status, error.body())


_started = threading.Lock()
_server = functools.cache(EndpointServer)


def endpoint() -> EndpointServer:
    """Return the server of this process, started when it is first needed. Thread-safe."""
    with _started:
        return _server()


def _json(status: int, body: dict[str, Any]) -> Reply:
    return status, "application/json", _dumped(body).encode()


def _dumped(content: dict[str, Any]) -> str:
    return json.dumps(finite(content), allow_nan=False)


def _turn_reply(request: ChatRequest | CompletionRequest, turn: ServedTurn, dialogue: Dialogue) -> Reply:
    """Return a turn as JSON, or as the events of a stream, sent together."""
    created, decode = int(time.time()), lambda token: str(dialogue.tokenizer.decode([token]))
    if not request.stream:
        return _json(HTTPStatus.OK, response_body(request, turn, created, decode))
    return HTTPStatus.OK, "text/event-stream", _events(stream_chunks(request, turn, created, decode))


def _events(chunks: Iterable[dict[str, Any]]) -> bytes:
    return "".join(f"data: {text}\n\n" for text in [*map(_dumped, chunks), "[DONE]"]).encode()
