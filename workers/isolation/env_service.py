"""Shares one pool of environments between threads.

    service_of         the service of a kind of environment, whose processes stay from one session to the next
    EnvService         owns the pool; its thread runs what clients submit and hands out the answers
    EnvClient          one caller's rows
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from typing import Any

from distflow.contracts.decorators import Turn
from distflow.errors import DistflowError, EngineError
from workers.isolation.env_pool import EnvFailure, EnvPool, EnvSettings, Episode
from workers.isolation.env_worker import fingerprint_of

_services: dict[str, EnvService] = {}
_lock = threading.Lock()
_keeps = threading.Event()  # steps that are under way go on when their callers leave


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


class EnvService:
    """Serves clients from a thread of its own, the only one that touches the pool; all calls fail once the pool has."""

    def __init__(self, config: EnvSettings, keeps: bool = False):
        """`keeps`: steps that are under way when their client leaves, for the one that asks for them next."""
        self.keeps, self.phase, self.used = keeps, 0, False  # phases of sampling in which there were clients
        self.left: dict[Left, tuple[Episode, int]] = {}  # with the phase in which it was left
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
                for episode, _ in self.pool.turns(math.inf):
                    self.hand_out(episode)
        except DistflowError as error:
            self._fail(error)
        finally:
            self._fail(EngineError(f"the environments of `{config.kind}` are closed"))
            opened.set()
        if self.closing:
            self.pool.close()

    def hand_out(self, episode: Episode) -> None:
        if episode.caller and episode.answer:
            episode.caller.answers.put((episode.row, episode.answer))
            episode.caller.wake()

    def begin_phase(self) -> None:
        """Drop what has been answered and nobody has asked for since the phase before the last one in which this rank
        took up conversations: another rank has it. Not what is under way, which would end its process."""
        self.phase += self.used
        self.used = False
        old = [left for left, (episode, phase) in self.left.items() if phase < self.phase - 1 and episode.answer]
        self.pool.drop([self.left.pop(left)[0] for left in old])

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
        self.episodes: dict[int, Episode] = {}
        self.requests: list[Callable[[], None]] = []  # submitted with the next `turns`
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
            self.requests.append(self._leave)
            self._submit()

    @property
    def busy(self) -> bool:
        return self.open > 0

    def step(self, row: int, columns: dict[str, str], text: str) -> None:
        episode = self.episodes.setdefault(row, Episode(self, row, columns))
        self.requests.append(lambda: self._ask(episode, text))
        self.open += 1

    def resume(self, row: int, columns: dict[str, str], texts: list[str], answers: list[Turn],
               state: tuple[int, Any] | None = None) -> None:
        """Go on with a conversation of another rank, whose environment is created with the next `step`."""
        self.episodes[row] = Episode(self, row, columns, texts, [*map(fingerprint_of, answers)], state)

    def turns(self, timeout_s: float = 0.0) -> list[tuple[int, Turn | EnvFailure]]:
        """Return (row, answer) of each environment that has answered; [] after `timeout_s` seconds."""
        if self.requests:
            self._submit()
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
        if row in self.episodes:
            episode = self.episodes.pop(row)
            self.requests.append(lambda: self.service.pool.drop([episode]))

    def _submit(self) -> None:
        requests, self.requests = self.requests, []
        self.service.submit(lambda: [request() for request in requests])

    def _ask(self, episode: Episode, text: str) -> None:
        service = self.service
        left, _ = service.left.pop((episode.row, (*episode.texts, text)), (None, 0))
        if left is None:
            service.pool.step(episode, text)
            return
        service.pool.drop([episode])
        self.episodes[left.row], left.caller = left, self  # before this thread has the answer
        service.hand_out(left)

    def _leave(self) -> None:
        """Drop environments; where steps are kept, not those of which one is under way and may be asked for again."""
        service, dropped = self.service, list[Episode]()
        for episode in self.episodes.values():
            left = episode.row, (*episode.texts,)
            if service.keeps and self.again and service.pool.is_under_way(episode) and left not in service.left:
                service.left[left], episode.caller = (episode, service.phase), None
            else:
                dropped.append(episode)
        service.pool.drop(dropped)
