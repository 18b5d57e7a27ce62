"""Finds the descendants of a process and ends them; ends a process with its parent."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path

from workers.isolation.sandbox import kernel

AGENT = "DISTFLOW_AGENT"  # environment variable with torchrun's process id, if `distflow` has started it


def descendants(root: int, but: Collection[int] = ()) -> set[int]:
    """Return the living descendants of `root`, without those of `but` and their descendants.

    The result is complete only if `root` is a subreaper, to which orphans return.
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
    """Kill all descendants; return those that were killed."""
    killed: set[int] = set()
    while new := descendants(root, but) - killed:
        _signal(new, signal.SIGSTOP)  # a stopped process cannot fork
        killed |= new
    _signal(killed, signal.SIGKILL)
    return killed


def kill_marked(name: str, value: str) -> None:
    """Kill each process that was started with this environment variable or has inherited it."""
    wanted = f"{name}={value}".encode()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                os.kill(int(process), signal.SIGKILL)


def _signal(processes: set[int], sign: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, sign)


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends; exit at once if it has ended already."""
    kernel.flag(kernel.PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def end_with_torchrun() -> None:
    """End with torchrun, if it has started this process: by SIGTERM, so that this process can end its children."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # started by a shell
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    agent = os.environ.get(AGENT)
    if agent and not Path(f"/proc/{agent}").exists():  # torchrun died while this process started
        os._exit(1)
