"""Supervises the worker of one rank: forks it, monitors it, and forks another after a failure.

torchrun starts one supervisor for each GPU. A worker's failure restarts the workers of its restart group and no others.
The supervisor does nothing that could fail together with a worker: no model, no collective, and no thread but
the store's. Because a worker is a fork, a restart pays for no import.

    WAITING    `should_run` is false: scaled down        -> RUNNING when scaled up
    RUNNING    a worker lives                            -> one of `_WorkerEnd`, or a `Failure`
    DONE       all workers of the group are done         -> exit 0
    FAILED     the next `Attempt` carries the failure    -> RUNNING, or the end: budget used up, or left out
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from distflow.config.robust import Robust
from distflow.errors import CheckpointError, quoted, shown
from distflow.plan import INFERENCE, ROLLOUT
from distflow.recovery import out_of_memory
from distflow.recovery.checkpoint_files import complete_checkpoints, step_of
from distflow.recovery.detectors import HealthMonitor
from distflow.recovery.hooks import When, may_exist
from distflow.recovery.live_config import LiveConfig
from distflow.recovery.membership import ElasticMember
from distflow.recovery.rank_status import absent_ranks
from distflow.recovery.restarts import Attempt, Failure, RestartCoordinator, RestartGroup, pause_before
from distflow.recovery.store import RunStore
from distflow.recovery.worker_process import (
    FAILED,
    INVALID,
    RELOAD,
    WorkerContext,
    become_worker,
    read_exit_report,
)
from distflow.store.interface import StoreUnavailable, poll_interval
from distflow.telemetry import events, startup
from distflow.telemetry.ettr import STARTS_AGAIN
from distflow.telemetry.events import Events
from distflow.telemetry.heartbeat import ASKED, STOPPED
from distflow.telemetry.processes import SIGNALS, Child, adopt_orphans, children, end_orphans, spawn, stopped
from distflow.telemetry.run_lock import RunLock
from distflow.telemetry.run_reader import RunReader
from distflow.telemetry.stack_file import StackFile, location_in
from distflow.telemetry.tracebacks import report_to_torchrun, users_line, users_part


def stop_message(folder: Path, step: int) -> str:
    """Return the last line on the screen of a run that was told to end: what is kept of it, and how to continue.
    `folder` may not exist; `step`: after which the run has ended in order, 0 if it was cut off."""
    ended = f"{folder} was stopped after step {step}" if step else f"{folder} was stopped in the middle of a step"
    if not folder.is_dir():
        return f"{folder} was stopped before it began; nothing is kept"
    return f"{ended}; {kept(folder)}"


def kept(folder: Path, ending: bool = False) -> str:
    """Return what a run folder keeps of a run that has ended before its time, and the command that continues it.
    `ending`: all steps were done, and the models are missing."""
    try:
        found = complete_checkpoints(folder / "checkpoints")
    except CheckpointError as error:
        return str(error)
    if not found:
        return "it has no checkpoint to go on from (`checkpoint.every` in the run file)"
    command = f"Go on:  distflow resume {quoted(folder)}"
    if ending:
        command = f"Write its models:  distflow resume {quoted(folder)}   or to another place:  distflow export " \
                  f"{quoted(folder)} FOLDER"
    return f"its checkpoint of step {step_of(found[-1])} is kept. {command}"


_POLL = 0.2  # seconds between two looks at the store and at the worker's heartbeat; a death is seen at once
_STORE_TIMEOUT = 0.5  # seconds within which the store must answer while a worker is watched
_GRACE = 5.0  # seconds that a worker has to clean up after it was told to end
_EXTERNAL = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that come from outside; a program's own mistake ends it by others, or by the kernel's SIGKILL."""
_SAME_SIGNAL = 1.0
"""Seconds in which a second signal counts as the first: a process group and its parent may both be sent it."""
_FAILED = "failed"  # key in the store: a restart group has failed for good, and torchrun ends the others


class _WorkerEnd(Enum):
    """How a worker ends, other than by a failure that this supervisor has seen first."""

    DONE = "its work is done, or it ended by itself"
    SUPERSEDED = "its restart group has begun the next attempt"
    SCALED_DOWN = "it should not run now"
    RELOAD = "settings have changed"


class TerminationRequested(BaseException):
    """A signal that ends this process; its number is the argument."""


@dataclass
class SupervisedRun:
    """A run as the supervisor of one of its ranks sees it.

    Args:
        required_processes: by descriptor that becomes readable when the process ends: the message of that failure.
        restart_required_processes: starts them again, and returns the new ones. None: the run cannot do without them.
        is_obsolete: whether nothing needs the group's work any more, so that it does not matter how its workers end.
        should_run: whether there should be a worker now.
        leave_out: called when the group is not started again; returns whether the run goes on without it.
        live_config: workers of other groups than the trainer end when settings change; its own by themselves, after a
            step.
        hooks: calls the users' hooks of a moment; after a failure, with the attempt that has it among its failures.
        lock: of the run's folder, to be held as soon as the folder exists.
    """

    folder: Path
    settings: Robust
    required_processes: Mapping[int, str] = field(default_factory=dict)
    restart_required_processes: Callable[[], Mapping[int, str]] | None = dict
    is_obsolete: Callable[[], bool] = lambda: False
    should_run: Callable[[], bool] = lambda: True
    leave_out: Callable[[], bool] = lambda: False
    live_config: LiveConfig | None = None
    hooks: Callable[[When, Attempt], None] | None = None
    lock: RunLock | None = None


class Supervisor:
    """Supervisor of one rank's worker. `work`: what a worker does from its start to its end, in a process of its own; a
    DistflowError that it raises is written for the user. `elastic`: membership of the machine, if machines come and
    go."""

    def __init__(self, store: RunStore, restart_group: RestartGroup, work: Callable[[WorkerContext], bool | None],
                 view: SupervisedRun, elastic: ElasticMember | None = None):
        settings, folder = view.settings, view.folder
        self.rank, self.ranks, self.group = store.rank, store.ranks, restart_group
        self.restarts = RestartCoordinator(store.store, restart_group, store.rank, settings.restarts)
        self.work, self.view, self.folder, self.elastic = work, view, folder, elastic
        self.monitor = HealthMonitor(restart_group.group, settings.detectors)
        self.events = Events()
        self.events.open(folder / "events.jsonl", store.rank)
        self.context = replace(elastic.worker_context if elastic else WorkerContext(), supervisor_pid=os.getpid())
        self.heartbeat = self.context.heartbeat
        self.worker: Child | None = None
        self.steps_done = 0  # of the workers of this attempt
        self.failures_handled = 0  # failures after which the required processes were started again
        self.known_children: set[int] = set()  # children of this process that belong to no worker
        self.store, self.parent, self.shutdown_timeout = store.store, os.getppid(), settings.shutdown_timeout
        self.signal, self.signalled_at = 0, 0.0  # the signal that told this process to end, and when (time.monotonic)
        adopt_orphans()  # what a worker leaves behind

    def run(self) -> int:
        """Supervise workers until the work is done or cannot be; return the exit status. Raises MembershipChanged."""
        self._handle_signals(self._on_signal)
        try:
            attempt = self._first_attempt()
            while not attempt.end:
                if not self._wait_until_scaled_up():
                    return 0
                self._pause_after_failure(attempt)
                end = self._run_worker(attempt)
                done = end is _WorkerEnd.DONE and self._group_is_done(attempt)
                if self.signal and not done:
                    raise TerminationRequested(self.signal)
                if end in (_WorkerEnd.SCALED_DOWN, _WorkerEnd.RELOAD):
                    self._call_hooks("on_leave", attempt)
                    if end is _WorkerEnd.RELOAD or self.restarts.is_superseded(attempt):
                        attempt = self.restarts.renew(attempt)
                    continue
                if done:
                    self._call_hooks("on_leave", attempt)
                    if self.stopped:
                        raise TerminationRequested(self.signal or signal.SIGTERM)
                    return 0
                if (attempt := self._next_attempt(attempt, end)) is None:
                    return self._wait_for_run_end()
        except TerminationRequested as request:
            return self._exit_on_signal(request.args[0])
        except StoreUnavailable as error:
            print(f"[rank {self.rank}] {error}", file=sys.stderr, flush=True)
            return FAILED
        finally:
            self._handle_signals(signal.SIG_IGN)
            self._end_worker()
        return attempt.failures[-1].code

    def _exit_on_signal(self, number: int) -> int:
        """End the worker and return the exit status for a signal. Raises SystemExit: torchrun has died, perhaps with
        its machine: what follows is for the other machines to decide."""
        self._handle_signals(signal.SIG_IGN)
        self._end_worker()
        self._print_stop_message(number)
        if self.orphaned:
            sys.exit(128 + number)
        return 128 + number

    def _fail_for_good(self) -> None:
        """Wait a moment for the group's workers to end, so that what is then printed stands last on the screen."""
        self._handle_signals(signal.SIG_IGN)  # torchrun ends this process as soon as another of the group has left
        self.store.put(_FAILED, "")
        self.store.put(f"{_FAILED}/{self.rank}", "")
        keys, until = [f"{_FAILED}/{rank}" for rank in self.group.ranks], time.monotonic() + _GRACE
        while not self.store.has(*keys) and time.monotonic() < until:
            time.sleep(_POLL / 4)

    def _on_signal(self, number: int, _: object) -> None:
        """Ask the worker to end after its step; end at once on a second signal, or where there is no step to wait for.
        Raises TerminationRequested: to leave `run`."""
        now = time.monotonic()
        if self.signal and now - self.signalled_at < _SAME_SIGNAL:
            return
        again, self.signal, self.signalled_at = self.signal, number, now
        if again or self.orphaned or self.elastic or not self.worker or self.heartbeat.read().phase == "starting":
            raise TerminationRequested(number)
        self.heartbeat.page.stop = ASKED

    def _handle_signals(self, handler: Callable[[int, Any], None] | signal.Handlers) -> None:
        for number in SIGNALS:
            signal.signal(number, handler)

    def _print_stop_message(self, number: int) -> None:
        """Print on rank 0 what is kept of a run that was told to end. A SIGTERM in the middle of a step is left out:
        torchrun sends it after a failure too, which has its own last line on the screen."""
        if self.rank == 0 and not self.elastic and (self.stopped or number == signal.SIGINT):
            step = self.heartbeat.read().step if self.stopped else 0
            self._record("run_stopped", after_step=step)
            events.show(stop_message(self.folder, step))

    @property
    def orphaned(self) -> bool:
        """Whether torchrun, which started this process, has ended. A shell that did may end before the run."""
        return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent

    @property
    def stopped(self) -> bool:
        """Whether the worker has ended after a step, as it was asked to."""
        return self.heartbeat.page.stop == STOPPED

    def _next_attempt(self, attempt: Attempt, end: Failure | _WorkerEnd) -> Attempt | None:
        following = self.restarts.next(attempt, end if isinstance(end, Failure) else None)
        if self.elastic and following.end and following.failures[-1].code != INVALID:
            self.elastic.wait_for_loss()
        left_out = bool(following.end) and not following.failures[-1].hopeless and self.view.leave_out()
        if following.end and not left_out and not self.elastic:
            self._fail_for_good()
        self._report(attempt, following, left_out)
        self.steps_done = 0
        return None if left_out else following

    def _first_attempt(self) -> Attempt:
        """Return attempt 0; on a machine that replaces another, the attempt after the last one of the lost machine."""
        if not (self.elastic and self.elastic.replaces):
            return Attempt()
        before = self.restarts.attempt_before(self.elastic.takeover)
        lost = Failure(self.rank, "its machine was lost, and another has taken its place", "waiting",
                       silent=self.elastic.silence)
        following = self.restarts.next(before, lost)
        self._report(before, following)
        return following

    def _poll(self) -> None:
        if self.orphaned:  # SIGTERM may have come while threads of torchrun were still alive
            raise TerminationRequested(self.signal or signal.SIGTERM)
        if self.signal and time.monotonic() - self.signalled_at > self.shutdown_timeout:
            raise TerminationRequested(self.signal)
        if self.view.lock and self.heartbeat.read().phase != "starting":
            self.view.lock.hold()  # not before: NFS cannot remove the folder of a start that fails while a file is open
        if self.elastic:
            self.elastic.poll()
        if self.signal and self.store.has(_FAILED):
            raise TerminationRequested(self.signal)

    def _wait_until_scaled_up(self) -> bool:
        """Wait until there should be a worker; False if the run is over first."""
        if not self.view.should_run():
            self._record("worker_scaled_down")
            print(f"rank {self.rank} is scaled down, as `distflow scale` has asked", flush=True)
        while not self.view.should_run():
            if self.view.is_obsolete():
                return False
            self._poll()
            time.sleep(poll_interval(_POLL, self.ranks))
        return True

    def _pause_after_failure(self, attempt: Attempt) -> None:
        """Wait before a failure is tried again that may pass by then."""
        until = time.monotonic() + pause_before(attempt)
        while len(attempt.failures) > self.failures_handled and time.monotonic() < until:
            self._poll()
            time.sleep(poll_interval(_POLL, self.ranks))

    def _wait_for_run_end(self) -> int:
        while not self.view.is_obsolete():
            self._poll()
            time.sleep(poll_interval(_POLL, self.ranks))
        return 0

    def _update_config(self, attempt: Attempt) -> None:
        """Give the next worker the newest settings; the group's first supervisor records the change."""
        number = self.view.live_config.newest() if self.view.live_config else 0
        reports = not self.context.first and self.rank == self.group.ranks.start
        if self.view.live_config and number > self.context.config_change and reports:
            self._record("settings_changed", group=self.group.name, attempt=attempt.number,
                         settings=self.view.live_config.changes_since(self.context.config_change))
        self.context = replace(self.context, config_change=number)

    def _run_worker(self, attempt: Attempt) -> Failure | _WorkerEnd:
        self.heartbeat.clear(attempt.number)
        renews = self.view.restart_required_processes
        if renews and len(attempt.failures) > self.failures_handled and attempt.failures[-1].required_process:
            self.view.required_processes = renews()
        self.failures_handled = len(attempt.failures)
        self._update_config(attempt)
        readable, writable = os.pipe()
        self.stack = StackFile()
        self.known_children = children(os.getpid())
        began, self.kills_before = time.monotonic(), out_of_memory.kill_count()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # or one that comes now would find no worker to end
        try:
            self.worker = spawn(partial(become_worker, self.work, replace(self.context, attempt=attempt), writable,
                                        self.stack), session=True, oom_score=out_of_memory.SCORE)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self.context = replace(self.context, first=False)
        os.close(writable)
        self._record("worker_started", attempt=attempt.number, pid=self.worker.pid)
        with contextlib.closing(os.fdopen(readable, "rb")) as pipe, contextlib.closing(self.stack):
            end = self._watch(self.worker, attempt)
            if end in (_WorkerEnd.SCALED_DOWN, _WorkerEnd.RELOAD) and len(self.group.ranks) > 1:
                self.restarts.renew(attempt)  # before the others miss this rank: no rank joins one attempt twice
            status = self._end_worker()
            seconds, report = round(time.monotonic() - began, 3), read_exit_report(pipe.fileno())
            self._record("worker_ended", attempt=attempt.number, status=status, seconds=seconds)
            if end is _WorkerEnd.DONE and report == RELOAD:
                end = _WorkerEnd.RELOAD
            elif end is _WorkerEnd.DONE and status:
                end = _WorkerEnd.SUPERSEDED if self.restarts.is_superseded(attempt) else \
                    self._failure_of_exit(status, report)
        self.steps_done += self.heartbeat.read().finished
        return _WorkerEnd.DONE if isinstance(end, Failure) and not end.hopeless and self.view.is_obsolete() else end

    def _watch(self, worker: Child, attempt: Attempt) -> Failure | _WorkerEnd:
        poll = select.poll()
        for descriptor in (worker.ended, *self.view.required_processes):
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        self.monitor.begin(self.heartbeat)
        answered, look_at = time.monotonic(), 0.0
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(_POLL * 1000)]
            lost = [self.view.required_processes[each] for each in ready if each in self.view.required_processes]
            if lost:
                return self._failure(lost[0], outside=True, required_process=True,
                                     hopeless=self.view.restart_required_processes is None)
            if worker.ended in ready:
                return _WorkerEnd.DONE
            if self.heartbeat.read().phase == "starting":
                startup.current().remind()
            else:
                startup.current().end()
            try:
                if (now := time.monotonic()) >= look_at:
                    with self.store.within(_STORE_TIMEOUT):
                        if end := self._due_end(attempt):
                            return end
                    answered, look_at = time.monotonic(), now + poll_interval(_POLL, self.ranks) - _POLL
            except StoreUnavailable as error:  # nothing is decided, and the worker goes on
                if error.gone or time.monotonic() - answered > self.store.deadline.seconds:
                    raise
            if finding := self.monitor.look():
                held = stopped(worker.pid)
                stack = "" if held else self.stack.dump(worker)
                what = finding.what + " It was stopped (SIGSTOP)." * held + \
                    (f" It stands{where}." if (where := location_in(stack)) else "") + self._describe_absent_ranks()
                return self._failure(what, details=stack and f"{stack}\n{what}", symptom=finding.symptom,
                                     silent=finding.silent, outside=held)

    def _due_end(self, attempt: Attempt) -> _WorkerEnd | None:
        self._poll()
        if self.restarts.is_superseded(attempt):
            return _WorkerEnd.SUPERSEDED
        if not self.view.should_run():
            return _WorkerEnd.SCALED_DOWN
        if self.group.group in (ROLLOUT, INFERENCE) and self.view.live_config \
                and self.view.live_config.newest() > self.context.config_change:
            return _WorkerEnd.RELOAD
        return None

    def _end_worker(self) -> int:
        """End the worker, and what it has left behind; return its exit status, negative for a signal. A worker that is
        starting gets SIGTERM and time to undo what it has made, any other SIGKILL."""
        if self.worker is None:
            return 0
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # or it might be ended, and waited for, twice
        if self.worker.poll() is None and self.heartbeat.read().phase == "starting":
            self.worker.signal(signal.SIGTERM)
            self.worker.poll(_GRACE)
        self.worker.signal(signal.SIGKILL)
        status, self.worker = self.worker.wait(), None
        if left := end_orphans(self.known_children):
            self._record("orphans_ended", pids=sorted(left))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return status

    def _call_hooks(self, when: When, attempt: Attempt) -> None:
        """Call the users' hooks, if there are any, in a process that cannot hold up this one for long."""
        if self.view.hooks is None or not may_exist(when, self.heartbeat.page.hooks):
            return
        helper = spawn(partial(self.view.hooks, when, attempt))
        helper.poll(_GRACE)
        if status := helper.end():
            why = f"took longer than {_GRACE:g} s" if status < 0 else "raised what stands above"
            events.show(f"an {when} hook {why}", sys.stderr)
            self._record("hook_failed", why=why)

    def _record(self, kind: str, **facts: Any) -> None:
        """Append an event, once the first worker has made the run's folder."""
        with contextlib.suppress(OSError):  # its file system is away
            if self.folder.is_dir():
                self.events.step = self.heartbeat.read().step
                self.events.record(kind, **facts)

    def _failure_of_exit(self, status: int, report: bytes) -> Failure:
        if report:
            facts = json.loads(report)
            return self._failure(facts.pop("what"), **facts)
        if status < 0:
            killed = status == -signal.SIGKILL
            why = f" {out_of_memory.kill_cause(self.kills_before)}" if killed else ""
            own = killed and out_of_memory.killed_since(self.kills_before)
            if status == -signal.SIGABRT:  # so NCCL ends a process whose collective has timed out
                why = self._describe_absent_ranks()
            stack = "" if -status in _EXTERNAL else self.stack.read()
            what = f"it was ended by {signal.Signals(-status).name}{location_in(stack)}.{why}"
            return self._failure(what, details=stack and f"{stack}\n{what}",
                                 outside=-status in _EXTERNAL and not own, full=own)
        return self._failure(f"it ended with exit status {status} and reported nothing")

    def _describe_absent_ranks(self) -> str:
        """Return a sentence about collectives that not all ranks of the group have entered, if there are any."""
        with self.store.within(_STORE_TIMEOUT):
            text = absent_ranks(self.store.below(f"{self.group.name}/{self.heartbeat.attempt}"), self.group.ranks)
        return f" Collectives: {text}." if text else ""

    def _failure(self, what: str, full: bool = False, **more: Any) -> Failure:
        """Return a failure of the present step. `full`: the worker has run out of memory."""
        reading = self.heartbeat.read()
        if full and (line := out_of_memory.remedy(reading.phase, RunReader(self.folder).settings())):
            what = f"{what}\n{line}"
            more["details"] = f"{more['details'].rstrip()}\n{line}" if more.get("details") else ""
        return Failure(self.rank, what, reading.phase, reading.step, self.steps_done + reading.finished, **more)

    def _group_is_done(self, attempt: Attempt) -> bool:
        """Wait until all workers of the group are done. If one of them fails now, all repeat their last step."""
        if self.restarts.is_superseded(attempt):
            return False
        self.restarts.mark_done(attempt)
        while not self.restarts.all_done(attempt):
            if self.restarts.is_superseded(attempt):
                return False
            self._poll()
            time.sleep(poll_interval(_POLL / 4, self.ranks))
        return True

    def _report(self, attempt: Attempt, following: Attempt, left_out: bool = False) -> None:
        """Record and print a failure; of the group's supervisors, only the one whose worker failed does."""
        cause = following.failures[-1] if len(following.failures) > len(attempt.failures) else None
        if cause is None or cause.rank != self.rank:
            return
        name, ranks = self.group.name, self.group.ranks
        self._record("failure", group=name, ranks=[ranks.start, ranks.stop - 1], attempt=attempt.number,
                     phase=cause.phase, failed_step=cause.step, what=cause.what, details=cause.details,
                     seen_after=round(cause.silent, 3), verdict=following.end or STARTS_AGAIN)
        where = f"rank {cause.rank} failed in step {cause.step} ({cause.phase})" if cause.step else \
            f"rank {cause.rank} failed as it started"
        self._call_hooks("on_failure", following)
        if left_out:
            self._record("left_out", group=name, why=following.end)
            text = f"{name} is left out, and others go on: {where}: {cause.what}\nIt is not started again: " \
                   f"{following.end}."
        elif not following.end:
            text = f"{name} starts again: {where}: {cause.what}"
            text += f"\n{line}" if (line := users_line(cause.details)) else ""
        elif cause.hopeless:
            text = cause.what
        else:  # the cause comes last: nothing stands below it on the screen
            text = f"{where}; {name} is not started again: {following.end}.\n"
            if (first := following.failures[0]) is not cause:
                text += f"The first failure was that of rank {first.rank} in step {first.step}: {first.what}\n"
            text += self._traceback(cause.details) if cause.details else cause.what.rstrip()
        if following.end and not left_out:
            text += self._kept(following.failures)
        events.show(f"[rank {cause.rank}] {text}" if cause.rank else text, sys.stderr)
        if following.end and not left_out:
            report_to_torchrun(text)

    def _kept(self, failures: tuple[Failure, ...]) -> str:
        """Return a line of what is kept of a run that has failed for good; empty if it was refused or never began."""
        ending = failures[-1].phase == "ending"
        if failures[-1].code == INVALID or not (ending or any(each.finished for each in failures)):
            return ""
        return f"\n{shown(self.folder)}: {'all steps are done, and ' * ending}{kept(self.folder, ending)}"

    def _traceback(self, details: str) -> str:
        """Return the user's part of a traceback, and where the rest is."""
        text, left_out = users_part(details.rstrip() + "\n")
        rest = f"({left_out} frames of distflow and libraries are left out. All of them:  distflow why " \
               f"{quoted(shown(self.folder))}   or event `failure` in {shown(self.folder / 'events.jsonl')})"
        return f"{text}{rest}" if left_out else text.rstrip()
