"""Recognises workers that run out of memory: an allocator raises an error, or the kernel kills them before supervisors.
"""

from __future__ import annotations

import contextlib
import errno
import re
import traceback
from collections.abc import Mapping
from pathlib import Path

_LIMITS = (errno.EMFILE, errno.ENFILE)
"""Errors at a limit: of a process's open files, and of those of the system."""
_FORK = re.compile(r"\b(_execute_child|os\.fork|os\.forkpty|_fork_exec|posix_spawnp?)\b")
"""Calls whose EAGAIN says that a user has no processes left; a socket's says that nothing has come yet."""
_SIZES = {"inference": "micro_batch_tokens", "training": "micro_batch_tokens", "generating": "batch_rows",
          "validating": "batch_rows"}
"""By phase of a worker, the setting of roles that decides how much memory it takes."""
SCORE = 500
"""Score of a worker (`spawn`): the kernel ends workers before supervisors of one size, which hold snapshots."""


def kill_count() -> int | None:
    """Return how many processes of this machine the kernel has killed for lack of memory; None if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator has raised this error: Python's, or torch's of a GPU (torch.OutOfMemoryError, by its
    name: supervisors' modules load no torch) or of the CPU."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def is_exhausted(error: BaseException) -> bool:
    """Return whether this process or another one has no threads, processes or open files left, or the dock no memory,
    of all of which a restarted worker needs as much."""
    return getattr(error, "exhausted", False) or "can't start new thread" in str(error) or (
        isinstance(error, OSError) and (error.errno in _LIMITS or error.errno == errno.EAGAIN and _forks(error)))


def _forks(error: BaseException) -> bool:
    """Return whether an error comes from the call that starts a process."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return any(_FORK.search(f"{frame.name} {frame.line}") for frame in last)


def killed_since(before: int | None) -> bool:
    """Return whether the kernel is known to have killed a process since `kill_count` was `before`."""
    return before is not None and (kill_count() or 0) > before


def kill_cause(before: int | None) -> str:
    """Return the probable cause of a SIGKILL since `kill_count` was `before`; another process may have been killed."""
    now = kill_count()
    if before is None or now is None:
        return "The kernel may have ended it because memory was full."
    return f"The kernel probably ended it because memory was full: it has ended {now - before} since this one began." \
        if now > before else "Another process sent it: the kernel has killed nothing for memory since."


def remedy(phase: str, settings: Mapping[str, str]) -> str:
    """Return what to write so that a worker takes less memory in this phase; "" if no setting decides it. `settings`:
    those of the run, by key."""
    smaller = [f"--set {key}={int(value) // 2}" for key, value in settings.items()
               if phase in _SIZES and key.startswith("roles.") and key.endswith(f".{_SIZES[phase]}") and int(value) > 1]
    return f"Memory was too small. It takes less with  {' '.join(smaller)}" if smaller else ""
