"""Reads the process table (/proc), and ends what a worker has left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_LEFT, _KILLED, _LOOK = 2.0, 5.0, 0.02
"""Seconds that a process has to end after SIGTERM, and after SIGKILL; and between two looks."""


def began(process: int) -> int:
    """Return when a process began, in clock ticks since boot: with the pid it identifies the process.

    Raises:
        OSError: there is no such process.
    """
    return int(_facts(process)[19])


def alive(process: int, since: int) -> bool:
    """Return whether the process that began at `since` has not ended; a zombie has."""
    with contextlib.suppress(OSError):
        facts = _facts(process)
        return int(facts[19]) == since and facts[0] not in ("Z", "X")
    return False


def parent(process: int) -> int:
    """Return the pid of a process's parent.

    Raises:
        OSError: there is no such process.
    """
    return int(_facts(process)[1])


def stopped(process: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    with contextlib.suppress(OSError):
        return _facts(process)[0] in ("T", "t")
    return False


def children(process: int) -> set[int]:
    """Return the processes that a process has started or adopted; none if it has ended."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def family(process: int) -> Iterator[int]:
    """Yield a process and its descendants, as far as their parents live."""
    yield process
    for child in children(process):
        yield from family(child)


def end_at_once(processes: Iterable[int]) -> None:
    """Kill processes, all of them stopped first: none sees another end, or starts anything more."""
    stopped = []
    for each in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGSTOP)
            stopped.append(each)
    for each in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_orphans(known: set[int]) -> set[int]:
    """End the unknown children of this process, whatever group they are in: by SIGTERM and SIGCONT, and after a while
    by SIGKILL.

    Returns:
        The children that even SIGKILL has not ended in time: they wait in the kernel, as for a disk that does not
        answer.
    """
    deadline, signalled = time.monotonic() + _LEFT, set()
    while left := _unreaped(children(os.getpid()) - known):
        over = time.monotonic() > deadline
        if time.monotonic() > deadline + _KILLED:
            return left
        for each in left if over else left - signalled:
            if over:
                end_at_once(family(each))
            else:
                _send(each, signal.SIGTERM)
                _send(each, signal.SIGCONT)
        signalled |= left
        time.sleep(_LOOK)
    return set()


def _unreaped(processes: set[int]) -> set[int]:
    left = set()
    for each in processes:
        with contextlib.suppress(ChildProcessError):
            if not os.waitpid(each, os.WNOHANG)[0]:
                left.add(each)
    return left


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def end_group(group: int) -> None:
    """End a process group by SIGTERM, and after a while by SIGKILL: its processes hold memory that others need."""
    deadline = time.monotonic() + _LEFT
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        while _members(group) and time.monotonic() < deadline:
            time.sleep(_LOOK)
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> bool:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = _facts(int(name))
            if int(its_group) == group and int(name) != group and state not in ("Z", "X"):
                return True
    return False


def _facts(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
