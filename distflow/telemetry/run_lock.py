"""Exclusive lock on a run folder, so that no two trainers write checkpoints and metrics there.

`run.lock` is locked by `flock` and names its holder; where the file system has no `flock`, the name decides. The lock
ends with the process that holds it, the supervisor of rank 0; workers do not inherit it. A restart by the same
torchrun, and a later rank 0 of the same elastic machines, may take it over: they are the same job.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import shlex
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from distflow.errors import Diagnostic, InvalidInput
from distflow.telemetry.files import AWAY
from distflow.telemetry.processes import alive, began

NAME = "run.lock"
_EXIT_TIMEOUT, _POLL_INTERVAL = 3.0, 0.1  # seconds in which killed processes are gone, and between two looks
_EVERY = 30.0  # seconds between two checks of a lock that is held
_WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # errors of a file system without `flock`


@dataclass(frozen=True)
class Holder:
    """Holder of a run's lock. pid: of torchrun, which lives as long as the run; began: in clock ticks since boot."""

    job: str
    host: str
    pid: int
    began: int
    since: str
    command: str

    @classmethod
    def here(cls, job: str) -> Holder:
        pid, since = _own_process(), datetime.now().astimezone().isoformat(" ", "seconds")
        return cls(job, socket.gethostname(), pid, began(pid), since, shlex.join(sys.argv))

    @property
    def gone(self) -> bool:
        """Whether the holder's process has certainly ended: it was on this host."""
        return self.host == socket.gethostname() and not alive(self.pid, self.began)

    @property
    def own(self) -> bool:
        """Whether the holder is this process, or the torchrun above it."""
        pid = _own_process()
        return (self.host, self.pid, self.began) == (socket.gethostname(), pid, began(pid))

    @property
    def running(self) -> bool:
        """Whether the holder's process certainly goes on."""
        return self.host == socket.gethostname() and alive(self.pid, self.began)


def _own_process() -> int:
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def _own_job() -> str:
    return f"{socket.gethostname()} {_own_process()} {began(_own_process())}"


class RunLock:
    """The lock of one run folder, as one process sees it. `job`: name that a restart of the run has too; default: the
    torchrun above this process, or this process."""

    def __init__(self, folder: Path, job: str = ""):
        self.path, self.job = folder / NAME, job or _own_job()
        self.file: int | None = None
        self.looked, self.locked = -math.inf, False
        """When (time.monotonic) a lock that is held was last checked; whether `flock` is this process's own."""
        os.register_at_fork(after_in_child=self._close)

    def hold(self) -> None:
        """Take the lock, if this process does not have it. Raises InvalidInput: another job has it."""
        if self.looked == -math.inf:
            self._take()
        elif time.monotonic() - self.looked >= _EVERY:
            self.looked = time.monotonic()
            with contextlib.suppress(OSError):  # a network file system is away for a moment; the kernel keeps the lock
                self._renew()

    def _renew(self) -> None:
        """Take the lock again if the file was removed, or if only its content, not `flock`, is this job's."""
        if self.file is None or not self.path.exists():
            self._close()
            self._take()
        elif not self.locked and self._taken(self.file):
            self.locked = True
            self._sign(self.file)

    def _take(self) -> None:
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, *AWAY):
                return  # no reason for a run to end; it is tried again
            raise
        until, self.locked = time.monotonic() + _EXIT_TIMEOUT, True
        while not self._taken(file):
            if time.monotonic() > until:
                held = holder(self.path.parent)
                if held is not None and held.job == self.job:
                    self.locked = False
                    break
                os.close(file)
                raise refusal(self.path.parent, held)
            time.sleep(_POLL_INTERVAL)
        self.file, self.looked = file, time.monotonic()
        self._sign(file)

    def _sign(self, file: int) -> None:
        with contextlib.suppress(OSError):  # a full disk: `flock` holds all the same
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(asdict(Holder.here(self.job))).encode(), 0)

    def release(self) -> None:
        if self.file is not None:
            held = holder(self.path.parent)
            if held is None or held.own:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.file, 0)
            self._close()
            self.looked = -math.inf

    def _taken(self, file: int) -> bool:
        held = holder(self.path.parent)
        other = None if held is None or held.job == self.job else held
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _WITHOUT:
                raise
            return other is None or other.gone
        if other is not None and other.running:  # its ranks are being started again
            fcntl.flock(file, fcntl.LOCK_UN)
            return False
        return True

    def _close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


def holder(folder: Path) -> Holder | None:
    """Return the holder that a folder's lock names, which may be gone; None if it names none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Holder(**json.loads((folder / NAME).read_text()))
    return None


def in_use(folder: Path) -> Holder | None:
    """Return the present holder of a folder's lock, without taking it; None if it is free."""
    held = holder(folder)
    if held is None or held.gone:
        return None
    if held.running:
        return held
    try:
        with (folder / NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return held
    except OSError:
        return held
    return None


def refusal(folder: Path, held: Holder | None) -> InvalidInput:
    """Return the error that names the holder of a run."""
    if held is None:
        return InvalidInput(Diagnostic(f"{folder} is in use by another process, which has locked {folder / NAME}", None,
                                       "Wait until it has ended."))
    here = held.host == socket.gethostname()
    hint = f"End it:  kill {held.pid}   or wait." if here else \
        f"End it on {held.host}:  kill {held.pid}   or, if that machine is lost:  rm {folder / NAME}"
    return InvalidInput(Diagnostic(f"{folder} is in use: process {held.pid} on {held.host} trains it since "
                                   f"{held.since} ({held.command})", None, hint))
