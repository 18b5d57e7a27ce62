"""One process that holds environments, as its rank sees it: neither reading from it nor writing to it can block."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgpack

from distflow.schema.registry import Turn

_LARGEST = 1 << 20
"""Bytes of an answer."""
_AHEAD = 64
"""Steps that a process is asked for at a time, which it does one after the other."""
_PATIENCE = 0.25
"""Seconds that steps wait behind another one before they go to another process."""


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
    """Which the environments share, if they are safe; those that are slow get their own, and so do unsafe ones."""
    seconds: float = 10.0
    """That a step may take."""
    memory_gib: float = 4.0
    """For each process."""
    together: int = 64
    """Steps that a process is asked for at a time, if they are coroutines."""


@dataclass(eq=False)
class Talk:
    """A row's environment: what it was made from, and all that the model said to it."""

    row: int
    columns: dict[str, str]
    said: list[str] = field(default_factory=list)
    place: Process | None = None
    """The process that has the instance, once a step was sent there."""
    tries: int = 0
    """Of the newest step."""
    steps: int = 1
    """That the process has to do for it: all of them where it makes the instance."""


def _packed(message: dict[str, Any]) -> bytes:
    return msgpack.packb(message, unicode_errors="surrogatepass")


class Process:
    """A process that holds environments, and the steps that it has been asked for."""

    def __init__(self, hosting: Hosting, selector: selectors.BaseSelector, pid: int, line: socket.socket):
        self.hosting, self.selector, self.pid, self.line = hosting, selector, pid, line
        self.asked: dict[Talk, float] = {}
        """Steps that it was asked for, and until when; for ever as long as another one is under way before it."""
        self.waiting: deque[Talk] = deque()
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

    def forget(self, talk: Talk) -> None:
        """It is not asked for again."""
        if talk in self.waiting:
            self.waiting.remove(talk)
        self._forget(talk.row)

    def _forget(self, row: int) -> None:
        self.made.discard(row)
        self.out += _packed({"end": row})

    def leave_only(self, talk: Talk) -> None:
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

    def hear(self) -> tuple[list[tuple[int, Turn | Failure]], str]:
        """The answers that have come, and what is wrong with the process if something is."""
        found: list[tuple[int, Turn | Failure]] = []
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
        self._clock()
        return talk.row, answer

    def close(self) -> None:
        self.selector.unregister(self.line)
        self.line.close()
