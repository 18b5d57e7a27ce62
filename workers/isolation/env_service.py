"""Environments for several threads: each sees its own rows, and one more sees to the processes of all."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
from collections.abc import Callable, Iterator

from distflow.contracts.decorators import Turn
from distflow.errors import DistflowError, EngineError
from workers.engines.rollout import Session
from workers.isolation.env_pool import EnvFailure, EnvPool, EnvSettings

_hosts: dict[str, EnvPool] = {}
_receptions: dict[str, EnvService] = {}
_opening = threading.Lock()


@contextlib.contextmanager
def environments_for(session: Session, hosting: EnvSettings) -> Iterator[EnvPool | EnvClient]:
    """Environments for the rows of a session; what it leaves behind is let go of. Their processes stay for the next.

    Where several threads have sessions each is a guest; a thread alone has the host for itself, which is faster.
    """
    if session.shared:
        with service_of(hosting).guest(session.wake) as guest:
            yield guest
        return
    host = _hosts.get(repr(hosting)) or _hosts.setdefault(repr(hosting), EnvPool(hosting))
    try:
        yield host
    finally:
        host.tidy()


def service_of(hosting: EnvSettings) -> EnvService:
    with _opening:
        key = repr(hosting)
        if key not in _receptions:
            _receptions[key] = EnvService(hosting)
        return _receptions[key]


def close_all() -> None:
    """End all processes of environments."""
    for each in (*_hosts.values(), *_receptions.values()):
        each.close()
    _hosts.clear()
    _receptions.clear()


class EnvService:
    """Serves guests from a thread of its own, which is the host's only one.

    Raises, in all guests: EngineError, if the host fails.
    """

    def __init__(self, hosting: EnvSettings):
        self.numbers = itertools.count()
        """Of rows: two guests may have rows of one id, in two nodes."""
        self.owners: dict[int, tuple[EnvClient, int]] = {}
        """Of each number, whose row it is, and its id there."""
        self.asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.guests: set[EnvClient] = set()
        self.lock = threading.Lock()
        self.failure: DistflowError | None = None
        self.over = False
        opened = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(hosting, opened), name="environments", daemon=True)
        self.thread.start()
        opened.wait()
        self.check()

    def guest(self, notify: Callable[[], None] = lambda: None) -> EnvClient:
        """For one thread; with `notify`, called in another one, it learns that answers have come."""
        return EnvClient(self, notify)

    def tell(self, action: Callable[[], None]) -> None:
        """Have the thread do it."""
        with self.lock:
            self.check()
            self.asked.put(action)
            self.host.wake()

    def check(self) -> None:
        if self.failure is not None:
            raise EngineError(str(self.failure)) from self.failure

    def close(self) -> None:
        """End all processes."""
        if self.failure is None:
            self.tell(lambda: setattr(self, "over", True))
        self.thread.join()

    def _serve(self, hosting: EnvSettings, opened: threading.Event) -> None:
        try:
            self.host = EnvPool(hosting)
            opened.set()
            while not self.over:
                self._obey()
                for number, answer in self.host.turns(math.inf):
                    guest, row = self.owners[number]
                    guest.answers.put((row, answer))
                    guest.notify()
        except DistflowError as error:
            self._fail(error)
        finally:
            self._fail(EngineError(f"the environments of `{hosting.kind}` are closed"))
            opened.set()
        if self.over:
            self.host.close()

    def _obey(self) -> None:
        """Do what guests ask. Without any step under way, wait for it."""
        if not self.host.busy:
            self.asked.get()()
        while not self.asked.empty():
            self.asked.get()()

    def _fail(self, error: DistflowError) -> None:
        with self.lock:
            self.failure = self.failure or error
            for guest in self.guests:
                guest.answers.put(None)


class EnvClient:
    """One caller's rows among all that a host has. For one thread; when it leaves, so do its rows."""

    def __init__(self, reception: EnvService, notify: Callable[[], None]):
        self.reception, self.notify = reception, notify
        self.answers: queue.SimpleQueue[tuple[int, Turn | EnvFailure] | None] = queue.SimpleQueue()
        self.numbers: dict[int, int] = {}
        """By row."""
        self.wishes: list[Callable[[], None]] = []
        """What the host is yet to be asked for."""
        self.open = 0
        """Steps without an answer."""

    def __enter__(self) -> EnvClient:
        with self.reception.lock:
            self.reception.guests.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        with self.reception.lock:
            self.reception.guests.discard(self)
        if self.reception.failure is None:
            self.reception.tell(self._leave)

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self.open > 0

    def step(self, row: int, columns: dict[str, str], text: str) -> None:
        """The model said `text` in its turn; the row's environment is made if this is its first."""
        number = self.numbers.get(row)
        if number is None:
            number = self.numbers[row] = next(self.reception.numbers)
        self.wishes.append(lambda: self._ask(number, row, columns, text))
        self.open += 1

    def turns(self, patience: float = 0.0) -> list[tuple[int, Turn | EnvFailure]]:
        """Rows whose environment has answered: waits up to `patience` seconds for one, if a step is under way."""
        if self.wishes:
            wishes, self.wishes = self.wishes, []
            self.reception.tell(lambda: [wish() for wish in wishes])
        found: list[tuple[int, Turn | EnvFailure] | None] = []
        try:
            if self.open and patience > 0:
                found.append(self.answers.get(timeout=None if patience == math.inf else patience))
            while True:
                found.append(self.answers.get_nowait())
        except queue.Empty:
            pass
        if None in found:
            self.reception.check()
        self.open -= len(found)
        return found

    def end(self, row: int) -> None:
        """The row is not asked again."""
        if row in self.numbers:
            number = self.numbers.pop(row)
            self.wishes.append(lambda: self._end(number))

    def _ask(self, number: int, row: int, columns: dict[str, str], text: str) -> None:
        """In the thread of the host, as what follows."""
        self.reception.owners[number] = (self, row)
        self.reception.host.step(number, columns, text)

    def _end(self, number: int) -> None:
        self.reception.host.end(number)
        self.reception.owners.pop(number, None)

    def _leave(self) -> None:
        mine = [number for number, (guest, _) in self.reception.owners.items() if guest is self]
        self.reception.host.tidy(mine)
        for number in mine:
            del self.reception.owners[number]

