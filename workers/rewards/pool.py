"""The worker processes of a rank, as it sees them: jobs go out, numbers come in, the dead are replaced.

`concurrent.futures` cannot do this: it can end no process that hangs, and one that dies takes all calls with it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from distflow.schema.errors import EngineError
from workers.jail.processes import kill_descendants, kill_marked

_START = 120.0
"""Seconds for a process to start and import a reward's module."""
_GRACE = 1.0
"""Seconds beyond the timeout of a call that the worker itself ends in time, as it does with async functions."""
_KINDS = ("loaded", "value", "failed", "done", "impossible")
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


@dataclass
class Results:
    """By the caller's name of a sample: a number, or why there is none. And what it took."""

    values: dict[int, float | Failed] = field(default_factory=dict)
    retried: int = 0
    timeouts: int = 0


class Pool:
    """Up to `size` processes, started when there is work for them and kept."""

    def __init__(self, size: int, memory_gib: float):
        self.size, self.memory = size, int(memory_gib * 2**30)
        self.workers: list[_Process] = []
        atexit.register(self.close)

    def run(self, jobs: list[Job], limit: float) -> Results:
        """Do all jobs; each sample comes to a number or a failure, whatever its function does.

        Args:
            limit: seconds for all of them; what has no result then has failed.

        Raises:
            EngineError: a function says, by a DistflowError, that no call of it can succeed.
        """
        return _Round(self, jobs, limit).run()

    def close(self) -> None:
        """End all processes, and what they have started."""
        for worker in self.workers:
            worker.end()
        self.workers = []


class _Round:
    """One `run` of a pool."""

    def __init__(self, pool: Pool, jobs: list[Job], limit: float):
        self.pool, self.results, self.deadline = pool, Results(), time.monotonic() + limit
        self.limit = limit
        self.waiting = deque(part for job in jobs for part in job.split(_chunk(job, pool.size)))

    def run(self) -> Results:
        try:
            while self._hand_out():
                self._listen()
                self._look_at_clocks()
                if time.monotonic() >= self.deadline:
                    self._give_up()
            return self.results
        finally:
            if any(worker.job for worker in self.pool.workers):
                self.pool.close()  # an error ends the round: what they still do is of no use to the next one

    def _hand_out(self) -> list[_Process]:
        """Give waiting jobs to idle processes; the busy ones."""
        for worker in self.pool.workers:
            if self.waiting and worker.job is None:
                worker.begin(self.waiting.popleft())
        while self.waiting and len(self.pool.workers) < self.pool.size:
            self.pool.workers.append(_Process(self.pool.memory))
            self.pool.workers[-1].begin(self.waiting.popleft())
        return [worker for worker in self.pool.workers if worker.job]

    def _listen(self) -> None:
        busy = [worker for worker in self.pool.workers if worker.job]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.results, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.jobs, selectors.EVENT_WRITE, worker)
            soonest = min([self.deadline, *(worker.deadline for worker in busy)])
            ready = selector.select(max(0.0, soonest - time.monotonic()))
        for key, _ in ready:
            if key.fd == key.data.jobs:
                key.data.send()
            else:
                self._hear(key.data)

    def _hear(self, worker: _Process) -> None:
        messages = worker.receive()
        if messages is None:
            self._lost(worker, worker.last_words())
            return
        for kind, number, *more in messages:
            if worker.job is None or number != worker.number:
                continue
            if kind == "impossible":
                raise EngineError(f"reward `{worker.job.name}` cannot be computed: {more[0]}")
            if kind == "done":
                worker.job = None
            elif kind == "value":
                self._keep(worker, more[0], more[1])
            elif kind == "failed":
                self._keep(worker, more[0], Failed(more[1], more[2]))
            worker.heard()

    def _keep(self, worker: _Process, place: int, found: float | Failed) -> None:
        """Note a result, or try the sample again."""
        job = worker.job
        worker.open.discard(place)
        self.results.timeouts += isinstance(found, Failed) and found.reason.startswith("took longer")
        if isinstance(found, Failed) and job.attempt < job.retries:
            self.results.retried += 1
            self.waiting.append(job.part([place], again=True))
        else:
            self.results.values[job.keys[place]] = found

    def _look_at_clocks(self) -> None:
        for worker in [worker for worker in self.pool.workers if worker.job and time.monotonic() >= worker.deadline]:
            what = f"took longer than {worker.job.timeout:g} s" if worker.loaded else \
                f"its module `{worker.job.module}` has not been imported in {_START:.0f} s"
            self._lost(worker, what)

    def _lost(self, worker: _Process, reason: str) -> None:
        """A process has died or hangs: end it, and decide about what it had to do."""
        job, places = worker.job, sorted(worker.open)
        worker.end()
        self.pool.workers.remove(worker)
        one_by_one = worker.loaded and not (job.batched or job.coroutine)
        guilty, innocent = (places[:1], places[1:]) if one_by_one else (places, [])
        if innocent:
            self.waiting.appendleft(job.part(innocent))
        for place in guilty:
            self._keep(worker, place, Failed(reason))

    def _give_up(self) -> None:
        """The time of the round is over."""
        for worker in [worker for worker in self.pool.workers if worker.job]:
            self.waiting.append(worker.job.part(sorted(worker.open)))
            worker.end()
            self.pool.workers.remove(worker)
        for job in self.waiting:
            reason = f"was not done when the {self.limit:g} s of all rewards of a step were over"
            self.results.values |= dict.fromkeys(job.keys, Failed(reason))
        self.waiting.clear()


class _Process:
    """One worker process. Neither reading from it nor writing to it can block."""

    def __init__(self, memory: int):
        theirs, self.jobs = os.pipe()
        self.results, theirs_too = os.pipe()
        self.mark = uuid.uuid4().hex
        place = json.dumps([_ROOT, *(place for place in sys.path if place != _ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, place, str(theirs), str(theirs_too), str(os.getpid()), str(memory)],
            stdin=subprocess.DEVNULL, pass_fds=(theirs, theirs_too), start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), _MARK: self.mark})
        os.close(theirs)
        os.close(theirs_too)
        os.set_blocking(self.jobs, False)
        self.unpacker = msgpack.Unpacker(unicode_errors="surrogatepass", max_buffer_size=1 << 26)
        self.job: Job | None = None
        self.open: set[int] = set()
        """Samples of the job that have no result yet, by their place in it."""
        self.number, self.loaded, self.unsent, self.deadline = 0, False, memoryview(b""), 0.0

    def begin(self, job: Job) -> None:
        self.job, self.open, self.loaded = job, set(range(len(job.keys))), False
        self.number += 1
        said = {name: getattr(job, name) for name in ("name", "module", "settings", "timeout", "concurrency", "batched",
                                                      "positional", "names", "rows")}
        self.unsent = memoryview(msgpack.packb({"job": self.number, **said}, unicode_errors="surrogatepass"))
        self.deadline = time.monotonic() + _START
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
        self.unpacker.feed(data)
        try:
            return [message for message in self.unpacker if message[0] in _KINDS]
        except (ValueError, TypeError, LookupError):
            return None

    def heard(self) -> None:
        """It is alive: the clock of the next call begins."""
        if self.job:
            self.loaded = True
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
            self.process.send_signal(signal.SIGSTOP)  # one that stands still starts no more
            kill_descendants(self.process.pid)
            self.process.kill()
        self.process.wait()
        kill_marked(_MARK, self.mark)


def _chunk(job: Job, workers: int) -> int:
    """Samples that go to a process at once: few enough that all have some, and that slow ones are shared."""
    return -(-len(job.keys) // (workers if job.coroutine else 4 * workers))
