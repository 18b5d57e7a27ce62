"""A version of weights as far as this process has it: what the trainer serves, and what a puller fills and relays."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy

from distflow.weights.boxes import Box
from distflow.weights.manifest import Chunk, Head, Part, checksum

Marks = Mapping[int, numpy.ndarray]
"""By part: [chunks] bool."""


class Holding:
    """Chunks come in from one side and go out at the other at the same time.

    memory: by part [bytes] uint8, None for parts that are not here. have: the chunks that are here and verified.
    wanted: those that are to come; entire: they are all that is needed for whole tensors. moved: bytes that came so
    far, in whole chunks or not: a sign of life.
    """

    def __init__(self, version: int, key: str):
        self.version, self.key = version, key
        self.parts: dict[int, Part] = {}
        self.packed: dict[int, bytes] = {}
        self.memory: dict[int, numpy.ndarray] = {}
        self.have: dict[int, numpy.ndarray] = {}
        self.wanted: dict[int, numpy.ndarray] = {}
        self.claimed: dict[int, numpy.ndarray] = {}
        self.changed = threading.Condition()  # re-entrant
        self.count = self.moved = 0
        self.entire = True

    def add(self, number: int, part: Part, packed: bytes, memory: numpy.ndarray, full: bool = False) -> None:
        """A part's manifest and its memory; `full` if all of it is there."""
        with self.changed:
            self.parts[number], self.packed[number], self.memory[number] = part, packed, memory
            self.have[number], self.wanted[number] = numpy.full(len(part), full), numpy.full(len(part), full)
            self.claimed[number] = numpy.zeros(len(part), bool)
            self.count += len(part) if full else 0
            self.changed.notify_all()

    def want(self, boxes: Mapping[str, Box] | None) -> None:
        """Only what these boxes need, and all of the tensors that are not among them; None: everything.

        A box that several ranks published is wanted of the first of them.
        """
        self.entire, seen = not boxes, set[Box]()
        for number, part in self.parts.items():
            for content in part.contents:
                if content.box in seen:
                    continue
                seen.add(content.box)
                touched = part.touching(content, (boxes or {}).get(content.box.name, content.box))
                self.wanted[number][touched.start : touched.stop] = True

    def claim(self, offered: Marks) -> Chunk | None:
        """The first chunk that is wanted, offered, and nobody's task yet: now it is the caller's."""
        with self.changed:
            for number, marks in offered.items():
                free = self.wanted[number] & ~self.have[number] & ~self.claimed[number] & marks
                if free.any():
                    index = int(free.argmax())
                    self.claimed[number][index] = True
                    return number, index
        return None

    def give_up(self, chunk: Chunk) -> None:
        """Somebody else may fetch it."""
        with self.changed:
            self.claimed[chunk[0]][chunk[1]] = False
            self.changed.notify_all()

    def place(self, chunk: Chunk) -> numpy.ndarray:
        """[bytes] uint8 where a chunk lies, or will."""
        number, index = chunk
        return self.memory[number][self.parts[number].span(index)]

    def verify(self, chunk: Chunk) -> bool:
        """Whether what lies in the chunk's place is what was published. If so, it is offered from now on."""
        number, index = chunk
        if checksum(self.place(chunk)) != self.parts[number].sum(index):
            return False
        with self.changed:
            self.have[number][index] = True
            self.claimed[number][index] = False
            self.count += 1
            self.changed.notify_all()
        return True

    def has(self, chunk: Chunk) -> bool:
        number, index = chunk
        return number in self.have and 0 <= index < len(self.have[number]) and bool(self.have[number][index])

    def lacks(self, offered: Marks | None = None) -> bool:
        """Whether anything wanted is not here; with `offered`: anything of that, claimed or not."""
        with self.changed:
            return any((wanted & ~self.have[number] & (True if offered is None else offered.get(number, False))).any()
                       for number, wanted in self.wanted.items())

    @property
    def awaited(self) -> int:
        """How many chunks are to be here in the end."""
        return sum(int(wanted.sum()) for wanted in self.wanted.values())

    def take_over(self, old: Holding | None) -> int:
        """Copy the chunks that `old` has too: what did not change need not move. Returns their bytes."""
        if old is None:
            return 0
        known = {part.sum(index): (number, index) for number, part in old.parts.items()
                 for index in numpy.flatnonzero(old.have[number]).tolist()}
        copied = 0
        for number, part in self.parts.items():
            for index in numpy.flatnonzero(self.wanted[number] & ~self.have[number]).tolist():
                same = known.get(part.sum(index))
                if same is None or len(old.place(same)) != len(self.place((number, index))):
                    continue
                memoryview(self.place((number, index)))[:] = memoryview(old.place(same))
                copied += len(self.place((number, index))) if self.verify((number, index)) else 0
        return copied


def packed(marks: Marks) -> dict[int, bytes]:
    return {number: numpy.packbits(each).tobytes() for number, each in marks.items()}


def unpacked(marks: Mapping[int, bytes], head: Head) -> Marks:
    return {number: numpy.unpackbits(numpy.frombuffer(each, numpy.uint8), count=head.shares[number].chunks).astype(bool)
            for number, each in marks.items()}
