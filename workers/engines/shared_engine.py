"""One engine that samples for many callers at a time, so that a row that ends leaves its place to any of them.

Each caller is a thread of its own and sees sessions as an engine would give it; the engine itself is used by one
thread, which runs `drive`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from distflow.errors import DistflowError, EngineError
from distflow.telemetry import heartbeat
from workers.engines.rollout import Rollout, SampledRow, Sampler, Session

_MOMENT = 0.05
"""Seconds that the engine waits for a caller, and one that aborts for the engine, before they look what else there
is."""


class EngineStopped(EngineError):
    """The stream has come to an end, or its engine has failed, which whoever drives it says."""


class SharedEngine(Sampler):
    """`renew` is called between two tokens, with the engine to itself; it may replace the weights.

    Raises, in all callers: EngineError, if the engine fails.
    """

    def __init__(self, rollout: Rollout, renew: Callable[[SharedEngine], None] = lambda stream: None):
        self.rollout, self.renew = rollout, renew
        self.generation, self.end_tokens = rollout.generation, rollout.end_tokens
        self.sessions: dict[tuple[float | None, bool], Session] = {}
        self.owners: dict[SampledRow, EngineCaller] = {}
        self.asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.failure: DistflowError | None = None
        self.changed = threading.Condition()
        self.callers: weakref.WeakSet[EngineCaller] = weakref.WeakSet()
        self.version = rollout.version
        self.was_busy = False

    def session(self, key: int, temperature: float | None = None, keeps: bool = False) -> EngineCaller:
        caller = EngineCaller(self, key, (temperature, keeps))
        with self.changed:
            self.callers.add(caller)
        return caller

    def drive(self, over: Callable[[], bool], failed: Callable[[], bool] = lambda: False) -> None:
        """Sample whatever callers ask for, until `over`. Rows under way have what they got by then, unless something
        has `failed`: an engine that suffers from it would hide by an error of its own what it was."""
        try:
            while not over():
                self._obey()
                self.renew(self)
                self._see_version()
                self._show()
                for session in self.sessions.values():
                    for row in session.step():
                        self.owners.pop(row).ended.put(row)
            for session in () if failed() else self.sessions.values():
                session.abort()
        except DistflowError as error:
            self._fail(error)
            raise
        finally:
            self._fail(EngineError("nothing is sampled any more"))

    def _show(self) -> None:
        """Having nothing to sample is no silence."""
        busy = any(session.busy for session in self.sessions.values())
        if busy != self.was_busy:
            self.was_busy = busy
            heartbeat.current().enter("generating" if busy else "waiting")

    def wait(self, version: int) -> None:
        """Until the engine has at least these weights."""
        with self.changed:
            self.changed.wait_for(lambda: self.version >= version or self.failure)
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            raise EngineStopped(str(self.failure)) from self.failure

    def restart(self) -> None:
        """All turns under way begin anew. In the thread that drives."""
        for session in self.sessions.values():
            together: dict[int, list[SampledRow]] = defaultdict(list)
            for row in session.abort():
                together[id(row.sequence)].append(row)  # samples of a prompt share the tensor, and are read once
            for rows in together.values():
                session.add(rows)

    def tell(self, action: Callable[[], None]) -> None:
        """Have the driving thread do it before the next token."""
        with self.changed:
            self.check()
            self.asked.put(action)

    def _obey(self) -> None:
        """Do what callers ask. Without anything to sample, wait a moment for it."""
        idle = not any(session.busy for session in self.sessions.values())
        try:
            self.asked.get(timeout=_MOMENT)() if idle else self.asked.get_nowait()()
            while True:
                self.asked.get_nowait()()
        except queue.Empty:
            return

    def _see_version(self) -> None:
        if self.version != self.rollout.version:
            with self.changed:
                self.version = self.rollout.version
                self.changed.notify_all()

    def _fail(self, error: DistflowError) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()
            for caller in self.callers:
                caller.wake()

    def _real(self, kind: tuple[float | None, bool]) -> Session:
        if kind not in self.sessions:
            self.sessions[kind] = self.rollout.session(0, *kind)
        return self.sessions[kind]


class EngineCaller(Session):
    """One caller's rows among all that the engine samples. For one thread."""

    shared = True

    def __init__(self, stream: SharedEngine, key: int, kind: tuple[float | None, bool]):
        self.stream, self.key, self.kind = stream, key, kind
        self.ended: queue.SimpleQueue[SampledRow | None] = queue.SimpleQueue()
        self.open = 0

    @property
    def busy(self) -> bool:
        return self.open > 0

    def add(self, rows: list[SampledRow]) -> None:
        self._ask("add", rows, rows)

    def extend(self, row: SampledRow, observation: Tensor, limit: int) -> None:
        self._ask("extend", [row], row, observation, limit)

    def forget(self, row: SampledRow) -> None:
        self.stream.tell(lambda: self.stream._real(self.kind).forget(row))

    def step(self) -> list[SampledRow]:
        """The rows whose turn ended; waits for the first one, or for `wake`."""
        # Without a time limit: to look around now and then, some hundred threads would use half a processor.
        if self.busy and self.ended.empty():
            self.stream.check()  # what would wake it may have been taken together with a row
        ended = [self.ended.get()] if self.busy else []
        with contextlib.suppress(queue.Empty):
            while True:
                ended.append(self.ended.get_nowait())
        found = [row for row in ended if row is not None]
        self.open -= len(found)
        if not found:
            self.stream.check()
        return found

    def wake(self) -> None:
        self.ended.put(None)

    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        done: queue.SimpleQueue[list[SampledRow]] = queue.SimpleQueue()

        def act() -> None:
            mine = [row for row, owner in self.stream.owners.items() if owner is self and (rows is None or row in rows)]
            left = self.stream._real(self.kind).abort(mine)
            for row in left:
                del self.stream.owners[row]
            done.put(left)

        self.stream.tell(act)
        while True:
            try:
                left = done.get(timeout=_MOMENT)
                self.open -= len(left)
                return left
            except queue.Empty:
                self.stream.check()

    def _ask(self, method: str, rows: list[SampledRow], *arguments: Any) -> None:
        self.open += len(rows)

        def act() -> None:
            for row in rows:
                row.key = self.key
                self.stream.owners[row] = self
            getattr(self.stream._real(self.kind), method)(*arguments)

        self.stream.tell(act)
