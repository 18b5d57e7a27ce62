"""How much memory this process may take: the limit of its control groups."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")


def limit() -> int | None:
    """Return the memory limit of this process's control groups, in bytes; None if no lower than what is available."""
    found, groups = [], Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, resources, path = line.split(":", 2)
        root, name = (_GROUPS, "memory.max") if not resources else (_GROUPS / "memory", "memory.limit_in_bytes")
        if not resources or "memory" in resources.split(","):
            for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    found.append(int((folder / name).read_text()))
    most = available()
    return min((each for each in found if each < most), default=None)


def available() -> int:
    return psutil.virtual_memory().available
