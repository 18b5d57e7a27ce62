"""Runs in a reward process: calls reward functions for the rank, one job after the other.

    rank → worker   a job: {job, name, module, settings, secrets, timeout, concurrency, batched, positional, names,
                    rows}; secrets: environment variables that the settings name
    worker → rank   ["loaded", job], then for each row ["value", job, row, number] or
                    ["failed", job, row, reason, trace], finally ["done", job]; or ["impossible", job, why]
                    after a call's values ["metrics", job, [[name, sum, count], …]] if it has reported any

Messages are msgpack, back to back on one pipe each way. A row is the list of its arguments; a function of lists gets
one row of lists and answers rows 0, 1, ….
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import resource
import signal
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgpack

from distflow.contracts.decorators import REWARDS, load_module
from distflow.errors import DistflowError
from distflow.telemetry.metrics import Metrics, recording
from workers.isolation.sandbox.guard import fork_from_guard
from workers.isolation.sandbox.processes import descendants, kill_descendants
from workers.isolation.user_code import guarded

_READ_SIZE = 1 << 16
_TRACE = 4000
"""Characters of a traceback that are sent, counted from its end."""
_LARGEST = 3.4028234663852886e38
"""The largest float32, the type of rewards."""
Job = dict[str, Any]


class CallFailure(Exception):
    """A call that returned no finite number."""


def main(jobs: int, results: int, parent: int, memory: int) -> None:
    """Work until the rank closes `jobs`. `memory` in bytes limits private memory (by the kernel) and shared memory (by
    the guard)."""
    _set_up(jobs, results, parent, memory)
    worker, unpacker = RewardWorker(results), msgpack.Unpacker(unicode_errors="surrogatepass", max_buffer_size=0)
    while data := os.read(jobs, _READ_SIZE):
        unpacker.feed(data)
        for job in unpacker:
            worker.work(job)
    kill_descendants(os.getpid())


def _set_up(jobs: int, results: int, parent: int, memory: int) -> None:
    for number in (jobs, results):
        os.set_inheritable(number, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fork_from_guard(parent, memory)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the OOM killer takes this process, not the rank


class RewardWorker:
    """Runs jobs and sends their results."""

    def __init__(self, results: int):
        self.results, self.process = results, os.getpid()
        self.loop = asyncio.new_event_loop()
        self.loaded: dict[tuple[str, str], Callable[..., Any]] = {}
        self.kept: set[int] = set()
        """Processes that modules have started while being imported, which may stay."""

    def work(self, job: Job) -> None:
        os.environ |= job["secrets"]
        try:
            function = self._function(job)
            self._send("loaded", job)
            self._run(function, job)
        except DistflowError as error:
            self._send("impossible", job, f"{error}")
        else:
            self._send("done", job)
        finally:
            for name in job["secrets"]:
                os.environ.pop(name, None)

    def _function(self, job: Job) -> Callable[..., Any]:
        name, key = job["name"], (job["module"], job["name"])
        if key not in self.loaded:
            load_module(job["module"])
            if name not in REWARDS:
                raise DistflowError(f"reward `{name}` is not there when module `{job['module']}` is imported alone. "
                                    "Define it at the top of a module, and import no module that needs the run.")
            self.loaded[key] = REWARDS[name]
            self.kept = descendants(self.process)
        return self.loaded[key]

    def _run(self, function: Callable[..., Any], job: Job) -> None:
        coroutine = inspect.iscoroutinefunction(function)
        if coroutine and not job["batched"]:
            self.loop.run_until_complete(self._run_async(function, job))
            self._end_leftovers()
            return
        for index, row in enumerate(job["rows"]):
            reported = Metrics()
            with guarded(partial(self._send_failure, job, index), BaseException, but=DistflowError), \
                    recording(reported):
                result = _call(function, job, row)
                value = self.loop.run_until_complete(asyncio.wait_for(result, job["timeout"])) if coroutine else result
                self._exit_if_forked()
                self._end_leftovers()
                self._send_values(job, index, value, reported)

    async def _run_async(self, function: Callable[..., Coroutine[Any, Any, Any]], job: Job) -> None:
        free = asyncio.Semaphore(job["concurrency"])

        async def one(index: int, row: list[Any]) -> None:
            reported = Metrics()
            async with free:
                with guarded(partial(self._send_failure, job, index), but=DistflowError), recording(reported):
                    value = await asyncio.wait_for(_call(function, job, row), job["timeout"])
                    self._exit_if_forked()
                    self._send_values(job, index, value, reported)

        await asyncio.gather(*(one(index, row) for index, row in enumerate(job["rows"])))

    def _send_values(self, job: Job, index: int, value: Any, reported: Metrics) -> None:
        """Send what a call returned, then its metrics, which do not count if the call failed."""
        if job["batched"]:
            self._send_each(job, index, value)
        else:
            self._send("value", job, index, _number(value))
        if means := reported.means():
            self._send("metrics", job, means)

    def _send_each(self, job: Job, index: int, value: Any) -> None:
        values = value.tolist() if hasattr(value, "tolist") else value
        count = len(job["rows"][index][0])
        if not isinstance(values, list | tuple) or len(values) != count:
            shown = f"{len(values)} values" if isinstance(values, list | tuple) else repr(value)[:200]
            raise CallFailure(f"returned {shown} for {count} samples")
        for row, item in enumerate(values):
            try:
                self._send("value", job, row, _number(item))
            except CallFailure as error:
                self._send("failed", job, row, str(error), "")

    def _send_failure(self, job: Job, index: int, error: BaseException) -> None:
        self._exit_if_forked()
        reason = _reason(error)
        if isinstance(error, TimeoutError) and not str(error):
            reason = f"took longer than {job['timeout']:g} s"
        trace = "" if isinstance(error, CallFailure) else traceback.format_exc()[-_TRACE:]
        for row in range(len(job["rows"][0][0])) if job["batched"] else (index,):
            self._send("failed", job, row, reason, trace)

    def _exit_if_forked(self) -> None:
        """Exit in a copy of the worker that a function has forked, which must not send results."""
        if os.getpid() != self.process:
            os._exit(0)

    def _end_leftovers(self) -> None:
        """End processes that a call has left running.

        Raises:
            CallFailure: there were some.
        """
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return  # the usual case: no child at all
        killed = kill_descendants(self.process, self.kept)
        for process in killed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if killed:
            raise CallFailure(f"left {len(killed)} processes running, which were ended; what is to stay must be "
                              "started while the module is imported")

    def _send(self, kind: str, job: Job, *more: Any) -> None:
        data = msgpack.packb([kind, job["job"], *more], unicode_errors="surrogatepass")
        while data:
            data = data[os.write(self.results, data) :]


def call_in_rank(function: Callable[..., Any], job: Job, row: list[Any]) -> float | str | None:
    """Call a reward in this process; return its number, the reason for a failure, or None if it returned None.

    Raises:
        DistflowError: the function raises it.
    """
    reasons: list[str] = []
    with guarded(lambda error: reasons.append(_reason(error)), but=DistflowError):
        value = _call(function, job, row)
        return None if value is None else _number(value)
    return reasons[0]


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, CallFailure) else f"raised {type(error).__name__}: {str(error)[:300]}"


def _call(function: Callable[..., Any], job: Job, row: list[Any]) -> Any:
    positional = job["positional"]
    return function(*row[:positional], **dict(zip(job["names"], row[positional:])), **job["settings"])


def _number(value: Any) -> float:
    """Return a reward as a float.

    Raises:
        CallFailure: `value` is no number, or not finite as float32.
    """
    try:
        number = None if isinstance(value, str | bytes | None) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises RuntimeError for a tensor of many
        number = None
    if number is None or not abs(number) <= _LARGEST:
        raise CallFailure(f"returned {repr(value)[:200]}, not a finite number")
    return number

