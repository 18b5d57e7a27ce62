"""The processes of a rank's environments, seen from outside: it never waits for one, and ends those that take too
long.

One process that holds environments, as its rank sees it: neither reading from it nor writing to it can block.
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

_LARGEST = 1 << 20
"""Bytes of an answer."""
_AHEAD = 64
"""Steps that a process is asked for at a time, which it does one after the other."""
_PATIENCE = 0.25
"""Seconds that steps wait behind another one before they go to another process."""


@dataclass(frozen=True)
class EnvFailure:
    """An environment gave no turn; `timeout`: because it took too long."""

    reason: str
    timeout: bool = False


@dataclass(frozen=True)
class EnvSettings:
    """How the environments of a node are held. `kind` is `module:Name`; `safe` and `coroutine` are its class's."""

    kind: str
    settings: dict[str, Any]
    safe: bool
    coroutine: bool
    processes: int = 2
    """Which the environments share, if they are safe; those that are slow get their own, and so do unsafe ones."""
    seconds: float = 10.0
    """That a step may take."""
    memory_gib: float = 4.0
    """For each process."""
    together: int = 64
    """Steps that a process is asked for at a time, if they are coroutines."""


@dataclass(eq=False)
class Episode:
    """A row's environment: what it was made from, and all that the model said to it."""

    row: int
    columns: dict[str, str]
    said: list[str] = field(default_factory=list)
    place: EnvProcess | None = None
    """The process that has the instance, once a step was sent there."""
    tries: int = 0
    """Of the newest step."""
    steps: int = 1
    """That the process has to do for it: all of them where it makes the instance."""


def _packed(message: dict[str, Any]) -> bytes:
    return msgpack.packb(message, unicode_errors="surrogatepass")


class EnvProcess:
    """A process that holds environments, and the steps that it has been asked for."""

    def __init__(self, hosting: EnvSettings, selector: selectors.BaseSelector, pid: int, line: socket.socket):
        self.hosting, self.selector, self.pid, self.line = hosting, selector, pid, line
        self.asked: dict[Episode, float] = {}
        """Steps that it was asked for, and until when; for ever as long as another one is under way before it."""
        self.waiting: deque[Episode] = deque()
        self.made: set[int] = set()
        """Rows whose environment it has."""
        self.given_up: set[int] = set()
        """Rows that were asked for here, and then elsewhere."""
        self.since = math.inf
        """When the step that is under way began."""
        self.out, self.messages = bytearray(), msgpack.Unpacker(max_buffer_size=_LARGEST)
        line.setblocking(False)
        selector.register(line, selectors.EVENT_READ, self)

    @property
    def deadline(self) -> float:
        return min(self.asked.values(), default=math.inf)

    @property
    def blocked_at(self) -> float:
        """When others have waited for one step long enough to go elsewhere."""
        crowded = not self.hosting.coroutine and len(self.asked) + len(self.waiting) > 1
        return self.since + _PATIENCE if crowded and self.asked else math.inf

    def pump(self) -> None:
        """Ask for what waits, as much as the process takes on at a time."""
        most = self.hosting.together if self.hosting.coroutine else _AHEAD
        while self.waiting and len(self.asked) < most:
            talk = self.waiting.popleft()
            made = talk.row in self.made
            self.made.add(talk.row)
            self.asked[talk] = math.inf
            talk.steps = 1 if made else len(talk.said)
            self.out += _packed({"row": talk.row, "columns": {} if made else talk.columns,
                                 "said": talk.said[-1:] if made else talk.said})
        self._clock()
        if self.out:
            self.flush()

    def _clock(self) -> None:
        """The time of a step begins when it can begin."""
        for talk, deadline in self.asked.items():
            if deadline == math.inf:
                self.since = time.monotonic()
                self.asked[talk] = self.since + self.hosting.seconds * talk.steps
            if not self.hosting.coroutine:
                break

    def forget(self, talk: Episode) -> None:
        """It is not asked for again."""
        if talk in self.waiting:
            self.waiting.remove(talk)
        self._forget(talk.row)

    def _forget(self, row: int) -> None:
        self.made.discard(row)
        self.out += _packed({"end": row})

    def leave_only(self, talk: Episode) -> None:
        """Nobody waits for other answers of this process any more."""
        self.given_up = {other.row for other in self.asked if other is not talk}
        for row in self.made - {talk.row}:
            self._forget(row)
        self.asked, self.made = {talk: self.asked[talk]}, {talk.row}
        self.waiting.clear()

    def flush(self) -> None:
        """Send what the line takes now."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # its end is heard, not felt
            del self.out[: self.line.send(self.out)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.out else 0)
        self.selector.modify(self.line, events, self)

    def hear(self) -> tuple[list[tuple[int, Turn | EnvFailure]], str]:
        """The answers that have come, and what is wrong with the process if something is."""
        found: list[tuple[int, Turn | EnvFailure]] = []
        try:
            data = self.line.recv(1 << 16)
            if not data:
                return found, "its process ended"
            self.messages.feed(data)
            for message in self.messages:
                if message["row"] not in self.given_up:
                    found.append(self._answer(message))
        except ConnectionResetError:
            return found, "its process ended"
        except (msgpack.exceptions.UnpackException, msgpack.exceptions.BufferFull, ValueError, LookupError,
                TypeError) as error:
            return found, f"its process sent what is no answer: {type(error).__name__}: {error}"[:300]
        return found, ""

    def _answer(self, message: Any) -> tuple[int, Turn | EnvFailure]:
        talk = {talk.row: talk for talk in self.asked}[message["row"]]
        if "error" in message:
            answer: Turn | EnvFailure = EnvFailure(str(message["error"]))
            self.made.discard(talk.row)
        else:
            answer = Turn(str(message["observation"]), bool(message["done"]), float(message["reward"]))
            if not math.isfinite(answer.reward):
                raise ValueError(f"a reward of {answer.reward}")
        del self.asked[talk]
        self._clock()
        return talk.row, answer

    def close(self) -> None:
        self.selector.unregister(self.line)
        self.line.close()


_ROOT = str(Path(__file__).resolve().parents[2])
_START = 120.0
"""Seconds that an environment's module may take to be imported."""
_ENDING = 5.0
"""Seconds in which a process has ended whose line is closed."""
_MOST = 512
"""Processes at a time, as far as they are shared."""
_AT_ONCE = 64
"""Processes that have been told to end, until it is seen to that they did."""
_LAUNCH = f"import sys; sys.path.append({_ROOT!r}); from workers.isolation.fork_server import main; main()"


class EnvPool:
    """Environments by row. `step` hands over what the model said, `turns` gives what has come back.

    For one thread, but for `wake`. Its processes end with the thread that has made it.
    """

    def __init__(self, hosting: EnvSettings):
        self.hosting = hosting
        self.talks: dict[int, Episode] = {}
        self.selector = selectors.DefaultSelector()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector.register(self.bell, selectors.EVENT_READ)
        self.shared: list[EnvProcess] = []
        self.over: list[int] = []
        """Processes that have been told to end."""
        self.failures: deque[tuple[int, EnvFailure]] = deque()
        self.nursery, self.line = self._start()

    def _start(self) -> tuple[subprocess.Popen, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        job = {"kind": self.hosting.kind, "settings": self.hosting.settings, "path": sys.path,
               "memory_gib": self.hosting.memory_gib}
        with theirs:
            nursery = subprocess.Popen([sys.executable, "-c", _LAUNCH, str(theirs.fileno()), json.dumps(job)],
                                       env=without_secrets() | named_secrets(self.hosting.settings),
                                       pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2,
                                       start_new_session=True)
        ours.settimeout(_START)
        try:
            said = json.loads(ours.recv(1 << 16) or b'{"failed": "its process ended"}')
        except TimeoutError:
            said = {"failed": f"importing it takes longer than {_START:.0f} s"}
        if "failed" in said:
            nursery.kill()
            nursery.wait()
            raise EngineError(f"environment `{self.hosting.kind}` could not be loaded: {said['failed']}")
        return nursery, ours

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return bool(self.failures) or any(each.asked or each.waiting for each in self._processes())

    def step(self, row: int, columns: dict[str, str], text: str) -> None:
        """The model said `text` in its turn; the row's environment is made if this is its first."""
        talk = self.talks.setdefault(row, Episode(row, columns))
        talk.said.append(text)
        talk.tries = 0
        self._ask(talk)

    def turns(self, patience: float = 0.0) -> list[tuple[int, Turn | EnvFailure]]:
        """Rows whose environment has answered: waits up to `patience` seconds for one, if a step is under way and
        nobody calls `wake`."""
        found: list[tuple[int, Turn | EnvFailure]] = []
        until, woken = time.monotonic() + patience, False
        while True:
            for process in self._processes():
                process.pump()
            self._make_way()
            deadline = min([until, *(each.deadline for each in self._processes()),
                            *(each.blocked_at for each in self._may_be_left())])
            waits = self.busy and not self.failures
            for key, events in self.selector.select(max(0.0, deadline - time.monotonic()) if waits else 0.0):
                woken |= key.data is None and bool(os.eventfd_read(self.bell))
                found += self._hear(key.data, events) if key.data else []
            for process in [each for each in self._processes() if each.deadline <= time.monotonic()]:
                late = [talk for talk, deadline in process.asked.items() if deadline <= time.monotonic()]
                self._lose(process, late, EnvFailure(f"took longer than {self.hosting.seconds:g} s", timeout=True))
            found += self.failures
            self.failures.clear()
            if found or woken or not self.busy or time.monotonic() >= until:
                return found

    def wake(self) -> None:
        """Have a `turns` that waits return, or the next one. From any thread."""
        os.eventfd_write(self.bell, 1)

    def _may_be_left(self) -> list[EnvProcess]:
        return self.shared if len(self.selector.get_map()) < _MOST else []

    def _make_way(self) -> None:
        """A step that takes long has its process for itself: the others there are made again elsewhere."""
        for process in [each for each in self._may_be_left() if each.blocked_at <= time.monotonic()]:
            slow, *others = [*process.asked, *process.waiting]
            self.shared.remove(process)
            for talk in self.talks.values():
                talk.place = None if talk.place is process and talk is not slow else talk.place
            process.leave_only(slow)
            for talk in others:
                talk.tries -= 1
                self._ask(talk)
                talk.place.pump()

    def end(self, row: int) -> None:
        """The row is not asked again."""
        talk = self.talks.pop(row, None)
        if talk is None or talk.place is None:
            return
        if talk.place not in self.shared:
            self._close(talk.place)
        elif talk in talk.place.asked:  # it may go on for long
            self._lose(talk.place, [talk])
        else:
            talk.place.forget(talk)

    def tidy(self, rows: Iterable[int] | None = None) -> None:
        """Let go of everything that was left behind, of these rows (None: of all)."""
        for row in list(self.talks) if rows is None else rows:
            self.end(row)
        if self.over:
            self._reap()

    def close(self) -> None:
        """End all processes."""
        for process in self._processes():
            process.line.close()
        self.selector.close()
        os.close(self.bell)
        self.line.close()
        self.nursery.wait()

    def _processes(self) -> list[EnvProcess]:
        return [key.data for key in self.selector.get_map().values() if key.data]

    def _ask(self, talk: Episode) -> None:
        talk.tries += 1
        if talk.place is None:
            talk.place = self._place()
        talk.place.waiting.append(talk)

    def _place(self) -> EnvProcess:
        """A process for an environment: of its own, or the least used of those that may be shared."""
        if self.hosting.safe and len(self.shared) >= self.hosting.processes:
            return min(self.shared, key=lambda each: len(each.waiting) + len(each.asked))
        ours, theirs = socket.socketpair()
        with theirs:
            number = self._order(b"f", theirs.fileno())
        process = EnvProcess(self.hosting, self.selector, number, ours)
        if self.hosting.safe:
            self.shared.append(process)
        return process

    def _reap(self) -> None:
        """See to it that the processes which have been told to end do so."""
        self._order(b"k" + array.array("i", self.over).tobytes())
        self.over.clear()

    def _order(self, packet: bytes, *files: int) -> int:
        """Tell the nursery what to do; the id of the process that it has forked for a file.

        Raises:
            EngineError: it is gone.
        """
        try:
            socket.send_fds(self.line, [packet], files)
            said = self.line.recv(4) if files else b"\0"
        except OSError:
            said = b""
        if not said:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its line may close a moment before it has ended
                self.nursery.wait(_ENDING)
            raise EngineError(f"the process that starts environments of `{self.hosting.kind}` has ended, with code "
                              f"{self.nursery.poll()}. An environment may have killed it, or memory ran out.")
        return int.from_bytes(said, "little")

    def _hear(self, process: EnvProcess, events: int) -> list[tuple[int, Turn | EnvFailure]]:
        if events & selectors.EVENT_WRITE:
            process.flush()
        answers, wrong = process.hear() if events & selectors.EVENT_READ else ([], "")
        found: list[tuple[int, Turn | EnvFailure]] = []
        for row, answer in answers:
            if isinstance(answer, Turn):
                found.append((row, answer))
            else:
                self._retry(self.talks[row], answer)
        if wrong:
            under_way = [talk for talk, deadline in process.asked.items() if deadline < math.inf]
            self._lose(process, under_way, EnvFailure(wrong))
        return found

    def _lose(self, process: EnvProcess, late: list[Episode], failure: EnvFailure | None = None) -> None:
        """End a process. The steps of `late` have failed, or are not wanted any more; other environments that it held
        are made again."""
        others = [talk for talk in [*process.asked, *process.waiting] if talk not in late]
        self._close(process)
        for talk in self.talks.values():
            talk.place = None if talk.place is process else talk.place
        for talk in others:
            talk.tries -= 1
            self._ask(talk)
        for talk in late if failure else ():
            self._retry(talk, failure)

    def _retry(self, talk: Episode, failure: EnvFailure) -> None:
        """Once more from its beginning, if that is safe; else the trajectory has failed."""
        if self.hosting.safe and talk.tries < 2:
            self._ask(talk)
        else:
            self.failures.append((talk.row, failure))

    def _close(self, process: EnvProcess) -> None:
        process.close()
        self.over.append(process.pid)
        if process in self.shared:
            self.shared.remove(process)
        if process.asked or process.waiting or len(self.over) >= _AT_ONCE:  # it may be at work: at once
            self._reap()
