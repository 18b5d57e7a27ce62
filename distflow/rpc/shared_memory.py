"""The shared memory of a machine's ranks (DistFlow §6.2).

A segment belongs to one rank; its neighbours write rows into it, and what they wrote is used where it lies. Segments
have no names: the owner holds them open and a neighbour opens them through /proc. So a killed run leaves nothing
behind, and the small /dev/shm of a container does not matter. A segment is free again when the last tensor that looks
into it is gone, and a free one is used again: fresh pages cost six times what warm ones do.
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
"""A new segment is this much larger than asked for: the next step's rows fit too, and untouched pages cost nothing."""


class SharedSegment(NamedTuple):
    """A segment, as its owner announces it. `descriptor` is the owner's."""

    number: int
    descriptor: int
    size: int
    free: bool


class PoolNotice(NamedTuple):
    """What a rank announces of its warehouse.

    reads: (owner, number) of the neighbours' segments that its tensors still look into.
    """

    process: int
    shelves: tuple[SharedSegment, ...]
    reads: tuple[tuple[int, int], ...]

    @classmethod
    def unpack(cls, packed: Sequence) -> PoolNotice:
        process, shelves, reads = packed
        return cls(process, tuple(SharedSegment(*shelf) for shelf in shelves), tuple((a, b) for a, b in reads))


def choose(stocks: Sequence[PoolNotice], wanted: dict[int, int]) -> dict[int, int | None]:
    """For each owner the number of its smallest free segment of as many bytes as `wanted` says, None if it has none
    and -1 if it wants none; every rank finds the same."""
    read = {key for stock in stocks for key in stock.reads}
    chosen: dict[int, int | None] = {}
    for owner, size in wanted.items():
        fitting = [(shelf.size, shelf.number) for shelf in stocks[owner].shelves
                   if shelf.free and shelf.size >= size and (owner, shelf.number) not in read]
        chosen[owner] = min(fitting)[1] if fitting and size else None if size else -1
    return chosen


class SharedMemoryPool:
    """One rank's segments, and its view of its neighbours'."""

    def __init__(self, rank: int):
        self.rank, self.shared = rank, bool(machine_name())
        self._mine: dict[int, tuple[SharedSegment, mmap.mmap]] = {}
        self._theirs: dict[tuple[int, int], mmap.mmap] = {}
        self._used: set[tuple[int, int]] = set()
        self._count = 0

    def stock(self) -> PoolNotice:
        shelves = tuple(shelf._replace(free=(self.rank, number) not in self._used)
                        for number, (shelf, _) in self._mine.items())
        return PoolNotice(os.getpid(), shelves, tuple(key for key in list(self._used) if key[0] != self.rank))

    def add(self, size: int) -> None:
        """A new free segment of at least `size` bytes; the largest that was free, but did not do, is given up."""
        free = [shelf for shelf in self.stock().shelves if shelf.free]
        if free:
            number = max(free, key=lambda shelf: shelf.size).number
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

    def open(self, stocks: Sequence[PoolNotice], owner: int, number: int) -> np.ndarray:
        """[bytes] uint8: the memory of a segment of this machine. Those that their owners gave up are let go."""
        if owner == self.rank:
            return np.frombuffer(self._mine[number][1], dtype=np.uint8)
        alive = {(rank, shelf.number) for rank, stock in enumerate(stocks) for shelf in stock.shelves}
        self._theirs = {key: memory for key, memory in self._theirs.items() if key in alive}
        if (owner, number) not in self._theirs:
            shelf = next(shelf for shelf in stocks[owner].shelves if shelf.number == number)
            descriptor = os.open(f"/proc/{stocks[owner].process}/fd/{shelf.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._theirs[owner, number] = mmap.mmap(descriptor, shelf.size)
            finally:
                os.close(descriptor)
        return np.frombuffer(self._theirs[owner, number], dtype=np.uint8)

    def lease(self, memory: np.ndarray, owner: int, number: int, size: int) -> Tensor:
        """[size] uint8: the beginning of a segment, which is not used for anything else while the tensor, or a view of
        it, lives."""
        part, key = memory[:size], (owner, number)
        self._used.add(key)
        weakref.finalize(part, self._used.discard, key).atexit = False
        return torch.from_numpy(part)


def machine_name() -> str:
    """The same for two processes if they can share memory; empty where that is not possible.

    Each agent of torchrun counts as a machine of its own. `DISTFLOW_MACHINE` overrides the name, and so does, with an
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
