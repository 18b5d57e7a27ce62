"""What a rank has sampled in the step under way, in host memory that outlives the worker (RobustRL §5.1.1).

In mode sync nobody else has these rows; a worker that starts again in the same step takes them instead of sampling them
anew. In the other modes the dock keeps them.

    bytes
    8     where the last whole entry ends
    then for each entry
    8     n, the length of the header
    16    xxh3 of the header and what follows
    n     msgpack: step, key, report, columns: [name, dtype, shape of the values, rows of each level of lengths], bytes
    …     ids, then of each column its lengths, level by level, and its values
"""

from __future__ import annotations

import mmap
from typing import Any

import msgpack
import torch
import xxhash
from torch import Tensor

from distflow.data.batch import Batch, levels, of_levels
from distflow.robust.snapshots import Slot

_MARK, _HEAD = 8, 24


class KeptRows:
    """One rank's rows of one step. One that is made before a fork is shared by both processes."""

    def __init__(self) -> None:
        self.slot = Slot()

    def clear(self) -> None:
        """Forget everything: a step is done."""
        if (memory := self.slot.memory()) is not None:
            memory[:_MARK] = _MARK.to_bytes(_MARK, "little")

    def add(self, step: int, key: str, rows: Batch, report: bytes) -> None:
        """Keep what was sampled under a key, and what was measured meanwhile."""
        heads, tensors = [], [rows.ids]
        for name, column in rows.columns.items():
            lengths, values = levels(column)
            heads.append([name, str(values.dtype).removeprefix("torch."), list(values.shape),
                          [len(level) for level in lengths]])
            tensors += [*lengths, values]
        body = b"".join(_raw(tensor) for tensor in tensors)
        header = msgpack.packb({"step": step, "key": key, "rows": len(rows), "columns": heads, "report": report,
                                "bytes": len(body)})
        entry = header + body
        memory = self.slot.memory(_MARK)
        end = int.from_bytes(memory[:_MARK], "little") or _MARK
        memory = self.slot.memory(end + _HEAD + len(entry))
        memory[end : end + _HEAD] = len(header).to_bytes(_MARK, "little") + xxhash.xxh3_128_digest(entry)
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
    start = place + _HEAD + int.from_bytes(memory[place : place + _MARK], "little")
    if start > end:
        return None
    header = msgpack.unpackb(memory[place + _HEAD : start])
    stop = start + header["bytes"]
    if stop > end or xxhash.xxh3_128_digest(memory[place + _HEAD : stop]) != memory[place + _MARK : place + _HEAD]:
        return None
    return header, memory[start:stop], stop


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
