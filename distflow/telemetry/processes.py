"""What the kernel says of processes: when one began, what it has started, and ending what a worker has left behind."""

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
"""Seconds in which what a worker has left behind ends, in which what is killed does, and between two looks."""


def began(process: int) -> int:
    """In the kernel's clock ticks since the machine began: what another process of the same number has not.

    Raises:
        OSError: there is no such process.
    """
    return int(_facts(process)[19])


def alive(process: int, since: int) -> bool:
    """Return whether the process that began then has not ended; one that nobody has waited for has."""
    with contextlib.suppress(OSError):
        facts = _facts(process)
        return int(facts[19]) == since and facts[0] not in ("Z", "X")
    return False


def parent(process: int) -> int:
    """Raises:
        OSError: there is no such process.
    """
    return int(_facts(process)[1])


def stopped(process: int) -> bool:
    """Whether somebody has stopped a process, by SIGSTOP or a debugger."""
    with contextlib.suppress(OSError):
        return _facts(process)[0] in ("T", "t")
    return False


def children(process: int) -> set[int]:
    """Those that a process has started or adopted; none if it has ended."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def family(process: int) -> Iterator[int]:
    """A process and all that it has started, directly or not, as far as their parents live."""
    yield process
    for child in children(process):
        yield from family(child)


def end_at_once(processes: Iterable[int]) -> None:
    """None of them sees another end, and what stands still starts nothing more."""
    stopped = []
    for each in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGSTOP)
            stopped.append(each)
    for each in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def adopt_orphans() -> None:
    """From now on what a child of this process leaves behind when it ends becomes a child of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_orphans(known: set[int]) -> set[int]:
    """End the children of this process but those that are known, whatever group they are in: told to, and continued
    where they were stopped, and after a while at once.

    Returns:
        Those that even SIGKILL has not ended in time: the kernel lets them wait, as for a disk that does not answer.
    """
    deadline, told = time.monotonic() + _LEFT, set()
    while left := _unreaped(children(os.getpid()) - known):
        over = time.monotonic() > deadline
        if time.monotonic() > deadline + _KILLED:
            return left
        for each in left if over else left - told:
            if over:
                end_at_once(family(each))
            else:
                _send(each, signal.SIGTERM)
                _send(each, signal.SIGCONT)
        told |= left
        time.sleep(_LOOK)
    return set()


def _unreaped(processes: set[int]) -> set[int]:
    """Those that have not ended."""
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
    """Tell a group of processes to end, and end it after a while: they hold memory that others need."""
    deadline = time.monotonic() + _LEFT
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        while _members(group) and time.monotonic() < deadline:
            time.sleep(_LOOK)
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> bool:
    """Whether a living process is in the group, beside the one that it is named after."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = _facts(int(name))
            if int(its_group) == group and int(name) != group and state not in ("Z", "X"):
                return True
    return False


def _facts(process: int) -> list[str]:
    """The fields of /proc/PROCESS/stat behind the name, which may have anything in it."""
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
