"""The process that torchrun starts for a GPU: it starts a worker, watches it, and starts another when it dies.

A worker's death, of whatever kind, ends the lives of its unit's other workers and of nobody else. The seat itself does
nothing that could fail with them: no model, no collective, no thread. A worker is a fork of it, so that what a seat has
imported is there at once, and a restart pays for no import.

What a run that was told to end says: what is kept of it, and how to go on.
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
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distflow.config.run import Robust
from distflow.errors import CheckpointError
from distflow.plan import ROLLOUT
from distflow.recovery import out_of_memory
from distflow.recovery.checkpoint_files import step_of, whole
from distflow.recovery.detectors import HealthMonitor
from distflow.recovery.hooks import When, may_be
from distflow.recovery.live_config import LiveConfig
from distflow.recovery.membership import ElasticMember
from distflow.recovery.restarts import Attempt, Failure, RestartCoordinator, RestartGroup
from distflow.recovery.store import Store
from distflow.recovery.worker_process import (
    BESIDE,
    FAILED,
    GIVES_WAY,
    INVALID,
    SIGNALS,
    WorkerContext,
    become_worker,
    do_beside,
    last_of,
)
from distflow.telemetry import events
from distflow.telemetry.ettr import STARTS_AGAIN
from distflow.telemetry.events import Events
from distflow.telemetry.heartbeat import ASKED, STOPPED
from distflow.telemetry.processes import adopt_orphans, children, end_group, end_orphans, stopped
from distflow.telemetry.run_lock import RunLock


def last_words(folder: Path, step: int) -> str:
    """Return the last line on the screen.

    Args:
        folder: of the run; it may not exist.
        step: after which the run has ended in order; 0 if it was cut off.
    """
    ended = f"{folder} was stopped after step {step}" if step else f"{folder} was stopped in the middle of a step"
    if not folder.is_dir():
        return f"{folder} was stopped before it began; nothing is kept"
    try:
        found = whole(folder / "checkpoints")
    except CheckpointError as error:
        return f"{ended}; {error}"
    if not found:
        return f"{ended}; it has no checkpoint to go on from (`checkpoint.every` in the run file)"
    return f"{ended}; its checkpoint of step {step_of(found[-1])} is kept. Go on:  distflow resume {folder}"


_LOOK = 0.2
"""Seconds between two looks at the board and at the worker's page; a death is seen at once."""
_GRACE = 5.0
"""Seconds in which a worker that is told to leave tidies up."""
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a worker gets from somebody else: by a mistake of its own it is ended by others, as SIGSEGV, or by the
kernel's SIGKILL because it takes more memory than there is."""
_ONE = 1.0
"""Seconds in which a second signal counts as the first: a group of processes and its parent may both be sent it."""
_FAILED = "failed"
"""Key on the board: a unit has failed for good, and torchrun ends the others."""


class _WorkerEnd(Enum):
    """How a worker comes to its end, other than by a failure that this seat has seen first."""

    DONE = "it has done its work, or ended by itself"
    OVERTAKEN = "its unit has begun another life"
    RESTS = "it is not wanted now"
    GIVES_WAY = "settings have changed"


class TerminationRequested(BaseException):
    """torchrun wants this process to end."""


class Supervisor:
    """One rank's seat.

    Args:
        work: a worker's whole life, in a process of its own; a DistflowError that it raises is the user's to read.
        folder: of the run.
        companions: descriptors that become readable when a process ends that the unit needs, and what to say.
        needless: whether nobody needs what this unit does any more, so that it does not matter how its workers end.
        wanted: whether there should be a worker now.
        changes: of settings; a rollout's worker ends when there is one, others end by themselves after a step.
        hooks: calls those of users for a moment; after a failure, with the life that has it among its failures.
        apart: machines that come and go, of which this seat's is one.
        renew_companions: starts those processes again, and returns as much of the new ones.
        leave_out: called when this unit is not started again: whether the run goes on without it.
        lock: of the run's folder, to be held from when the folder is there.
    """

    def __init__(self, board: Store, unit: RestartGroup, work: Callable[[WorkerContext], bool | None], folder: Path,
                 settings: Robust,
                 companions: Mapping[int, str], needless: Callable[[], bool] = lambda: False,
                 wanted: Callable[[], bool] = lambda: True, changes: LiveConfig | None = None,
                 hooks: Callable[[When, Attempt], None] | None = None, apart: ElasticMember | None = None,
                 leave_out: Callable[[], bool] = lambda: False,
                 renew_companions: Callable[[], Mapping[int, str]] = dict,
                 lock: RunLock | None = None):
        self.lives = RestartCoordinator(board.store, unit, board.rank,
                                        settings.restarts if settings.restart == "role" else None)
        self.work, self.folder, self.companions, self.hooks = work, folder, companions, hooks
        self.needless, self.wanted, self.changes, self.apart = needless, wanted, changes, apart
        self.leave_out, self.renew_companions = leave_out, renew_companions
        self.watcher = HealthMonitor(unit.group, settings.detectors)
        self.events = Events()
        self.events.open(folder / "events.jsonl", board.rank)
        self.berth = replace(apart.berth if apart else WorkerContext(), seat=os.getpid())
        self.pulse = self.berth.pulse
        self.lock, self.worker, self.useful, self.answered = lock, 0, 0, 0
        """The run folder's lock; the worker; steps that workers of this life have done; failures after which companions
        began again."""
        self.beside: set[int] = set()
        """Children of this process that are no worker's."""
        self.store, self.parent, self.shutdown_timeout = board.store, os.getppid(), settings.shutdown_timeout
        self.told, self.told_at = 0, 0.0
        """The signal by which this process was told to end, and when (time.monotonic)."""
        adopt_orphans()  # what a worker leaves behind

    def run(self) -> int:
        """Until the work is done or cannot be; the exit status of this process.

        Raises:
            BegunAnew: all machines begin a later era.
        """
        self._handle_signals(self._hear)
        try:
            life = self._first_life()
            while not life.end:
                if not self._wait_until_wanted():
                    return 0
                end = self._live(life)
                done = end is _WorkerEnd.DONE and self._all_are_done(life)
                if self.told and not done:
                    raise TerminationRequested(self.told)
                if end in (_WorkerEnd.RESTS, _WorkerEnd.GIVES_WAY):
                    self._call("on_leave", life)
                    life = life if end is _WorkerEnd.RESTS and not self.lives.over(life) else self.lives.renew(life)
                    continue
                if done:
                    self._call("on_leave", life)
                    if self.stopped:
                        raise TerminationRequested(self.told or signal.SIGTERM)
                    return 0
                if (life := self._after(life, end)) is None:
                    return self._stay_out()
        except TerminationRequested as told:
            return self._leave(told.args[0])
        except dist.DistError as error:
            print(f"[rank {self.lives.rank}] the board does not answer; torchrun, which keeps it, or its machine may "
                  f"have ended: {error}", file=sys.stderr, flush=True)
            return FAILED
        finally:
            self._handle_signals(signal.SIG_IGN)
            self._end()
        return life.failures[-1].code

    def _leave(self, number: int) -> int:
        """End as a signal has asked for; the exit status.

        Raises:
            SystemExit: torchrun has died, perhaps with its machine: what follows is for the other machines to decide.
        """
        self._handle_signals(signal.SIG_IGN)
        self._end()
        self._say_what_is_kept(number)
        if os.getppid() != self.parent:
            sys.exit(128 + number)
        return 128 + number

    def _fail_for_good(self) -> None:
        """Wait a moment for the workers of the unit to end: what this process then says stands last on the screen."""
        self._handle_signals(signal.SIG_IGN)  # torchrun ends this process as soon as another of the unit has left
        self.store.set(_FAILED, "")
        self.store.set(f"{_FAILED}/{self.lives.rank}", "")
        keys, until = [f"{_FAILED}/{rank}" for rank in self.lives.unit.ranks], time.monotonic() + _GRACE
        while not self.store.check(keys) and time.monotonic() < until:
            time.sleep(_LOOK / 4)

    def _hear(self, number: int, _: object) -> None:
        """Ask the worker to end after its step; what cannot be waited for, or is told twice, ends at once.

        Raises:
            Told: to leave `run`.
        """
        now = time.monotonic()
        if self.told and now - self.told_at < _ONE:
            return
        again, self.told, self.told_at = self.told, number, now
        orphan = os.getppid() != self.parent
        if again or orphan or self.apart or not self.worker or self.pulse.read().phase == "starting":
            raise TerminationRequested(number)
        self.pulse.page.stop = ASKED

    def _handle_signals(self, handler: Callable[[int, Any], None] | signal.Handlers) -> None:
        for number in SIGNALS:
            signal.signal(number, handler)

    def _say_what_is_kept(self, number: int) -> None:
        """On rank 0. torchrun's SIGTERM may follow a failure, of which the last line on the screen tells."""
        if self.lives.rank == 0 and not self.apart and (self.stopped or number == signal.SIGINT):
            events.show(last_words(self.folder, self.pulse.read().step if self.stopped else 0))

    @property
    def stopped(self) -> bool:
        """Whether the worker has ended after a step, as it was asked to."""
        return self.pulse.page.stop == STOPPED

    def _after(self, life: Attempt, end: Failure | _WorkerEnd) -> Attempt | None:
        """Return the life that follows one which has failed; None if the run goes on without this unit."""
        following = self.lives.next(life, end if isinstance(end, Failure) else None)
        if self.apart and following.end and following.failures[-1].code != INVALID:
            self.apart.reprieve()
        left_out = bool(following.end) and not following.failures[-1].hopeless and self.leave_out()
        if following.end and not left_out and not self.apart:
            self._fail_for_good()
        self._tell(life, following, left_out)
        self.useful = 0
        return None if left_out else following

    def _first_life(self) -> Attempt:
        """That of the unit; the one after the last life of a machine whose place this one has taken."""
        if not (self.apart and self.apart.replaces):
            return Attempt()
        before = self.lives.before(self.berth.era)
        lost = Failure(self.lives.rank, "its machine was lost, and another has taken its place", "waiting")
        following = self.lives.next(before, lost)
        self._tell(before, following)
        return following

    def _look(self) -> None:
        if self.apart:
            self.apart.look()
        if self.lock:
            self._hold()
        if self.told and (time.monotonic() - self.told_at > self.shutdown_timeout or self.store.check([_FAILED])):
            raise TerminationRequested(self.told)

    def _hold(self) -> None:
        """Hold the run folder's lock, from when its first worker has made the folder."""
        with contextlib.suppress(FileNotFoundError):
            self.lock.hold()

    def _wait_until_wanted(self) -> bool:
        """False if the run is over first."""
        if not self.wanted():
            self._record("worker rests")
            print(f"rank {self.lives.rank} rests, as `distflow scale` has asked for", flush=True)
        while not self.wanted():
            if self.needless():
                return False
            self._look()
            time.sleep(_LOOK)
        return True

    def _stay_out(self) -> int:
        """Wait for the end of a run that goes on without this unit."""
        while not self.needless():
            self._look()
            time.sleep(_LOOK)
        return 0

    def _take_up_changes(self, life: Attempt) -> None:
        """The next worker has the newest settings; the unit's first seat says so."""
        number = self.changes.newest() if self.changes else 0
        if number > self.berth.changes and not self.berth.first and self.lives.rank == self.lives.unit.ranks.start:
            self._record("settings changed", unit=self.lives.unit.name, life=life.number,
                         settings=self.changes.since(self.berth.changes))
        self.berth = replace(self.berth, changes=number)

    def _live(self, life: Attempt) -> Failure | _WorkerEnd:
        """One worker, from its start to its end: how it came to it."""
        self.pulse.clear(life.number)
        if len(life.failures) > self.answered and life.failures[-1].companion:
            self.companions = self.renew_companions()
        self.answered = len(life.failures)
        self._take_up_changes(life)
        words, said = os.pipe()
        self.beside = children(os.getpid())
        began, self.ended_before = time.monotonic(), out_of_memory.ended()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what a seat does about them is not for its worker
        self.worker = os.fork()
        if not self.worker:
            os.close(words)
            become_worker(self.work, replace(self.berth, life=life), said)
        self.berth = replace(self.berth, first=False)
        with contextlib.suppress(OSError):  # it has done so itself, and may have ended since
            os.setpgid(self.worker, self.worker)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(said)
        self._record("worker started", life=life.number, pid=self.worker)
        with contextlib.closing(os.fdopen(words, "rb")) as pipe:
            end = self._watch(life)
            if end in (_WorkerEnd.RESTS, _WorkerEnd.GIVES_WAY) and len(self.lives.unit.ranks) > 1:
                self.lives.renew(life)  # before the others miss this rank: nobody is met twice in one life
            status = self._end()
            seconds, said_last = round(time.monotonic() - began, 3), last_of(pipe.fileno())
            if end is _WorkerEnd.DONE and said_last == GIVES_WAY:
                end = _WorkerEnd.GIVES_WAY
            elif end is _WorkerEnd.DONE and status:
                end = _WorkerEnd.OVERTAKEN if self.lives.over(life) else self._explained(status, said_last)
            self._record("worker ended", life=life.number, status=status, seconds=seconds)
        self.useful += self.pulse.read().finished
        return _WorkerEnd.DONE if isinstance(end, Failure) and not end.hopeless and self.needless() else end

    def _watch(self, life: Attempt) -> Failure | _WorkerEnd:
        """Until the worker ends, or is to be ended."""
        ended = os.pidfd_open(self.worker)
        poll = select.poll()
        for descriptor in (ended, *self.companions):
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        self.watcher.begin(self.pulse)
        try:
            while True:
                ready = [descriptor for descriptor, _ in poll.poll(_LOOK * 1000)]
                if lost := next((self.companions[each] for each in ready if each in self.companions), ""):
                    return self._failure(lost, outside=True, companion=True)
                if ended in ready:
                    return _WorkerEnd.DONE
                self._look()
                if self.lives.over(life):
                    return _WorkerEnd.OVERTAKEN
                if not self.wanted():
                    return _WorkerEnd.RESTS
                if self.watcher.unit == ROLLOUT and self.changes and self.changes.newest() > self.berth.changes:
                    return _WorkerEnd.GIVES_WAY
                if finding := self.watcher.look():
                    held = stopped(self.worker)
                    return self._failure(finding.what + " Somebody has stopped it (SIGSTOP)." * held,
                                         symptom=finding.symptom, silent=finding.silent, outside=held)
        finally:
            os.close(ended)

    def _end(self) -> int:
        """The worker's exit status, negative for a signal. One that lives is ended: while it starts, in a way that lets
        it take away what it has made; later at once. What it has started and left behind is told to end."""
        if not self.worker:
            return 0
        with contextlib.closing(os.fdopen(os.pidfd_open(self.worker), "rb")) as ended:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            if not poll.poll(0) and self.pulse.read().phase == "starting":
                os.kill(self.worker, signal.SIGTERM)
                poll.poll(_GRACE * 1000)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # or it might be waited for twice
        os.kill(self.worker, signal.SIGKILL)  # which a process that has ended does not mind
        end_group(self.worker)  # it has this name until the worker is waited for
        _, status = os.waitpid(self.worker, 0)
        self.worker = 0
        if left := end_orphans(self.beside | BESIDE):
            self._record("orphans left", pids=sorted(left))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return os.waitstatus_to_exitcode(status)

    def _call(self, when: When, life: Attempt) -> None:
        """The users' hooks, if there are any, in a process that cannot hold up this one for long."""
        if self.hooks is None or not may_be(when, self.pulse.page.hooks):
            return
        if status := do_beside(partial(self.hooks, when, life), _GRACE):
            why = f"took longer than {_GRACE:g} s" if status < 0 else "raised what stands above"
            print(f"an {when} hook {why}", file=sys.stderr, flush=True)
            self._record("hook failed", why=why)

    def _record(self, kind: str, **facts: Any) -> None:
        """A new run's folder is made by its first worker. A full disk is no reason for a seat to end."""
        if self.folder.is_dir():
            self.events.step = self.pulse.read().step
            self.events.record(kind, **facts)

    def _explained(self, status: int, words: bytes) -> Failure:
        if words:
            said = json.loads(words)
            return self._failure(said.pop("what"), **said)
        if status < 0:
            killed = status == -signal.SIGKILL
            why = f" {out_of_memory.cause(self.ended_before)}" if killed else ""
            own = killed and out_of_memory.ended_since(self.ended_before)
            return self._failure(f"it was ended by {signal.Signals(-status).name}.{why}",
                                 outside=-status in _SENT and not own)
        return self._failure(f"it ended with exit status {status} and without a word")

    def _failure(self, what: str, **more: Any) -> Failure:
        beat = self.pulse.read()
        return Failure(self.lives.rank, what, beat.phase, beat.step, self.useful + beat.finished, **more)

    def _all_are_done(self, life: Attempt) -> bool:
        """This rank's worker has ended well. If another of the unit fails now, all do their last step again."""
        if self.lives.over(life):
            return False
        self.lives.done(life)
        while not self.lives.all_done(life):
            if self.lives.over(life):
                return False
            self._look()
            time.sleep(_LOOK / 4)
        return True

    def _tell(self, life: Attempt, following: Attempt, left_out: bool = False) -> None:
        """Of all seats of the unit, the one whose worker failed speaks."""
        cause = following.failures[-1] if len(following.failures) > len(life.failures) else None
        if cause is None or cause.rank != self.lives.rank:
            return
        name, ranks = self.lives.unit.name, self.lives.unit.ranks
        self._record("failure", unit=name, ranks=[ranks.start, ranks.stop - 1], life=life.number, phase=cause.phase,
                     failed_step=cause.step, what=cause.what, details=cause.details, seen_after=round(cause.silent, 3),
                     verdict=following.end or STARTS_AGAIN)
        where = f"rank {cause.rank} failed in step {cause.step} ({cause.phase})" if cause.step else \
            f"rank {cause.rank} failed as it started"
        self._call("on_failure", following)
        if left_out:
            self._record("left out", unit=name, why=following.end)
            text = f"{name} is left out, and others sample on: {where}: {cause.what}\nIt is not started again: " \
                   f"{following.end}."
        elif not following.end:
            text = f"{name} starts again: {where}: {cause.what}"
        elif cause.hopeless:
            text = cause.what
        else:  # the cause comes last: nothing stands below it on the screen
            text = f"{where}; {name} is not started again: {following.end}.\n"
            if (first := following.failures[0]) is not cause:
                text += f"The first failure was that of rank {first.rank} in step {first.step}: {first.what}\n"
            text += (cause.details or cause.what).rstrip()
        events.show(f"[rank {cause.rank}] {text}" if cause.rank else text, sys.stderr)
