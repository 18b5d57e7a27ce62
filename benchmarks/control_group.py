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
"""What its processes have for their own end, when the group's has come."""


@contextlib.contextmanager
def control_group(controller: str, name: str) -> Iterator[Path]:
    """A new one's folder, of this `controller` where each has groups of its own (cgroup v1). At the end it is gone, and
    so is every process that has not left it.

    Raises:
        OSError: there can be none.
    """
    first = _ROOT / controller if (_ROOT / controller).is_dir() else _ROOT
    group = first / f"distflow-{os.getpid()}-{name}"
    group.mkdir()
    try:
        yield group
    finally:
        end = time.monotonic() + _SECONDS
        while members := (group / "cgroup.procs").read_text().split():
            for member in members if time.monotonic() > end else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(member), signal.SIGKILL)
            time.sleep(0.05)
        group.rmdir()


def joining(group: Path | str) -> list[str]:
    """What goes before a command that is to run in a group; the shell may have to fill its name in."""
    return ["sh", "-c", f'echo 0 > {group}/cgroup.procs && exec "$@"', "sh"]


def limit_memory(group: Path, size: int) -> None:
    """Of all its processes together, in bytes.

    Raises:
        OSError: this system has no such limit.
    """
    file = group / "memory.max"
    (file if file.exists() else group / "memory.limit_in_bytes").write_text(str(size))
