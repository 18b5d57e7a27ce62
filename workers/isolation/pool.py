"""Pool of child processes for users' code, which may raise, hang, crash, eat memory or leave processes behind.

    CallPool       starts a fork server (`workers.isolation.child`), forks children, hands out answers and failures
    ChildProcess   the rank's end of one child with the calls that it was sent
    Call           one question to a child, with its time limit

A child answers one call after the other, or if it is `concurrent` all of them together. The clock of a call starts when
its turn comes: a call whose clock runs is to blame if its child dies or it takes too long; the others start elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgpack

from distflow.errors import EngineError
from distflow.telemetry.processes import Child, kill_marked, spawn, stopped
from workers.isolation.child import Channel, Message, packed
from workers.isolation.sandbox.variables import without_secrets

LOAD_TIMEOUT = 120.0  # seconds to import a module of users' code
EXIT_GRACE = 1.0  # seconds from the end of a child's connection to its own end
_END_TIMEOUT = 10.0  # seconds for a fork server to kill its children and to end
_LOOK, _MOST_STOPS = 0.25, 8
"""Seconds between two looks at a fork server that has not answered, and how often it may be found stopped meanwhile."""
_KILL_AT = 64  # idle children that have been ended before the fork server is asked to kill them
MALFORMED = (msgpack.UnpackException, ValueError, LookupError, TypeError)
"""What reading a message raises that users' code has written, or that is damaged."""
_MARK = "DISTFLOW_CHILD_POOL"
_ROOT = str(Path(__file__).resolve().parents[2])
_LAUNCH = ("import json, sys; sys.path[:] = json.loads(sys.argv[2])['path']; "
           "from workers.isolation.child import main; main()")


class ForkServerLost(EngineError):
    """The process that forks children has ended."""


@dataclass(eq=False, kw_only=True)
class Call:
    number: int = -1
    seconds: float = 0.0  # time limit
    deadline: float = math.inf  # infinite until the clock starts
    attempt: int = 0


class ChildProcess:
    """Rank's end of one child. A subclass checks and reads its messages."""

    concurrent = False
    max_bytes = 1 << 20  # most bytes of a message

    def __init__(self, pid: int, connection: socket.socket, selector: selectors.BaseSelector):
        self.pid, self.channel, self.selector = pid, Channel(connection, self.max_bytes), selector
        self.pending: dict[int, Any] = {}  # calls without an answer by number, in the order in which they were sent
        self.numbers = itertools.count()
        selector.register(connection, selectors.EVENT_READ, self)

    def start(self, call: Any) -> None:
        """Send a call, by `ask`."""
        raise NotImplementedError

    def ask(self, call: Call, message: Message) -> None:
        call.number, call.deadline = next(self.numbers), math.inf
        self.pending[call.number] = call
        self.send({"call": call.number, **message})
        self.start_clocks()

    def send(self, message: Message) -> None:
        self.channel.unsent += packed(message)
        self.flush()

    def flush(self) -> None:
        self.channel.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.channel.unsent else 0)
        if self.selector.get_key(self.channel.connection).events != events:
            self.selector.modify(self.channel.connection, events, self)

    def answered(self, call: Call) -> None:
        del self.pending[call.number]
        self.start_clocks()

    def start_clocks(self) -> None:
        for call in self.pending.values():
            if call.deadline == math.inf:
                call.deadline = time.monotonic() + call.seconds
            if not self.concurrent:
                break

    @property
    def deadline(self) -> float:
        return min((call.deadline for call in self.pending.values()), default=math.inf)

    def due(self, until: float) -> list[Any]:
        return [call for call in self.pending.values() if call.deadline <= until and call.deadline < math.inf]

    def close(self) -> None:
        self.selector.unregister(self.channel.connection)
        self.channel.connection.close()

    def drain(self) -> list[Any]:
        found: list[Any] = []
        self.channel.connection.settimeout(EXIT_GRACE)
        with contextlib.suppress(EOFError, TimeoutError, *MALFORMED):
            while True:
                found += map(self.read, self.channel.receive())
        return found

    def read(self, message: Any) -> Any:
        raise NotImplementedError


C = TypeVar("C", bound=ChildProcess)


class CallPool(Generic[C]):
    """Children that one fork server has forked, and their calls. Not thread-safe, except for `wake`. `module:name`
    makes their `Handler` from `arguments`; `memory_gib` limits each and its descendants; `secrets` are passed on.

    Calls are `waiting` until a child takes them. A subclass says which one (`choose`), and what follows: `done` with
    the answer of a call, `failed` for one that is late (`lateness` in words) or to blame for the end of its child.
    """

    in_order = False  # whether a call that no child takes holds up those behind it

    def __init__(self, kind: type[C], what: str, handler: str, arguments: Message, memory_gib: float,
                 secrets: dict[str, str] | None = None):
        self.kind, self.what, self.secrets = kind, what, secrets or {}
        self.job = {"handler": handler, "arguments": arguments, "memory": int(memory_gib * 2**30)}
        self.server: Child | None = None
        self.forked: dict[int, C] = {}
        self.to_kill: list[int] = []
        self.killing = False  # whether a busy child has been ended that may still run: no later request is answered yet
        self.waiting: deque[Any] = deque()
        self.woken = False
        self.selector = selectors.DefaultSelector()
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector.register(self.wakeup, selectors.EVENT_READ)

    @property
    def children(self) -> list[C]:
        return [*self.forked.values()]

    def start(self) -> None:
        """Start the fork server; raise EngineError if the handler cannot be made, ForkServerLost if it ends instead."""
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.mark = uuid.uuid4().hex
        job = {**self.job, "rank": os.getpid(), "path": [_ROOT, *(path for path in sys.path if path != _ROOT)]}
        environment = {"OMP_NUM_THREADS": "1", **without_secrets(), **self.secrets, _MARK: self.mark}
        with theirs:
            program = [sys.executable, "-P", "-c", _LAUNCH, str(theirs.fileno()), json.dumps(job)]
            self.server = spawn(program, die_with_parent=0, session=True, env=environment, pass_fds=[theirs.fileno()],
                                stdin=subprocess.DEVNULL, stdout=2)
        self.selector.register(self.connection, selectors.EVENT_READ, self)
        self.connection.settimeout(LOAD_TIMEOUT)
        try:
            answer = self.connection.recv(1 << 18)
            reply = msgpack.unpackb(answer or packed({"failed": "its process ended"}), unicode_errors="surrogatepass")
        except TimeoutError:
            answer, reply = b"", {"failed": f"importing it takes longer than {LOAD_TIMEOUT:.0f} s"}
        if "failed" in reply:
            lost = self.server.poll(EXIT_GRACE) is not None
            self.stop()
            raise (ForkServerLost if lost and not answer else EngineError)(
                f"{self.what} could not be loaded: {reply['failed']}")

    def fork(self) -> C:
        """Return a new child; raise ForkServerLost if the fork server has ended."""
        if self.server is None:
            self.start()
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self._request(["fork"], theirs.fileno())
        self.forked[pid] = self.kind(pid, ours, self.selector)
        return self.forked[pid]

    def choose(self, call: Any) -> C | None:
        """Return the child for a call; None if none takes it yet."""
        raise NotImplementedError

    def done(self, call: Any, answer: Any) -> None:
        raise NotImplementedError

    def failed(self, call: Any, reason: str, late: bool) -> None:
        raise NotImplementedError

    def lateness(self, child: C, call: Any) -> str:
        raise NotImplementedError

    def assign(self) -> None:
        """Send waiting calls to the children that take them."""
        for _ in range(len(self.waiting)):
            child = self.choose(self.waiting[0])
            if child is None and self.in_order:
                return
            call = self.waiting.popleft()
            if child is None:
                self.waiting.append(call)
            else:
                child.start(call)

    def hand_out(self, until: float) -> None:
        """Wait until `until`, `wake` or the deadline of a call; hand out answers, and lose children that have ended."""
        for child, answers, wrong in self.receive(min([until, *(child.deadline for child in self.children)])):
            for call, answer in filter(None, answers):
                self.done(call, answer)
            if wrong:
                self.lose(child, child.due(math.inf), wrong)

    def end_late(self) -> None:
        now = time.monotonic()
        for child in self.children:
            if late := child.due(now):
                self.lose(child, late, self.lateness(child, late[0]), late=True)

    def lose(self, child: C, blamed: list[Any], reason: str, late: bool = False) -> None:
        """End a child: the calls that are to blame have failed, and the others start elsewhere. Without a `reason`
        the first are of no use."""
        self.waiting.extendleft(call for call in reversed(child.pending.values()) if call not in blamed)
        for call in blamed if reason else ():
            self.failed(call, reason, late)
        self.end_child(child)  # last: the fork server may be lost, and no call with it

    def receive(self, until: float) -> Iterator[tuple[C, list[Any], str]]:
        """Wait until `until` or `wake` for messages; yield each child that has sent some, what these say, and what is
        wrong with the child ("" if nothing is). Raises ForkServerLost: so do its children end."""
        self.woken = False
        ready = self.selector.select(max(0.0, until - time.monotonic()))
        if not ready:
            self._resume()
        for key, events in ready:
            child = key.data
            if child is None:
                self.woken = bool(os.eventfd_read(self.wakeup))
            elif child is self:  # an answer to no request: the end of the connection
                raise self._lost()
            elif child.pid in self.forked:  # it may have been ended a moment ago
                if events & selectors.EVENT_WRITE:
                    child.flush()
                if events & selectors.EVENT_READ:
                    yield child, *self._read(child)

    def wake(self) -> None:
        """Make a waiting `receive`, or the next one, return at once. Thread-safe."""
        os.eventfd_write(self.wakeup, 1)

    def _read(self, child: C) -> tuple[list[Any], str]:
        found: list[Any] = []
        try:
            for message in child.channel.receive():
                found.append(child.read(message))
        except EOFError:
            return found, self._exit_reason(child)
        except MALFORMED as error:
            return found, f"its process sent what is no answer: {type(error).__name__}: {error}"[:300]
        return found, ""

    def _exit_reason(self, child: C) -> str:
        code, crashed = self._request(["exit_code", child.pid, EXIT_GRACE])
        if code is None:
            return "its process no longer answers"
        if code >= 0:
            return f"its process ended with code {code}"
        name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"  # a realtime one
        return f"its process was killed by {name}" + \
            (" (out of memory?)" if code == -signal.SIGKILL else crashed)

    def location(self, child: C) -> str:
        """Return where a child stands, as " in FILE, line N, in FUNCTION"; "" if it cannot say."""
        return self._request(["location", child.pid])

    def end_child(self, child: C) -> None:
        """Kill a child and all that its calls have started: at once if it is busy, else with others."""
        del self.forked[child.pid]
        child.close()
        self.to_kill.append(child.pid)
        self.killing |= bool(child.pending)
        if child.pending or len(self.to_kill) >= _KILL_AT:
            self.kill_ended()

    def kill_ended(self) -> None:
        if self.to_kill:
            self._request(["kill", *self.to_kill], answers=False)
            self.to_kill.clear()

    def _request(self, request: list[Any], *files: int, answers: bool = True) -> Any:
        try:
            socket.send_fds(self.connection, [packed(request)], files)
            reply = self._answer() if answers else packed(None)
        except OSError:
            reply = b""
        if not reply:
            raise self._lost()
        self.killing &= not answers
        return msgpack.unpackb(reply)

    def _answer(self) -> bytes:
        """Return the fork server's answer to a request; b"" if it gives none, such as one that is stopped for ever."""
        until, stops = time.monotonic() + LOAD_TIMEOUT, 0
        answers = select.poll()
        answers.register(self.connection, select.POLLIN)
        while not answers.poll(1000 * _LOOK):
            stops += self._resume()
            if stops > _MOST_STOPS or time.monotonic() > until:
                if self.server:
                    self.server.signal(signal.SIGKILL)
                return b""
        return self.connection.recv(1 << 12)

    def _resume(self) -> bool:
        """Let the fork server continue if users' code has stopped it; return whether it was."""
        was_stopped = self.server is not None and stopped(self.server.pid)
        if self.server and was_stopped:
            self.server.signal(signal.SIGCONT)
        return was_stopped

    def _lost(self) -> ForkServerLost:
        code = self.server and self.server.poll(EXIT_GRACE)  # its connection may close a moment before it ends
        return ForkServerLost(f"the process that starts {self.what} has ended, with code {code}. One of them may have "
                              "killed it, or memory ran out.")

    def stop(self) -> None:
        """End all children and their descendants; a `fork` starts again."""
        if self.server is None:
            return
        for child in self.forked.values():
            child.close()
        self.selector.unregister(self.connection)
        self.connection.close()
        self.server.end(_END_TIMEOUT)
        kill_marked(_MARK, self.mark)  # what has escaped a fork server that was killed
        self.server = None
        self.forked.clear()
        self.to_kill.clear()
        self.killing = False

    def close(self) -> None:
        self.stop()
        self.selector.close()
        os.close(self.wakeup)
