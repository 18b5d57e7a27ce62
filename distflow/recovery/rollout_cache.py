"""What a rank has sampled in the step under way, in host memory that outlives the worker (RobustRL §5.1.1).

In mode sync nobody else has these rows; a worker that starts again in the same step takes them instead of sampling them
anew. In the other modes the dock keeps them.

    bytes
    8     where the last whole entry ends
    then for each entry
    8     n, the length of the header
    8     the length of the header and what follows
    16    xxh3 of both
    n     msgpack: step, key, report, rows, columns as in `distflow.dock.storage`
    …     the rows as a parcel has them on a line
"""

from __future__ import annotations

import mmap
from typing import Any

import msgpack
import torch
import xxhash

from distflow.data.batch import Batch
from distflow.dock.storage import RecordBatch, pack, unpack
from distflow.recovery.snapshots import Slot

_MARK, _SUM, _HEAD = 8, 16, 32
_ROOMY = 64 << 20
"""Bytes beyond which memory that a long step has needed is given back."""


class RolloutCache:
    """One rank's rows of one step. One that is made before a fork is shared by both processes."""

    def __init__(self) -> None:
        self.slot = Slot()

    def clear(self) -> None:
        """Forget everything: a step is done."""
        if (memory := self.slot.memory()) is not None:
            memory[:_MARK] = _MARK.to_bytes(_MARK, "little")
            if len(memory) > _ROOMY:
                memory.madvise(mmap.MADV_REMOVE, mmap.PAGESIZE)

    def add(self, step: int, key: str, rows: Batch, report: bytes) -> None:
        """Keep what was sampled under a key, and what was measured meanwhile."""
        whole = [(RecordBatch(rows, 0, 0), 0, len(rows))]
        heads, buffers = pack(rows.ids.numpy(), [(name, whole) for name in rows.columns])
        header = msgpack.packb({"step": step, "key": key, "rows": len(rows), "columns": heads, "report": report})
        both = len(header) + sum(map(len, buffers))
        memory = self.slot.memory(_MARK)
        end = int.from_bytes(memory[:_MARK], "little") or _MARK
        memory, start = self.slot.memory(end + _HEAD + both), end + _HEAD
        place = start
        for buffer in (header, *buffers):
            memory[place : place + len(buffer)] = buffer
            place += len(buffer)
        memory[end:start] = b"".join((len(header).to_bytes(_MARK, "little"), both.to_bytes(_MARK, "little"),
                                      _sum(memory, start, place)))
        memory[:_MARK] = place.to_bytes(_MARK, "little")  # from here on it counts

    def of(self, step: int) -> dict[str, tuple[Batch, bytes]]:
        """Rows and report by key; up to the first entry that is not whole."""
        memory, found = self.slot.memory(), {}
        end = int.from_bytes(memory[:_MARK], "little") if memory is not None else 0
        place = _MARK
        while place < end and (entry := _entry(memory, place, end)) is not None:
            header, body, place = entry
            if header["step"] == step:
                data = torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
                found[header["key"]] = unpack(header["rows"], header["columns"], data), header["report"]
        return found


def _entry(memory: mmap.mmap, place: int, end: int) -> tuple[dict[str, Any], bytearray, int] | None:
    """The entry at `place`, and where the next one begins; None if it is not whole."""
    length, both = (int.from_bytes(memory[at : at + _MARK], "little") for at in (place, place + _MARK))
    start, stop = place + _HEAD, place + _HEAD + both
    if stop > end or length > both or _sum(memory, start, stop) != memory[place + _SUM : start]:
        return None
    return msgpack.unpackb(memory[start : start + length]), bytearray(memory[start + length : stop]), stop


def _sum(memory: mmap.mmap, start: int, stop: int) -> bytes:
    return xxhash.xxh3_128_digest(memoryview(memory)[start:stop])
