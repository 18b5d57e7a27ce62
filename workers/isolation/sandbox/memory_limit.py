"""Shared memory of a process and its descendants, which resource limits do not see: RLIMIT_DATA counts private memory.

Counted are files of `memfd_create` that they hold open, those of /dev/shm that they hold open for writing or have held
open so and left there, and pages that they have mapped in common: tmpfs files, System V segments and anonymous
`MAP_SHARED`. What one process closes within a look that it has opened since the last is not seen.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_FILES = ("/dev/shm/", "/memfd:")
_LOOK, _SHARE = 0.25, 20.0
"""Seconds between two looks, and how often the time that a look takes passes before the next one."""
Inode = tuple[int, int]


class SharedMemoryUse:
    """What a process and its descendants share.

    Args:
        limit: bytes.
    """

    def __init__(self, process: int, limit: int):
        self.process, self.limit = process, limit
        self.left: dict[str, Inode] = {}
        """Files of /dev/shm that they have opened for writing."""

    def exceeded(self) -> bool:
        """Whether it is more than the limit."""
        processes = list(_family(self.process))
        files = self._files(processes)
        total = sum(files.values())
        if total + sum(map(_resident, processes)) <= self.limit:  # counts shared pages more than once, and is cheap
            return False
        return total + sum(_mapped(process, files) for process in processes) > self.limit

    def _files(self, processes: list[int]) -> dict[Inode, int]:
        """The bytes of each file."""
        found: dict[Inode, int] = {}
        for path, open_file in _open_files(processes):
            with contextlib.suppress(OSError):
                file = os.stat(open_file)
                found[file.st_dev, file.st_ino] = 512 * file.st_blocks
                if path.startswith(_FILES[0]):
                    self.left[path] = file.st_dev, file.st_ino
        for path, inode in list(self.left.items()):
            with contextlib.suppress(OSError):
                file = os.stat(path)
                if (file.st_dev, file.st_ino) == inode:
                    found[inode] = 512 * file.st_blocks
                    continue
            del self.left[path]
        return found


class LookSchedule:
    """When to look: often, but with a small share of the time."""

    def __init__(self) -> None:
        self.pause = _LOOK

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """The next pause is as long as what is done meanwhile asks for."""
        began = time.monotonic()
        yield
        self.pause = max(_LOOK, _SHARE * (time.monotonic() - began))


def _family(process: int) -> Iterator[int]:
    yield process
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                yield from _family(int(child))


def _open_files(processes: list[int]) -> Iterator[tuple[str, str]]:
    """The names of those that lie in memory, and how to reach each. A file of /dev/shm that is only read is somebody
    else's."""
    for process in processes:
        with contextlib.suppress(OSError):
            for number in os.listdir(folder := f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    path = os.readlink(f"{folder}/{number}")
                    written = os.lstat(f"{folder}/{number}").st_mode & stat.S_IWUSR  # of the link: how it is open
                    if path.startswith(_FILES) and (written or not path.startswith(_FILES[0])):
                        yield path, f"{folder}/{number}"


def _resident(process: int) -> int:
    """Bytes of shared memory that a process has mapped and touched."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssShmem:"):
                return 1024 * int(line.split()[1])
    return 0


def _mapped(process: int, counted: dict[Inode, int]) -> int:
    """The share of a process in the pages that it has mapped in common with others, without files that are counted."""
    total, counts = 0, False
    with contextlib.suppress(OSError), open(f"/proc/{process}/smaps", errors="replace") as lines:
        for line in lines:
            name, *fields = line.split()
            if name.endswith(":"):
                total += 1024 * int(fields[0]) if counts and name == "Pss:" else 0
                continue
            rights, _, device, inode, *path = fields
            major, minor = (int(part, 16) for part in device.split(":"))
            in_memory = path and path[0].startswith((*_FILES, "/dev/zero", "/SYSV"))
            counts = "s" in rights and bool(in_memory) and (os.makedev(major, minor), int(inode)) not in counted
    return total
