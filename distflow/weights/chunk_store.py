"""Chunk store: received, verified and served chunks of one version of the weights, and tensors made of them.

    ChunkStore       buffers and chunk masks of a version; filled from one side and served from the other at once
    IncomingChunks   a run of chunks under way, verified chunk by chunk
    Weights          a complete version as tensors
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy
import torch
import xxhash
from torch import Tensor

from distflow.rpc.packing import tensor_at
from distflow.weights.errors import WeightsError
from distflow.weights.fingerprint import Sums, sums_of
from distflow.weights.manifest import Chunk, PublishedVersion, RankManifest, Run, SliceEntry, checksum
from distflow.weights.shard_slice import Reads, ShardSlice

ChunkMasks = Mapping[int, numpy.ndarray]
"""By part: [chunks] bool."""


class ChunkStore:
    """Chunks of one version of the weights.

    memory: by part [bytes] uint8, as soon as it is decided where the part lies: in memory of this process, or of a
    source. have: verified chunks. wanted: needed chunks. moved: bytes received so far, verified or not. unchanged:
    bytes taken from another version. held_key: the key, and what is wanted of the version.
    """

    def __init__(self, version: int, key: str, held_key: str = ""):
        self.version, self.key, self.held_key = version, key, held_key or key
        self.parts: dict[int, RankManifest] = {}
        self.packed: dict[int, bytes] = {}
        self.memory: dict[int, numpy.ndarray] = {}
        self.mapped: set[int] = set()
        """Parts in a source's memory, which this process does not write to."""
        self.have: dict[int, numpy.ndarray] = {}
        self.wanted: dict[int, numpy.ndarray] = {}
        self.claimed: dict[int, numpy.ndarray] = {}
        self.changed = threading.Condition()  # re-entrant
        self.count = self.moved = self.unchanged = 0

    def add(self, number: int, part: RankManifest, packed: bytes, memory: numpy.ndarray | None = None) -> None:
        full = memory is not None
        with self.changed:
            self.parts[number], self.packed[number] = part, packed
            if memory is not None:
                self.memory[number] = memory
            self.have[number], self.wanted[number] = numpy.full(len(part), full), numpy.full(len(part), full)
            self.claimed[number] = numpy.zeros(len(part), bool)
            self.count += len(part) if full else 0
            self.changed.notify_all()

    def want(self, reads: Reads) -> None:
        """Want the chunks of slices that are read: of all, where the sums that prove an engine must be made of them.
        One that several ranks published is wanted of the first of them."""
        kinds = {content.slice.dtype for part in self.parts.values() for content in part.contents}
        boxes, seen = reads.boxes if self.parts[0].values and kinds == {reads.dtype} else {}, set[ShardSlice]()
        for number, part in self.parts.items():
            for content in part.contents:
                if content.slice not in seen:
                    seen.add(content.slice)
                    for span in part.chunks_of(content, boxes.get(content.slice.name)):
                        self.wanted[number][span] = True

    def place_part(self, number: int, mapped: numpy.ndarray | None, offered: numpy.ndarray,
                   allocate: Callable[[int], numpy.ndarray]) -> bool:
        """Decide where a part lies before chunks of it are fetched: in the source's own memory (`mapped`) if nothing of
        the part is here yet, or only chunks that the source has too, in memory of one that was left: they are verified
        again then. Else in memory of this process (`allocate`), with all chunks that are here already. Return whether
        memory was allocated."""
        with self.changed:
            old, have = self.memory.get(number), self.have[number]
            if old is not None and mapped is not None and old.ctypes.data == mapped.ctypes.data:
                return False
            if mapped is not None and not (have & ~offered if number in self.mapped else have).any():
                self.count -= int(have.sum())
                have[:] = False
                self.memory[number] = mapped
                self.mapped.add(number)
                return False
            if old is not None and number not in self.mapped:
                return False
            own = allocate(self.parts[number].size)
            for index in numpy.flatnonzero(have).tolist():
                numpy.copyto(own[self.parts[number].span(index)], self.view((number, index, 1)))
            self.memory[number] = own
            self.mapped.discard(number)
            return True

    def is_ahead(self, number: int, mapped: numpy.ndarray, offered: numpy.ndarray) -> bool:
        """Return whether chunks of a part are in memory of a source that was left, and another, with the part in
        `mapped`, does not have all of them."""
        return number in self.mapped and self.memory[number].ctypes.data != mapped.ctypes.data and \
            bool((self.have[number] & ~offered).any())

    def unclaimed(self, offered: ChunkMasks) -> ChunkMasks:
        with self.changed:
            masks = {number: self.wanted[number] & ~self.have[number] & ~self.claimed[number] & mask
                     for number, mask in offered.items()}
            return {number: mask for number, mask in masks.items() if mask.any()}

    def claim(self, offered: ChunkMasks, size: int) -> Run | None:
        """Claim for the caller the first `unclaimed` chunks, as many as lie together, up to `size` bytes."""
        with self.changed:
            for number, unclaimed in self.unclaimed(offered).items():
                first, most = int(unclaimed.argmax()), max(1, size // self.parts[number].chunk)
                row = unclaimed[first : first + most]
                count = len(row) if row.all() else int(row.argmin())
                self.claimed[number][first : first + count] = True
                return number, first, count
        return None

    def _claim_one(self, number: int, index: int) -> bool:
        with self.changed:
            free = not self.have[number][index] and not self.claimed[number][index]
            self.claimed[number][index] |= free
            return free

    def unclaim(self, run: Run) -> None:
        number, first, count = run
        with self.changed:
            self.claimed[number][first : first + count] = False
            self.changed.notify_all()

    def view(self, run: Run) -> numpy.ndarray:
        number, first, count = run
        return self.memory[number][self.parts[number].span(first, count)]

    def verify(self, chunk: Chunk, found: bytes) -> bool:
        """Return whether a chunk with the checksum `found` is the published one. If so, it is served from now on."""
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

    def is_missing(self, offered: ChunkMasks | None = None) -> bool:
        """Return whether a wanted chunk is missing; with `offered`, whether one of those is, claimed or not."""
        with self.changed:
            return any((wanted & ~self.have[number] & (True if offered is None else offered.get(number, False))).any()
                       for number, wanted in self.wanted.items())

    @property
    def expected(self) -> int:
        return sum(int(wanted.sum()) for wanted in self.wanted.values())

    def copy_unchanged(self, number: int, old: ChunkStore) -> None:
        """Copy the chunks of a part that `old` has too."""
        part, known = self.parts[number], old.checksums
        for index in numpy.flatnonzero(self.wanted[number] & ~self.have[number]).tolist():
            target, same = self.view((number, index, 1)), known.get(part.sum(index))
            if same is not None and len(old.view(same)) == len(target) and self._claim_one(number, index):
                numpy.copyto(target, old.view(same))
                with self.changed:
                    self.unchanged += len(target) if self.verify((number, index), checksum(target)) else 0

    @functools.cached_property
    def checksums(self) -> dict[bytes, Run]:
        return {part.sum(index): (number, index, 1) for number, part in self.parts.items()
                for index in numpy.flatnonzero(self.have[number]).tolist()}


class IncomingChunks:
    """Run of chunks that is being received; each is verified when its last byte is there, still in the CPU's cache.
    good: number of chunks that were right. bad: called with each chunk that was not."""

    def __init__(self, chunks: ChunkStore, run: Run, bad: Callable[[Chunk], None]):
        self.chunks, self.bad, self.good = chunks, bad, 0
        self.part, self.index, _ = run
        self.memory, self.filled = chunks.view(run).data, 0
        self.chunk = chunks.parts[self.part].chunk
        self.state = xxhash.xxh3_128()

    def advance(self, count: int) -> None:
        """Continue by `count` bytes of chunks."""
        with self.chunks.changed:
            self.chunks.moved += count
        end = self.filled + count
        while self.filled < end:
            stop = min(end, len(self.memory), (self.filled // self.chunk + 1) * self.chunk)
            self.state.update(self.memory[self.filled : stop])
            self.filled = stop
            if stop % self.chunk == 0 or stop == len(self.memory):
                self._verify()

    def _verify(self) -> None:
        chunk = self.part, self.index
        if self.chunks.verify(chunk, self.state.digest()):
            self.good += 1
        else:
            self.bad(chunk)
        self.state.reset()
        self.index += 1


def pack_masks(masks: ChunkMasks) -> dict[int, bytes]:
    return {number: numpy.packbits(each).tobytes() for number, each in masks.items()}


def unpack_masks(masks: Mapping[int, bytes], head: PublishedVersion) -> ChunkMasks:
    return {number: numpy.unpackbits(numpy.frombuffer(each, numpy.uint8), count=head.shares[number].chunks).astype(bool)
            for number, each in masks.items()}


class Weights:
    """Complete, verified version in this process's host memory, which stays unchanged while this object or a tensor of
    it lives."""

    def __init__(self, chunks: ChunkStore):
        self.chunks = chunks
        self.found: dict[str, list[tuple[int, SliceEntry]]] = {}
        for number, part in chunks.parts.items():
            for content in part.contents:
                self.found.setdefault(content.slice.name, []).append((number, content))

    @property
    def version(self) -> int:
        return self.chunks.version

    @property
    def key(self) -> str:
        """Identity of the version: its number, and the attempt of the trainer, which may publish a number again."""
        return self.chunks.key

    @property
    def values(self) -> Sums:
        """Sums of the weights in the dtype in which they were published; empty if the trainer has given none."""
        return self.chunks.parts[0].values

    def values_in(self, dtype: torch.dtype) -> Sums:
        """Return the published sums; for an engine of another dtype, those of these weights in it."""
        travelled = {content.slice.dtype for pieces in self.found.values() for _, content in pieces}
        return self.values if self.values and travelled == {dtype} else sums_of(
            ((name, tensor.to(dtype)) for name, tensor in self.tensors()), dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor by name, on the CPU, perhaps a view of memory that other processes use: it must not be
        changed. What was not to be read has any values. Raises `WeightsError` if slices do not cover a tensor."""
        for name in sorted(self.found, key=lambda name: self.found[name][0][1].order):
            yield name, self._tensor(name)

    @torch.no_grad()
    def _tensor(self, name: str) -> Tensor:
        first, pieces = self.found[name][0][1].slice, {content.slice: None for _, content in self.found[name]}
        odd = any(each.shape != first.shape for each in pieces)
        if odd or sum(each.numel for each in pieces) != math.prod(first.shape):
            raise WeightsError(f"the slices published of tensor `{name}` {list(first.shape)} do not cover it exactly "
                               "once; did all ranks publish the same tensors?")
        here = self._slices(name)
        if len(pieces) == len(here) == 1:
            return here[first]
        whole = torch.empty(first.shape, dtype=first.dtype)
        for shard_slice, piece in here.items():
            whole[shard_slice.index].copy_(piece)
        return whole

    def _slices(self, name: str) -> dict[ShardSlice, Tensor]:
        """Return each slice once of which something is here, also if several ranks published it, with its contents."""
        pieces = dict[ShardSlice, Tensor]()
        for number, content in self.found[name]:
            (shard_slice, offset, _), (span,) = content, self.chunks.parts[number].chunks_of(content)
            if shard_slice not in pieces and self.chunks.have[number][span].any():
                memory = torch.from_numpy(self.chunks.memory[number])
                pieces[shard_slice] = tensor_at(memory, offset, shard_slice.size, shard_slice.dtype)
        return pieces
