"""What the kernel says of processes: when one began, what it has started, and ending what a worker has left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_LEFT, _LOOK = 2.0, 0.02
"""Seconds in which what a worker has left behind ends, and between two looks."""


def began(process: int) -> int:
    """In the kernel's clock ticks since the machine began: what another process of the same number has not.

    Raises:
        OSError: there is no such process.
    """
    return int(_facts(process)[19])


def parent(process: int) -> int:
    """Raises:
        OSError: there is no such process.
    """
    return int(_facts(process)[1])


def family(process: int) -> Iterator[int]:
    """A process and all that it has started, directly or not, as far as their parents live."""
    yield process
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from family(int(child))


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
