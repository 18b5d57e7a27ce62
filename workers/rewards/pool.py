"""The worker processes of a rank, as it sees them: jobs go out, numbers come in, the dead are replaced.

`concurrent.futures` cannot do this: it can end no process that hangs, and one that dies takes all calls with it.
"""

from __future__ import annotations

import atexit
import selectors
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from distflow.schema.errors import EngineError
from workers.rewards.process import START, Failed, Job, Process

_STILLBORN = 3
"""Processes of a step that may end before they have imported what they need."""


@dataclass
class Results:
    """By the caller's name of a sample: a number, or why there is none. And what it took."""

    values: dict[int, float | Failed] = field(default_factory=dict)
    retried: int = 0
    timeouts: int = 0
    metrics: list[list[Any]] = field(default_factory=list)
    """Name, sum and count of what calls have reported by `metric`."""


class Pool:
    """Up to `size` processes, started when there is work for them and kept."""

    def __init__(self, size: int, memory_gib: float):
        self.size, self.memory = size, int(memory_gib * 2**30)
        self.workers: list[Process] = []
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
        self.limit, self.stillborn = limit, 0
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

    def _hand_out(self) -> list[Process]:
        """Give waiting jobs to idle processes; the busy ones."""
        for worker in list(self.pool.workers):
            if worker.job is None and worker.process.poll() is not None:  # it died between steps
                worker.end()
                self.pool.workers.remove(worker)
            elif worker.job is None and self.waiting:
                worker.begin(self.waiting.popleft())
        while self.waiting and len(self.pool.workers) < self.pool.size:
            self.pool.workers.append(Process(self.pool.memory))
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

    def _hear(self, worker: Process) -> None:
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
                    self._keep(worker, place, Failed("its process has not said what became of it"))
                worker.job = None
            elif kind == "value":
                self._keep(worker, more[0], more[1])
            elif kind == "metrics":
                self.results.metrics += more[0]
            elif kind == "failed":
                self._keep(worker, more[0], Failed(more[1], more[2]))
            worker.heard()

    def _keep(self, worker: Process, place: int, found: float | Failed) -> None:
        """Note a result, or try the sample again."""
        job = worker.job
        if place not in worker.open:
            return
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
                f"its module `{worker.job.module}` has not been imported in {START:.0f} s"
            self._lost(worker, what)

    def _lost(self, worker: Process, reason: str) -> None:
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


def _chunk(job: Job, workers: int) -> int:
    """Samples that go to a process at once: few enough that all have some, and that slow ones are shared."""
    return -(-len(job.keys) // (workers if job.coroutine else 4 * workers))
