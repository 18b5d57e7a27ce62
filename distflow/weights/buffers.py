"""Host memory for whole parts: kept, used again, and open to other processes of the machine.

Pages that are new cost six times what warm ones do, so a buffer is given back when the last view of it is gone, and
the next version is written into it. Whoever still sends from an old version keeps it from being overwritten.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import NamedTuple

import numpy

from distflow.data.warehouse import machine_name

NAME = "distflow-weights"
"""What such a file is called in /proc."""


class Place(NamedTuple):
    """Where a buffer lies, as its owner tells it: number, descriptor, bytes. The descriptor is the owner's."""

    number: int
    descriptor: int
    size: int


class Buffers:
    """One process's buffers; `spare` are those that nobody looks at."""

    def __init__(self) -> None:
        self.spare: list[tuple[Place, numpy.ndarray]] = []
        self.made = 0
        self.places: dict[int, Place] = {}
        """By the address at which it begins, of those in use."""

    def take(self, size: int) -> numpy.ndarray:
        """[size] uint8, with anything in it. It is spare again when the last view of it is gone."""
        size = max(size, 1)
        fitting = [pair for pair in self.spare if size <= pair[0].size <= 2 * size + mmap.PAGESIZE]
        pair = min(fitting, key=lambda pair: pair[0].size) if fitting else self._new(size)
        self.spare = [each for each in self.spare if each is not pair]
        part = numpy.frombuffer(memoryview(pair[1])[:size], numpy.uint8)  # of its own: views keep this, not the whole
        address = part.ctypes.data
        self.places[address] = pair[0]
        weakref.finalize(part, self._give_back, pair).atexit = False
        return part

    def locate(self, view: numpy.ndarray) -> tuple[Place, int]:
        """In which buffer a view of one lies, and at which byte of it."""
        address = view.ctypes.data
        begin = max(begin for begin in list(self.places) if begin <= address)
        return self.places[begin], address - begin

    def trim(self) -> None:
        """Give spare memory back to the system."""
        self.spare = []

    def _new(self, size: int) -> tuple[Place, numpy.ndarray]:
        self.made += 1
        size = max(size, mmap.PAGESIZE)
        if not machine_name():
            return Place(self.made, -1, size), numpy.frombuffer(mmap.mmap(-1, size), numpy.uint8)
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        memory = mmap.mmap(descriptor, size)
        weakref.finalize(memory, os.close, descriptor).atexit = False
        return Place(self.made, descriptor, size), numpy.frombuffer(memory, numpy.uint8)

    def _give_back(self, pair: tuple[Place, numpy.ndarray]) -> None:
        self.places.pop(pair[1].ctypes.data, None)
        self.spare = [*self.spare, pair]
