"""The state after the last two steps, in host memory that outlives the worker (RobustRL §2.3).

Each rank copies its own shards, in a thread: weights do not change before the next update, and only that waits for the
copy. The memory belongs to the seat, so that a worker that dies leaves it behind, and the next one reads it where no
disk is asked. Two slots take turns: while one is written the other is whole. A third takes part where a write to disk
from one of them lasts longer than a step.

    bytes
    8     n, the length of the header; 0 while the slot is written
    8     where all of it ends
    16    xxh3 of what follows, with n as its seed
    n     msgpack: step, progress, tensors: [path, dtype, shape, offset]
    …     the tensors' bytes, from the next multiple of 64 on
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgpack
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from distflow.schema.errors import CheckpointError

_LENGTH, _SUM, _HEAD, _ALIGNED = 8, 16, 32, 64
Path = tuple[str, ...]


class Slot:
    """Memory without a name, which processes that are forked from this one share."""

    def __init__(self) -> None:
        self.file = os.memfd_create("snapshot", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        self.map: mmap.mmap | None = None
        self.step: int | None = None
        """Of what this process has written to it."""

    def memory(self, size: int = 0) -> mmap.mmap | None:
        """At least `size` bytes; None if nothing was ever written."""
        have = os.fstat(self.file).st_size
        if have < size:
            os.ftruncate(self.file, have := size)
        if have and (self.map is None or len(self.map) < have):
            self.map = mmap.mmap(self.file, have)
        return self.map

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
        memory[_HEAD : _HEAD + len(packed)] = packed
        memory[_LENGTH:_HEAD] = end.to_bytes(_LENGTH, "little") + _sum(memory, len(packed), end)
        memory[:_LENGTH] = len(packed).to_bytes(_LENGTH, "little")  # from here on it counts

    def read(self) -> tuple[dict[str, Any], Tensor] | None:
        """The header and the bytes ([size] uint8) of the tensors; None if the slot is not whole."""
        memory = self.memory()
        if memory is None:
            return None
        length, end = (int.from_bytes(memory[at : at + _LENGTH], "little") for at in (0, _LENGTH))
        if not length or not _start(length) <= end <= len(memory) or _sum(memory, length, end) != memory[_SUM:_HEAD]:
            return None
        header = msgpack.unpackb(memory[_HEAD : _HEAD + length])
        return header, torch.frombuffer(memory, dtype=torch.uint8)[_start(length) : end]

    @property
    def age(self) -> int:
        """The step of what is in it; -1 if nothing whole is."""
        if self.step is None:
            self.step = found[0]["step"] if (found := self.read()) else -1
        return self.step


class Snapshots:
    """One rank's slots; one is enough for what is only written to disk."""

    def __init__(self, slots: int = 3) -> None:
        self.slots = tuple(Slot() for _ in range(slots))
        self.newest: Slot | None = None
        self.held: Slot | None = None
        """One that must stay as it is."""
        self.copying: Future[None] | None = None

    def begin(self, step: int, state: Mapping[str, Any], progress: dict[str, Any]) -> int:
        """Begin to copy this rank's part of the state after `step` steps, which must not change before `wait` has
        returned; returns the bytes.

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
        header = {"step": step, "progress": progress, "tensors": leaves}
        self.wait()
        self.newest = min([slot for slot in self.slots if slot is not self.held][:2], key=lambda slot: slot.age)
        self.newest.step = step
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

    def steps(self) -> list[int]:
        """Of the whole copies, oldest first. One that was changed since it was made is passed over."""
        return sorted(found[0]["step"] for slot in self.slots if (found := slot.read()) is not None)

    def corrupt(self) -> None:
        """Change a byte of the newest copy, to see that this is noticed."""
        self.wait()
        found = {read[0]["step"]: slot for slot in self.slots if (read := slot.read()) is not None}
        if found:
            newest = found[max(found)]
            newest.memory()[_HEAD] ^= 0xFF
            newest.step = -1

    @torch.no_grad()
    def load(self, step: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy back into the tensors of `state`, which has the form that was saved, and return the progress.

        Raises:
            CheckpointError: the copy is of something else.
        """
        header, body = next(found for slot in self.slots if (found := slot.read()) and found[0]["step"] == step)
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
    return -(-(_HEAD + length) // _ALIGNED) * _ALIGNED


def _sum(memory: mmap.mmap, length: int, end: int) -> bytes:
    return xxhash.xxh3_128_digest(memoryview(memory)[_HEAD:end], seed=length)
