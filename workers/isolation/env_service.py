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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from distflow.contracts.decorators import Turn
from distflow.errors import DistflowError, EngineError
from workers.engines.rollout import Session
from workers.isolation.env_pool import EnvFailure, EnvPool, EnvSettings

_services: dict[str, EnvService] = {}
_lock = threading.Lock()
_keeps = threading.Event()  # steps that are under way go on when their callers leave


def environments_for(session: Session, config: EnvSettings) -> EnvClient:
    """Return a client for the rows of a session, whose environments are dropped when it is left; the processes stay for
    the next session."""
    return service_of(config).client(session.wake)


def service_of(config: EnvSettings) -> EnvService:
    with _lock:
        key = repr(config)
        if key not in _services:
            _services[key] = EnvService(config, _keeps.is_set())
        return _services[key]


def begin_phase() -> None:
    """Begin a phase of sampling on a rank that also trains: steps that are under way when it is stopped go on, for the
    conversations that this rank takes up again in the next phase."""
    _keeps.set()
    with _lock:
        for service in _services.values():
            service.submit(service.begin_phase)


Left = tuple[int, tuple[str, ...]]
"""A conversation that was left: its row, and the model's turns so far, of which the last one has no answer."""


@dataclass
class _LeftStep:
    """Step of an environment whose client has left before the answer."""

    number: int  # of its environment in the pool
    phase: int  # in which it was left
    answer: Turn | EnvFailure | None = None


class EnvService:
    """Serves clients from a thread of its own, the only one that touches the pool; all calls fail once the pool has."""

    def __init__(self, config: EnvSettings, keeps: bool = False):
        """`keeps`: steps that are under way when their client leaves, for the one that asks for them next."""
        self.keeps, self.phase, self.used = keeps, 0, False  # phases of sampling in which there were clients
        self.left: dict[Left, _LeftStep] = {}
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

    def client(self, wake: Callable[[], None] = lambda: None, again: bool = True) -> EnvClient:
        """Return a client for one thread; the service's thread calls `wake` when answers have arrived. `again`: whether
        its rows are asked the same again, if it leaves without their answers: a later client may be given these."""
        return EnvClient(self, wake, again)

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
                        self.hand_out(number, answer)
                    for step in self.left.values():
                        if step.number == number:
                            step.answer = answer
        except DistflowError as error:
            self._fail(error)
        finally:
            self._fail(EngineError(f"the environments of `{config.kind}` are closed"))
            opened.set()
        if self.closing:
            self.pool.close()

    def hand_out(self, number: int, answer: Turn | EnvFailure) -> None:
        client, row = self.owners[number]
        client.answers.put((row, answer))
        client.wake()

    def begin_phase(self) -> None:
        """Drop what has been answered and nobody has asked for since the phase before the last one in which this rank
        took up conversations: another rank has it. Not what is under way, which would end its process."""
        self.phase += self.used
        self.used = False
        for left in [left for left, step in self.left.items() if step.phase < self.phase - 1 and step.answer]:
            self.pool.release([self.left.pop(left).number])

    def leave(self, numbers: Mapping[int, int], again: bool) -> None:
        """Drop environments; where steps are kept, not those of which one is under way and may be asked for `again`.
        `numbers`: rows by number in the pool."""
        dropped = []
        for number, row in numbers.items():
            del self.owners[number]
            kept = self.keeps and again and self.pool.is_under_way(number)
            left = (row, (*self.pool.episodes[number].texts,)) if kept else None
            if left is None or left in self.left:
                dropped.append(number)
            else:
                self.left[left] = _LeftStep(number, self.phase)
        self.pool.release(dropped)

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

    def __init__(self, service: EnvService, wake: Callable[[], None], again: bool):
        self.service, self.wake, self.again = service, wake, again
        self.answers: queue.SimpleQueue[tuple[int, Turn | EnvFailure] | None] = queue.SimpleQueue()
        self.numbers: dict[int, int] = {}  # number in the pool, by row
        self.requests: list[Callable[[], None]] = []  # calls of the pool that are submitted with the next `turns`
        self.open = 0  # steps without an answer

    def __enter__(self) -> EnvClient:
        with self.service.lock:
            self.service.clients.add(self)
            self.service.used = True
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
        service, episode = self.service, self.service.pool.episodes.get(number)
        left = service.left.pop((row, (*(episode.texts if episode else ()), text)), None)
        if left is None:
            service.owners[number] = (self, row)
            service.pool.step(number, columns, text)
            return
        self._end(number)
        self.numbers[row] = left.number  # before this thread has the answer
        service.owners[left.number] = (self, row)
        if left.answer:
            service.hand_out(left.number, left.answer)

    def _end(self, number: int) -> None:
        self.service.pool.end(number)
        self.service.owners.pop(number, None)

    def _leave(self) -> None:
        mine = {number: row for number, (client, row) in self.service.owners.items() if client is self}
        self.service.leave(mine, self.again)

