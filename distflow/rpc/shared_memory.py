"""Shared memory of the ranks of a machine (DistFlow §6.2).

A segment belongs to one rank; the other ranks of the machine write rows into it, and the rows are used in place.
Segments have no names: other ranks open the owner's through /proc. So a killed run leaves nothing behind, and the small
/dev/shm of a container does not matter. A segment is reused when the last tensor that views it is gone: fresh pages
cost six times what warm ones do.
"""

from __future__ import annotations

import functools
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_SLACK = 1.25
"""Factor by which a new segment exceeds the request: the next step's rows fit too, and untouched pages cost nothing."""


class SharedSegment(NamedTuple):
    """Segment as its owner announces it. `descriptor` is the owner's."""

    number: int
    descriptor: int
    size: int
    free: bool


class PoolNotice(NamedTuple):
    """Announcement of one rank's pool.

    reads: (owner, number) of other ranks' segments that its tensors still view.
    """

    process: int
    segments: tuple[SharedSegment, ...]
    reads: tuple[tuple[int, int], ...]

    @classmethod
    def unpack(cls, packed: Sequence) -> PoolNotice:
        process, segments, reads = packed
        return cls(process, tuple(SharedSegment(*segment) for segment in segments), tuple((a, b) for a, b in reads))


def choose(notices: Sequence[PoolNotice], wanted: dict[int, int]) -> dict[int, int | None]:
    """Return for each owner the number of its smallest free segment of at least `wanted` bytes, None if it has none
    and -1 if it wants no bytes; every rank finds the same."""
    read = {key for notice in notices for key in notice.reads}
    chosen: dict[int, int | None] = {}
    for owner, size in wanted.items():
        fitting = [(segment.size, segment.number) for segment in notices[owner].segments
                   if segment.free and segment.size >= size and (owner, segment.number) not in read]
        chosen[owner] = min(fitting)[1] if fitting and size else None if size else -1
    return chosen


class SharedMemoryPool:
    """One rank's segments, and those of the machine's other ranks that it has mapped."""

    def __init__(self, rank: int):
        self.rank, self.shared = rank, bool(machine_name())
        self._mine: dict[int, tuple[SharedSegment, mmap.mmap]] = {}
        self._theirs: dict[tuple[int, int], mmap.mmap] = {}
        self._used: set[tuple[int, int]] = set()
        self._count = 0

    def notice(self) -> PoolNotice:
        segments = tuple(segment._replace(free=(self.rank, number) not in self._used)
                        for number, (segment, _) in self._mine.items())
        return PoolNotice(os.getpid(), segments, tuple(key for key in list(self._used) if key[0] != self.rank))

    def add(self, size: int) -> None:
        """Add a free segment of at least `size` bytes; the largest free one, which is too small, is given up."""
        free = [segment for segment in self.notice().segments if segment.free]
        if free:
            number = max(free, key=lambda segment: segment.size).number
            self._mine.pop(number)
        size = max(int(size * _SLACK), mmap.PAGESIZE)
        descriptor = os.memfd_create("distflow") if self.shared else -1
        if self.shared:
            os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        if self.shared:
            weakref.finalize(memory, os.close, descriptor).atexit = False
        self._mine[self._count] = SharedSegment(self._count, descriptor, size, True), memory
        self._count += 1

    def open(self, notices: Sequence[PoolNotice], owner: int, number: int) -> np.ndarray:
        """Map a segment of this machine, and unmap those that their owners gave up; returns [bytes] uint8."""
        if owner == self.rank:
            return np.frombuffer(self._mine[number][1], dtype=np.uint8)
        alive = {(rank, segment.number) for rank, notice in enumerate(notices) for segment in notice.segments}
        self._theirs = {key: memory for key, memory in self._theirs.items() if key in alive}
        if (owner, number) not in self._theirs:
            segment = next(segment for segment in notices[owner].segments if segment.number == number)
            descriptor = os.open(f"/proc/{notices[owner].process}/fd/{segment.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._theirs[owner, number] = mmap.mmap(descriptor, segment.size)
            finally:
                os.close(descriptor)
        return np.frombuffer(self._theirs[owner, number], dtype=np.uint8)

    def lease(self, memory: np.ndarray, owner: int, number: int, size: int) -> Tensor:
        """Return the beginning of a segment, [size] uint8; it is not reused while the tensor or a view of it lives."""
        part, key = memory[:size], (owner, number)
        self._used.add(key)
        weakref.finalize(part, self._used.discard, key).atexit = False
        return torch.from_numpy(part)


def machine_name() -> str:
    """Return a name that is equal for two processes if they can share memory; empty where that is not possible.

    Each agent of torchrun counts as a machine. `DISTFLOW_MACHINE` overrides the name, and so does, with an
    empty value, the use of shared memory.
    """
    if "DISTFLOW_MACHINE" in os.environ:
        return os.environ["DISTFLOW_MACHINE"]
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return ""
    try:
        return f"{_boot()}/{os.readlink('/proc/self/ns/pid')}/{os.geteuid()}/{os.environ.get('GROUP_RANK', '0')}"
    except OSError:
        return ""  # a sandbox that shows less of /proc


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
