"""What a worker shows its seat, in a page of memory that both have: showing it costs no message."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distflow.config.run import PHASES, Phase
from distflow.telemetry.events import record
from distflow.telemetry.processes import began

_LISTEN = 0.05


class _Page(ctypes.Structure):
    _fields_ = [("phase", ctypes.c_int64), ("since", ctypes.c_double), ("step", ctypes.c_int64),
                ("finished", ctypes.c_int64), ("progress", ctypes.c_int64), ("asked", ctypes.c_int64),
                ("answered", ctypes.c_int64), ("hooks", ctypes.c_int64), ("stop", ctypes.c_int64),
                ("gpu", ctypes.c_char * 64)]


ASKED, STOPPED = 1, 2
"""`stop` of a page: the supervisor asks for an end after the step under way; the worker has ended so."""


@dataclass(frozen=True)
class HeartbeatReading:
    """A page as it was at a moment. since: when the phase began (time.monotonic); finished: steps of this life."""

    phase: Phase
    since: float
    step: int
    finished: int
    progress: int


class Heartbeat:
    """The page. One that is made before a fork is shared by both processes; elsewhere nobody looks at it."""

    def __init__(self) -> None:
        self.page = _Page.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
        self.clear()
        self.watching: Callable[[Phase, int], None] | None = None
        """Told of each phase that begins, and in which step."""

    def clear(self, life: int = 0) -> None:
        """A new worker begins."""
        self.life = life
        ctypes.memset(ctypes.addressof(self.page), 0, ctypes.sizeof(_Page))
        self.page.since = time.monotonic()

    def ready(self, **seconds: float) -> None:
        """The worker can begin, and waits for something to do; `seconds` of each part of its start."""
        self.enter("waiting")
        record("worker ready", life=self.life, pid=os.getpid(), began=began(os.getpid()), host=socket.gethostname(),
               seconds={name: round(each, 3) for name, each in seconds.items()})

    def enter(self, phase: Phase) -> None:
        """This worker does something else from now on, which is progress too."""
        page = self.page
        if PHASES[page.phase] != phase:
            page.phase, page.since = PHASES.index(phase), time.monotonic()
        page.progress += 1
        self.happens(phase)

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """For a while, this worker does something else."""
        before = self.read().phase
        self.enter(phase)
        yield
        self.enter(before)

    def happens(self, phase: Phase) -> None:
        """This is done too, beside the phase that the worker is in."""
        if self.watching is not None:
            self.watching(phase, self.page.step)

    def tick(self) -> None:
        """Some of the work is done: a micro-batch, or a token of each row."""
        self.page.progress += 1

    def begin(self, step: int) -> None:
        """A step begins, counted from 1."""
        self.page.step = step

    def finish(self) -> None:
        """The step is done: whatever comes now, it is not done again."""
        self.page.finished += 1
        if self.page.finished == 1:
            record("worker useful", life=self.life)

    def computes_on(self, gpu: str) -> None:
        """The GPU of this worker, as NVML calls it: GPU-…."""
        self.page.gpu = gpu.encode()

    @property
    def gpu(self) -> str:
        return self.page.gpu.decode()

    def read(self) -> HeartbeatReading:
        page = self.page
        return HeartbeatReading(PHASES[page.phase], page.since, page.step, page.finished, page.progress)

    def ask(self) -> int:
        """Ask whether the worker still answers; what `answered` says then."""
        self.page.asked += 1
        return self.page.asked

    @property
    def answered(self) -> int:
        return self.page.answered

    def answer(self) -> None:
        """In the worker: answer from now on, in a thread of its own. It stands still when the process does."""
        threading.Thread(target=self._answer, name="pulse", daemon=True).start()

    def _answer(self) -> None:
        while True:
            self.page.answered = self.page.asked
            time.sleep(_LISTEN)


_current = Heartbeat()


def current() -> Heartbeat:
    """This process's page."""
    return _current


def show(pulse: Heartbeat) -> None:
    """In a new worker: this is its page."""
    global _current
    _current = pulse
