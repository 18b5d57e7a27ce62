"""Measures the shared memory of a process and its descendants, which no resource limit covers (RLIMIT_DATA counts
private memory).

Counted are open files of `memfd_create`, files of /dev/shm that are or were open for writing, and shared mappings:
tmpfs files, System V segments and anonymous `MAP_SHARED`. A file opened and closed between two polls is missed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from distflow.telemetry.processes import children

_SHM, _MEMFD = "/dev/shm/", "/memfd:"
_ANONYMOUS = ("psm_", "pym-", "sem.", "mp-", "torch_")
"""How the names begin that Python and torch give to shared memory. Somebody may look for a file of any other name."""
_PAUSE, _PAUSE_PER_POLL = 0.25, 20.0  # shortest pause between polls: seconds, multiples of what the poll took
Inode = tuple[int, int]


class SharedMemoryUse:
    """Shared memory of a process and its descendants. earlier: files of /dev/shm that were there before the process."""

    def __init__(self, process: int, limit: int, earlier: Collection[str] = ()):
        self.process, self.limit, self.earlier = process, limit, earlier
        self.left: dict[str, Inode] = {}  # files of /dev/shm that the processes have opened for writing

    def exceeded(self) -> bool:
        processes = list(with_descendants(self.process))
        files = self._files(processes)
        total = sum(files.values())
        if total + sum(map(_resident, processes)) <= self.limit:  # counts shared pages more than once, and is cheap
            return False
        return total + sum(_mapped(process, files) for process in processes) > self.limit

    def note_files(self) -> None:
        """Note the files of /dev/shm that the processes have open or mapped for writing, before they are killed."""
        processes = list(with_descendants(self.process))
        self._files(processes)
        self.left |= dict(_mapped_files(processes))

    @property
    def leftovers(self) -> dict[str, Inode]:
        """Anonymous files of /dev/shm that the processes have made and left behind."""
        return {path: inode for path, inode in self.left.items()
                if os.path.basename(path).startswith(_ANONYMOUS) and path not in self.earlier}

    def _files(self, processes: list[int]) -> dict[Inode, int]:
        found: dict[Inode, int] = {}
        for path, open_file in _open_files(processes):
            with contextlib.suppress(OSError):
                file = os.stat(open_file)
                found[file.st_dev, file.st_ino] = 512 * file.st_blocks
                if path.startswith(_SHM):
                    self.left[path] = file.st_dev, file.st_ino
        for path, inode in list(self.left.items()):
            with contextlib.suppress(OSError):
                file = os.stat(path)
                if (file.st_dev, file.st_ino) == inode:
                    found[inode] = 512 * file.st_blocks
                    continue
            del self.left[path]
        return found


def unlink_unused(files: Mapping[str, Inode]) -> None:
    """Remove those of these files of /dev/shm that no process of this user has open or mapped."""
    used = _used_files() if files else set()
    for path, inode in files.items():
        with contextlib.suppress(OSError):
            file = os.stat(path)
            if (file.st_dev, file.st_ino) == inode and inode not in used:
                os.unlink(path)


def shm_files() -> set[str]:
    """Return the paths of the files that are in /dev/shm now."""
    with contextlib.suppress(OSError):
        return {_SHM + name for name in os.listdir(_SHM)}
    return set()


class PollSchedule:
    """When the next poll is `due`, by time.monotonic(), so that polls take less than 5% of the time."""

    def __init__(self) -> None:
        self.due = 0.0

    @contextlib.contextmanager
    def poll(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        now = time.monotonic()
        self.due = now + max(_PAUSE, _PAUSE_PER_POLL * (now - began))


def with_descendants(process: int) -> Iterator[int]:
    yield process
    for child in children(process):
        yield from with_descendants(child)


def _used_files() -> set[Inode]:
    """Return the files in memory that processes have open or mapped, as far as this user may see."""
    processes = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    found = {inode for _, inode in _mapped_files(processes, rights="")}
    for _, open_file in _open_files(processes, read=True):
        with contextlib.suppress(OSError):
            file = os.stat(open_file)
            found.add((file.st_dev, file.st_ino))
    return found


def _open_files(processes: list[int], read: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the name and the /proc path of each open file that lies in memory. Unless `read`, those of /dev/shm must be
    open for writing: the others belong to other processes."""
    for process in processes:
        with contextlib.suppress(OSError):
            for number in os.listdir(folder := f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    path = os.readlink(f"{folder}/{number}")
                    # the link's own mode says how the file is open
                    written = os.lstat(f"{folder}/{number}").st_mode & stat.S_IWUSR
                    if path.startswith((_SHM, _MEMFD)) and (read or written or not path.startswith(_SHM)):
                        yield path, f"{folder}/{number}"


def _mapped_files(processes: Iterable[int], rights: str = "ws") -> Iterator[tuple[str, Inode]]:
    """Yield the files of /dev/shm that processes have mapped with these rights, by default shared and for writing."""
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps", errors="replace") as lines:
            for line in lines:
                _, granted, _, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
                if path and path[0].startswith(_SHM) and set(rights) <= set(granted):
                    major, minor = (int(part, 16) for part in device.split(":"))
                    yield path[0], (os.makedev(major, minor), int(inode))


def _resident(process: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssShmem:"):
                return 1024 * int(line.split()[1])
    return 0


def _mapped(process: int, counted: dict[Inode, int]) -> int:
    """Return the process's proportional share (PSS) of shared mappings, without the files in `counted`."""
    total, counts = 0, False
    with contextlib.suppress(OSError), open(f"/proc/{process}/smaps", errors="replace") as lines:
        for line in lines:
            name, *fields = line.split()
            if name.endswith(":"):
                total += 1024 * int(fields[0]) if counts and name == "Pss:" else 0
                continue
            rights, _, device, inode, *path = fields
            major, minor = (int(part, 16) for part in device.split(":"))
            in_memory = path and path[0].startswith((_SHM, _MEMFD, "/dev/zero", "/SYSV"))
            counts = "s" in rights and bool(in_memory) and (os.makedev(major, minor), int(inode)) not in counted
    return total
