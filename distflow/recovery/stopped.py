"""Continues processes that somebody has stopped (SIGSTOP) and that nothing monitors: torchrun, supervisors, helpers.

A stopped supervisor would not see its worker end, and a stopped torchrun stops the store with it, so that all ranks
wait. Each worker therefore has a thread that looks at the processes above and beside it, and continues one that was
stopped for too long. A worker that ends, as when a stopped dock does not answer, continues all of them at once.

So Ctrl-Z at a plain `torchrun` holds for the same time only. Without torchrun no process is continued: the supervisor's
parent is then the user's shell, and the shell's children are the user's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from distflow.telemetry.events import record
from distflow.telemetry.heartbeat import Silence
from distflow.telemetry.processes import children, parent, stopped

_POLL = 1.0  # seconds between two looks


def continue_stopped(supervisor: int, seconds: float) -> None:
    """Start a worker's thread that continues processes stopped for more than `seconds`. `supervisor`: its pid."""
    if _below_torchrun():
        threading.Thread(target=_watch, args=(supervisor, seconds), name="stopped", daemon=True).start()


def continue_all(supervisor: int) -> None:
    """Continue all stopped processes: the supervisor must see this worker end, and the next one needs the dock."""
    for process in [supervisor, *(dict(_unmonitored_processes(supervisor)) if _below_torchrun() else ())]:
        if stopped(process):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGCONT)


def _below_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _watch(supervisor: int, seconds: float) -> None:
    silences: dict[int, Silence] = {}
    while True:
        time.sleep(min(_POLL, seconds))
        found = {process: what for process, what in _unmonitored_processes(supervisor) if stopped(process)}
        silences = {process: silences.get(process) or Silence(2 * _POLL) for process in found}
        for process, what in found.items():
            if (silent := silences[process].of(None)) > seconds:
                _continue(process, what, silent)
                del silences[process]


def _continue(process: int, what: str, seconds: float) -> None:
    with contextlib.suppress(OSError):
        os.kill(process, signal.SIGCONT)
        text = f"{what} (process {process}) stood stopped for {seconds:.0f} s, and was continued (SIGCONT)"
        print(f"warning: {text}", file=sys.stderr, flush=True)
        record("process_continued", what=text, pid=process)


def _unmonitored_processes(supervisor: int) -> Iterator[tuple[int, str]]:
    """Yield the pid and the description of each process that nothing else monitors."""
    with contextlib.suppress(OSError):
        above = parent(supervisor)
        yield above, "torchrun"
        for each in children(above):
            yield each, "the supervisor of a rank"
            for beside in children(each):
                with contextlib.suppress(OSError):
                    if os.getpgid(beside) == os.getpgid(each):  # a worker has a group of its own
                        yield beside, "a helper process of a supervisor, such as the dock's,"
