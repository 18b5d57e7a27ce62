"""The context that a forked worker gets, the exit report that it returns by a pipe, and its Python stack."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from distflow.errors import DistflowError, InvalidInput, RankMissing
from distflow.recovery.out_of_memory import is_out_of_memory
from distflow.recovery.peer_replica import PeerReplica
from distflow.recovery.restarts import Attempt
from distflow.recovery.rollout_cache import RolloutCache
from distflow.recovery.snapshots import Snapshots
from distflow.recovery.stopped import continue_all
from distflow.telemetry.heartbeat import Heartbeat
from distflow.telemetry.processes import Child, defy

INVALID, FAILED = 2, 1
RELOAD = b"reload"  # exit report of a worker that has not failed and that another one with newer settings should follow
_LONGEST = 4000  # characters of each text of an exit report; a pipe takes them without a reader
_DUMP = signal.SIGRTMIN + 9  # asks a worker for its stack
_PATIENCE, _PAUSE = 1.0, 0.02  # seconds that a worker has to write its stack, and between two looks at it
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_LIBRARIES = tuple({sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")} | {"<"})


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


class StackFile:
    """Python stack of a worker, written by the worker when it crashes or is asked for it, and read by its supervisor.

    The interpreter writes it from within the signal, so it is also there when a call into a library never returns or
    holds Python's lock. The file is anonymous memory, freed with its last process.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("stack")

    def enable(self) -> None:
        """Let this process write its stack when it crashes or is asked for it."""
        faulthandler.enable(self.file)
        faulthandler.register(_DUMP, self.file)

    def dump(self, worker: Child) -> str:
        """Return the stack of a worker that still runs; "" if it writes none within a second."""
        os.ftruncate(self.file, 0)
        os.lseek(self.file, 0, os.SEEK_SET)
        worker.signal(_DUMP)
        until, before = time.monotonic() + _PATIENCE, ""
        while time.monotonic() < until and worker.poll(_PAUSE) is None and not before == (text := self.read()) > "":
            before = text
        return self.read()

    def read(self) -> str:
        """Return what has been written: the stack of each thread, the innermost call first, and the thread that got the
        signal before all others."""
        text = os.pread(self.file, 1 << 16, 0).decode(errors="replace").partition("\nExtension modules:")[0]
        others, marker, ours = text.partition("Current thread ")
        return _cut(f"{marker}{ours.strip()}\n\n{others.strip()}".strip())

    def close(self) -> None:
        os.close(self.file)


def location_in(stack: str) -> str:
    """Return where a stack stands, as " in FILE, line N, in FUNCTION": its innermost call outside Python's library and
    installed packages; "" for an empty one."""
    frames = _FRAME.findall(stack.partition("\n\n")[0])
    path, line, function = next((each for each in frames if not each[0].startswith(_LIBRARIES)),
                                frames[0] if frames else ("", "", ""))
    return f" in {path}, line {line}, in {function}" if path else ""


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
                          outside=error.elsewhere)
        else:  # an engine, or a function of the user's, may raise SystemExit: that is no way to end a worker
            what = f"it left by sys.exit({error.code!r})" if isinstance(error, SystemExit) else \
                "".join(traceback.format_exception_only(error)).strip()
            _write_report(pipe, what, details="".join(traceback.format_exception(error)),
                          out_of_memory=is_out_of_memory(error))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        continue_all(os.getppid())
        os._exit(status)


def _write_report(pipe: int, what: str, details: str = "", **more: int) -> None:
    text = json.dumps({"what": _cut(what), "details": _cut(details), **more}, ensure_ascii=False)
    os.write(pipe, text.encode(errors="backslashreplace") + b"\n")


def read_exit_report(pipe: int) -> bytes:
    """Return the exit report of a worker that has ended; empty if it has written none. A process that the worker has
    left behind may hold the pipe open, and may have written too."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        first, end, _ = os.read(pipe, 1 << 16).partition(b"\n")
        return first if end else b""
    return b""


def _cut(text: str) -> str:
    return text if len(text) < _LONGEST else f"{text[: _LONGEST // 2]}\n…\n{text[-_LONGEST // 2 :]}"
