"""How much memory this process may take: the limit of its control groups, and what the machine has left."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")


def limit() -> int | None:
    """Return the memory limit of this process's control groups, in bytes; None if none is below the machine's memory.
    """
    found, groups = [psutil.virtual_memory().total], Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, resources, path = line.split(":", 2)
        root, name = (_GROUPS, "memory.max") if not resources else (_GROUPS / "memory", "memory.limit_in_bytes")
        if not resources or "memory" in resources.split(","):
            for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    found.append(int((folder / name).read_text()))
    return least if (least := min(found)) < found[0] else None


def available() -> int:
    """Return the bytes of memory that this machine has left."""
    return psutil.virtual_memory().available


def why_unbounded() -> str:
    """Return why a process that takes all it may would take what other processes need too; "" if it would not."""
    most, free = limit(), available()
    if most is None:
        return "nothing limits this process"
    return f"the limit of {most / 2**30:.3g} GiB is more than the {free / 2**30:.3g} GiB that are free" \
        if most >= free else ""


def limited_command() -> str:
    """Return how a run is started with a limit of half of the memory that is free."""
    return f"systemd-run --user --scope -p MemoryMax={available() // 2**21}M  distflow run …"
