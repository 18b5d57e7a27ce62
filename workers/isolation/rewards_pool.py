"""Pool of processes that compute a rank's rewards: sends jobs, collects numbers, replaces dead or hanging processes.

    RewardPool      up to `size` processes, kept between steps
    RewardProcess   the rank's end of one process (`rewards_worker`); a job is sent, loaded, then answered row by row
    Job             calls of one reward; RewardResults what came of all jobs of a step

`concurrent.futures` cannot end a hanging process, and fails all calls when one process dies.
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

START_TIMEOUT = 120.0
"""Seconds to start a process and import a reward's module."""
_EXTRA_TIME = 1.0
"""Seconds added to the timeout of async functions, which the worker itself cancels in time."""
_END_TIMEOUT = 10.0
"""Seconds for a guard to end its process and all descendants."""
_FIELDS: dict[str, tuple[type, ...]] = {
    "loaded": (), "value": (int, float), "failed": (int, str, str), "done": (), "impossible": (str,),
    "metrics": (list,)}
"""Kinds of messages and the types of their fields; see `workers.isolation.rewards_worker`."""
_MARK = "DISTFLOW_REWARDS"
_ROOT = str(Path(__file__).resolve().parents[2])
_LAUNCH = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
           "from workers.isolation.rewards_worker import main; "
           "main(*map(int, sys.argv[2:]))")


@dataclass
class Job:
    """Calls of one reward. `rows` holds the arguments of each sample, or with `batched` one row of lists."""

    name: str
    module: str
    rows: list[list[Any]]
    keys: list[int]
    """The caller's key of each sample."""
    settings: dict[str, Any] = field(default_factory=dict)
    timeout: float = 10.0
    retries: int = 1
    concurrency: int = 16
    batched: bool = False
    coroutine: bool = False
    positional: int = 2
    names: list[str] = field(default_factory=list)
    attempt: int = 0

    def part(self, indices: Iterable[int], again: bool = False) -> Job:
        """Return some of the samples as a new job; `again` counts as another attempt."""
        indices = list(indices)
        rows = [[[values[index] for index in indices] for values in self.rows[0]]] if self.batched else \
            [self.rows[index] for index in indices]
        return Job(self.name, self.module, rows, [self.keys[index] for index in indices], self.settings, self.timeout,
                   self.retries, self.concurrency, self.batched, self.coroutine, self.positional, self.names,
                   self.attempt + again)

    def split(self, size: int) -> list[Job]:
        """Split into jobs of at most `size` samples; a function of lists gets all samples at once."""
        if self.batched:
            return [self]
        return [self.part(range(start, min(start + size, len(self.keys)))) for start in range(0, len(self.keys), size)]


@dataclass(frozen=True)
class FailedSample:
    """Reason why a sample has no reward."""

    reason: str
    trace: str = ""


class RewardProcess:
    """Rank's end of one worker process, behind its guard (`sandbox.guard`). No operation blocks."""

    def __init__(self, memory: int):
        theirs, self.jobs = os.pipe()
        self.results, theirs_too = os.pipe()
        self.mark = uuid.uuid4().hex
        index = json.dumps([_ROOT, *(index for index in sys.path if index != _ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, index, str(theirs), str(theirs_too), str(os.getpid()), str(memory)],
            stdin=subprocess.DEVNULL, pass_fds=(theirs, theirs_too), start_new_session=True,
            env={**without_secrets(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), _MARK: self.mark})
        os.close(theirs)
        os.close(theirs_too)
        os.set_blocking(self.jobs, False)
        self.unpacker = msgpack.Unpacker(unicode_errors="surrogatepass", max_buffer_size=1 << 26)
        self.job: Job | None = None
        self.open: set[int] = set()
        """Indices of the job's samples without a result."""
        self.starting = True
        """Whether the process has yet to import its first module."""
        self.number, self.loaded, self.unsent, self.deadline = 0, False, memoryview(b""), 0.0

    def start_job(self, job: Job) -> None:
        self.job, self.open, self.loaded = job, set(range(len(job.keys))), False
        self.number += 1
        names = ("name", "module", "settings", "timeout", "concurrency", "batched", "positional", "names", "rows")
        message = {name: getattr(job, name) for name in names}
        message |= {"job": self.number, "secrets": named_secrets(job.settings)}
        self.unsent = memoryview(msgpack.packb(message, unicode_errors="surrogatepass"))
        self.deadline = time.monotonic() + START_TIMEOUT
        self.send()

    def send(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # `receive` notices a dead process
            while self.unsent:
                self.unsent = self.unsent[os.write(self.jobs, self.unsent) :]

    def receive(self) -> list[Any] | None:
        """Return the messages that have arrived; None if the process has ended or sent garbage."""
        data = os.read(self.results, 1 << 16)
        if not data:
            return None
        try:
            self.unpacker.feed(data)
            return [_checked(message) for message in self.unpacker]
        except (ValueError, TypeError, LookupError, msgpack.UnpackException):
            return None

    def reset_deadline(self) -> None:
        """Start the time limit of the next call."""
        if self.job:
            self.loaded, self.starting = True, False
            self.deadline = time.monotonic() + self.job.timeout + (_EXTRA_TIME if self.job.coroutine else 0.0)

    def exit_reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_EXTRA_TIME)
            signalled = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            return f"its process {signalled}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
        return "its process no longer answers"

    def end(self) -> None:
        """Kill the process and all its descendants."""
        os.close(self.jobs)
        os.close(self.results)
        if self.process.poll() is None:
            self.process.terminate()  # the guard, which ends the others first
            self.process.send_signal(signal.SIGCONT)  # a stopped guard would not react
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_TIMEOUT)
        if self.process.poll() is None:
            kill_descendants(self.process.pid)
            self.process.kill()
        self.process.wait()
        kill_marked(_MARK, self.mark)


def _checked(message: Any) -> list[Any]:
    """Check a message: a reward function may have written to the pipe, which must not end the rank.

    Raises:
        ValueError, TypeError, LookupError: the message is malformed.
    """
    kind, number, *more = message
    if not (type(number) is int and tuple(map(type, more)) == _FIELDS[kind]):
        raise ValueError(f"{kind} with {more}")
    if kind == "value" and not math.isfinite(more[1]):
        raise ValueError(f"{more[1]} is no reward")
    if kind == "metrics" and not all(tuple(map(type, each)) == (str, float, float) for each in more[0]):
        raise ValueError(f"{more[0]} are no metrics")
    return message


_MAX_START_FAILURES = 3
"""Processes that may end before their first import, in one run."""


@dataclass
class RewardResults:
    """Rewards or failures by the caller's key of a sample, with counts of retries and timeouts."""

    values: dict[int, float | FailedSample] = field(default_factory=dict)
    retried: int = 0
    timeouts: int = 0
    metrics: list[list[Any]] = field(default_factory=list)
    """[name, sum, count] of values that calls have reported by `metric`."""


class RewardPool:
    """Up to `size` processes, started on demand and kept."""

    def __init__(self, size: int, memory_gib: float):
        self.size, self.memory = size, int(memory_gib * 2**30)
        self.workers: list[RewardProcess] = []
        atexit.register(self.close)

    def run(self, jobs: list[Job], limit: float) -> RewardResults:
        """Run all jobs; each sample gets a number or a failure, whatever its function does.

        Args:
            limit: seconds for all jobs; samples without a result by then have failed.

        Raises:
            EngineError: a function has raised a DistflowError: no call of it can succeed.
        """
        return _PoolRun(self, jobs, limit).run()

    def close(self) -> None:
        """End all processes and their descendants."""
        for worker in self.workers:
            worker.end()
        self.workers = []


class _PoolRun:
    """One `run` of a pool."""

    def __init__(self, pool: RewardPool, jobs: list[Job], limit: float):
        self.pool, self.results, self.deadline = pool, RewardResults(), time.monotonic() + limit
        self.limit, self.start_failures = limit, 0
        self.waiting = deque(part for job in jobs for part in job.split(_chunk(job, pool.size)))

    def run(self) -> RewardResults:
        try:
            while self._assign_jobs():
                self._receive()
                self._end_late_processes()
                if time.monotonic() >= self.deadline:
                    self._fail_rest()
            return self.results
        finally:
            if any(worker.job for worker in self.pool.workers):
                self.pool.close()  # after an error the remaining results are of no use

    def _assign_jobs(self) -> list[RewardProcess]:
        """Give waiting jobs to idle processes; return the busy ones."""
        for worker in list(self.pool.workers):
            if worker.job is None and worker.process.poll() is not None:  # it ended between steps
                worker.end()
                self.pool.workers.remove(worker)
            elif worker.job is None and self.waiting:
                worker.start_job(self.waiting.popleft())
        while self.waiting and len(self.pool.workers) < self.pool.size:
            self.pool.workers.append(RewardProcess(self.pool.memory))
            self.pool.workers[-1].start_job(self.waiting.popleft())
        return [worker for worker in self.pool.workers if worker.job]

    def _receive(self) -> None:
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
                continue  # its pipes were closed a moment ago
            if key.fd == key.data.jobs:
                key.data.send()
            else:
                self._handle(key.data)

    def _handle(self, worker: RewardProcess) -> None:
        messages = worker.receive()
        if messages is None:
            self._end_process(worker, worker.exit_reason())
            return
        for kind, number, *more in messages:
            if worker.job is None or number != worker.number:
                continue  # a fork of the process may repeat messages
            if kind == "impossible":
                raise EngineError(f"reward `{worker.job.name}` cannot be computed: {more[0]}")
            if kind == "done":
                for index in sorted(worker.open):
                    self._record(worker, index, FailedSample("its process has sent no result"))
                worker.job = None
            elif kind == "value":
                self._record(worker, more[0], more[1])
            elif kind == "metrics":
                self.results.metrics += more[0]
            elif kind == "failed":
                self._record(worker, more[0], FailedSample(more[1], more[2]))
            worker.reset_deadline()

    def _record(self, worker: RewardProcess, index: int, found: float | FailedSample) -> None:
        """Record a result, or retry the sample."""
        job = worker.job
        if index not in worker.open:
            return
        worker.open.discard(index)
        self.results.timeouts += isinstance(found, FailedSample) and found.reason.startswith("took longer")
        if isinstance(found, FailedSample) and job.attempt < job.retries:
            self.results.retried += 1
            self.waiting.append(job.part([index], again=True))
        else:
            self.results.values[job.keys[index]] = found

    def _end_late_processes(self) -> None:
        for worker in [worker for worker in self.pool.workers if worker.job and time.monotonic() >= worker.deadline]:
            what = f"took longer than {worker.job.timeout:g} s" if worker.loaded else \
                f"its module `{worker.job.module}` has not been imported in {START_TIMEOUT:.0f} s"
            self._end_process(worker, what)

    def _end_process(self, worker: RewardProcess, reason: str) -> None:
        """End a process that has died or hangs; fail the sample it was at and queue the others again."""
        job, indices = worker.job, sorted(worker.open)
        worker.end()
        self.pool.workers.remove(worker)
        self.start_failures += worker.starting
        if self.start_failures == _MAX_START_FAILURES:
            raise EngineError(f"reward `{job.name}` cannot be computed: {reason}, and so {_MAX_START_FAILURES} times, "
                              f"before its module `{job.module}` was imported. See:  python -c 'import {job.module}'")
        one_by_one = worker.loaded and not (job.batched or job.coroutine)
        failed, unfinished = (indices[:1], indices[1:]) if one_by_one else (indices, [])
        if unfinished:
            self.waiting.appendleft(job.part(unfinished))
        for index in failed:
            self._record(worker, index, FailedSample(reason))

    def _fail_rest(self) -> None:
        """Fail all samples without a result: the time limit is over."""
        for worker in [worker for worker in self.pool.workers if worker.job]:
            self.waiting.append(worker.job.part(sorted(worker.open)))
            worker.end()
            self.pool.workers.remove(worker)
        for job in self.waiting:
            reason = f"was not done when the {self.limit:g} s of all rewards of a step were over"
            self.results.values |= dict.fromkeys(job.keys, FailedSample(reason))
        self.waiting.clear()


def _chunk(job: Job, workers: int) -> int:
    """Return the samples per job: few enough to keep all processes busy and to spread slow samples."""
    return -(-len(job.keys) // (workers if job.coroutine else 4 * workers))
