"""The process that torchrun starts for a GPU: it starts a worker, watches it, and starts another when it dies.

A worker's death, of whatever kind, ends the lives of its unit's other workers and of nobody else. The seat itself does
nothing that could fail with them: no model, no collective, no thread. A worker is a fork of it, so that what a seat has
imported is there at once, and a restart pays for no import.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distflow.observe.events import Events
from distflow.observe.recovery import STARTS_AGAIN
from distflow.robust.board import Board
from distflow.robust.detect import Watcher
from distflow.robust.lives import Failure, Life, Lives, Unit
from distflow.robust.pulse import Pulse
from distflow.robust.snapshots import Snapshots
from distflow.schema.errors import DistflowError, InvalidInput, RankMissing
from distflow.schema.robust import Robust

INVALID, FAILED = 2, 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK = 0.2
"""Seconds between two looks at the board and at the worker's page; a death is seen at once."""
_GRACE = 5.0
"""Seconds in which a worker that is told to leave tidies up."""
_LONGEST = 4000
"""Characters of each of a worker's last words; a pipe takes them without a reader."""


@dataclass(frozen=True)
class Berth:
    """What a worker finds in its seat: which life it is, a page to show itself on, and memory that outlives it."""

    life: Life = Life()
    pulse: Pulse = field(default_factory=Pulse)
    snapshots: Snapshots = field(default_factory=Snapshots)
    seat: int = 0
    """The seat's process; 0 if there is none."""


class Told(BaseException):
    """torchrun wants this process to end."""


class Seat:
    """One rank's seat.

    Args:
        work: a worker's whole life, in a process of its own; a DistflowError that it raises is the user's to read.
        folder: of the run.
        companions: descriptors that become readable when a process ends without which there is no run, and what to say.
        needless: whether nobody needs what this unit does any more, so that it does not matter how its workers end.
        wanted: whether there should be a worker now.
        on_failure: called in a process of its own, with the life whose failures have this unit's last one in them.
    """

    def __init__(self, board: Board, unit: Unit, work: Callable[[Berth], None], folder: Path, settings: Robust,
                 companions: Mapping[int, str], needless: Callable[[], bool] = lambda: False,
                 wanted: Callable[[], bool] = lambda: True, on_failure: Callable[[Life], None] = lambda life: None):
        self.lives = Lives(board.store, unit, board.rank, settings.restarts if settings.restart == "role" else 0)
        self.work, self.folder, self.companions, self.on_failure = work, folder, companions, on_failure
        self.needless, self.wanted = needless, wanted
        self.watcher = Watcher(unit.name.split()[0], settings.detectors)
        self.events = Events()
        self.events.open(folder / "events.jsonl", board.rank)
        self.pulse, self.snapshots = Pulse(), Snapshots()
        self.worker = 0

    def run(self) -> int:
        """Until the work is done or cannot be; the exit status of this process."""
        for number in _SIGNALS:
            signal.signal(number, _leave)
        life = Life()
        try:
            while not life.end:
                if not self._wait_until_wanted():
                    return 0
                failure = self._live(life)
                if failure is None and not self.wanted():
                    continue
                if failure is None and self._all_are_done(life):
                    return 0
                following = self.lives.next(life, failure)
                self._tell(life, following)
                life = following
        except Told as told:
            return 128 + told.args[0]
        except dist.DistError as error:
            print(f"[rank {self.lives.rank}] the board is gone, and with it the machine that kept it: {error}",
                  file=sys.stderr, flush=True)
            return FAILED
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            self._end()
        return life.failures[-1].code

    def _wait_until_wanted(self) -> bool:
        """False if the run is over first."""
        if not self.wanted():
            self._record("worker rests")
        while not self.wanted():
            if self.needless():
                return False
            time.sleep(_LOOK)
        return True

    def _live(self, life: Life) -> Failure | None:
        """One worker, from its start to its end; None if it did its work, or if the unit has begun another life."""
        self.pulse.clear(life.number)
        words, said = os.pipe()
        began = time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # what a seat does about them is not for its worker
        seat = os.getpid()
        self.worker = os.fork()
        if not self.worker:
            os.close(words)
            _become_worker(self.work, Berth(life, self.pulse, self.snapshots, seat), said)
        with contextlib.suppress(OSError):  # it has done so itself, and may have ended since
            os.setpgid(self.worker, self.worker)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(said)
        self._record("worker started", life=life.number, pid=self.worker)
        with contextlib.closing(os.fdopen(words, "rb")) as last_words:
            failure, status = self._watch(life), self._end()
            seconds = round(time.monotonic() - began, 3)
            if failure is None and status and self.wanted() and not self.lives.over(life):
                failure = self._explained(status, _last(last_words.fileno()))
            self._record("worker ended", life=life.number, status=status, seconds=seconds)
        return None if failure and not failure.hopeless and self.needless() else failure

    def _watch(self, life: Life) -> Failure | None:
        """Until the worker ends, or is to be ended: why, if this seat has seen it first."""
        ended = os.pidfd_open(self.worker)
        poll = select.poll()
        for descriptor in (ended, *self.companions):
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        self.watcher.begin(self.pulse)
        try:
            while True:
                ready = [descriptor for descriptor, _ in poll.poll(_LOOK * 1000)]
                if lost := next((self.companions[each] for each in ready if each in self.companions), ""):
                    return self._failure(lost, hopeless=True)
                if ended in ready or self.lives.over(life) or not self.wanted():
                    return None
                if finding := self.watcher.look():
                    return self._failure(finding.what, symptom=finding.symptom, silent=finding.silent)
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
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # or it might be waited for twice
        os.kill(self.worker, signal.SIGKILL)  # which a process that has ended does not mind
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.worker, signal.SIGTERM)  # its group has this name until the worker is waited for
        _, status = os.waitpid(self.worker, 0)
        self.worker = 0
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return os.waitstatus_to_exitcode(status)

    def _beside(self, action: Callable[[], None]) -> None:
        """Do what users have written, in a process that cannot hold up this one for long."""
        process = os.fork()
        if not process:
            _become_worker(lambda _: action(), Berth(), os.open(os.devnull, os.O_WRONLY))
        ended = os.pidfd_open(process)
        select.select([ended], [], [], _GRACE)
        os.close(ended)
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if status:
            self._record("hook failed", status=os.waitstatus_to_exitcode(status))

    def _record(self, kind: str, **facts: Any) -> None:
        """A new run's folder is made by its first worker. A full disk is no reason for a seat to end."""
        if self.folder.is_dir():
            self.events.step = self.pulse.read().step
            with contextlib.suppress(OSError):
                self.events.record(kind, **facts)

    def _explained(self, status: int, words: bytes) -> Failure:
        if words:
            said = json.loads(words)
            return self._failure(said.pop("what"), **said)
        if status < 0:
            name = signal.Signals(-status).name
            why = " The kernel may have ended it because the machine's memory was full." if name == "SIGKILL" else ""
            return self._failure(f"it was ended by {name}.{why}")
        return self._failure(f"it ended with exit status {status} and without a word")

    def _failure(self, what: str, **more: Any) -> Failure:
        beat = self.pulse.read()
        return Failure(self.lives.rank, what, beat.phase, beat.step, beat.finished, **more)

    def _all_are_done(self, life: Life) -> bool:
        """This rank's worker has ended well. If another of the unit fails now, all do their last step again."""
        if self.lives.over(life):
            return False
        self.lives.done(life)
        while not self.lives.all_done(life):
            if self.lives.over(life):
                return False
            time.sleep(_LOOK / 4)
        return True

    def _tell(self, life: Life, following: Life) -> None:
        """Of all seats of the unit, the one whose worker failed speaks."""
        cause = following.failures[-1]
        if cause.rank != self.lives.rank:
            return
        name = self.lives.unit.name
        ranks = [self.lives.unit.ranks.start, self.lives.unit.ranks.stop - 1]
        self._record("failure", unit=name, ranks=ranks, life=life.number, phase=cause.phase, failed_step=cause.step,
                     what=cause.what, details=cause.details, seen_after=round(cause.silent, 3),
                     verdict=following.end or STARTS_AGAIN)
        where = f"rank {cause.rank} failed in step {cause.step} ({cause.phase})" if cause.step else \
            f"rank {cause.rank} failed as it started"
        self._beside(partial(self.on_failure, following))
        if not following.end:
            text = f"{name} starts again: {where}: {cause.what}"
        elif cause.hopeless:
            text = cause.what
        else:
            text = f"{cause.details or cause.what}\n{where}; {name} is not started again: {following.end}."
            first = following.failures[0]
            if first is not cause:
                text += f"\nThe first failure was that of rank {first.rank} in step {first.step}: {first.what}"
        print(f"[rank {cause.rank}] {text}" if cause.rank else text, file=sys.stderr, flush=True)


def _become_worker(work: Callable[[Berth], None], berth: Berth, said: int) -> None:
    """In the new process, which this never leaves. What it starts belongs to its process group."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its seat is told too, and ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    status = FAILED
    try:
        work(berth)
        status = 0
    except DistflowError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        status = INVALID if isinstance(error, InvalidInput) else FAILED
        _say(said, text, symptom=isinstance(error, RankMissing), hopeless=not error.passing, code=status)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else FAILED
    except BaseException as error:  # noqa: BLE001 - whatever ends a worker, its seat is told
        _say(said, "".join(traceback.format_exception_only(error)).strip(), details=traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _say(said: int, what: str, details: str = "", **more: int) -> None:
    text = json.dumps({"what": _cut(what), "details": _cut(details), **more}, ensure_ascii=False)
    os.write(said, text.encode(errors="backslashreplace") + b"\n")


def _last(words: int) -> bytes:
    """What a worker that has ended said; nothing if it did not come to that. A process that it has left behind may hold
    the pipe open, and may have spoken too."""
    os.set_blocking(words, False)
    with contextlib.suppress(BlockingIOError):
        first, end, _ = os.read(words, 1 << 16).partition(b"\n")
        return first if end else b""
    return b""


def _cut(text: str) -> str:
    return text if len(text) < _LONGEST else f"{text[: _LONGEST // 2]}\n…\n{text[-_LONGEST // 2 :]}"


def _leave(number: int, _: object) -> None:
    raise Told(number)
