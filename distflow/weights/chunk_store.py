"""Weights that have come, as tensors: whole ones, or the boxes that another layout wants.

A version of weights as far as this process has it: what the trainer serves, and what a puller fills and relays.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy
import torch
import xxhash
from torch import Tensor

from distflow.weights.errors import WeightsError
from distflow.weights.manifest import Chunk, PublishedVersion, RankManifest, Run, SliceEntry, checksum
from distflow.weights.shard_slice import ShardSlice

Marks = Mapping[int, numpy.ndarray]
"""By part: [chunks] bool."""


class ChunkStore:
    """Chunks come in from one side and go out at the other at the same time.

    memory: by part [bytes] uint8, as soon as it is settled where the part lies: in this process's own memory, or in a
    source's. have: the chunks that are here and verified. wanted: those that are to come; entire: they are all that is
    needed for whole tensors. moved: bytes that came so far, in whole chunks or not: a sign of life. unchanged: bytes
    that were taken over from another version.
    """

    def __init__(self, version: int, key: str):
        self.version, self.key = version, key
        self.parts: dict[int, RankManifest] = {}
        self.packed: dict[int, bytes] = {}
        self.memory: dict[int, numpy.ndarray] = {}
        self.shown: set[int] = set()
        """The parts that lie in a source's memory, which this process does not write to."""
        self.have: dict[int, numpy.ndarray] = {}
        self.wanted: dict[int, numpy.ndarray] = {}
        self.claimed: dict[int, numpy.ndarray] = {}
        self.changed = threading.Condition()  # re-entrant
        self.count = self.moved = self.unchanged = 0
        self.entire = True

    def add(self, number: int, part: RankManifest, packed: bytes, memory: numpy.ndarray | None = None) -> None:
        """A part's manifest; and its memory, if all of it is there."""
        full = memory is not None
        with self.changed:
            self.parts[number], self.packed[number] = part, packed
            if memory is not None:
                self.memory[number] = memory
            self.have[number], self.wanted[number] = numpy.full(len(part), full), numpy.full(len(part), full)
            self.claimed[number] = numpy.zeros(len(part), bool)
            self.count += len(part) if full else 0
            self.changed.notify_all()

    def want(self, boxes: Mapping[str, ShardSlice] | None) -> None:
        """Only what these boxes need, and all of the tensors that are not among them; None: everything.

        A box that several ranks published is wanted of the first of them.
        """
        self.entire, seen = not boxes, set[ShardSlice]()
        for number, part in self.parts.items():
            for content in part.contents:
                if content.box in seen:
                    continue
                seen.add(content.box)
                touched = part.touching(content, (boxes or {}).get(content.box.name, content.box))
                self.wanted[number][touched.start : touched.stop] = True

    def settle(self, number: int, shown: numpy.ndarray | None, room: Callable[[int], numpy.ndarray]) -> bool:
        """See that a part has memory to which chunks can come from a source: that which the source itself has `shown`,
        if nothing of the part is here yet; else `room` of this process's own, with all that is here already.

        Returns whether such room is new.
        """
        old = self.memory.get(number)
        if shown is not None and not self.have[number].any():
            with self.changed:
                self.memory[number] = shown
                self.shown.add(number)
            return False
        if old is not None and (number not in self.shown or _is_same(old, shown)):
            return False
        own = room(self.parts[number].size)
        for index in numpy.flatnonzero(self.have[number]).tolist():
            numpy.copyto(own[self.parts[number].span(index)], self.place((number, index, 1)))
        with self.changed:
            self.memory[number] = own
            self.shown.discard(number)
        return True

    def free(self, offered: Marks) -> Marks:
        """What is wanted, offered, and nobody's task yet, of the parts that have such chunks."""
        with self.changed:
            found = {number: self.wanted[number] & ~self.have[number] & ~self.claimed[number] & marks
                     for number, marks in offered.items()}
            return {number: marks for number, marks in found.items() if marks.any()}

    def claim(self, offered: Marks, size: int) -> Run | None:
        """The first chunks that are `free`, as many as lie together, up to `size` bytes: now they are the caller's."""
        with self.changed:
            for number, free in self.free(offered).items():
                first, most = int(free.argmax()), max(1, size // self.parts[number].chunk)
                row = free[first : first + most]
                count = len(row) if row.all() else int(row.argmin())
                self.claimed[number][first : first + count] = True
                return number, first, count
        return None

    def give_up(self, run: Run) -> None:
        """Somebody else may fetch what has not come."""
        number, first, count = run
        with self.changed:
            self.claimed[number][first : first + count] = False
            self.changed.notify_all()

    def place(self, run: Run) -> numpy.ndarray:
        """[bytes] uint8 where chunks lie, or will."""
        number, first, count = run
        return self.memory[number][self.parts[number].span(first, count)]

    def verify(self, chunk: Chunk, found: bytes) -> bool:
        """Whether what came, with the checksum `found`, is what was published. If so, it is offered from now on."""
        number, index = chunk
        good = found == self.parts[number].sum(index)
        with self.changed:
            self.have[number][index] |= good
            self.claimed[number][index] = False
            self.count += good
            self.changed.notify_all()
        return good

    def has(self, run: Run) -> bool:
        number, first, count = run
        return number in self.have and 0 <= first < first + count <= len(self.have[number]) and \
            bool(self.have[number][first : first + count].all())

    def lacks(self, offered: Marks | None = None) -> bool:
        """Whether anything wanted is not here; with `offered`: anything of that, claimed or not."""
        with self.changed:
            return any((wanted & ~self.have[number] & (True if offered is None else offered.get(number, False))).any()
                       for number, wanted in self.wanted.items())

    @property
    def awaited(self) -> int:
        """How many chunks are to be here in the end."""
        return sum(int(wanted.sum()) for wanted in self.wanted.values())

    def take_over(self, number: int, old: ChunkStore) -> None:
        """Copy the chunks of a part that `old` has too: what did not change need not move."""
        part, known = self.parts[number], old.sums
        for index in numpy.flatnonzero(self.wanted[number] & ~self.have[number]).tolist():
            place, same = self.place((number, index, 1)), known.get(part.sum(index))
            if same is not None and len(old.place(same)) == len(place):
                numpy.copyto(place, old.place(same))
                with self.changed:
                    self.unchanged += len(place) if self.verify((number, index), checksum(place)) else 0

    @functools.cached_property
    def sums(self) -> dict[bytes, Run]:
        """Where chunks are that are here, by their checksums; of a version that is whole."""
        return {part.sum(index): (number, index, 1) for number, part in self.parts.items()
                for index in numpy.flatnonzero(self.have[number]).tolist()}


class IncomingChunks:
    """A run of chunks that is coming in: each is verified when its last byte is there, still in the cache.

    good: how many chunks were right. bad: called with each chunk that was not.
    """

    def __init__(self, holding: ChunkStore, run: Run, bad: Callable[[Chunk], None]):
        self.holding, self.bad, self.good = holding, bad, 0
        self.part, self.index, _ = run
        self.memory, self.filled = memoryview(holding.place(run)), 0
        self.chunk = holding.parts[self.part].chunk
        self.state = xxhash.xxh3_128()

    def moved(self, count: int) -> None:
        """So many bytes more have come."""
        self.holding.moved += count
        end = self.filled + count
        while self.filled < end:
            stop = min(end, len(self.memory), (self.filled // self.chunk + 1) * self.chunk)
            self.state.update(self.memory[self.filled : stop])
            self.filled = stop
            if stop % self.chunk == 0 or stop == len(self.memory):
                self._verify()

    def _verify(self) -> None:
        chunk = self.part, self.index
        if self.holding.verify(chunk, self.state.digest()):
            self.good += 1
        else:
            self.bad(chunk)
        self.state.reset()
        self.index += 1


def _is_same(memory: numpy.ndarray, other: numpy.ndarray | None) -> bool:
    return other is not None and memory.ctypes.data == other.ctypes.data


def packed(marks: Marks) -> dict[int, bytes]:
    return {number: numpy.packbits(each).tobytes() for number, each in marks.items()}


def unpacked(marks: Mapping[int, bytes], head: PublishedVersion) -> Marks:
    return {number: numpy.unpackbits(numpy.frombuffer(each, numpy.uint8), count=head.shares[number].chunks).astype(bool)
            for number, each in marks.items()}


class Weights:
    """A version, whole and verified, in this process's host memory, which stays as it is while this object or a tensor
    of it lives.

    wanted: the boxes that were pulled, by name; tensors that are not among them are whole.
    """

    def __init__(self, holding: ChunkStore, wanted: Mapping[str, ShardSlice]):
        self.holding, self.wanted = holding, wanted
        self.found: dict[str, list[tuple[int, SliceEntry]]] = {}
        for number, part in holding.parts.items():
            for content in part.contents:
                self.found.setdefault(content.box.name, []).append((number, content))

    @property
    def version(self) -> int:
        return self.holding.version

    @property
    def key(self) -> str:
        """Of the version and the start of the trainer that published it, which may publish a version again."""
        return self.holding.key

    @property
    def nbytes(self) -> int:
        """Of all tensors, as they were pulled."""
        return sum(self.box(name).nbytes for name in self.found)

    def names(self) -> list[str]:
        """In the model's order."""
        return sorted(self.found, key=lambda name: self.found[name][0][1].order)

    def box(self, name: str) -> ShardSlice:
        """What is here of a tensor."""
        first = self.found[name][0][1].box
        return self.wanted.get(name, ShardSlice.whole(name, first.shape, first.dtype))

    def tensors(self, into: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor by name, on the CPU; those that lie in one piece are views of staging memory, which other
        processes may use too, and must not be changed.

        Args:
            into: tensors of the right shapes, of any device or dtype, such as an engine's parameters: what is named
                there is written there, without a copy in between.

        Raises:
            WeightsError: boxes do not cover a tensor, or `into` has another shape for it.
        """
        for name in self.names():
            target = (into or {}).get(name)
            yield name, self._one(name, target)

    @torch.no_grad()
    def _one(self, name: str, target: Tensor | None) -> Tensor:
        box, pieces = self.box(name), self._pieces(name)
        if target is not None and tuple(target.shape) != box.size:
            raise WeightsError(f"tensor `{name}` comes as {list(box.size)} and was to be written into one of "
                               f"{list(target.shape)}")
        if sum(common.numel for common, _ in pieces) != box.numel:
            raise WeightsError(f"the boxes that were published of tensor `{name}` {list(box.shape)} do not cover what "
                               "is wanted of it exactly once; did all ranks publish the same tensors?")
        if target is None:
            if len(pieces) == 1 and pieces[0][1].is_contiguous():
                return pieces[0][1]
            target = torch.empty(box.size, dtype=box.dtype)
        for common, piece in pieces:
            target[common.within(box)].copy_(piece)
        return target

    def _pieces(self, name: str) -> list[tuple[ShardSlice, Tensor]]:
        """What each published box has of the wanted one; of boxes that several ranks published, one."""
        wanted, pieces = self.box(name), {}
        for number, (box, offset, _) in self.found[name]:
            common = box.overlap(wanted)
            if common is not None and box not in pieces:
                memory = torch.from_numpy(self.holding.memory[number])[offset : offset + box.nbytes]
                pieces[box] = common, memory.view(box.dtype).view(box.size)[common.within(box)]
        return list(pieces.values())
