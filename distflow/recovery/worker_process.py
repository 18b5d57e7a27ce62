"""What a worker finds in its seat, and what it says when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from distflow.errors import DistflowError, InvalidInput, RankMissing
from distflow.recovery.out_of_memory import go_first
from distflow.recovery.peer_replica import PeerReplica
from distflow.recovery.restarts import Attempt
from distflow.recovery.rollout_cache import RolloutCache
from distflow.recovery.snapshots import Snapshots
from distflow.recovery.stopped import wake
from distflow.telemetry.heartbeat import Heartbeat

INVALID, FAILED = 2, 1
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Those by which a seat is told to end."""
GIVES_WAY = b"gives way"
"""The last words of a worker that has done nothing wrong, and that another one is to follow."""
_LONGEST = 4000
"""Characters of each of a worker's last words; a pipe takes them without a reader."""


@dataclass(frozen=True)
class WorkerContext:
    """What a worker finds in its seat: which life it is, a page to show itself on, and memory that outlives it."""

    life: Attempt = Attempt()
    pulse: Heartbeat = field(default_factory=Heartbeat)
    snapshots: Snapshots = field(default_factory=Snapshots)
    rows: RolloutCache = field(default_factory=RolloutCache)
    first: bool = True
    """Whether no worker was in it before."""
    seat: int = 0
    """The seat's process; 0 if there is none."""
    changes: int = 0
    """The number of the newest change of settings that it knows."""
    era: int = 0
    """Of machines that come and go."""
    kept: Snapshots = field(default_factory=partial(Snapshots, slots=0))
    """Copies of another machine's rank."""
    neighbour: PeerReplica | None = None
    """Where this rank's copies are kept in turn."""


def become_worker(work: Callable[[WorkerContext], bool | None], berth: WorkerContext, said: int) -> None:
    """In the new process, which this never leaves. What it starts belongs to its process group. `work` returns False if
    another worker is to go on with it."""
    os.setpgid(0, 0)
    go_first()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its seat is told too, and ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    with contextlib.ExitStack() as end:
        end.push(lambda _, error, __: _leave(said, error))
        if work(berth) is False:
            os.write(said, GIVES_WAY + b"\n")


def _leave(said: int, error: BaseException | None) -> None:
    """End this process. Whatever has ended its work, its seat is told."""
    status = FAILED
    try:
        if error is None:
            status = 0
        elif isinstance(error, DistflowError):
            status = INVALID if isinstance(error, InvalidInput) else FAILED
            _say(said, "\n".join([str(error), *getattr(error, "__notes__", ())]),
                 symptom=isinstance(error, RankMissing), hopeless=not error.passing, code=status,
                 outside=error.elsewhere)
        else:  # an engine, or a function of the user's, may raise SystemExit: that is no way to end a worker
            what = f"it left by sys.exit({error.code!r})" if isinstance(error, SystemExit) else \
                "".join(traceback.format_exception_only(error)).strip()
            _say(said, what, details="".join(traceback.format_exception(error)))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        wake(os.getppid())
        os._exit(status)


BESIDE: set[int] = set()
"""Processes that `start_beside` has started."""


def start_beside(action: Callable[[], None]) -> int:
    """Do something in a process of its own, whose number is returned. What it raises is shown."""
    process = os.fork()
    if process:
        BESIDE.add(process)
        return process
    status = FAILED
    try:
        action()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)


def end_beside(process: int) -> None:
    """End at once what `start_beside` has started."""
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def do_beside(action: Callable[[], None], seconds: float) -> int:
    """The same, and wait for it; its exit status. After so many seconds it is ended."""
    process = start_beside(action)
    with contextlib.closing(os.fdopen(os.pidfd_open(process), "rb")) as ended:
        select.select([ended], [], [], seconds)
    os.kill(process, signal.SIGKILL)  # which a process that has ended does not mind
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _say(said: int, what: str, details: str = "", **more: int) -> None:
    text = json.dumps({"what": _cut(what), "details": _cut(details), **more}, ensure_ascii=False)
    os.write(said, text.encode(errors="backslashreplace") + b"\n")


def last_of(words: int) -> bytes:
    """What a worker that has ended said; nothing if it did not come to that. A process that it has left behind may hold
    the pipe open, and may have spoken too."""
    os.set_blocking(words, False)
    with contextlib.suppress(BlockingIOError):
        first, end, _ = os.read(words, 1 << 16).partition(b"\n")
        return first if end else b""
    return b""


def _cut(text: str) -> str:
    return text if len(text) < _LONGEST else f"{text[: _LONGEST // 2]}\n…\n{text[-_LONGEST // 2 :]}"
