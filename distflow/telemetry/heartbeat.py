"""Heartbeats: counters that grow while something lives, and how long one has stood still.

    counter                                who judges its silence
    progress of a worker, in shared memory `recovery.detectors.HealthMonitor`, by the worker's phase
    heartbeats of a worker, by a thread    the same: a process that waits for others sends them, a stopped one does not
    heartbeat of a machine, in the store   the other machines, `recovery.membership`
    heartbeat of a holder of weights       those that pull from it, `weights.directory`
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distflow.config.robust import PHASES, Phase
from distflow.telemetry.events import record
from distflow.telemetry.processes import began

_INTERVAL = 0.05  # seconds


class Silence:
    """How long a counter has stood still, by this process's clock. Time in which this process itself stood still, since
    it looked later than `pause` seconds after the last time, does not count."""

    def __init__(self, pause: float = math.inf):
        self.pause, self.counter = pause, None
        self.since = self.looked = time.monotonic()

    def of(self, counter: object) -> float:
        """Return the seconds for which the counter, which is read now, has not changed."""
        now = time.monotonic()
        self.since += max(0.0, now - self.looked - self.pause)
        self.looked = now
        if counter != self.counter:
            self.counter, self.since = counter, now
        return now - self.since


class _Page(ctypes.Structure):
    _fields_ = [("phase", ctypes.c_int64), ("since", ctypes.c_double), ("step", ctypes.c_int64),
                ("finished", ctypes.c_int64), ("progress", ctypes.c_int64), ("heartbeats", ctypes.c_int64),
                ("hooks", ctypes.c_int64), ("stop", ctypes.c_int64), ("gpu", ctypes.c_char * 64)]


ASKED, STOPPED = 1, 2
"""`stop` of a page: the supervisor asks for an end after the step under way; the worker has ended so."""


@dataclass(frozen=True)
class HeartbeatReading:
    """A heartbeat at one moment. since: when the phase began (time.monotonic); finished: steps of this attempt."""

    phase: Phase
    since: float
    step: int
    finished: int
    progress: int


class Heartbeat:
    """Shared page of a worker. A heartbeat that is made before a fork is shared by both processes."""

    def __init__(self) -> None:
        self.page = _Page.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
        self.clear()
        self.on_phase: Callable[[Phase, int], None] | None = None  # called with each phase that begins, and its step

    def clear(self, attempt: int = 0) -> None:
        self.attempt = attempt
        ctypes.memset(ctypes.addressof(self.page), 0, ctypes.sizeof(_Page))
        self.page.since = time.monotonic()

    def ready(self, **seconds: float) -> None:
        """Record that the worker is ready; `seconds` of each part of its start."""
        self.enter("waiting")
        record("worker_ready", attempt=self.attempt, pid=os.getpid(), began=began(os.getpid()),
               host=socket.gethostname(), seconds={name: round(each, 3) for name, each in seconds.items()})

    def enter(self, phase: Phase) -> None:
        """Enter a phase, which counts as progress."""
        page = self.page
        if PHASES[page.phase] != phase:
            page.phase, page.since = PHASES.index(phase), time.monotonic()
        page.progress += 1
        self.notify(phase)

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        before = self.read().phase
        self.enter(phase)
        yield
        self.enter(before)

    def notify(self, phase: Phase) -> None:
        """Call `on_phase` for a phase that runs beside the worker's own."""
        if self.on_phase is not None:
            self.on_phase(phase, self.page.step)

    def tick(self) -> None:
        """Count progress: a micro-batch, or a token of each row."""
        self.page.progress += 1

    def begin(self, step: int) -> None:
        self.page.step = step

    def finish(self) -> None:
        """Finish the step: it will not be repeated."""
        self.page.finished += 1
        if self.page.finished == 1:
            record("worker_caught_up", attempt=self.attempt)

    def set_gpu(self, gpu: str) -> None:
        """Set this worker's GPU, by its NVML name: GPU-…."""
        self.page.gpu = gpu.encode()

    @property
    def gpu(self) -> str:
        return self.page.gpu.decode()

    def read(self) -> HeartbeatReading:
        page = self.page
        return HeartbeatReading(PHASES[page.phase], page.since, page.step, page.finished, page.progress)

    def start(self) -> None:
        """Start the thread that counts heartbeats. It stands still when the process does."""
        threading.Thread(target=self._count, name="heartbeat", daemon=True).start()

    def _count(self) -> None:
        while True:
            self.page.heartbeats += 1
            time.sleep(_INTERVAL)


_current = Heartbeat()


def current() -> Heartbeat:
    return _current


def set_current(heartbeat: Heartbeat) -> None:
    global _current
    _current = heartbeat
