"""HTTP server of the training API, on rank 0: the token, the order of calls, and which of them are retries.

A call says its id, the `attempt` of the worker and the `step` that its client knows. One with a known id gets the
answer of that one; one of another attempt or step is refused, so that no gradient is applied twice or without those
that a worker lost when it died. Address and token outlive the worker, in the run folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import queue
import secrets
import socket
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgpack

from distflow.telemetry.files import write_atomically
from distflow.telemetry.run_folder import finite
from workers.endpoint.http_server import HttpServer, ReadBody, Reply
from workers.endpoint.messages import RequestRefused
from workers.training_api.requests import PACKED, OutOfStep, Request, read_call

ADDRESS = "training_api.json"
_ANSWER_SECONDS = 20.0  # after which a client that waits is told to ask again
_KEPT_BYTES = 256 * 2**20  # of answers, for retries
_BODY_SECONDS = 300.0


class TrainingCall:
    """Call to be answered once: by `answer` or `refuse`, from any thread. Its request, and retries of it, await
    `outcome`."""

    def __init__(self, server: TrainingServer, name: str, request: Request, digest: bytes, packed: bool):
        self.server, self.name, self.request, self.digest, self.packed = server, name, request, digest, packed
        self.outcome: asyncio.Future[Reply | RequestRefused] = server.loop.create_future()
        self.size = 0  # bytes of the answer that is kept

    def answer(self, result: Any) -> None:
        self.server.call_in(lambda: self._settle(_encoded(HTTPStatus.OK, result, self.packed)))

    def refuse(self, error: RequestRefused) -> None:
        self.server.call_in(self._settle, error)

    def _settle(self, outcome: Reply | RequestRefused) -> None:
        self.size = len(outcome[2]) if isinstance(outcome, tuple) else 0
        self.outcome.set_result(outcome)
        self.server.drop_excess(self)

    def drop(self) -> None:
        """Forget the answer, but not that it was given: requests that wait for it have the future."""
        self.size, self.outcome = 0, self.server.loop.create_future()
        self.outcome.set_result(RequestRefused("the call was made, and its answer is not kept any longer: other calls "
                                               "came after it", "answer_dropped", 410))


class TrainingServer(HttpServer):
    """Server that puts calls into the queue `calls`, in the order in which they come. `facts`: what `info` says."""

    max_body, body_seconds = 1 << 30, _BODY_SECONDS

    def __init__(self, address: str, folder: Path, step: int, facts: dict[str, Any]):
        self.facts, self.step, self.attempt = facts, step, secrets.token_hex(8)
        self.passes = 0  # calls of forward_backward whose gradient is not applied
        self.calls: queue.SimpleQueue[TrainingCall] = queue.SimpleQueue()
        self.known: dict[str, TrainingCall] = {}  # by id
        before = _read(folder / ADDRESS)
        self.token = str(before.get("token") or secrets.token_urlsafe(32))
        host, _, number = address.rpartition(":")
        host, port = host.strip("[]"), int(number)
        try:
            super().__init__(host, port or int(before.get("port") or 0))
        except OSError:
            if port:
                raise
            super().__init__(host)
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        mine = {"url": self.address, "port": self.port, "token": self.token}
        write_atomically(folder / ADDRESS, json.dumps(mine), mode=0o600)  # the token is its owner's alone

    def confirm(self, step: int) -> None:
        """Accept calls of the step after `step`, which is done. Thread-safe."""
        self.call_in(self._confirm, step)

    def _confirm(self, step: int) -> None:
        self.step = step + 1
        self.known = {id: call for id, call in self.known.items() if call.request.step >= step}

    def sender(self, token: str) -> str | None:
        return token if hmac.compare_digest(token.encode(errors="surrogateescape"), self.token.encode()) else None

    async def reply(self, sender: str | None, method: str, path: str, headers: Mapping[str, str],
                    body: ReadBody) -> Reply:
        if sender is None:
            raise RequestRefused(f"the token is not this run's: send the one that {ADDRESS} of the run folder has, as  "
                                 "Authorization: Bearer TOKEN", "invalid_api_key", 401)
        packed = headers.get("content-type", "") == PACKED
        if (method, path) == ("GET", "/v1/info"):
            return _encoded(HTTPStatus.OK, {**self.facts, "attempt": self.attempt, "step": self.step,
                                            "forward_backward_calls": self.passes}, packed)
        content = await body()
        if method != "POST" or not path.startswith("/v1/"):
            raise RequestRefused(f"there is no {method} {path[:100]} here, only POST /v1/CALL and GET /v1/info",
                                 "not_found", 404)
        call = self._taken_up(path.removeprefix("/v1/"), content, PACKED if packed else "")
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                outcome = await asyncio.shield(call.outcome)
        except TimeoutError:
            return _encoded(HTTPStatus.ACCEPTED, {"pending": True}, packed)
        if isinstance(outcome, RequestRefused):
            raise outcome
        return outcome

    def refused(self, sender: str | None, error: RequestRefused) -> Reply:
        standing = {} if sender is None else {"attempt": self.attempt, "step": self.step}
        return _encoded(error.status, {**error.body(), **standing}, packed=False)

    def _taken_up(self, name: str, content: bytes, kind: str) -> TrainingCall:
        """Return the call that a body makes, which is a new one unless its id is known."""
        request, digest = read_call(name, content, kind), hashlib.sha256(name.encode() + content).digest()
        if (call := self.known.get(request.id)) is None:
            self.check_standing(request)
            call = self.known[request.id] = TrainingCall(self, name, request, digest, kind == PACKED)
            self.calls.put(call)
        elif call.digest != digest:
            raise RequestRefused(f"the id {request.id} was of another call: give each its own", "id_reused")
        return call

    def drop_excess(self, newest: TrainingCall) -> None:
        """Drop the oldest answers where all together have become too large."""
        excess = sum(each.size for each in self.known.values()) - _KEPT_BYTES
        for each in self.known.values():
            if excess > 0 and each is not newest and each.size:
                excess -= each.size
                each.drop()

    def check_standing(self, request: Request) -> None:
        """Raise OutOfStep if a client does not know of a restart or of another client's step."""
        if request.attempt != self.attempt:
            raise OutOfStep(f"the worker was started again, and the run stands at step {self.step}: gradients that "
                            "were not applied are lost", "restarted")
        if request.step != self.step:
            raise OutOfStep(f"the run stands at step {self.step}, and the call is of step {request.step}", "other_step")


def _encoded(status: int, body: Any, packed: bool) -> Reply:
    """Return an answer. JSON has no numbers that are not finite, which are null there; MessagePack has no halves of
    surrogate pairs."""
    if packed:
        return status, PACKED, msgpack.packb(body, unicode_errors="replace") or b""
    return status, "application/json", json.dumps(finite(body), allow_nan=False).encode()


def _read(path: Path) -> dict[str, Any]:
    """Return the address of the worker before; nothing where there was none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
