"""The worker processes of a rank, as it sees them: jobs go out, numbers come in, the dead are replaced.

`concurrent.futures` cannot do this: it can end no process that hangs, and one that dies takes all calls with it.

One worker process as its rank sees it, and the jobs that it gets.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
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

from distflow.errors import EngineError
from workers.isolation.sandbox.processes import kill_descendants, kill_marked
from workers.isolation.sandbox.variables import named_secrets, without_secrets

START = 120.0
"""Seconds for a process to start and import a reward's module."""
_GRACE = 1.0
"""Seconds beyond the timeout of a call that the worker itself ends in time, as it does with async functions."""
_TIDY = 10.0
"""Seconds for the guard of a process to end it, and what it has started."""
_SAYS: dict[str, tuple[type, ...]] = {
    "loaded": (), "value": (int, float), "failed": (int, str, str), "done": (), "impossible": (str,),
    "metrics": (list,)}
"""What a process may say of a job, and with it: see `workers.isolation.rewards_worker`."""
_MARK = "DISTFLOW_REWARDS"
_ROOT = str(Path(__file__).resolve().parents[2])
_LAUNCH = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
           "from workers.isolation.rewards_worker import main; "
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
class FailedSample:
    """Why a sample has no reward."""

    reason: str
    trace: str = ""


class RewardProcess:
    """One worker process, behind its guard (`sandbox.guard`). Neither reading from it nor writing to it blocks."""

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


_STILLBORN = 3
"""Processes of a step that may end before they have imported what they need."""


@dataclass
class RewardResults:
    """By the caller's name of a sample: a number, or why there is none. And what it took."""

    values: dict[int, float | FailedSample] = field(default_factory=dict)
    retried: int = 0
    timeouts: int = 0
    metrics: list[list[Any]] = field(default_factory=list)
    """Name, sum and count of what calls have reported by `metric`."""


class RewardPool:
    """Up to `size` processes, started when there is work for them and kept."""

    def __init__(self, size: int, memory_gib: float):
        self.size, self.memory = size, int(memory_gib * 2**30)
        self.workers: list[RewardProcess] = []
        atexit.register(self.close)

    def run(self, jobs: list[Job], limit: float) -> RewardResults:
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

    def __init__(self, pool: RewardPool, jobs: list[Job], limit: float):
        self.pool, self.results, self.deadline = pool, RewardResults(), time.monotonic() + limit
        self.limit, self.stillborn = limit, 0
        self.waiting = deque(part for job in jobs for part in job.split(_chunk(job, pool.size)))

    def run(self) -> RewardResults:
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

    def _hand_out(self) -> list[RewardProcess]:
        """Give waiting jobs to idle processes; the busy ones."""
        for worker in list(self.pool.workers):
            if worker.job is None and worker.process.poll() is not None:  # it died between steps
                worker.end()
                self.pool.workers.remove(worker)
            elif worker.job is None and self.waiting:
                worker.begin(self.waiting.popleft())
        while self.waiting and len(self.pool.workers) < self.pool.size:
            self.pool.workers.append(RewardProcess(self.pool.memory))
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
            if key.data not in self.pool.workers:
                continue  # it was just found dead, and its pipes are closed
            if key.fd == key.data.jobs:
                key.data.send()
            else:
                self._hear(key.data)

    def _hear(self, worker: RewardProcess) -> None:
        messages = worker.receive()
        if messages is None:
            self._lost(worker, worker.last_words())
            return
        for kind, number, *more in messages:
            if worker.job is None or number != worker.number:
                continue  # a process that a function has forked may repeat what was said
            if kind == "impossible":
                raise EngineError(f"reward `{worker.job.name}` cannot be computed: {more[0]}")
            if kind == "done":
                for place in sorted(worker.open):
                    self._keep(worker, place, FailedSample("its process has not said what became of it"))
                worker.job = None
            elif kind == "value":
                self._keep(worker, more[0], more[1])
            elif kind == "metrics":
                self.results.metrics += more[0]
            elif kind == "failed":
                self._keep(worker, more[0], FailedSample(more[1], more[2]))
            worker.heard()

    def _keep(self, worker: RewardProcess, place: int, found: float | FailedSample) -> None:
        """Note a result, or try the sample again."""
        job = worker.job
        if place not in worker.open:
            return
        worker.open.discard(place)
        self.results.timeouts += isinstance(found, FailedSample) and found.reason.startswith("took longer")
        if isinstance(found, FailedSample) and job.attempt < job.retries:
            self.results.retried += 1
            self.waiting.append(job.part([place], again=True))
        else:
            self.results.values[job.keys[place]] = found

    def _look_at_clocks(self) -> None:
        for worker in [worker for worker in self.pool.workers if worker.job and time.monotonic() >= worker.deadline]:
            what = f"took longer than {worker.job.timeout:g} s" if worker.loaded else \
                f"its module `{worker.job.module}` has not been imported in {START:.0f} s"
            self._lost(worker, what)

    def _lost(self, worker: RewardProcess, reason: str) -> None:
        """A process has died or hangs: end it, and decide about what it had to do."""
        job, places = worker.job, sorted(worker.open)
        worker.end()
        self.pool.workers.remove(worker)
        self.stillborn += worker.fresh
        if self.stillborn == _STILLBORN:
            raise EngineError(f"reward `{job.name}` cannot be computed: {reason}, and so {_STILLBORN} times, before "
                              f"its module `{job.module}` was imported. See:  python -c 'import {job.module}'")
        one_by_one = worker.loaded and not (job.batched or job.coroutine)
        guilty, innocent = (places[:1], places[1:]) if one_by_one else (places, [])
        if innocent:
            self.waiting.appendleft(job.part(innocent))
        for place in guilty:
            self._keep(worker, place, FailedSample(reason))

    def _give_up(self) -> None:
        """The time of the round is over."""
        for worker in [worker for worker in self.pool.workers if worker.job]:
            self.waiting.append(worker.job.part(sorted(worker.open)))
            worker.end()
            self.pool.workers.remove(worker)
        for job in self.waiting:
            reason = f"was not done when the {self.limit:g} s of all rewards of a step were over"
            self.results.values |= dict.fromkeys(job.keys, FailedSample(reason))
        self.waiting.clear()


def _chunk(job: Job, workers: int) -> int:
    """Samples that go to a process at once: few enough that all have some, and that slow ones are shared."""
    return -(-len(job.keys) // (workers if job.coroutine else 4 * workers))
