"""Snapshots: the training state after the last two steps, in host memory that outlives the worker (RobustRL §2.3).

Each rank copies its own shard in a thread: weights do not change before the next update, and only that waits for the
copy. The memory belongs to the supervisor, so that the next worker finds what a dead one has left, without a disk. Two
slots take turns: while one is written the other is complete. Further slots are used while a slot is still written to
disk, or sent to another machine (`peer_replica.py`), for longer than a step.

    bytes of a record, which `seal` completes
    8     n, the length of the header; 0 while the record is written
    8     where all of it ends
    16    xxh3 of what follows, with n as its seed
    n     header, msgpack; of a snapshot: shard, progress, and the schema of the tensors, by their paths
    …     body, from the next multiple of 64 on: bytes of the schema's columns (`data/columns.py`)
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgpack
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from distflow.data.column_buffers import decode_tensors, tensor_entry
from distflow.data.columns import lay_out
from distflow.errors import CheckpointError
from distflow.rpc.messages import MACHINE_MEMORY
from distflow.rpc.packing import aligned
from distflow.weights.host_copy import HostCopy

_LENGTH, _SUM = 8, 16
_UNUSED = 8  # snapshots after which the memory of a slot that was not needed is returned to the system
HEAD = 32  # bytes before the header
_LIBC, _MADV_POPULATE_WRITE = ctypes.CDLL(None), 23
_POPULATE_THREADS, _POPULATE_BYTES = 8, 64 << 20  # at most, and of a call
StateId = tuple[int, int, int]
"""Identifies a state: the round and the attempt that made it, and the steps done. A later state is greater."""


class StateShard(NamedTuple):
    """Identifies the part of a state that one of `ranks` ranks has. A step that another attempt repeats gives another
    state: shards of the two do not fit together."""

    round: int
    attempt: int
    step: int
    rank: int
    ranks: int

    @property
    def state_id(self) -> StateId:
        return self[:3]


class Slot:
    """Anonymous memory for one shard, shared with processes that are forked from this one."""

    def __init__(self) -> None:
        self.file = os.memfd_create("snapshot", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        self.map: mmap.mmap | None = None
        self.shard: StateShard | None = None  # what this process has last written to the slot, or found there
        self.unused = 0  # snapshots begun since the slot was needed

    def memory(self) -> mmap.mmap | None:
        """Return the memory; None if nothing was ever written."""
        have = os.fstat(self.file).st_size
        return self.reserve(have) if have else None

    def reserve(self, size: int) -> mmap.mmap:
        """Return the memory, of at least `size` bytes. Raises OSError: the machine has less."""
        have = os.fstat(self.file).st_size
        if size > MACHINE_MEMORY:
            raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)} of {size} bytes")
        if have < size:
            os.ftruncate(self.file, size)
        if self.map is None or max(have, size) != len(self.map):
            self.map = mmap.mmap(self.file, max(have, size))
        if have < size:
            _populate(self.map, have)
        return self.map

    def clear(self) -> None:
        """Return the memory to the system. No process may have a view of it."""
        os.ftruncate(self.file, 0)
        self.map = self.shard = None

    @torch.no_grad()
    def write(self, header: dict[str, Any], tensors: list[tuple[int, Tensor]], size: int,
              copy: Callable[[Iterator[tuple[Tensor, Tensor]]], Iterator[None]]) -> None:
        """Write a shard. `tensors`: each with its offset in `size` bytes. `copy`: see `HostCopy.copy`."""
        packed = msgpack.packb(header) or b""
        start = body_start(len(packed))
        end = start + size
        memory = self.reserve(end)
        memory[:_LENGTH] = bytes(_LENGTH)
        body = torch.frombuffer(memory, dtype=torch.uint8)[start:]
        for _ in copy((body[offset : offset + tensor.nbytes], tensor) for offset, tensor in tensors):
            continue
        seal(memory, packed, end)

    def read(self) -> tuple[dict[str, Any], Tensor] | None:
        """Return the header and the bytes ([size] uint8) of the tensors; None if the slot is not complete."""
        memory = self.memory()
        if memory is None:
            return None
        try:
            if (record := read_record(memory)) is None:
                return None
            self.shard = StateShard(*map(int, record.header["shard"]))
        except (ValueError, TypeError, LookupError):  # another process has sent it
            return None
        return record.header, torch.frombuffer(memory, dtype=torch.uint8)[record.start : record.end]

    def content(self) -> tuple[bytes, memoryview]:
        """Return the content of a complete slot as `paste` takes it: the first bytes, and the others."""
        memory = self.reserve(HEAD)
        head = memory[:HEAD]
        return head, memoryview(memory)[HEAD : end_of(head)]

    def paste(self, head: bytes, fill: Callable[[memoryview], Any]) -> bool:
        """Take the content of another slot: its first bytes, and the others by `fill`, which writes them into the
        memory that it gets. Returns whether all arrived; until then the slot counts as empty."""
        end = end_of(head)
        memory = self.reserve(end)
        self.shard = None
        memory[:_LENGTH] = bytes(_LENGTH)
        fill(memoryview(memory)[HEAD:end])
        memory[_LENGTH:HEAD] = head[_LENGTH:]
        memory[:_LENGTH] = head[:_LENGTH]
        return self.read() is not None


class Snapshots:
    """One rank's slots. Checkpoints alone need one slot; slots that are never used take no memory."""

    def __init__(self, slots: int = 5) -> None:
        self.slots = tuple(Slot() for _ in range(slots))
        self.newest: Slot | None = None
        self.held: list[Slot] = []  # slots that must not be overwritten, beside the newest
        self.copying: Future[None] | None = None
        self.host_copy = HostCopy()

    def begin(self, shard: StateShard, state: Mapping[str, Any], progress: dict[str, Any]) -> int:
        """Begin to copy this rank's part of a state, which must not change until `wait` returns; return its bytes.

        Args:
            state: nested mappings of DTensors and tensors.
            progress: what is alike on all ranks, for msgpack.

        Raises:
            CheckpointError: the machine has no memory for it.
        """
        leaves = dict(_leaves(state))
        schema = [tensor_entry(path, local.dtype, local.shape) for path, local in leaves.items()]
        placed, size = lay_out(schema)
        tensors = [(begins[0], local) for (_, begins), local in zip(placed, leaves.values()) if local.nbytes]
        header = {"shard": list(shard), "progress": progress, "tensors": schema}
        self._require_room(size)
        self.wait()
        before, self.newest = self.newest, self._free_slot()
        self._release_unused({before, self.newest, *self.held})
        self.newest.shard = shard
        thread = ThreadPoolExecutor(1, "snapshot")
        copy = partial(self.host_copy.copy, values_ready=self.host_copy.record_event(tensor for _, tensor in tensors))
        self.copying = thread.submit(self.newest.write, header, tensors, size, copy)
        thread.shutdown(wait=False)
        return size

    def _require_room(self, size: int) -> None:
        """Refuse copies that cannot fit: they would be pushed out to disk, or the kernel would end a process."""
        ranks, copies = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), min(len(self.slots), 2)
        if ranks * copies * size > MACHINE_MEMORY:
            gib = 2**30
            raise CheckpointError(
                f"the states of {ranks} ranks, {size / gib:.1f} GiB each and {copies} times, do not fit the "
                f"{MACHINE_MEMORY / gib:.1f} GiB of host memory of this machine. Set  robust: {{snapshots: false}}  , "
                "which keeps one copy for checkpoints, or with one copy too many  checkpoint: {every: 0}")

    def wait(self) -> None:
        if self.copying is not None:
            self.copying.result()

    def view(self, slot: Slot, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a slot's content in the form of `state`, without a copy; None if incomplete, or changed since."""
        if (found := slot.read()) is None:
            return None
        header, body = found
        return _view(state, decode_tensors(header["tensors"], body))

    def complete(self) -> dict[StateShard, Slot]:
        """Return the complete slots, oldest first. One that was changed since it was written is passed over."""
        with ThreadPoolExecutor(len(self.slots) or 1) as threads:  # newer xxhash lets go of Python's lock
            read = threads.map(lambda slot: slot.read(), self.slots)
            found = {slot.shard: slot for slot, found in zip(self.slots, read)
                     if found is not None and slot.shard is not None}
        return {shard: found[shard] for shard in sorted(found)}

    def clear(self) -> None:
        for slot in self.slots:
            slot.clear()

    def corrupt(self) -> None:
        """Change a byte of the newest snapshot: the fault `corrupt`."""
        self.wait()
        if found := self.complete():
            found[max(found)].reserve(HEAD + 1)[HEAD] ^= 0xFF
            self.newest = None

    def _free_slot(self) -> Slot:
        newest = self.newest or max(self.complete().items(), default=(None, None))[1]
        return next((slot for slot in self.slots if slot is not newest and slot not in self.held), self.slots[0])

    def _release_unused(self, needed: set[Slot | None]) -> None:
        for slot in self.slots:
            slot.unused = 0 if slot in needed else slot.unused + 1
            if slot.unused == _UNUSED:
                slot.clear()

    @torch.no_grad()
    def load(self, slot: Slot, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the content of a slot into the tensors of `state` and return the progress. Raises CheckpointError: the
        snapshot is of another model or engine, or has changed since it was made."""
        if (content := slot.read()) is None:
            raise CheckpointError("the copy of the state in memory has changed since it was made")
        header, body = content
        step = StateShard(*header["shard"]).step
        found = decode_tensors(header["tensors"], body)
        asked = dict(_leaves(state))
        if found.keys() != asked.keys():
            odd = min(found.keys() ^ asked.keys())
            raise CheckpointError(f"the copy of step {step} is of another model or engine: they differ in "
                                  f"{odd}")
        for path, local in asked.items():
            copy = found[path]
            if (copy.dtype, copy.shape) != (local.dtype, local.shape):
                raise CheckpointError(f"the copy of step {step} has {path} as {copy.dtype} {list(copy.shape)}, the "
                                      f"worker as {local.dtype} {list(local.shape)}")
            local.copy_(copy)
        return header["progress"]


def _leaves(state: Mapping[str, Any] | Tensor, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the local tensors of a state by their paths, as in `actor.model.lm_head.weight`."""
    if isinstance(state, Mapping):
        for name, each in state.items():
            yield from _leaves(each, f"{path}.{name}" if path else str(name))
    else:
        yield path, state.to_local() if isinstance(state, DTensor) else state


def _view(state: Mapping[str, Any] | Tensor, tensors: Mapping[str, Tensor], path: str = "") -> Any:
    if isinstance(state, Mapping):
        return {name: _view(each, tensors, f"{path}.{name}" if path else str(name)) for name, each in state.items()}
    copy = tensors[path]
    # not from_local, which would move it to the mesh's device
    return DTensor(copy, state._spec, requires_grad=False) if isinstance(state, DTensor) else copy


def _populate(memory: mmap.mmap, start: int) -> None:
    """Allocate the pages of `memory` from `start` on, by several threads: one at a time, as it is written, a page takes
    ten times as long as its copy. Where the system cannot (before Linux 5.14) they are allocated that way."""
    first = ctypes.c_char.from_buffer(memory)
    threads = min(_POPULATE_THREADS, max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    starts = range(start - start % mmap.PAGESIZE, len(memory), _POPULATE_BYTES)
    with ThreadPoolExecutor(threads, "populate") as pool:
        for each in starts:
            pool.submit(_LIBC.madvise, ctypes.c_void_p(ctypes.addressof(first) + each),
                        ctypes.c_size_t(min(_POPULATE_BYTES, len(memory) - each)), _MADV_POPULATE_WRITE)


class Record(NamedTuple):
    """Complete record of a memory: its header, and where its body begins and ends."""

    header: dict[str, Any]
    start: int
    end: int


def seal(memory: mmap.mmap, header: bytes, size: int, at: int = 0) -> None:
    """Complete the record of `size` bytes that begins at byte `at`, whose body is there already."""
    memory[at + HEAD : at + HEAD + len(header)] = header
    memory[at + _LENGTH : at + HEAD] = size.to_bytes(_LENGTH, "little") + _checksum(memory, len(header), at, size)
    memory[at : at + _LENGTH] = len(header).to_bytes(_LENGTH, "little")  # from here on it counts


def read_record(memory: mmap.mmap, at: int = 0) -> Record | None:
    """Return the record that begins at byte `at`; None if it is not complete, or has changed since."""
    length, size = (int.from_bytes(memory[place : place + _LENGTH], "little") for place in (at, at + _LENGTH))
    if not length or not body_start(length) <= size <= len(memory) - at or \
            _checksum(memory, length, at, size) != memory[at + _SUM : at + HEAD]:
        return None
    return Record(msgpack.unpackb(memory[at + HEAD : at + HEAD + length]), at + body_start(length), at + size)


def body_start(length: int) -> int:
    """Return where a record's body begins, by the length of its header."""
    return aligned(HEAD + length)


def end_of(head: bytes) -> int:
    return int.from_bytes(head[_LENGTH : 2 * _LENGTH], "little")


def _checksum(memory: mmap.mmap, length: int, at: int, size: int) -> bytes:
    return xxhash.xxh3_128_digest(memoryview(memory)[at + HEAD : at + size], seed=length)
