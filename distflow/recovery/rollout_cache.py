"""Rollout cache: the rows that a rank has sampled in the step under way, in memory that outlives the worker.

A worker that starts again in the same step takes them instead of sampling again (RobustRL §5.1.1). Only mode sync needs
that: in the other modes the dock has these rows.

    bytes
    8     where the last complete entry ends
    then for each entry
    8     n, the length of the header
    8     the length of the header and what follows
    16    xxh3 of both
    n     msgpack: step, key, report, rows, columns as in `distflow.dock.extents`
    …     the rows as a `RecordBatch` is sent
"""

from __future__ import annotations

import mmap
from typing import Any

import msgpack
import numpy
import xxhash

from distflow.data.batch import Batch
from distflow.dock.record_batch import RecordBatch, unpack
from distflow.recovery.snapshots import Slot

_WORD, _CHECKSUM_SIZE, _ENTRY_HEAD = 8, 16, 32
_ROOMY = 64 << 20  # bytes beyond which memory is returned to the system after a step


class RolloutCache:
    """One rank's rows of one step. A cache that is made before a fork is shared by both processes."""

    def __init__(self) -> None:
        self.slot = Slot()

    def clear(self) -> None:
        """Drop all rows at the end of a step."""
        if (memory := self.slot.memory()) is not None:
            memory[:_WORD] = _WORD.to_bytes(_WORD, "little")
            if len(memory) > _ROOMY:
                memory.madvise(mmap.MADV_REMOVE, mmap.PAGESIZE)

    def add(self, step: int, key: str, rows: Batch, report: bytes) -> None:
        """Store sampled rows and their metrics under a key."""
        heads, buffers = RecordBatch(rows).pack()
        header = msgpack.packb({"step": step, "key": key, "rows": len(rows), "columns": heads, "report": report}) or b""
        size = len(header) + sum(map(len, buffers))
        memory = self.slot.reserve(_WORD)
        end = int.from_bytes(memory[:_WORD], "little") or _WORD
        memory, start = self.slot.reserve(end + _ENTRY_HEAD + size), end + _ENTRY_HEAD
        offset = start
        for buffer in (header, *buffers):
            memory[offset : offset + len(buffer)] = buffer
            offset += len(buffer)
        memory[end:start] = b"".join((len(header).to_bytes(_WORD, "little"), size.to_bytes(_WORD, "little"),
                                      _checksum(memory, start, offset)))
        memory[:_WORD] = offset.to_bytes(_WORD, "little")  # from here on it counts

    def rows_of_step(self, step: int) -> dict[str, tuple[Batch, bytes]]:
        """Return rows and report by key, up to the first torn entry."""
        found: dict[str, tuple[Batch, bytes]] = {}
        if (memory := self.slot.memory()) is None:
            return found
        end, offset = int.from_bytes(memory[:_WORD], "little"), _WORD
        while offset < end and (entry := _read_entry(memory, offset, end)) is not None:
            header, body, offset = entry
            if header["step"] == step:
                data = numpy.frombuffer(body, numpy.uint8)
                found[header["key"]] = unpack(header["rows"], header["columns"], data), header["report"]
        return found


def _read_entry(memory: mmap.mmap, offset: int, end: int) -> tuple[dict[str, Any], bytearray, int] | None:
    """Return header and rows of the entry at `offset`, and where the next one begins; None if it is torn."""
    length, size = (int.from_bytes(memory[at : at + _WORD], "little") for at in (offset, offset + _WORD))
    start, stop = offset + _ENTRY_HEAD, offset + _ENTRY_HEAD + size
    if stop > end or length > size or _checksum(memory, start, stop) != memory[offset + _CHECKSUM_SIZE : start]:
        return None
    return msgpack.unpackb(memory[start : start + length]), bytearray(memory[start + length : stop]), stop


def _checksum(memory: mmap.mmap, start: int, stop: int) -> bytes:
    return xxhash.xxh3_128_digest(memoryview(memory)[start:stop])
