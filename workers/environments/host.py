"""A rank's side of its environments: it never waits for one, and ends those that take too long."""

from __future__ import annotations

import array
import contextlib
import json
import math
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from distflow.schema.errors import EngineError
from distflow.schema.registry import Turn

_ROOT = str(Path(__file__).resolve().parents[2])
_START = 120.0
"""Seconds that an environment's module may take to be imported."""
_LARGEST = 1 << 20
"""Bytes of an answer."""
_TOGETHER = 64
"""Steps that a process which may be shared takes on at a time, if they are coroutines."""
_hosts: dict[str, Host] = {}
_LAUNCH = f"import sys; sys.path.append({_ROOT!r}); from workers.environments.nursery import main; main()"


@dataclass(frozen=True)
class Failure:
    """An environment gave no turn; `timeout`: because it took too long."""

    reason: str
    timeout: bool = False


@dataclass(frozen=True)
class Hosting:
    """How the environments of a node are held. `kind` is `module:Name`; `safe` and `coroutine` are its class's."""

    kind: str
    settings: dict[str, Any]
    safe: bool
    coroutine: bool
    processes: int = 2
    """Which the environments share, if they are safe; else each has its own."""
    seconds: float = 10.0
    """That a step may take."""
    memory_mib: int = 4096
    """Of addresses, for each process."""


def host_of(hosting: Hosting) -> Host:
    """The host of these environments; it stays for the steps to come."""
    key = repr(hosting)
    if key not in _hosts:
        _hosts[key] = Host(hosting)
    return _hosts[key]


@dataclass(eq=False)
class _Talk:
    """A row's environment: what it was made from, and all that the model said to it."""

    row: int
    columns: dict[str, str]
    said: list[str] = field(default_factory=list)
    place: _Process | None = None
    """The process that has the instance, once a step was sent there."""
    tries: int = 0
    """Of the newest step."""


class Host:
    """Environments by row. `step` hands over what the model said, `turns` gives what has come back."""

    def __init__(self, hosting: Hosting):
        self.hosting = hosting
        self.talks: dict[int, _Talk] = {}
        self.selector = selectors.DefaultSelector()
        self.shared: list[_Process] = []
        self.over: list[int] = []
        """Processes that have been told to end."""
        self.failures: deque[tuple[int, Failure]] = deque()
        self.nursery, self.line = self._start()

    def _start(self) -> tuple[subprocess.Popen, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        job = {"kind": self.hosting.kind, "settings": self.hosting.settings, "path": sys.path,
               "memory_mib": self.hosting.memory_mib}
        with theirs:
            nursery = subprocess.Popen([sys.executable, "-c", _LAUNCH, str(theirs.fileno()), json.dumps(job)],
                                       pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=sys.stderr,
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
        talk = self.talks.setdefault(row, _Talk(row, columns))
        talk.said.append(text)
        talk.tries = 0
        self._ask(talk)

    def turns(self, wait: bool) -> list[tuple[int, Turn | Failure]]:
        """Rows whose environment has answered; with `wait` at least one, unless nothing is under way."""
        found: list[tuple[int, Turn | Failure]] = []
        while True:
            deadline = min((each.deadline for each in self._processes()), default=math.inf)
            patience = max(0.0, deadline - time.monotonic()) if wait and self.busy and not self.failures else 0.0
            for key, events in self.selector.select(patience):
                found += self._hear(key.data, events)
            for process in [each for each in self._processes() if each.deadline <= time.monotonic()]:
                self._lose(process, f"took longer than {self.hosting.seconds:g} s", timeout=True)
            found += self.failures
            self.failures.clear()
            if found or not wait or not self.busy:
                return found

    def end(self, row: int) -> None:
        """The row is not asked again."""
        talk = self.talks.pop(row, None)
        if talk and talk.place:
            if self.hosting.safe:
                talk.place.say({"end": row})
            else:
                self._close(talk.place)

    def tidy(self) -> None:
        """Let go of everything that was left behind."""
        for row in list(self.talks):
            self.end(row)
        if self.over:
            self.line.sendall(b"k" + array.array("i", self.over).tobytes())
            self.over.clear()

    def close(self) -> None:
        """End all processes."""
        for process in self._processes():
            process.line.close()
        self.selector.close()
        self.line.close()
        self.nursery.wait()

    def _processes(self) -> list[_Process]:
        return [key.data for key in self.selector.get_map().values()]

    def _ask(self, talk: _Talk) -> None:
        talk.tries += 1
        if talk.place is None:
            talk.place = self._place()
        talk.place.waiting.append(talk)
        talk.place.pump()

    def _place(self) -> _Process:
        """A process for an environment: of its own, or the least used of those that may be shared."""
        if self.hosting.safe and len(self.shared) >= self.hosting.processes:
            return min(self.shared, key=lambda each: len(each.waiting) + len(each.asked))
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.line, [b"f"], [theirs.fileno()])
        process = _Process(self, int.from_bytes(self.line.recv(4), "little"), ours)
        if self.hosting.safe:
            self.shared.append(process)
        return process

    def _hear(self, process: _Process, events: int) -> list[tuple[int, Turn | Failure]]:
        if events & selectors.EVENT_WRITE:
            process.flush()
        try:
            answers = process.hear() if events & selectors.EVENT_READ else []
        except _Nonsense as error:
            self._lose(process, str(error))
            return []
        found: list[tuple[int, Turn | Failure]] = []
        for row, answer in answers:
            if isinstance(answer, Turn):
                found.append((row, answer))
            else:
                self._retry(self.talks[row], answer)
        process.pump()
        return found

    def _lose(self, process: _Process, reason: str, timeout: bool = False) -> None:
        """End a process. A step that was under way has failed; other environments that it held are made again."""
        late = [talk for talk, deadline in process.asked.items() if not timeout or deadline <= time.monotonic()]
        others = [talk for talk in [*process.asked, *process.waiting] if talk not in late]
        self._close(process)
        for talk in self.talks.values():
            talk.place = None if talk.place is process else talk.place
        for talk in others:
            talk.tries -= 1
            self._ask(talk)
        for talk in late:
            self._retry(talk, Failure(reason, timeout))

    def _retry(self, talk: _Talk, failure: Failure) -> None:
        """Once more from its beginning, if that is safe; else the trajectory has failed."""
        if self.hosting.safe and talk.tries < 2:
            self._ask(talk)
        else:
            self.failures.append((talk.row, failure))

    def _close(self, process: _Process) -> None:
        process.close()
        self.over.append(process.pid)
        if process in self.shared:
            self.shared.remove(process)
        if process.asked or process.waiting or len(self.over) >= _TOGETHER:  # it may be at work: at once
            self.line.sendall(b"k" + array.array("i", self.over).tobytes())
            self.over.clear()


class _Nonsense(Exception):
    """What came over a line is no answer to what was asked, or the process is gone."""


class _Process:
    """A process that holds environments, and the steps that it has been asked for."""

    def __init__(self, host: Host, pid: int, line: socket.socket):
        self.host, self.pid, self.line = host, pid, line
        self.asked: dict[_Talk, float] = {}
        """Steps under way, and until when."""
        self.waiting: deque[_Talk] = deque()
        self.made: set[int] = set()
        """Rows whose environment it has."""
        self.out, self.messages = bytearray(), msgpack.Unpacker(max_buffer_size=_LARGEST)
        line.setblocking(False)
        host.selector.register(line, selectors.EVENT_READ, self)

    @property
    def deadline(self) -> float:
        return min(self.asked.values(), default=math.inf)

    def pump(self) -> None:
        """Ask for what waits, as much as the process takes on at a time."""
        hosting = self.host.hosting
        while self.waiting and len(self.asked) < (_TOGETHER if hosting.coroutine else 1):
            talk = self.waiting.popleft()
            made = talk.row in self.made
            self.made.add(talk.row)
            steps = 1 if made else len(talk.said)
            self.asked[talk] = time.monotonic() + hosting.seconds * steps
            self.say({"row": talk.row, "columns": {} if made else talk.columns,
                      "said": talk.said[-1:] if made else talk.said})

    def say(self, message: dict[str, Any]) -> None:
        self.out += msgpack.packb(message, unicode_errors="surrogatepass")
        self.flush()

    def flush(self) -> None:
        """Send what the line takes now."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # its end is heard, not felt
            del self.out[: self.line.send(self.out)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.out else 0)
        self.host.selector.modify(self.line, events, self)

    def hear(self) -> list[tuple[int, Turn | Failure]]:
        """The answers that have come.

        Raises:
            _Nonsense: something else has.
        """
        try:
            data = self.line.recv(1 << 16)
            if not data:
                raise _Nonsense("its process ended")
            self.messages.feed(data)
            return [self._answer(message) for message in self.messages]
        except ConnectionResetError:
            raise _Nonsense("its process ended") from None
        except (msgpack.exceptions.UnpackException, msgpack.exceptions.BufferFull, ValueError, LookupError,
                TypeError) as error:
            raise _Nonsense(f"its process sent what is no answer: {type(error).__name__}: {error}"[:300]) from None

    def _answer(self, message: Any) -> tuple[int, Turn | Failure]:
        talk = {talk.row: talk for talk in self.asked}[message["row"]]
        if "error" in message:
            answer: Turn | Failure = Failure(str(message["error"]))
            self.made.discard(talk.row)
        else:
            answer = Turn(str(message["observation"]), bool(message["done"]), float(message["reward"]))
            if not math.isfinite(answer.reward):
                raise ValueError(f"a reward of {answer.reward}")
        del self.asked[talk]
        return talk.row, answer

    def close(self) -> None:
        self.host.selector.unregister(self.line)
        self.line.close()
