"""The state after the last two steps, in host memory that outlives the worker (RobustRL §2.3).

Each rank copies its own shards, in a thread: weights do not change before the next update, and only that waits for the
copy. The memory belongs to the seat, so that a worker that dies leaves it behind, and the next one reads it where no
disk is asked. Two slots take turns: while one is written the other is whole. Others take part where a write to disk
from one of them, or its way to another machine (`neighbour.py`), lasts longer than a step.

    bytes
    8     n, the length of the header; 0 while the slot is written
    8     where all of it ends
    16    xxh3 of what follows, with n as its seed
    n     msgpack: piece, progress, tensors: [path, dtype, shape, offset]
    …     the tensors' bytes, from the next multiple of 64 on
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import msgpack
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from distflow.errors import CheckpointError

_LENGTH, _SUM, _ALIGNED = 8, 16, 64
_UNUSED = 8
"""Copies that a slot is not needed for before its memory is given back."""
HEAD = 32
"""Bytes before the header."""
Path = tuple[str, ...]
Moment = tuple[int, int, int]
"""Of a state: the era and the life that made it, and the steps that were done. A later one is greater."""


class Piece(NamedTuple):
    """What a copy is of: one of `ranks` ranks' part of the state of a moment. Steps that are done again by another life
    are other moments: their pieces do not fit together."""

    era: int
    life: int
    step: int
    rank: int
    ranks: int

    @property
    def moment(self) -> Moment:
        return self[:3]


class Slot:
    """Memory without a name, which processes that are forked from this one share."""

    def __init__(self) -> None:
        self.file = os.memfd_create("snapshot", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        self.map: mmap.mmap | None = None
        self.piece: Piece | None = None
        """What this process has last written to it, or found there."""
        self.unused = 0
        """Copies that were begun since it was needed."""

    def memory(self, size: int = 0) -> mmap.mmap | None:
        """At least `size` bytes; None if nothing was ever written."""
        have = os.fstat(self.file).st_size
        if have < size:
            os.ftruncate(self.file, have := size)
        if have != (0 if self.map is None else len(self.map)):
            self.map = mmap.mmap(self.file, have) if have else None
        return self.map

    def clear(self) -> None:
        """Give its memory back. No process may be looking into it."""
        os.ftruncate(self.file, 0)
        self.map = self.piece = None

    @torch.no_grad()
    def write(self, header: dict[str, Any], tensors: list[tuple[int, Tensor]], size: int) -> None:
        """`tensors`: each with its place among `size` bytes."""
        packed = msgpack.packb(header)
        start = _start(len(packed))
        end = start + size
        memory = self.memory(end)
        memory[:_LENGTH] = bytes(_LENGTH)
        body = torch.frombuffer(memory, dtype=torch.uint8)[start:]
        for place, tensor in tensors:
            body[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        memory[HEAD : HEAD + len(packed)] = packed
        memory[_LENGTH:HEAD] = end.to_bytes(_LENGTH, "little") + _sum(memory, len(packed), end)
        memory[:_LENGTH] = len(packed).to_bytes(_LENGTH, "little")  # from here on it counts

    def read(self) -> tuple[dict[str, Any], Tensor] | None:
        """The header and the bytes ([size] uint8) of the tensors; None if the slot is not whole."""
        memory = self.memory()
        if memory is None:
            return None
        length, end = (int.from_bytes(memory[at : at + _LENGTH], "little") for at in (0, _LENGTH))
        if not length or not _start(length) <= end <= len(memory) or _sum(memory, length, end) != memory[_SUM:HEAD]:
            return None
        header = msgpack.unpackb(memory[HEAD : HEAD + length])
        self.piece = Piece(*header["piece"])
        return header, torch.frombuffer(memory, dtype=torch.uint8)[_start(length) : end]

    def image(self) -> tuple[bytes, memoryview]:
        """All that is in it, as `paste` takes it: the first bytes, and the others. Only of what is whole."""
        memory = self.memory()
        head = memory[:HEAD]
        return head, memoryview(memory)[HEAD : end_of(head)]

    def paste(self, head: bytes, fill: Callable[[memoryview], Any]) -> bool:
        """Take what another slot has: its first bytes, and the others by `fill`, which writes them where it is told to.
        Whether it came whole; while it comes, and if it does not, nothing is here."""
        end = end_of(head)
        memory = self.memory(end)
        self.piece = None
        memory[:_LENGTH] = bytes(_LENGTH)
        fill(memoryview(memory)[HEAD:end])
        memory[_LENGTH:HEAD] = head[_LENGTH:]
        memory[:_LENGTH] = head[:_LENGTH]
        return self.read() is not None


class Snapshots:
    """One rank's slots; one is enough for what is only written to disk. Those that are never used take no memory."""

    def __init__(self, slots: int = 5) -> None:
        self.slots = tuple(Slot() for _ in range(slots))
        self.newest: Slot | None = None
        self.held: list[Slot] = []
        """Those that must stay as they are, beside the newest."""
        self.copying: Future[None] | None = None

    def begin(self, piece: Piece, state: Mapping[str, Any], progress: dict[str, Any]) -> int:
        """Begin to copy this rank's part of the state of a moment, which must not change before `wait` has returned;
        returns the bytes.

        Args:
            state: nested mappings of DTensors and tensors.
            progress: what is alike on all ranks, for msgpack.
        """
        leaves, tensors, size = [], [], 0
        for path, local in _leaves(state):
            leaves.append([path, str(local.dtype), list(local.shape), size])
            if local.nbytes:
                tensors.append((size, local))
            size += -(-local.nbytes // _ALIGNED) * _ALIGNED
        header = {"piece": list(piece), "progress": progress, "tensors": leaves}
        self.wait()
        before, self.newest = self.newest, self._free()
        self._give_back({before, self.newest, *self.held})
        self.newest.piece = piece
        thread = ThreadPoolExecutor(1, "snapshot")
        self.copying = thread.submit(self.newest.write, header, tensors, size)
        thread.shutdown(wait=False)
        return size

    def wait(self) -> None:
        """Until the copy that was begun is whole."""
        if self.copying is not None:
            self.copying.result()

    def view(self, slot: Slot, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """What is in a slot, in the form of the state that it is a copy of; nothing is copied. None if it is not whole,
        as when it was changed since."""
        if (found := slot.read()) is None:
            return None
        header, body = found
        places = {tuple(path): place for path, _, _, place in header["tensors"]}
        return _view(state, body, places)

    def whole(self) -> dict[Piece, Slot]:
        """What is there, oldest first. A copy that was changed since it was made is passed over."""
        with ThreadPoolExecutor(len(self.slots) or 1) as threads:  # newer xxhash lets go of Python's lock
            read = threads.map(lambda slot: slot.read(), self.slots)
            found = {slot.piece: slot for slot, there in zip(self.slots, read) if there is not None}
        return {piece: found[piece] for piece in sorted(found)}

    def clear(self) -> None:
        """Give all memory back."""
        for slot in self.slots:
            slot.clear()

    def corrupt(self) -> None:
        """Change a byte of the newest copy, to see that this is noticed."""
        self.wait()
        if found := self.whole():
            found[max(found)].memory()[HEAD] ^= 0xFF
            self.newest = None

    def _free(self) -> Slot:
        """One that may be written to."""
        newest = self.newest or max(self.whole().items(), default=(None, None))[1]
        return next((slot for slot in self.slots if slot is not newest and slot not in self.held), self.slots[0])

    def _give_back(self, needed: set[Slot | None]) -> None:
        """The memory of those that have not been needed for a while, as when what held them was slow once."""
        for slot in self.slots:
            slot.unused = 0 if slot in needed else slot.unused + 1
            if slot.unused == _UNUSED:
                slot.clear()

    @torch.no_grad()
    def load(self, slot: Slot, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy what is in a slot back into the tensors of `state`, which has the form that was saved, and return the
        progress.

        Raises:
            CheckpointError: the copy is of something else.
        """
        header, body = slot.read()
        step = slot.piece.step
        there = {tuple(path): (dtype, shape, place) for path, dtype, shape, place in header["tensors"]}
        asked = dict(_leaves(state))
        if there.keys() != asked.keys():
            odd = min(there.keys() ^ asked.keys())
            raise CheckpointError(f"the copy of step {step} is of another model or engine: they differ in "
                                  f"{'.'.join(odd)}")
        for path, local in asked.items():
            dtype, shape, place = there[path]
            if [dtype, shape] != [str(local.dtype), list(local.shape)]:
                raise CheckpointError(f"the copy of step {step} has {'.'.join(path)} as {dtype} {shape}, the worker as "
                                      f"{local.dtype} {list(local.shape)}")
            local.copy_(body[place : place + local.nbytes].view(local.dtype).view(local.shape))
        return header["progress"]


def _leaves(state: Mapping[str, Any] | Tensor, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(state, Mapping):
        for name, each in state.items():
            yield from _leaves(each, (*path, str(name)))
    else:
        yield path, state.to_local() if isinstance(state, DTensor) else state


def _view(state: Mapping[str, Any] | Tensor, body: Tensor, places: Mapping[Path, int], path: Path = ()) -> Any:
    if isinstance(state, Mapping):
        return {name: _view(each, body, places, (*path, str(name))) for name, each in state.items()}
    local = state.to_local() if isinstance(state, DTensor) else state
    place = places[path]
    copy = body[place : place + local.nbytes].view(local.dtype).view(local.shape)
    # not from_local, which would move it to the mesh's device
    return DTensor(copy, state._spec, requires_grad=False) if isinstance(state, DTensor) else copy


def _start(length: int) -> int:
    return -(-(HEAD + length) // _ALIGNED) * _ALIGNED


def end_of(head: bytes) -> int:
    """Where all of a slot with these first bytes ends."""
    return int.from_bytes(head[_LENGTH : 2 * _LENGTH], "little")


def _sum(memory: mmap.mmap, length: int, end: int) -> bytes:
    return xxhash.xxh3_128_digest(memoryview(memory)[HEAD:end], seed=length)
