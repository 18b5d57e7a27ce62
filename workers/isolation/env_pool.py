"""Pool of processes that run a rank's environments: routes steps, restarts crashed processes, enforces time limits.

    EnvPool      one per rank and kind of environment; assigns rows to processes and retries failed steps
    EnvProcess   the rank's end of one process (`env_worker`), forked by a fork server (`fork_server`)
    Episode      one row's environment: its columns, the texts of the model so far, the process that runs it

Neither reading from a process nor writing to it blocks the rank.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from distflow.contracts.decorators import Turn
from distflow.errors import EngineError
from workers.isolation.sandbox.variables import named_secrets, without_secrets

_MAX_ANSWER = 1 << 20
"""Bytes."""
_MAX_PENDING = 64
"""Steps sent to a process ahead of their answers; the process runs them one after the other."""
_MAX_WAIT = 0.25
"""Seconds that steps wait behind a slow one before they move to another process."""


@dataclass(frozen=True)
class EnvFailure:
    """Why an environment returned no turn; `timeout` is set where it took too long."""

    reason: str
    timeout: bool = False


@dataclass(frozen=True)
class EnvSettings:
    """Settings of a node's environments. `kind` is `module:Name`; `safe` and `coroutine` are marks of its class."""

    kind: str
    settings: dict[str, Any]
    safe: bool
    coroutine: bool
    processes: int = 2
    """Shared by safe environments; slow and unsafe environments get a process each."""
    seconds: float = 10.0
    """Limit of a step."""
    memory_gib: float = 4.0
    """Limit of each process."""
    together: int = 64
    """Steps under way in a process at a time, if `step` is a coroutine."""


@dataclass(eq=False)
class Episode:
    """Environment of a row, with all that is needed to create it again."""

    row: int
    columns: dict[str, str]
    texts: list[str] = field(default_factory=list)
    """Turns of the model, oldest first."""
    process: EnvProcess | None = None
    attempts: int = 0
    """Attempts at the newest step."""
    steps: int = 1
    """Steps that the process runs for the newest request: all of them where it creates the instance."""


def _pack(message: dict[str, Any]) -> bytes:
    return msgpack.packb(message, unicode_errors="surrogatepass")


class EnvProcess:
    """Rank's end of one environment process, with the steps sent to it."""

    def __init__(self, config: EnvSettings, selector: selectors.BaseSelector, pid: int,
                 connection: socket.socket):
        self.config, self.selector, self.pid, self.connection = config, selector, pid, connection
        self.pending: dict[Episode, float] = {}
        """Deadline of each step that was sent; infinite while another step is under way before it."""
        self.queued: deque[Episode] = deque()
        self.rows: set[int] = set()
        """Rows whose environment lives here."""
        self.abandoned: set[int] = set()
        """Rows that have moved to another process; their late answers are dropped."""
        self.step_began = math.inf
        """Time at which the step under way began."""
        self.out, self.messages = bytearray(), msgpack.Unpacker(max_buffer_size=_MAX_ANSWER)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self)

    @property
    def deadline(self) -> float:
        return min(self.pending.values(), default=math.inf)

    @property
    def blocked_at(self) -> float:
        """Time from which queued steps move away from a slow one; infinite if none waits."""
        crowded = not self.config.coroutine and len(self.pending) + len(self.queued) > 1
        return self.step_began + _MAX_WAIT if crowded and self.pending else math.inf

    def send_queued(self) -> None:
        """Send queued steps, up to the number that the process takes at a time."""
        most = self.config.together if self.config.coroutine else _MAX_PENDING
        while self.queued and len(self.pending) < most:
            episode = self.queued.popleft()
            known = episode.row in self.rows
            self.rows.add(episode.row)
            self.pending[episode] = math.inf
            episode.steps = 1 if known else len(episode.texts)
            self.out += _pack({"row": episode.row, "columns": {} if known else episode.columns,
                               "texts": episode.texts[-1:] if known else episode.texts})
        self._start_clock()
        if self.out:
            self.send()

    def _start_clock(self) -> None:
        """Set the deadline of steps that can run now: all of a coroutine's, else the first."""
        for episode, deadline in self.pending.items():
            if deadline == math.inf:
                self.step_began = time.monotonic()
                self.pending[episode] = self.step_began + self.config.seconds * episode.steps
            if not self.config.coroutine:
                break

    def forget(self, episode: Episode) -> None:
        """Let the process drop the row's environment."""
        if episode in self.queued:
            self.queued.remove(episode)
        self._forget(episode.row)

    def _forget(self, row: int) -> None:
        self.rows.discard(row)
        self.out += _pack({"end": row})

    def keep_only(self, episode: Episode) -> None:
        """Give up all other steps and environments of this process."""
        self.abandoned = {other.row for other in self.pending if other is not episode}
        for row in self.rows - {episode.row}:
            self._forget(row)
        self.pending, self.rows = {episode: self.pending[episode]}, {episode.row}
        self.queued.clear()

    def send(self) -> None:
        """Send what the socket takes without blocking."""
        # `receive` notices a lost connection
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            del self.out[: self.connection.send(self.out)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.out else 0)
        self.selector.modify(self.connection, events, self)

    def receive(self) -> tuple[list[tuple[int, Turn | EnvFailure]], str]:
        """Return the answers that have arrived, and what is wrong with the process ("" if nothing)."""
        found: list[tuple[int, Turn | EnvFailure]] = []
        try:
            data = self.connection.recv(1 << 16)
            if not data:
                return found, "its process ended"
            self.messages.feed(data)
            for message in self.messages:
                if message["row"] not in self.abandoned:
                    found.append(self._answer(message))
        except ConnectionResetError:
            return found, "its process ended"
        except (msgpack.exceptions.UnpackException, msgpack.exceptions.BufferFull, ValueError, LookupError,
                TypeError) as error:
            return found, f"its process sent what is no answer: {type(error).__name__}: {error}"[:300]
        return found, ""

    def _answer(self, message: Any) -> tuple[int, Turn | EnvFailure]:
        episode = {episode.row: episode for episode in self.pending}[message["row"]]
        if "error" in message:
            answer: Turn | EnvFailure = EnvFailure(str(message["error"]))
            self.rows.discard(episode.row)
        else:
            answer = Turn(str(message["observation"]), bool(message["done"]), float(message["reward"]))
            if not math.isfinite(answer.reward):
                raise ValueError(f"a reward of {answer.reward}")
        del self.pending[episode]
        self._start_clock()
        return episode.row, answer

    def close(self) -> None:
        self.selector.unregister(self.connection)
        self.connection.close()


_ROOT = str(Path(__file__).resolve().parents[2])
_LOAD_TIMEOUT = 120.0
"""Seconds to import an environment's module."""
_EXIT_TIMEOUT = 5.0
"""Seconds in which the fork server ends once its connection is closed."""
_MAX_PROCESSES = 512
"""Shared processes at a time."""
_REAP_AT = 64
"""Closed processes that are collected before the fork server is asked to kill them."""
_LAUNCH = f"import sys; sys.path.append({_ROOT!r}); from workers.isolation.fork_server import main; main()"


class EnvPool:
    """Environments by row: `step` sends a turn of the model, `turns` returns the answers that have arrived.

    Not thread-safe, except for `wake`. The processes end with the thread that created the pool.
    """

    def __init__(self, config: EnvSettings):
        self.config = config
        self.episodes: dict[int, Episode] = {}
        self.selector = selectors.DefaultSelector()
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector.register(self.wakeup, selectors.EVENT_READ)
        self.shared: list[EnvProcess] = []
        self.ended: list[int] = []
        """Ids of closed processes that the fork server has yet to kill."""
        self.failures: deque[tuple[int, EnvFailure]] = deque()
        self.fork_server, self.connection = self._start_fork_server()

    def _start_fork_server(self) -> tuple[subprocess.Popen, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        job = {"kind": self.config.kind, "settings": self.config.settings, "path": sys.path,
               "memory_gib": self.config.memory_gib}
        with theirs:
            server = subprocess.Popen([sys.executable, "-c", _LAUNCH, str(theirs.fileno()), json.dumps(job)],
                                      env=without_secrets() | named_secrets(self.config.settings),
                                      pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2,
                                      start_new_session=True)
        ours.settimeout(_LOAD_TIMEOUT)
        try:
            reply = json.loads(ours.recv(1 << 16) or b'{"failed": "its process ended"}')
        except TimeoutError:
            reply = {"failed": f"importing it takes longer than {_LOAD_TIMEOUT:.0f} s"}
        if "failed" in reply:
            server.kill()
            server.wait()
            raise EngineError(f"environment `{self.config.kind}` could not be loaded: {reply['failed']}")
        return server, ours

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return bool(self.failures) or any(each.pending or each.queued for each in self._processes())

    def step(self, row: int, columns: dict[str, str], text: str) -> None:
        """Send the model's turn `text` to the row's environment, which is created on its first turn."""
        episode = self.episodes.setdefault(row, Episode(row, columns))
        episode.texts.append(text)
        episode.attempts = 0
        self._queue(episode)

    def turns(self, timeout_s: float = 0.0) -> list[tuple[int, Turn | EnvFailure]]:
        """Return (row, answer) of each environment that has answered; [] after `timeout_s` seconds, after `wake`, or
        if no step is under way."""
        found: list[tuple[int, Turn | EnvFailure]] = []
        until, woken = time.monotonic() + timeout_s, False
        while True:
            for process in self._processes():
                process.send_queued()
            self._isolate_slow_steps()
            deadline = min([until, *(each.deadline for each in self._processes()),
                            *(each.blocked_at for each in self._leavable())])
            waits = self.busy and not self.failures
            for key, events in self.selector.select(max(0.0, deadline - time.monotonic()) if waits else 0.0):
                woken |= key.data is None and bool(os.eventfd_read(self.wakeup))
                found += self._receive(key.data, events) if key.data else []
            for process in [each for each in self._processes() if each.deadline <= time.monotonic()]:
                late = [episode for episode, deadline in process.pending.items() if deadline <= time.monotonic()]
                failure = EnvFailure(f"took longer than {self.config.seconds:g} s", timeout=True)
                self._end_process(process, late, failure)
            found += self.failures
            self.failures.clear()
            if found or woken or not self.busy or time.monotonic() >= until:
                return found

    def wake(self) -> None:
        """Make a waiting `turns`, or the next one, return at once. Thread-safe."""
        os.eventfd_write(self.wakeup, 1)

    def _leavable(self) -> list[EnvProcess]:
        return self.shared if len(self.selector.get_map()) < _MAX_PROCESSES else []

    def _isolate_slow_steps(self) -> None:
        """Leave a slow step alone in its process: create the other environments of that process again elsewhere."""
        for process in [each for each in self._leavable() if each.blocked_at <= time.monotonic()]:
            slow, *others = [*process.pending, *process.queued]
            self.shared.remove(process)
            for episode in self.episodes.values():
                episode.process = None if episode.process is process and episode is not slow else episode.process
            process.keep_only(slow)
            for episode in others:
                episode.attempts -= 1
                self._queue(episode)
                episode.process.send_queued()

    def end(self, row: int) -> None:
        """Drop the row's environment."""
        episode = self.episodes.pop(row, None)
        if episode is None or episode.process is None:
            return
        if episode.process not in self.shared:
            self._close(episode.process)
        elif episode in episode.process.pending:  # the step may take long
            self._end_process(episode.process, [episode])
        else:
            episode.process.forget(episode)

    def release(self, rows: Iterable[int] | None = None) -> None:
        """Drop the environments of these rows (None: of all)."""
        for row in list(self.episodes) if rows is None else rows:
            self.end(row)
        if self.ended:
            self._reap()

    def close(self) -> None:
        """End all processes."""
        for process in self._processes():
            process.connection.close()
        self.selector.close()
        os.close(self.wakeup)
        self.connection.close()
        self.fork_server.wait()

    def _processes(self) -> list[EnvProcess]:
        return [key.data for key in self.selector.get_map().values() if key.data]

    def _queue(self, episode: Episode) -> None:
        episode.attempts += 1
        if episode.process is None:
            episode.process = self._pick_process()
        episode.process.queued.append(episode)

    def _pick_process(self) -> EnvProcess:
        """Return a process for an environment: a new one, or the least loaded of the shared ones."""
        if self.config.safe and len(self.shared) >= self.config.processes:
            return min(self.shared, key=lambda each: len(each.queued) + len(each.pending))
        ours, theirs = socket.socketpair()
        with theirs:
            number = self._request(b"f", theirs.fileno())
        process = EnvProcess(self.config, self.selector, number, ours)
        if self.config.safe:
            self.shared.append(process)
        return process

    def _reap(self) -> None:
        """Have the fork server kill the closed processes."""
        self._request(b"k" + array.array("i", self.ended).tobytes())
        self.ended.clear()

    def _request(self, packet: bytes, *files: int) -> int:
        """Send a command to the fork server; return the id of the process forked for a file.

        Raises:
            EngineError: the fork server has ended.
        """
        try:
            socket.send_fds(self.connection, [packet], files)
            reply = self.connection.recv(4) if files else b"\0"
        except OSError:
            reply = b""
        if not reply:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its connection may close a moment before it ends
                self.fork_server.wait(_EXIT_TIMEOUT)
            raise EngineError(f"the process that starts environments of `{self.config.kind}` has ended, with code "
                              f"{self.fork_server.poll()}. An environment may have killed it, or memory ran out.")
        return int.from_bytes(reply, "little")

    def _receive(self, process: EnvProcess, events: int) -> list[tuple[int, Turn | EnvFailure]]:
        if events & selectors.EVENT_WRITE:
            process.send()
        answers, wrong = process.receive() if events & selectors.EVENT_READ else ([], "")
        found: list[tuple[int, Turn | EnvFailure]] = []
        for row, answer in answers:
            if isinstance(answer, Turn):
                found.append((row, answer))
            else:
                self._retry(self.episodes[row], answer)
        if wrong:
            under_way = [episode for episode, deadline in process.pending.items() if deadline < math.inf]
            self._end_process(process, under_way, EnvFailure(wrong))
        return found

    def _end_process(self, process: EnvProcess, late: list[Episode], failure: EnvFailure | None = None) -> None:
        """End a process and create its other environments again elsewhere. With a `failure`, the steps of `late` have
        failed; without one nobody wants them."""
        others = [episode for episode in [*process.pending, *process.queued] if episode not in late]
        self._close(process)
        for episode in self.episodes.values():
            episode.process = None if episode.process is process else episode.process
        for episode in others:
            episode.attempts -= 1
            self._queue(episode)
        for episode in late if failure else ():
            self._retry(episode, failure)

    def _retry(self, episode: Episode, failure: EnvFailure) -> None:
        """Run a safe environment once more from its beginning; record the failure of any other."""
        if self.config.safe and episode.attempts < 2:
            self._queue(episode)
        else:
            self.failures.append((episode.row, failure))

    def _close(self, process: EnvProcess) -> None:
        process.close()
        self.ended.append(process.pid)
        if process in self.shared:
            self.shared.remove(process)
        if process.pending or process.queued or len(self.ended) >= _REAP_AT:  # a busy process is killed at once
            self._reap()
