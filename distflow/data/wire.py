"""A batch as bytes: a small msgpack header and the raw buffers. No pickle: what arrives can only become a batch.

    offset  bytes
    0       4      `DFB1`
    4       4      n, the length of the header
    8       4      CRC-32 of the header
    12      4      zero
    16      n      header: rows and, for each column, name, levels of raggedness, dtype, shape of its elements
    …              ids; for each column the lengths of each level, outermost first, and its elements

Every part starts at a multiple of 8, and numbers are little-endian. The buffers carry no checksum: the transports
below have their own, and a second one would cost as much as the copy.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import msgpack
import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, Ragged, dtype_name, levels
from distflow.schema.errors import ColumnError

_MAGIC = b"DFB1"
_HEAD = struct.Struct("<4sIII")
_DTYPES = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def to_wire(batch: Batch) -> Tensor:
    """[bytes] uint8 on the CPU, a multiple of 8 long."""
    header, buffers = [], [_raw(batch.ids)]
    for name, column in batch.columns.items():
        lengths, values = levels(column)
        header.append([name, len(lengths), dtype_name(values.dtype), list(values.shape)])
        buffers += [_raw(part) for part in (*lengths, values)]
    packed = msgpack.packb([len(batch), header])
    head = _HEAD.pack(_MAGIC, len(packed), zlib.crc32(packed), 0) + packed
    return torch.cat([_filled(torch.frombuffer(bytearray(head), dtype=torch.uint8)), *buffers])


def from_wire(wire: Tensor) -> Batch:
    """The batch that `to_wire` packed; its columns are views of `wire` [bytes] (uint8) where alignment allows.

    Raises:
        ColumnError: the bytes are not a whole batch.
    """
    if len(wire) < _HEAD.size:
        raise ColumnError(f"these {len(wire)} bytes are not a batch: they are fewer than a header has")
    magic, size, checksum, _ = _HEAD.unpack(wire[: _HEAD.size].numpy().tobytes())
    packed = wire[_HEAD.size : _HEAD.size + size].numpy().tobytes()
    if magic != _MAGIC or len(packed) < size or zlib.crc32(packed) != checksum:
        raise ColumnError(f"these {len(wire)} bytes are not a batch: their header is torn, or of another distflow")
    rows, header = msgpack.unpackb(packed)
    reader = _Reader(wire, _HEAD.size + size + -size % 8)
    ids = reader.take("ids", "int64", [rows])
    columns: dict[str, ColumnData] = {}
    for name, depth, dtype, shape in header:
        lengths: list[Tensor] = []
        for _ in range(depth):
            lengths.append(_checked(name, reader.take(name, "int64", [int(lengths[-1].sum()) if lengths else rows])))
        column: ColumnData = reader.take(name, dtype, shape)
        for level in reversed(lengths):
            column = Ragged(column, level)
        columns[name] = column
    if reader.position != len(wire):
        raise ColumnError(f"a batch of {reader.position} bytes came as {len(wire)} bytes")
    return Batch(ids, columns)


def _checked(name: str, lengths: Tensor) -> Tensor:
    if len(lengths) and int(lengths.min()) < 0:
        raise ColumnError(f"column `{name}` arrived with a row of negative length; its bytes were changed on the way")
    return lengths


def _raw(tensor: Tensor) -> Tensor:
    return _filled(tensor.detach().cpu().contiguous().flatten().view(torch.uint8))


def _filled(raw: Tensor) -> Tensor:
    """`raw` up to a multiple of 8 bytes, so that what follows is aligned."""
    return torch.nn.functional.pad(raw, (0, -len(raw) % 8))


class _Reader:
    def __init__(self, wire: Tensor, position: int):
        self.wire, self.position = wire, position

    def take(self, name: str, dtype: str, shape: list[Any]) -> Tensor:
        kind = _DTYPES.get(dtype)
        if kind is None:
            raise ColumnError(f"column `{name}` is of type {dtype}, which torch {torch.__version__} does not have")
        raw = math.prod(shape) * kind.itemsize
        part = self.wire[self.position : self.position + raw]
        if len(part) < raw:
            raise ColumnError(f"a batch of {len(self.wire)} bytes ends within column `{name}`, which has {raw} bytes")
        self.position += raw + -raw % 8
        if part.storage_offset() % kind.itemsize:
            part = part.clone()
        return part.view(kind).reshape(shape)
