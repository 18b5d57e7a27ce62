"""Shares one sampling engine between many threads, so that the slot of an ended row goes to any of them.

    SharedEngine   owns the engine; the thread that runs `drive` is the only one that touches it
    EngineCaller   the session of one thread: submits calls and waits for its rows
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distflow.config.robust import Phase
from distflow.errors import DistflowError, EngineError
from distflow.telemetry import heartbeat, timeline
from workers.engines.rollout import Rollout, SampledRow, Sampler, Session
from workers.engines.sampling import TokenLimits

Kind = tuple[float | None, bool, TokenLimits | None]
"""Temperature, whether caches are kept, and limits of a session of the engine, which callers with these share."""
_POLL_INTERVAL = 0.05  # seconds between checks of an idle engine, and of a caller that waits for an abort


class EngineStopped(EngineError):
    """The shared engine has stopped or failed; the driving thread raises the cause."""


class SharedEngine(Sampler):
    """Engine with many callers. `renew` runs between two tokens in the driving thread and may replace the weights.
    Every call of every caller raises EngineError once the engine has failed."""

    def __init__(self, rollout: Rollout, renew: Callable[[SharedEngine], None] = lambda engine: None):
        self.rollout, self.renew = rollout, renew
        self.generation, self.end_tokens = rollout.generation, rollout.end_tokens
        self.sessions: dict[Kind, Session] = {}
        self.owners: dict[SampledRow, EngineCaller] = {}
        self.actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.failure: DistflowError | None = None
        self.changed = threading.Condition()
        self.callers: weakref.WeakSet[EngineCaller] = weakref.WeakSet()
        self.version = rollout.version
        self.held_from: int | None = None
        self.idle_phase: Phase = "waiting"  # the phase of this rank while nothing is sampled
        self.shown: Phase = "waiting"
        self.gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def session(self, key: int, temperature: float | None = None, keep_cache: bool = False,
                limits: TokenLimits | None = None) -> EngineCaller:
        caller = EngineCaller(self, key, (temperature, keep_cache, limits))
        with self.changed:
            self.callers.add(caller)
        return caller

    def drive(self, stopped: Callable[[], bool], failed: Callable[[], bool] = lambda: False) -> None:
        """Sample what callers submit until `stopped`; then abort the rows, but not once something has `failed`."""
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)  # another thread has made the engine, and each begins with the first GPU
        try:
            while not stopped():
                self._run_actions()
                if not self.holds_weights:
                    self.renew(self)
                self._announce_version()
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

    @property
    def was_busy(self) -> bool:
        """Whether it sampled when it last looked."""
        return self.shown == "generating"

    def _show(self) -> None:
        """Report the phase of an idle engine as `idle_phase`, since it samples no tokens."""
        busy = any(session.busy for session in self.sessions.values())
        phase = "generating" if busy else self.idle_phase
        if phase != self.shown:
            self.shown, heart = phase, heartbeat.current()
            heart.enter(phase)
            doing = {"generating": "sampling", "waiting": "waiting for prompts"}.get(phase, phase)
            timeline.current().enter(doing, phase, heart.page.step)

    def hold(self, version: int | None) -> None:
        """Keep the weights as they are once they are at least of this version; None: let newer ones come again."""
        self.held_from = version

    @property
    def holds_weights(self) -> bool:
        return (held_from := self.held_from) is not None and self.version >= held_from

    def wait(self, version: int, seconds: float | None = None) -> bool:
        """Block until the engine has at least this version of the weights. Return whether it came in `seconds`."""
        with self.changed:
            self.changed.wait_for(lambda: self.version >= version or self.failure, seconds)
        self.check()
        return self.version >= version

    def check(self) -> None:
        if self.failure is not None:
            raise EngineStopped(str(self.failure)) from self.failure

    def submit(self, action: Callable[[], None]) -> None:
        """Run an action in the driving thread before the next token."""
        with self.changed:
            self.check()
            self.actions.put(action)

    def _run_actions(self) -> None:
        idle = not any(session.busy for session in self.sessions.values())
        try:
            self.actions.get(timeout=_POLL_INTERVAL)() if idle else self.actions.get_nowait()()
            while True:
                self.actions.get_nowait()()
        except queue.Empty:
            return

    def _announce_version(self) -> None:
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

    def _session(self, kind: Kind) -> Session:
        if kind not in self.sessions:
            self.sessions[kind] = self.rollout.session(0, *kind)
        return self.sessions[kind]


class EngineCaller(Session):
    """Session of one caller of a shared engine. Not thread-safe."""

    shared = True

    def __init__(self, engine: SharedEngine, key: int, kind: Kind):
        self.engine, self.key, self.kind = engine, key, kind
        self.ended: queue.SimpleQueue[SampledRow | None] = queue.SimpleQueue()
        self.open = 0

    @property
    def busy(self) -> bool:
        return self.open > 0

    def add(self, rows: list[SampledRow]) -> None:
        self._ask(rows, lambda session: session.add(rows))

    def extend(self, row: SampledRow, observation: Tensor, limit: int) -> None:
        self._ask([row], lambda session: session.extend(row, observation, limit))

    def forget(self, row: SampledRow) -> None:
        self.engine.submit(lambda: self.engine._session(self.kind).forget(row))

    def step(self) -> list[SampledRow]:
        """Return the rows whose turn has ended; wait for the first one, or for `wake`."""
        # No time limit: some hundred threads that poll would use half a processor.
        if self.busy and self.ended.empty():
            self.engine.check()  # the wake-up may have been taken together with a row
        ended = [self.ended.get()] if self.busy else []
        with contextlib.suppress(queue.Empty):
            while True:
                ended.append(self.ended.get_nowait())
        found = [row for row in ended if row is not None]
        self.open -= len(found)
        if not found:
            self.engine.check()
        return found

    def wake(self) -> None:
        self.ended.put(None)

    def wait(self) -> None:
        if self.ended.empty():
            self.engine.check()
        self.ended.get()
        self.engine.check()

    def check(self) -> None:
        self.engine.check()

    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        done: queue.SimpleQueue[list[SampledRow]] = queue.SimpleQueue()

        def act() -> None:
            mine = [row for row, owner in self.engine.owners.items() if owner is self and (rows is None or row in rows)]
            left = self.engine._session(self.kind).abort(mine)
            for row in left:
                del self.engine.owners[row]
            done.put(left)

        self.engine.submit(act)
        while True:
            try:
                left = done.get(timeout=_POLL_INTERVAL)
                self.open -= len(left)
                return left
            except queue.Empty:
                self.engine.check()

    def _ask(self, rows: list[SampledRow], begin: Callable[[Session], None]) -> None:
        self.open += len(rows)

        def act() -> None:
            for row in rows:
                row.key = self.key
                self.engine.owners[row] = self
            begin(self.engine._session(self.kind))

        self.engine.submit(act)
