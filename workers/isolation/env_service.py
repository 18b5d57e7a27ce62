"""Shares one pool of environments between threads.

    environments_for   the environments of a session, by a client of the service
    EnvService         owns the pool; its thread runs what clients submit and hands out the answers
    EnvClient          one caller's rows, renumbered so that rows of two callers never collide
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

from distflow.contracts.decorators import Turn
from distflow.errors import DistflowError, EngineError
from workers.engines.rollout import Session
from workers.isolation.env_pool import EnvFailure, EnvPool, EnvSettings

_services: dict[str, EnvService] = {}
_lock = threading.Lock()


def environments_for(session: Session, config: EnvSettings) -> EnvClient:
    """Return a client for the rows of a session, whose environments are dropped when it is left; the processes stay for
    the next session."""
    return service_of(config).client(session.wake)


def service_of(config: EnvSettings) -> EnvService:
    with _lock:
        key = repr(config)
        if key not in _services:
            _services[key] = EnvService(config)
        return _services[key]


class EnvService:
    """Serves clients from a thread of its own, the only one that touches the pool; all calls fail once the pool has."""

    def __init__(self, config: EnvSettings):
        self.numbers = itertools.count()  # of rows in the pool: clients of two nodes may have rows of one id
        self.owners: dict[int, tuple[EnvClient, int]] = {}  # client of each number, and the row's id there
        self.actions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.clients: set[EnvClient] = set()
        self.lock = threading.Lock()
        self.failure: DistflowError | None = None
        self.closing = False
        opened = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(config, opened), name="environments", daemon=True)
        self.thread.start()
        opened.wait()
        self.check()

    def client(self, wake: Callable[[], None] = lambda: None) -> EnvClient:
        """Return a client for one thread; the service's thread calls `wake` when answers have arrived."""
        return EnvClient(self, wake)

    def submit(self, action: Callable[[], object]) -> None:
        with self.lock:
            self.check()
            self.actions.put(action)
            self.pool.wake()

    def check(self) -> None:
        if self.failure is not None:
            raise EngineError(str(self.failure)) from self.failure

    def close(self) -> None:
        if self.failure is None:
            self.submit(lambda: setattr(self, "closing", True))
        self.thread.join()

    def _serve(self, config: EnvSettings, opened: threading.Event) -> None:
        try:
            self.pool = EnvPool(config)
            opened.set()
            while not self.closing:
                self._run_actions()
                for number, answer in self.pool.turns(math.inf):
                    if number in self.owners:
                        client, row = self.owners[number]
                        client.answers.put((row, answer))
                        client.wake()
        except DistflowError as error:
            self._fail(error)
        finally:
            self._fail(EngineError(f"the environments of `{config.kind}` are closed"))
            opened.set()
        if self.closing:
            self.pool.close()

    def _run_actions(self) -> None:
        if not self.pool.busy:
            self.actions.get()()
        while not self.actions.empty():
            self.actions.get()()

    def _fail(self, error: DistflowError) -> None:
        with self.lock:
            self.failure = self.failure or error
            for client in self.clients:
                client.answers.put(None)
                client.wake()


class EnvClient:
    """One caller's rows in the shared pool. Not thread-safe; leaving the context drops the rows."""

    def __init__(self, service: EnvService, wake: Callable[[], None]):
        self.service, self.wake = service, wake
        self.answers: queue.SimpleQueue[tuple[int, Turn | EnvFailure] | None] = queue.SimpleQueue()
        self.numbers: dict[int, int] = {}  # number in the pool, by row
        self.requests: list[Callable[[], None]] = []  # calls of the pool that are submitted with the next `turns`
        self.open = 0  # steps without an answer

    def __enter__(self) -> EnvClient:
        with self.service.lock:
            self.service.clients.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        with self.service.lock:
            self.service.clients.discard(self)
        if self.service.failure is None:
            self.service.submit(self._leave)

    @property
    def busy(self) -> bool:
        return self.open > 0

    def step(self, row: int, columns: dict[str, str], text: str) -> None:
        number = self._number(row)
        self.requests.append(lambda: self._ask(number, row, columns, text))
        self.open += 1

    def resume(self, row: int, columns: dict[str, str], texts: list[str], answers: list[Turn],
               state: tuple[int, Any] | None = None) -> None:
        number = self._number(row)
        self.requests.append(lambda: self._resume(number, row, columns, texts, answers, state))

    def turns(self, timeout_s: float = 0.0) -> list[tuple[int, Turn | EnvFailure]]:
        """Return (row, answer) of each environment that has answered; [] after `timeout_s` seconds."""
        if self.requests:
            requests, self.requests = self.requests, []
            self.service.submit(lambda: [request() for request in requests])
        found: list[tuple[int, Turn | EnvFailure] | None] = []
        try:
            if self.open and timeout_s > 0:
                found.append(self.answers.get(timeout=None if timeout_s == math.inf else timeout_s))
            while True:
                found.append(self.answers.get_nowait())
        except queue.Empty:
            pass
        if None in found:
            self.service.check()
        self.open -= len(found)
        return [each for each in found if each is not None]

    def end(self, row: int) -> None:
        if row in self.numbers:
            number = self.numbers.pop(row)
            self.requests.append(lambda: self._end(number))

    def _number(self, row: int) -> int:
        if row not in self.numbers:
            self.numbers[row] = next(self.service.numbers)
        return self.numbers[row]

    def _resume(self, number: int, row: int, *conversation: Any) -> None:
        self.service.owners[number] = (self, row)
        self.service.pool.resume(number, *conversation)

    def _ask(self, number: int, row: int, columns: dict[str, str], text: str) -> None:
        self.service.owners[number] = (self, row)
        self.service.pool.step(number, columns, text)

    def _end(self, number: int) -> None:
        self.service.pool.end(number)
        self.service.owners.pop(number, None)

    def _leave(self) -> None:
        mine = [number for number, (client, _) in self.service.owners.items() if client is self]
        for number in mine:
            del self.service.owners[number]
        self.service.pool.release(mine)

