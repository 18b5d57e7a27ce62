"""What a process has started, directly or not, and ending all of it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path

from workers.isolation.sandbox import kernel

AGENT = "DISTFLOW_AGENT"
"""Environment variable: the process of torchrun, if `distflow` has started it."""


def descendants(root: int, but: Collection[int] = ()) -> set[int]:
    """The living processes below `root`, those of `but` and below left out.

    All of them if `root` is a subreaper: orphans become its children then.
    """
    parents = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal():
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    parents[int(name)] = int(parent)
    found = {root}
    while more := {process for process, parent in parents.items() if parent in found}.difference(found, but):
        found |= more
    return found - {root}


def kill_descendants(root: int, but: Collection[int] = ()) -> set[int]:
    """End what `descendants` finds; returns those that it has killed."""
    killed: set[int] = set()
    while new := descendants(root, but) - killed:
        _send(new, signal.SIGSTOP)  # one that stands still cannot fork
        killed |= new
    _send(killed, signal.SIGKILL)
    return killed


def kill_marked(name: str, value: str) -> None:
    """End each process that was started with this environment variable, or by one that was."""
    wanted = f"{name}={value}".encode()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                os.kill(int(process), signal.SIGKILL)


def _send(processes: set[int], sign: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, sign)


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, in whatever way; end at once if it has."""
    kernel.flag(kernel.PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def end_with_torchrun() -> None:
    """End when torchrun does, if it has started this process: by SIGTERM, so that what this has started ends too."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # a shell may leave its children alone
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    agent = os.environ.get(AGENT)
    if agent and not Path(f"/proc/{agent}").exists():  # it died while this process started
        os._exit(1)
