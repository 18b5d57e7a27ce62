"""When the kernel has no more memory to give: a worker goes before its seat, and its seat knows why it went."""

from __future__ import annotations

import contextlib
from pathlib import Path

_SOONER = 500
"""Half of the scale on which the kernel compares processes (proc(5), oom_score_adj)."""
_GROUPS = Path("/sys/fs/cgroup")


def go_first() -> None:
    """From now on this process, and what it starts, is ended before others that have the same memory: before its seat,
    which holds the copies of its state."""
    own = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # another system, or a container that forbids it
        own.write_text(str(max(_SOONER, int(own.read_text()))))


def ended() -> int | None:
    """How many processes of this machine the kernel has ended for lack of memory; None where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def ended_since(before: int | None) -> bool:
    """Whether the kernel is known to have ended a process for lack of memory since `ended` was `before`."""
    return before is not None and (ended() or 0) > before


def cause(before: int | None) -> str:
    """What probably stands behind a SIGKILL that a process has got since `ended` was `before`. It may have been another
    process of the machine that the kernel ended."""
    now = ended()
    if before is None or now is None:
        return "The kernel may have ended it because memory was full."
    return f"The kernel probably ended it because memory was full: it has ended {now - before} since this one began." \
        if now > before else "Somebody sent it: the kernel has ended nothing for lack of memory meanwhile."


def limit() -> int | None:
    """Bytes that the control groups of this process let it take; None if they do not say, or no less than are free."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root, name = (_GROUPS, "memory.max") if not controllers else (_GROUPS / "memory", "memory.limit_in_bytes")
        if not controllers or "memory" in controllers.split(","):
            for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    found.append(int((folder / name).read_text()))
    most = available()
    return min((each for each in found if each < most), default=None)


def available() -> int:
    """Bytes that this machine can give without swapping."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(facts["MemAvailable"].split()[0])
