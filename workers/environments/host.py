"""The processes of a rank's environments, seen from outside: it never waits for one, and ends those that take too
long."""

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
from pathlib import Path

from distflow.schema.errors import EngineError
from distflow.schema.registry import Turn
from workers.environments.process import Failure, Hosting, Process, Talk
from workers.jail.variables import named_secrets, without_secrets

_ROOT = str(Path(__file__).resolve().parents[2])
_START = 120.0
"""Seconds that an environment's module may take to be imported."""
_ENDING = 5.0
"""Seconds in which a process has ended whose line is closed."""
_MOST = 512
"""Processes at a time, as far as they are shared."""
_AT_ONCE = 64
"""Processes that have been told to end, until it is seen to that they did."""
_LAUNCH = f"import sys; sys.path.append({_ROOT!r}); from workers.environments.nursery import main; main()"


class Host:
    """Environments by row. `step` hands over what the model said, `turns` gives what has come back.

    For one thread, but for `wake`. Its processes end with the thread that has made it.
    """

    def __init__(self, hosting: Hosting):
        self.hosting = hosting
        self.talks: dict[int, Talk] = {}
        self.selector = selectors.DefaultSelector()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector.register(self.bell, selectors.EVENT_READ)
        self.shared: list[Process] = []
        self.over: list[int] = []
        """Processes that have been told to end."""
        self.failures: deque[tuple[int, Failure]] = deque()
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
        talk = self.talks.setdefault(row, Talk(row, columns))
        talk.said.append(text)
        talk.tries = 0
        self._ask(talk)

    def turns(self, patience: float = 0.0) -> list[tuple[int, Turn | Failure]]:
        """Rows whose environment has answered: waits up to `patience` seconds for one, if a step is under way and
        nobody calls `wake`."""
        found: list[tuple[int, Turn | Failure]] = []
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
                self._lose(process, late, Failure(f"took longer than {self.hosting.seconds:g} s", timeout=True))
            found += self.failures
            self.failures.clear()
            if found or woken or not self.busy or time.monotonic() >= until:
                return found

    def wake(self) -> None:
        """Have a `turns` that waits return, or the next one. From any thread."""
        os.eventfd_write(self.bell, 1)

    def _may_be_left(self) -> list[Process]:
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

    def _processes(self) -> list[Process]:
        return [key.data for key in self.selector.get_map().values() if key.data]

    def _ask(self, talk: Talk) -> None:
        talk.tries += 1
        if talk.place is None:
            talk.place = self._place()
        talk.place.waiting.append(talk)

    def _place(self) -> Process:
        """A process for an environment: of its own, or the least used of those that may be shared."""
        if self.hosting.safe and len(self.shared) >= self.hosting.processes:
            return min(self.shared, key=lambda each: len(each.waiting) + len(each.asked))
        ours, theirs = socket.socketpair()
        with theirs:
            number = self._order(b"f", theirs.fileno())
        process = Process(self.hosting, self.selector, number, ours)
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

    def _hear(self, process: Process, events: int) -> list[tuple[int, Turn | Failure]]:
        if events & selectors.EVENT_WRITE:
            process.flush()
        answers, wrong = process.hear() if events & selectors.EVENT_READ else ([], "")
        found: list[tuple[int, Turn | Failure]] = []
        for row, answer in answers:
            if isinstance(answer, Turn):
                found.append((row, answer))
            else:
                self._retry(self.talks[row], answer)
        if wrong:
            under_way = [talk for talk, deadline in process.asked.items() if deadline < math.inf]
            self._lose(process, under_way, Failure(wrong))
        return found

    def _lose(self, process: Process, late: list[Talk], failure: Failure | None = None) -> None:
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

    def _retry(self, talk: Talk, failure: Failure) -> None:
        """Once more from its beginning, if that is safe; else the trajectory has failed."""
        if self.hosting.safe and talk.tries < 2:
            self._ask(talk)
        else:
            self.failures.append((talk.row, failure))

    def _close(self, process: Process) -> None:
        process.close()
        self.over.append(process.pid)
        if process in self.shared:
            self.shared.remove(process)
        if process.asked or process.waiting or len(self.over) >= _AT_ONCE:  # it may be at work: at once
            self._reap()
