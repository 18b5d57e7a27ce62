"""Rollout cache: the rows that a rank has sampled in the step under way, in memory that outlives the worker.

A worker that starts again in the same step takes them instead of sampling again (RobustRL §5.1.1). Only mode sync needs
that: in the other modes the dock has these rows.

    bytes
    8     where the last complete record ends
    …     records as of a snapshot (`snapshots.py`); header: step, key, report, ids and the schema of the columns
"""

from __future__ import annotations

import mmap

import msgpack
import numpy
import torch

from distflow.data.batch import Batch
from distflow.data.column_buffers import decode_batch, rows_of
from distflow.data.columns import encode
from distflow.recovery.snapshots import Slot, body_start, read_record, seal
from distflow.rpc.messages import write_parts

_WORD = 8
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
        schema, parts = encode(rows_of(rows))
        header = msgpack.packb({"step": step, "key": key, "ids": rows.ids.tolist(), "columns": schema,
                                "report": report}) or b""
        start = body_start(len(header))
        size, memory = start + sum(map(len, parts)), self.slot.reserve(_WORD)
        end = int.from_bytes(memory[:_WORD], "little") or _WORD
        memory = self.slot.reserve(end + size)
        write_parts(memoryview(memory)[end + start : end + size], parts)
        seal(memory, header, size, end)
        memory[:_WORD] = (end + size).to_bytes(_WORD, "little")  # from here on it counts

    def rows_of_step(self, step: int) -> dict[str, tuple[Batch, bytes]]:
        """Return rows and report by key, up to the first torn record."""
        found: dict[str, tuple[Batch, bytes]] = {}
        if (memory := self.slot.memory()) is None:
            return found
        end, offset = int.from_bytes(memory[:_WORD], "little"), _WORD
        while offset < end and (record := read_record(memory, offset)) is not None:
            header, start, offset = record
            if header["step"] == step:
                body = numpy.frombuffer(bytearray(memory[start:offset]), numpy.uint8)
                rows = decode_batch(torch.tensor(header["ids"], dtype=torch.int64), header["columns"], body)
                found[header["key"]] = rows, header["report"]
        return found
