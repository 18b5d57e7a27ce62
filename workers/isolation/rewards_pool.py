"""Computes a rank's rewards in child processes: each sample gets a number or a failure, whatever its function does."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distflow.errors import EngineError
from distflow.telemetry import events
from distflow.telemetry.run_reader import RunReader
from workers.isolation.child import Message
from workers.isolation.pool import LOAD_TIMEOUT, Call, CallPool, ChildProcess, ForkServerLost
from workers.isolation.rewards_worker import NO_VALUE
from workers.isolation.sandbox.variables import named_secrets

_EXTRA_TIME = 1.0  # seconds added to the timeout of async functions, which the child itself cancels in time
_SENT_AHEAD = 4  # calls that a child has at a time; it runs them one after the other
_SLOW = 10.0  # seconds after which rewards of a step that are not done are reported, each reward once in a run
_EVENT = "reward_slow"
_MAX_START_FAILURES = 3  # children that may end while they import a module, in one run


@dataclass
class Job:
    """Calls of one reward. `rows` holds the arguments of each sample, or with `batched` one row of lists."""

    name: str
    module: str
    rows: list[list[Any]]
    keys: list[int]  # the caller's key of each sample
    settings: dict[str, Any] = field(default_factory=dict)
    timeout: float = 10.0
    retries: int = 1
    concurrency: int = 16
    batched: bool = False
    coroutine: bool = False
    positional: int = 2
    names: list[str] = field(default_factory=list)
    where: str = ""  # file and line of its definition

    def calls(self) -> Iterator[RewardCall]:
        if self.batched:
            yield RewardCall(self, self.keys, self.rows[0])
        else:
            yield from (RewardCall(self, [key], row) for key, row in zip(self.keys, self.rows))


@dataclass(eq=False)
class RewardCall(Call):

    job: Job
    keys: list[int]
    row: list[Any]
    alone: bool = False  # whether no other call may run beside it, in any child

    def again(self, index: int) -> RewardCall:
        row = [[values[index]] for values in self.row] if self.job.batched else self.row
        return RewardCall(self.job, [self.keys[index]], row, attempt=self.attempt + 1)

    def message(self) -> Message:
        names = ("name", "module", "settings", "timeout", "positional", "names")
        return {**{name: getattr(self.job, name) for name in names}, "row": self.row, "key": None,
                "secrets": named_secrets(self.job.settings), "samples": len(self.keys) if self.job.batched else None}


@dataclass(frozen=True)
class FailedSample:
    reason: str
    trace: str = ""


@dataclass
class RewardResults:
    """Rewards or failures by the caller's key of a sample, with counts of retries and timeouts."""

    values: dict[int, float | FailedSample] = field(default_factory=dict)
    retried: int = 0
    timeouts: int = 0
    metrics: list[list[Any]] = field(default_factory=list)
    """[name, sum, count] of values that calls have reported by `metric`."""
    of_sample: dict[int, list[list[Any]]] = field(default_factory=dict)
    """Those of each sample by its key, where a call had one sample."""


class RewardProcess(ChildProcess):
    max_bytes = 1 << 26

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.job: Job | None = None
        self.modules: set[str] = set()  # those that it has imported

    def takes(self, call: RewardCall) -> bool:
        """Return whether a call may be sent now. What failed before runs alone in its child."""
        if not self.pending:
            return True
        most = call.job.concurrency if call.job.coroutine else _SENT_AHEAD
        return self.job is call.job and len(self.pending) < most and not any(
            each.attempt for each in (call, *self.pending.values()))

    def start(self, call: RewardCall) -> None:
        self.job, self.concurrent = call.job, call.job.coroutine
        call.seconds = self.seconds(call.job)
        self.ask(call, call.message())

    def seconds(self, job: Job) -> float:
        if job.module not in self.modules:
            return LOAD_TIMEOUT
        return job.timeout + (_EXTRA_TIME if job.coroutine else 0.0)

    def read(self, message: Any) -> tuple[RewardCall, Message] | None:
        """Return a call and its checked answer; None for one that is not expected, as a copy of the child sends. Raises
        what MALFORMED lists: the answer is none, and the pool ends the child."""
        call: RewardCall | None = self.pending.get(message["call"])
        if call is None:
            return None
        if "loaded" in message:
            self.modules.add(call.job.module)
            for each in self.pending.values():
                each.seconds, each.deadline = self.seconds(each.job), math.inf
            self.start_clocks()
            return None
        if "impossible" not in message:
            _require_valid(message, len(call.keys))
        self.answered(call)
        return call, message


def _first_to_report(reward: str) -> bool:
    """Return whether no other rank has reported a reward as slow before this one."""
    path = events.current().path
    lines = RunReader(path.parent).rows("events") if path else ()
    first = next((event for event in lines if event["event"] == _EVENT and event.get("reward") == reward), None)
    return first is None or first["rank"] == events.current().rank


def _require_valid(message: Message, samples: int) -> None:
    """Raise ValueError unless there is a finite number, or [reason, traceback], for each sample, and metrics are named
    sums. Users' code runs in the child, and could send anything."""
    values, metrics = message["values"], message["metrics"]
    if type(values) is not list or type(metrics) is not list or len(values) != samples:
        raise ValueError(f"{values} and {metrics} for {samples} samples")
    for value in values:
        failed = isinstance(value, list) and [*map(type, value)] == [str, str]
        if not (failed or (isinstance(value, int | float) and math.isfinite(value))):
            raise ValueError(f"{value} is no reward")
    if not all(tuple(map(type, each)) == (str, float, float) for each in metrics):
        raise ValueError(f"{metrics} are no metrics")


class RewardPool(CallPool[RewardProcess]):
    """Up to `size` children, started on demand and kept between steps. `quiet`: slow rewards are not reported."""

    in_order = True

    def __init__(self, size: int, memory_gib: float, quiet: bool = False):
        super().__init__(RewardProcess, "rewards", "workers.isolation.rewards_worker:RewardHandler", {}, memory_gib)
        self.size, self.quiet = size, quiet
        self.reported: set[str] = set()  # rewards whose slowness has been reported
        atexit.register(self.stop)

    def run(self, jobs: list[Job], limit: float) -> RewardResults:
        """Run all jobs for at most `limit` seconds; samples without a result by then have failed. Raises EngineError: a
        function has raised a DistflowError, so that no call of it can succeed, or returned a list of a wrong length."""
        self.limit, self.results, self.start_failures = limit, RewardResults(), 0
        self.began, self.slow_at = time.time(), math.inf if self.quiet else time.monotonic() + _SLOW
        self.until, self.waiting = time.monotonic() + limit, deque(call for job in jobs for call in job.calls())
        try:
            while self.waiting or self._busy():
                try:
                    # first, since children may have ended since the last run
                    self.hand_out(min(self.until, self.slow_at) if self._busy() else 0.0)
                    self._report_slow()
                    self.end_late()
                    if time.monotonic() >= self.until:
                        self._fail_rest()
                    self.assign()
                except ForkServerLost as error:
                    self._start_again(error)
            return self.results
        finally:
            if self._busy():
                self.stop()  # after an error the remaining results are of no use

    def _busy(self) -> list[RewardProcess]:
        return [child for child in self.children if child.pending]

    def choose(self, call: RewardCall) -> RewardProcess | None:
        busy, children = self._busy(), self.children
        if busy and (call.alone or any(each.alone for child in busy for each in child.pending.values())):
            return None
        if len(busy) == len(children) < self.size:
            return self.fork()
        return min((child for child in children if child.takes(call)), key=lambda each: len(each.pending), default=None)

    def done(self, call: RewardCall, answer: Message) -> None:
        if "impossible" in answer:
            at = f"{call.job.where}: " * bool(call.job.where)
            raise EngineError(f"{at}reward `{call.job.name}` cannot be computed: {answer['impossible']}")
        self.results.metrics += answer["metrics"]
        if answer["metrics"] and not call.job.batched:
            self.results.of_sample[call.keys[0]] = answer["metrics"]
        for index, value in enumerate(answer["values"]):
            self._record(call, index, FailedSample(*value) if isinstance(value, list) else value)

    def _record(self, call: RewardCall, index: int, found: float | FailedSample) -> None:
        failed = isinstance(found, FailedSample)
        self.results.timeouts += failed and found.reason.startswith("took longer")
        if failed and found.reason != NO_VALUE and call.attempt < call.job.retries:
            self.results.retried += 1
            self.waiting.append(call.again(index))
        else:
            self.results.values[call.keys[index]] = found

    def _report_slow(self) -> None:
        """Report each reward that is under way `_SLOW` seconds after the beginning, once in a run."""
        if time.monotonic() < self.slow_at:
            return
        self.slow_at = math.inf
        for child in self._busy():
            call = next(iter(child.pending.values()))
            if call.job.name not in self.reported:
                self.reported.add(call.job.name)
                self._report(call.job, child)

    def _report(self, job: Job, child: RewardProcess) -> None:
        at, done = self.location(child), sum(key in self.results.values for key in job.keys)
        doing = f"its call stands{at}" if job.module in child.modules else \
            f"its module `{job.module}` is being imported{at and f', and stands{at}'}"
        events.record(_EVENT, reward=job.name, where=job.where, doing=doing, seconds=_SLOW, done=done,
                      samples=len(job.keys), timeout=job.timeout, limit=self.limit)
        if not _first_to_report(job.name):
            return
        since, more = time.strftime("%H:%M:%S", time.localtime(self.began)), 2 * job.timeout
        events.show(
            f"[rank {events.current().rank}] {job.where and f'{job.where}: '}reward `{job.name}` is slow: after "
            f"{_SLOW:g} s, since {since}, {done} of {len(job.keys)} samples have it; {doing}.\n"
            f"  One call may take {job.timeout:g} s. To change that:  reward: {{{job.name}: {{timeout: {more:g}}}}}  "
            f"in the DAG, or  @reward(timeout={more:g})\n"
            f"  All rewards of a step may take {self.limit:g} s. To change that:  limit: {2 * self.limit:g}  in the "
            "`with:` of the DAG's node. Samples without a reward by then leave the step.", sys.stderr)

    def lateness(self, child: RewardProcess, call: RewardCall) -> str:
        if call.job.module in child.modules:
            return f"took longer than {call.job.timeout:g} s"
        return f"its module `{call.job.module}` has not been imported in {LOAD_TIMEOUT:.0f} s"

    def lose(self, child: RewardProcess, blamed: list[RewardCall], reason: str, late: bool = False) -> None:
        if blamed and blamed[0].job.module not in child.modules:
            self._count_start_failure(reason, blamed[0].job)
        super().lose(child, blamed, reason, late)

    def _count_start_failure(self, reason: str, job: Job) -> None:
        self.start_failures += 1
        if self.start_failures == _MAX_START_FAILURES:
            raise EngineError(f"reward `{job.name}` cannot be computed: {reason}, and so {_MAX_START_FAILURES} times, "
                              f"before its module `{job.module}` was imported. See:  python -c 'import {job.module}'")

    def failed(self, call: RewardCall, reason: str, late: bool = False) -> None:
        for index in range(len(call.keys)):
            self._record(call, index, FailedSample(reason))

    def _start_again(self, error: ForkServerLost) -> None:
        """Start all children again. A call has failed if no other can have ended the fork server: none has just
        answered, and no late one may still run. Else those that ran are run one by one, which shows the one that did.
        """
        answers = [answer for child in self._busy() for answer in child.drain() if answer]
        for call, message in answers:
            self.done(call, message)
        lost = [call for child in self._busy() for call in child.pending.values()]
        running = [call for call in lost if call.deadline < math.inf]
        suspects = len(running) + len(answers) + self.killing
        self.stop()
        self.start_failures += not suspects
        if self.start_failures == _MAX_START_FAILURES:
            raise error
        if running and suspects == 1:
            lost.remove(running[0])
            self.failed(running[0], "its process was killed together with the one that had started it")
        for call in running:
            call.alone = True
        self.waiting.extendleft(reversed(lost))

    def _fail_rest(self) -> None:
        for child in self._busy():
            self.waiting.extend(child.pending.values())
            self.end_child(child)
        reason = f"was not done when the {self.limit:g} s of all rewards of a step were over"
        self.results.values |= {key: FailedSample(reason) for call in self.waiting for key in call.keys}
        self.waiting.clear()
