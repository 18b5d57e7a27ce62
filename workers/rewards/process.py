"""One worker process as its rank sees it, and the jobs that it gets."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from workers.jail.processes import kill_descendants, kill_marked
from workers.jail.variables import named_secrets, without_secrets

START = 120.0
"""Seconds for a process to start and import a reward's module."""
_GRACE = 1.0
"""Seconds beyond the timeout of a call that the worker itself ends in time, as it does with async functions."""
_TIDY = 10.0
"""Seconds for the guard of a process to end it, and what it has started."""
_SAYS: dict[str, tuple[type, ...]] = {
    "loaded": (), "value": (int, float), "failed": (int, str, str), "done": (), "impossible": (str,),
    "metrics": (list,)}
"""What a process may say of a job, and with it: see `workers.rewards.worker`."""
_MARK = "DISTFLOW_REWARDS"
_ROOT = str(Path(__file__).resolve().parents[2])
_LAUNCH = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); from workers.rewards.worker import main; "
           "main(*map(int, sys.argv[2:]))")


@dataclass
class Job:
    """Calls of one reward. `rows`: arguments of each sample, or with `batched` one row of lists with `size` values."""

    name: str
    module: str
    rows: list[list[Any]]
    keys: list[int]
    """The caller's name of each sample."""
    settings: dict[str, Any] = field(default_factory=dict)
    timeout: float = 10.0
    retries: int = 1
    concurrency: int = 16
    batched: bool = False
    coroutine: bool = False
    positional: int = 2
    names: list[str] = field(default_factory=list)
    attempt: int = 0

    def part(self, places: Iterable[int], again: bool = False) -> Job:
        """Some of the samples as a job of their own; `again` counts as a further attempt."""
        places = list(places)
        rows = [[[values[place] for place in places] for values in self.rows[0]]] if self.batched else \
            [self.rows[place] for place in places]
        return Job(self.name, self.module, rows, [self.keys[place] for place in places], self.settings, self.timeout,
                   self.retries, self.concurrency, self.batched, self.coroutine, self.positional, self.names,
                   self.attempt + again)

    def split(self, size: int) -> list[Job]:
        """Jobs of at most `size` samples; a function of lists gets all at once."""
        if self.batched:
            return [self]
        return [self.part(range(start, min(start + size, len(self.keys)))) for start in range(0, len(self.keys), size)]


@dataclass(frozen=True)
class Failed:
    """Why a sample has no reward."""

    reason: str
    trace: str = ""


class Process:
    """One worker process, behind its guard (`workers.jail.guard`). Neither reading from it nor writing to it blocks."""

    def __init__(self, memory: int):
        theirs, self.jobs = os.pipe()
        self.results, theirs_too = os.pipe()
        self.mark = uuid.uuid4().hex
        place = json.dumps([_ROOT, *(place for place in sys.path if place != _ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, place, str(theirs), str(theirs_too), str(os.getpid()), str(memory)],
            stdin=subprocess.DEVNULL, pass_fds=(theirs, theirs_too), start_new_session=True,
            env={**without_secrets(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), _MARK: self.mark})
        os.close(theirs)
        os.close(theirs_too)
        os.set_blocking(self.jobs, False)
        self.unpacker = msgpack.Unpacker(unicode_errors="surrogatepass", max_buffer_size=1 << 26)
        self.job: Job | None = None
        self.open: set[int] = set()
        """Samples of the job that have no result yet, by their place in it."""
        self.fresh = True
        """It has not imported any module yet."""
        self.number, self.loaded, self.unsent, self.deadline = 0, False, memoryview(b""), 0.0

    def begin(self, job: Job) -> None:
        self.job, self.open, self.loaded = job, set(range(len(job.keys))), False
        self.number += 1
        said = {name: getattr(job, name) for name in ("name", "module", "settings", "timeout", "concurrency", "batched",
                                                      "positional", "names", "rows")}
        said |= {"job": self.number, "secrets": named_secrets(job.settings)}
        self.unsent = memoryview(msgpack.packb(said, unicode_errors="surrogatepass"))
        self.deadline = time.monotonic() + START
        self.send()

    def send(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # one that died is noticed by what it says
            while self.unsent:
                self.unsent = self.unsent[os.write(self.jobs, self.unsent) :]

    def receive(self) -> list[Any] | None:
        """The messages that have come; None if the process is gone, or says what nobody understands."""
        data = os.read(self.results, 1 << 16)
        if not data:
            return None
        try:
            self.unpacker.feed(data)
            return [_understood(message) for message in self.unpacker]
        except (ValueError, TypeError, LookupError, msgpack.UnpackException):
            return None

    def heard(self) -> None:
        """It is alive: the clock of the next call begins."""
        if self.job:
            self.loaded, self.fresh = True, False
            self.deadline = time.monotonic() + self.job.timeout + (_GRACE if self.job.coroutine else 0.0)

    def last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_GRACE)
            signalled = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            return f"its process {signalled}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
        return "its process has stopped to answer"

    def end(self) -> None:
        """Kill it and all that it has started."""
        os.close(self.jobs)
        os.close(self.results)
        if self.process.poll() is None:
            self.process.terminate()  # the guard, which ends all others and comes last
            self.process.send_signal(signal.SIGCONT)  # somebody may have stopped it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_TIDY)
        if self.process.poll() is None:
            kill_descendants(self.process.pid)
            self.process.kill()
        self.process.wait()
        kill_marked(_MARK, self.mark)


def _understood(message: Any) -> list[Any]:
    """A message as it is. A function may have written to the pipe, which must not end the rank.

    Raises:
        ValueError, TypeError, LookupError: it is none.
    """
    kind, number, *more = message
    if not (type(number) is int and tuple(map(type, more)) == _SAYS[kind]):
        raise ValueError(f"{kind} with {more}")
    if kind == "value" and not math.isfinite(more[1]):
        raise ValueError(f"{more[1]} is no reward")
    if kind == "metrics" and not all(tuple(map(type, each)) == (str, float, float) for each in more[0]):
        raise ValueError(f"{more[0]} are no metrics")
    return message
