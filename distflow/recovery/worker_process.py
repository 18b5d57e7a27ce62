"""The context that a forked worker gets, and the exit report that it returns by a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from distflow.errors import DistflowError, InvalidInput, RankMissing
from distflow.recovery.out_of_memory import is_exhausted, is_out_of_memory
from distflow.recovery.peer_replica import PeerReplica
from distflow.recovery.restarts import Attempt
from distflow.recovery.rollout_cache import RolloutCache
from distflow.recovery.snapshots import Snapshots
from distflow.recovery.stopped import continue_all
from distflow.telemetry.heartbeat import Heartbeat
from distflow.telemetry.processes import defy
from distflow.telemetry.stack_file import StackFile

INVALID, FAILED = 2, 1
RELOAD = b"reload"  # exit report of a worker that has not failed and that another one with newer settings should follow
_LONGEST, _LARGEST = 10_000, 60_000
"""Characters of each text of an exit report, and bytes of all of it: a pipe takes them without a reader."""


@dataclass(frozen=True)
class WorkerContext:
    """Context that the supervisor passes to a forked worker: its attempt, and memory shared with the supervisor."""

    attempt: Attempt = Attempt()
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    snapshots: Snapshots = field(default_factory=Snapshots)
    rollout_cache: RolloutCache = field(default_factory=RolloutCache)
    first: bool = True  # whether this is the supervisor's first worker
    supervisor_pid: int = 0  # 0 without a supervisor
    config_change: int = 0  # the number of the newest change of settings that the worker has
    round: int = field(default_factory=lambda: int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
    """Rendezvous round where machines come and go; else how often torchrun has started all processes again."""
    replicas: Snapshots = field(default_factory=partial(Snapshots, slots=0))
    """Copies of the state of another machine's rank."""
    peer_replica: PeerReplica | None = None  # sends copies of this rank's state to another machine

    def ready(self, **seconds: float) -> None:
        """Report that the worker is ready, with the `seconds` of each part of its start. From here on only its
        supervisor ends it: a SIGTERM to all processes of a run asks for an end after the step under way."""
        self.heartbeat.ready(**seconds)
        if self.supervisor_pid:
            defy(signal.SIGTERM)


def become_worker(work: Callable[[WorkerContext], bool | None], context: WorkerContext, pipe: int,
                  stack: StackFile) -> None:
    """Turn the forked process into a worker; never returns. `pipe` takes the exit report.
    `work` returns False if another worker should go on with its work."""
    stack.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor gets it too, and ends the worker
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.ExitStack() as end:
        end.push(lambda _, error, __: _exit(pipe, error))
        if work(context) is False:
            os.write(pipe, RELOAD + b"\n")


def _exit(pipe: int, error: BaseException | None) -> None:
    """End this process; whatever ended its work is reported to the supervisor."""
    status = FAILED
    try:
        if error is None:
            status = 0
        elif isinstance(error, DistflowError):
            status = INVALID if isinstance(error, InvalidInput) else FAILED
            _write_report(pipe, "\n".join([str(error), *getattr(error, "__notes__", ())]),
                          symptom=isinstance(error, RankMissing), hopeless=not error.passing, code=status,
                          outside=error.elsewhere, exhausted=error.exhausted)
        else:  # an engine, or a function of the user's, may raise SystemExit: that is no way to end a worker
            what = f"it left by sys.exit({error.code!r})" if isinstance(error, SystemExit) else \
                "".join(traceback.format_exception_only(error)).strip()
            _write_report(pipe, what, details="".join(traceback.format_exception(error)),
                          full=is_out_of_memory(error), exhausted=is_exhausted(error))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        continue_all(os.getppid())
        os._exit(status)


def _write_report(pipe: int, what: str, details: str = "", **more: int) -> None:
    report, longest = b"", 2 * _LONGEST
    while not 0 < len(report) <= _LARGEST:  # a character has up to six bytes in JSON
        longest //= 2
        fields = {"what": _truncate(what, longest), "details": _truncate(details, longest), **more}
        text = json.dumps(fields, ensure_ascii=False)
        report = text.encode(errors="backslashreplace") + b"\n"
    os.write(pipe, report)


def read_exit_report(pipe: int) -> bytes:
    """Return the exit report of a worker that has ended; empty if it has written none. A process that the worker has
    left behind may hold the pipe open, and may have written too."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        first, end, _ = os.read(pipe, 1 << 16).partition(b"\n")
        return first if end else b""
    return b""


def _truncate(text: str, longest: int) -> str:
    return text if len(text) < longest else f"{text[: longest // 2]}\n…\n{text[-longest // 2 :]}"
