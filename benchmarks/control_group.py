"""Control groups for processes of a test or a benchmark: the kernel gives them no more than a group has.

Linux as root only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_SECONDS = 10.0
"""What its processes have for their own end, when the group's has come, and again after they were killed."""
_LOOK = 0.05


@contextlib.contextmanager
def control_group(controller: str, name: str) -> Iterator[Path]:
    """Yield the folder of a new control group, of this `controller` where each has groups of its own (cgroup v1). At
    the end it is gone, and so is every process that has not left it.

    Raises:
        OSError: there can be none; or, at the end, a process of it does not go.
    """
    first = _ROOT / controller if (_ROOT / controller).is_dir() else _ROOT
    group = first / f"distflow-{os.getpid()}-{name}"
    group.mkdir()
    try:
        enabled = group / "cgroup.controllers"
        if enabled.is_file() and controller not in enabled.read_text().split():
            raise OSError(f"{first}/cgroup.subtree_control does not have {controller}")
        yield group
    finally:
        _empty(group)
        group.rmdir()


def _empty(group: Path) -> None:
    """Wait for its processes, and end those that stay; one that cannot be ended is left to `rmdir`, which says so."""
    begin = time.monotonic()
    while (members := (group / "cgroup.procs").read_text().split()) and time.monotonic() < begin + 2 * _SECONDS:
        for member in members if time.monotonic() > begin + _SECONDS else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(member), signal.SIGKILL)
        time.sleep(_LOOK)


def joining(group: Path | str) -> list[str]:
    """Return what goes before a command that is to run in a group; the shell may have to fill its name in."""
    return ["sh", "-c", f'echo 0 > {group}/cgroup.procs && exec "$@"', "sh"]


def limit_memory(group: Path, size: int) -> None:
    """Limit the memory of all processes of a control group together, to `size` bytes."""
    file = group / "memory.max"
    (file if file.exists() else group / "memory.limit_in_bytes").write_text(str(size))
