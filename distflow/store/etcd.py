"""Store in etcd v3, by its JSON gateway: each call is one HTTP request, so that deadlines hold and forks are safe.

    etcd://HOST:PORT,HOST:PORT/RUN       members of one etcd, and a name that no other run there has; its keys begin so
    DISTFLOW_ETCD_USER                   name:password
    DISTFLOW_ETCD_CA, …_CERT, …_KEY      files; with the first one all connections are TLS

A call goes to the member that answered last, and to the next one when it does not answer.
"""

from __future__ import annotations

import base64
import contextlib
import os
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from distflow.errors import InvalidInput
from distflow.store.interface import ETCD, Store, StoreUnavailable

USER, _CA, _CERT, _KEY = (f"DISTFLOW_ETCD_{name}" for name in ("USER", "CA", "CERT", "KEY"))
_PER_MEMBER, _PAUSE, _WATCH = 3.0, 0.1, 10.0  # seconds for an answer, before the next member is asked, and of a watch
_OPERATIONS = 100  # of one transaction; etcd takes 128
_EXPIRED, _BUSY, _UNABLE = 401, 429, 500
"""Statuses of HTTP: the user's token has expired; the member has too much to do, or no space; it has no leader now."""
_OLD = "revision of auth store is old", "user name is empty"
"""What etcd answers, with status 400, to a token from before a change of its users."""


class EtcdStore(Store):
    """Client of etcd's members. Its counters may count twice when a member ends within a call. Raises InvalidInput: the
    address is none. StoreUnavailable: no member answers within `deadline` seconds."""

    def __init__(self, address: str, deadline: float):
        members, _, run = address.removeprefix(ETCD).partition("/")
        if not run or not all(member.rpartition(":")[2].isdecimal() for member in members.split(",")):
            raise InvalidInput(f"--store {address}: name etcd's members and the run, as  etcd://10.0.0.1:2379/grpo-1")
        super().__init__(members, deadline)
        self.url = address
        self.members, self.space, self.local, self.posts = members.split(","), f"distflow/{run}/", _Local(), _Posts()
        self.get("")

    @property
    def own_host(self) -> str:
        return self._own_host(self.members[self.local.member])

    def get(self, key: str) -> str | None:
        found = self._call("kv/range", key=self._key(key)).get("kvs")
        return _value(found[0]) if found else None

    def get_all(self, keys: Sequence[str]) -> list[str]:
        found = [found.get("kvs") for found in self._ranges(keys)[0]]
        return [_value(entries[0]) if entries else "" for entries in found]

    def put(self, key: str, value: str) -> None:
        self._call("kv/put", key=self._key(key), value=_encode(value))

    def put_all(self, values: Mapping[str, str]) -> None:
        self._run_transactions([{"requestPut": {"key": self._key(key), "value": _encode(value)}}
                                for key, value in values.items()])

    def post(self, key: str, value: str) -> None:
        self.posts.add(self, key, value)

    def put_if(self, key: str, value: str, before: str | None) -> str:
        done, found = self._swap(key, value, before)
        return value if done else found or ""

    def add(self, key: str, number: int = 1) -> int:
        done, before = False, self.get(key)
        while not done:
            after = int(before or 0) + number
            done, before = self._swap(key, str(after), before)
        return after

    def _swap(self, key: str, value: str, before: str | None) -> tuple[bool, str | None]:
        """Return whether `value` was put in place of `before`, and what else is there."""
        name = self._key(key)
        condition = {"target": "CREATE", "createRevision": "0"} if before is None else \
            {"target": "VALUE", "value": _encode(before)}
        answer = self._call("kv/txn", compare=[{"key": name, "result": "EQUAL"} | condition],
                            success=[{"requestPut": {"key": name, "value": _encode(value)}}],
                            failure=[{"requestRange": {"key": name}}])
        if answer.get("succeeded"):
            return True, value
        found = answer["responses"][0]["response_range"].get("kvs")
        return False, _value(found[0]) if found else None

    def delete(self, *keys: str) -> None:
        self._run_transactions([{"requestDeleteRange": {"key": self._key(key)}} for key in keys])

    def has(self, *keys: str) -> bool:
        return not self._missing(keys)[0]

    def list(self, prefix: str) -> dict[str, str]:
        start = f"{self.space}{self.prefix}"
        first = start + prefix
        found = self._call("kv/range", key=_encode(first), range_end=_encode(first[:-1] + chr(ord(first[-1]) + 1)))
        return {_decode(each["key"]).removeprefix(start): _value(each) for each in found.get("kvs", ())}

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while True:
            missing, revision = self._missing(keys)
            if not missing or (left := until - time.monotonic()) <= 0:
                return not missing
            self._watch(missing[0], revision + 1, min(left, _WATCH))

    def _missing(self, keys: Sequence[str]) -> tuple[list[str], int]:
        """Return the keys without values, and a revision at which they had none."""
        found, revision = self._ranges(keys, count_only=True)
        return [key for key, answer in zip(keys, found) if "count" not in answer], revision

    def _ranges(self, keys: Sequence[str], **more: bool) -> tuple[list[dict[str, Any]], int]:
        """Return etcd's answer for each key, and the revision of the first ones."""
        answers = self._run_transactions([{"requestRange": {"key": self._key(key)} | more} for key in keys])
        found = [each["response_range"] for answer in answers for each in answer["responses"]]
        return found, int(answers[0]["header"]["revision"]) if answers else 0

    def _run_transactions(self, operations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return etcd's answers to as many operations at a time as a transaction takes; all within one deadline."""
        until = time.monotonic() + self.deadline.seconds
        return [self._call("kv/txn", until, success=operations[first : first + _OPERATIONS])
                for first in range(0, len(operations), _OPERATIONS)]

    def _watch(self, key: str, revision: int, seconds: float) -> None:
        """Wait until a key changes, or a while; the member may end meanwhile."""
        asked, until = {"create_request": {"key": self._key(key), "start_revision": str(revision)}}, time.monotonic()
        until += seconds
        with contextlib.suppress(httpx.HTTPError), self._client(seconds).stream(
                "POST", f"{self._url}/v3/watch", json=asked, timeout=httpx.Timeout(seconds)) as answer:
            for line in answer.iter_lines():
                if "events" in line or "error" in line or time.monotonic() > until:
                    return
        time.sleep(min(_PAUSE, seconds))

    def _call(self, what: str, until: float | None = None, **body: Any) -> dict[str, Any]:
        """Ask one member after the other until one answers. `until`: by the clock, where other calls share the
        deadline. Raises StoreUnavailable."""
        until = until or time.monotonic() + self.deadline.seconds
        began = until - self.deadline.seconds
        while (left := until - time.monotonic()) > 0:
            try:
                answer = self._client(left).post(f"{self._url}/v3/{what}", json=body, timeout=min(left, _PER_MEMBER))
            except httpx.HTTPError:
                answer = None
            if answer is not None and answer.is_success:
                return answer.json()
            if answer is not None and _token_has_expired(answer):
                self.local.http = None
            elif answer is not None and not _is_transient(answer):
                raise StoreUnavailable(self.address, 0.0, f"etcd refuses: {answer.text.strip()}", gone=True)
            else:
                self.local.member = (self.local.member + 1) % len(self.members)
            time.sleep(min(_PAUSE, max(0.0, until - time.monotonic())))
        raise StoreUnavailable(self.address, time.monotonic() - began)

    def _client(self, seconds: float) -> httpx.Client:
        """Return this thread's connections. Raises httpx.HTTPError: the member that checks the user does not answer."""
        local = self.local
        if local.http is None or local.pid != os.getpid():
            local.pid, http = os.getpid(), httpx.Client(verify=_tls_verification(), trust_env=False)
            if user := os.environ.get(USER):
                name, _, password = user.partition(":")
                answer = http.post(f"{self._url}/v3/auth/authenticate", json={"name": name, "password": password},
                                   timeout=min(seconds, _PER_MEMBER))
                if not answer.is_success and not _is_transient(answer):
                    raise InvalidInput(f"etcd at {self.address} does not know the user `{name}` with that password; "
                                       f"export {USER}=NAME:PASSWORD  as its root user has given them")
                answer.raise_for_status()
                http.headers["Authorization"] = answer.json().get("token", "")
            local.http = http
        return local.http

    @property
    def _url(self) -> str:
        return f"{_scheme()}://{self.members[self.local.member]}"

    def _key(self, key: str) -> str:
        return _encode(f"{self.space}{self.prefix}{key}")


class _Local(threading.local):
    """Connections of one thread of one process, and the member that it asks."""

    member, pid = 0, 0
    http: httpx.Client | None = None


class _Posts:
    """Puts the newest value of each posted key, in a thread of its own."""

    def __init__(self):
        self.pid, self.changed, self.values = 0, threading.Condition(), dict[str, tuple[EtcdStore, str, str]]()

    def add(self, store: EtcdStore, key: str, value: str) -> None:
        if self.pid != os.getpid():
            self.pid, self.changed, self.values = os.getpid(), threading.Condition(), {}
            threading.Thread(target=self._put, name="store", daemon=True).start()
        with self.changed:
            self.values[f"{store.prefix}{key}"] = store, key, value
            self.changed.notify()

    def _put(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.values)
                values, self.values = self.values, {}
            for store, key, value in values.values():
                with contextlib.suppress(StoreUnavailable):
                    store.put(key, value)


def _token_has_expired(answer: httpx.Response) -> bool:
    return answer.status_code == _EXPIRED or USER in os.environ and any(each in answer.text for each in _OLD)


def _is_transient(answer: httpx.Response) -> bool:
    return answer.status_code >= _UNABLE or answer.status_code == _BUSY and "too many requests" in answer.text


def _scheme() -> str:
    return "https" if os.environ.get(_CA) else "http"


def _tls_verification() -> ssl.SSLContext | bool:
    if _scheme() == "http":
        return False
    context = ssl.create_default_context(cafile=os.environ[_CA])
    if cert := os.environ.get(_CERT):
        context.load_cert_chain(cert, os.environ.get(_KEY))
    return context


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decode(data: str) -> str:
    return base64.b64decode(data).decode()


def _value(entry: dict[str, str]) -> str:
    return _decode(entry.get("value", ""))
