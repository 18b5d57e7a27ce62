"""Client of a model behind an OpenAI-compatible API: repeats requests with pauses, keeps answers, counts requests."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import json
import os
import random
import sqlite3
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distflow.errors import InvalidInput

_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before a request is repeated; the first doubles each time
_BUSY = (408, 409, 425, 429)
"""Statuses, besides those from 500, after which a request is repeated."""


class _ServerBusy(OSError):
    """A request that may be repeated, `after` so many seconds."""

    after = 0.0


@dataclass(frozen=True)
class ModelAPI:
    """How a model is reached, and what limits that; see `judge`. `name`: what messages call it."""

    name: str
    address: str
    key_variable: str | None = None
    seconds: float = 60.0
    attempts: int = 4
    cache: str | None = None
    max_calls: int | None = None

    async def ask(self, path: str, body: dict[str, Any], kind: str, read: Callable[[Any], Any]) -> str:
        """Return what `read` finds in the first choice of the answer to a request, from the cache if that has it.
        `kind`: what the answer must be, for messages. Raises ValueError if `read` finds no text."""
        headers = self._headers()
        key = hashlib.sha256(json.dumps([self.address, body]).encode()).hexdigest()
        known = _query(self.cache, "SELECT text FROM answers WHERE key = ?", key)[1] if self.cache else None
        if known:
            return known[0]
        reply = await self._ask_with_pauses(path, body, headers)
        try:
            answer = read(json.loads(reply)["choices"][0])
        except (ValueError, LookupError, TypeError, AttributeError):
            answer = None
        if not isinstance(answer, str):
            raise ValueError(f"the {self.name}'s answer is no {kind}: {reply[:300]}")
        if self.cache:
            _query(self.cache, "INSERT OR REPLACE INTO answers VALUES (?, ?)", key, answer)
        return answer

    def _headers(self) -> dict[str, str]:
        if not self.address.startswith(("http://", "https://")):
            raise InvalidInput(f"the address of the {self.name} must begin with http:// or https://, not "
                               f"{self.address!r}")
        if self.key_variable is None:
            return {}
        if not os.environ.get(self.key_variable):
            raise InvalidInput(f"the {self.name}'s key belongs in the environment variable {self.key_variable}, which "
                               "is not set")
        return {"Authorization": f"Bearer {os.environ[self.key_variable]}"}

    async def _ask_with_pauses(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> str:
        for attempt in itertools.count(1):
            self._count()
            try:
                return await self._post(path, body, headers)
            except _ServerBusy as error:
                if attempt == self.attempts:
                    raise OSError(str(error)) from None
                pause = _PAUSE * 2 ** (attempt - 1) * (0.5 + random.random() / 2)
                await asyncio.sleep(min(max(error.after, pause), _LONGEST_PAUSE))
        raise AssertionError

    def _count(self) -> None:
        if not self.max_calls:
            return
        if not self.cache:
            raise InvalidInput("`max_calls` needs the file that counts them:  max_calls: 1000, cache: calls.sqlite")
        count = "INSERT INTO spent VALUES (1, 1) ON CONFLICT DO UPDATE SET calls = calls + 1 WHERE calls < ?"
        counted, _ = _query(self.cache, count, self.max_calls)
        if not counted:
            raise InvalidInput(f"the {self.max_calls} calls that `max_calls` allows are spent, as {self.cache} counts "
                               "them. To go on:  distflow resume runs/NAME --set nodes.…max_calls=NUMBER")

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> str:
        import httpx  # only a process that asks a model pays for it

        try:
            async with httpx.AsyncClient(timeout=self.seconds, verify=_certificates(), follow_redirects=True) as client:
                reply = await client.post(f"{self.address.rstrip('/')}/{path}", json=body, headers=headers)
        except httpx.HTTPError as error:
            raise _ServerBusy(f"the {self.name} at {self.address} does not answer: {type(error).__name__} {error}") \
                from None
        if reply.is_error:
            busy = reply.status_code in _BUSY or reply.status_code >= 500
            error = (_ServerBusy if busy else OSError)(
                f"the {self.name} answers {reply.status_code} {reply.reason_phrase}: {reply.text[:500]}")
            if isinstance(error, _ServerBusy) and reply.headers.get("Retry-After", "").isdigit():
                error.after = float(reply.headers["Retry-After"])
            raise error
        return reply.text


_lock = threading.Lock()  # modes run node functions in threads, new ones in each step


def _query(path: str, text: str, *values: Any) -> tuple[int, tuple[str, ...] | None]:
    """Return how many rows of a file's tables a statement has changed, and the first that it finds. Thread-safe."""
    with _lock:
        cursor = _cache(path).execute(text, values)
        return cursor.rowcount, cursor.fetchone()


@functools.cache
def _cache(path: str) -> sqlite3.Connection:
    """Return a file's tables: answers by the hash of their requests, and the number of requests made."""
    tables = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
    tables.execute("PRAGMA journal_mode = WAL")
    tables.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT)")
    tables.execute("CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY, calls INTEGER)")
    return tables


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the authorities of TLS, which take longer to load than a short answer takes."""
    return ssl.create_default_context()
