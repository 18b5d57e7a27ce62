"""Continues processes of a run that somebody has stopped: a seat, torchrun, or what stands beside a seat.

A seat watches its worker, and nobody watches the seat: stopped, it would neither see its worker end nor say so, and all
others would wait. With torchrun the store stops, and every seat waits in it. Workers live on meanwhile, each with a
thread that looks at the processes above and beside it; whichever stands stopped for too long is named and continued.
A worker that ends, as when a stopped dock does not answer, continues them at once.

So Ctrl-Z at a plain `torchrun` holds for the same time only. Without torchrun nobody is watched: what stands above a
seat then is the user's shell, and its children are the user's.
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
from distflow.telemetry.processes import children, parent, stopped

_LOOK = 1.0
"""Seconds between two looks."""


def continue_stopped(seat: int, seconds: float) -> None:
    """In a worker: from now on watch, in a thread, its seat and what stands above and beside it.

    Args:
        seconds: that a process may stand stopped.
    """
    if _below_torchrun():
        threading.Thread(target=_watch, args=(seat, seconds), name="stopped", daemon=True).start()


def wake(seat: int) -> None:
    """Before a worker ends: without its seat nobody would see it, and without the dock the next one ends too."""
    for process in [seat, *(dict(_around(seat)) if _below_torchrun() else ())]:
        if stopped(process):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGCONT)


def _below_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _watch(seat: int, seconds: float) -> None:
    since: dict[int, float] = {}
    looked = time.monotonic()
    while True:
        time.sleep(min(_LOOK, seconds))
        now = time.monotonic()
        late, looked = now - looked > 2 * _LOOK, now
        found = {process: what for process, what in _around(seat) if stopped(process)}
        since = {process: now if late else since.get(process, now) for process in found}  # late: it was stopped itself
        for process, what in found.items():
            if now - since[process] > seconds:
                _continue(process, what, now - since[process])
                del since[process]


def _continue(process: int, what: str, seconds: float) -> None:
    with contextlib.suppress(OSError):
        os.kill(process, signal.SIGCONT)
        text = f"{what} (process {process}) stood stopped for {seconds:.0f} s, and was continued (SIGCONT)"
        print(f"warning: {text}", file=sys.stderr, flush=True)
        record("process continued", what=text, pid=process)


def _around(seat: int) -> Iterator[tuple[int, str]]:
    """The processes that have no other watcher: torchrun, its seats, and those of a seat's group."""
    with contextlib.suppress(OSError):
        above = parent(seat)
        yield above, "torchrun"
        for each in children(above):
            yield each, "the seat of a rank"
            for beside in children(each):
                with contextlib.suppress(OSError):
                    if os.getpgid(beside) == os.getpgid(each):  # a worker has a group of its own
                        yield beside, "a process beside a seat, such as the dock's,"
