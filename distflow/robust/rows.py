"""What a rank has sampled in the step under way, in host memory that outlives the worker (RobustRL §5.1.1).

In mode sync nobody else has these rows; a worker that starts again in the same step takes them instead of sampling them
anew. In the other modes the dock keeps them.

    bytes
    8     where the last whole entry ends
    then for each entry
    8     n, the length of the header
    8     the length of the header and what follows
    16    xxh3 of both
    n     msgpack: step, key, report, rows, columns: [name, dtype, shape of the values, rows of each level of lengths]
    …     ids, then of each column its lengths, level by level, and its values
"""

from __future__ import annotations

import mmap
from typing import Any

import msgpack
import torch
import xxhash
from torch import Tensor

from distflow.data.batch import Batch, dtype_name, levels, of_levels
from distflow.robust.snapshots import Slot

_MARK, _SUM, _HEAD = 8, 16, 32
_ROOMY = 64 << 20
"""Bytes beyond which memory that a long step has needed is given back."""


class KeptRows:
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
        heads, tensors = [], [rows.ids]
        for name, column in rows.columns.items():
            lengths, values = levels(column)
            heads.append([name, dtype_name(values.dtype), list(values.shape), list(map(len, lengths))])
            tensors += [*lengths, values]
        body = b"".join(_raw(tensor) for tensor in tensors)
        header = msgpack.packb({"step": step, "key": key, "rows": len(rows), "columns": heads, "report": report})
        entry = header + body
        memory = self.slot.memory(_MARK)
        end = int.from_bytes(memory[:_MARK], "little") or _MARK
        memory = self.slot.memory(end + _HEAD + len(entry))
        lengths = len(header).to_bytes(_MARK, "little") + len(entry).to_bytes(_MARK, "little")
        memory[end : end + _HEAD] = lengths + xxhash.xxh3_128_digest(entry)
        memory[end + _HEAD : end + _HEAD + len(entry)] = entry
        memory[:_MARK] = (end + _HEAD + len(entry)).to_bytes(_MARK, "little")  # from here on it counts

    def of(self, step: int) -> dict[str, tuple[Batch, bytes]]:
        """Rows and report by key; up to the first entry that is not whole."""
        memory, found = self.slot.memory(), {}
        end = int.from_bytes(memory[:_MARK], "little") if memory is not None else 0
        place = _MARK
        while place < end and (entry := _entry(memory, place, end)) is not None:
            header, body, place = entry
            if header["step"] == step:
                found[header["key"]] = _rows(header, body), header["report"]
        return found


def _entry(memory: mmap.mmap, place: int, end: int) -> tuple[dict[str, Any], bytes, int] | None:
    """The entry at `place`, and where the next one begins; None if it is not whole."""
    length, both = (int.from_bytes(memory[at : at + _MARK], "little") for at in (place, place + _MARK))
    start, stop = place + _HEAD, place + _HEAD + both
    if stop > end or length > both or xxhash.xxh3_128_digest(memory[start:stop]) != memory[place + _SUM : start]:
        return None
    return msgpack.unpackb(memory[start : start + length]), memory[start + length : stop], stop


def _rows(header: dict[str, Any], body: bytes) -> Batch:
    data, place = bytearray(body), 0

    def take(dtype: torch.dtype, shape: list[int]) -> Tensor:
        nonlocal place
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        # A copy, since what is before it may leave it at no multiple of its size.
        piece = bytearray(data[place : place + count * dtype.itemsize])
        place += len(piece)
        return torch.frombuffer(piece, dtype=dtype).view(shape)

    ids, columns = take(torch.int64, [header["rows"]]), {}
    for name, dtype, shape, counts in header["columns"]:
        lengths = [take(torch.int64, [count]) for count in counts]
        columns[name] = of_levels(lengths, take(getattr(torch, dtype), shape))
    return Batch(ids, columns)


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
