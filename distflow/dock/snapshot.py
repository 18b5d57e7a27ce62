"""A process's part of the dock as a file: whole or absent, and without pickle.

    bytes
    4     `DFS1`
    …     messages, each as on a line: lengths (4 and 8 bytes), a msgpack header, buffers
    4     0xffffffff, then the CRC-32 of all that stands before

The first header holds what is known of rows and what consumers have committed; each other message is one parcel.
Taking the state is a matter of references, under the lock; writing is not.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy
import torch

from distflow.dock.index import Intervals
from distflow.dock.selection import DockLayout
from distflow.dock.shard_state import ShardState, read_ids, read_table
from distflow.dock.storage import RecordBatch, StoredRow, pack, unpack
from distflow.errors import CheckpointError

_MAGIC, _LENGTHS, _SUM = b"DFS1", struct.Struct("<IQ"), struct.Struct("<II")
_END = 0xFFFFFFFF
Message = tuple[dict[str, Any], list[Any]]
Living = dict[int, tuple[int, list[str]]]
"""See `Warehouse.living`."""


def capture(desk: ShardState) -> tuple[dict[str, Any], list[tuple[RecordBatch, Living]]]:
    """The head of a snapshot, and each parcel with its living rows. Metadata: rows are not touched, and as nobody
    changes a parcel, they can be packed later."""
    house = desk.warehouse
    consumed: dict[str, list[int]] = {}
    for row, kept in house.rows.items():
        for consumer in kept.consumed:
            consumed.setdefault(consumer, []).append(row)
    head = {"layout": desk.met().to_plain(), "number": house.number, "table": house.table(house.rows).tobytes(),
            "gone": house.gone.ranges,
            "consumed": {name: numpy.array(rows, numpy.int64).tobytes() for name, rows in consumed.items()},
            "controllers": {name: controller.state() for name, controller in desk.controllers.items()}}
    return head, [(parcel, house.living(parcel)) for parcel in house.parcels]


def messages(head: dict[str, Any], parcels: Iterable[tuple[RecordBatch, Living]]) -> Iterator[Message]:
    """All messages of a snapshot, one after the other; needs no lock."""
    yield head, []
    for parcel, live in parcels:
        yield from _parcel(parcel, live)


def _parcel(parcel: RecordBatch, live: Living) -> Iterator[Message]:
    """Its living rows: those that are finished, and those that are saved turns."""
    names = list(parcel.batch.columns)
    for turn in (False, True):
        local = [place for place, (_, found) in live.items() if bool(found) != turn]
        if local:
            ids = parcel.batch.ids.numpy()[local]
            spans = [(parcel, place, place + 1) for place in local]
            heads, buffers = pack(ids, [(name, spans) for name in names])
            yield {"rows": len(local), "columns": heads, "turn": turn}, buffers


def restore(desk: ShardState, path: Path) -> None:
    """Fill a new desk from a file and take its place in the layout again.

    Raises:
        CheckpointError: the file is not there, torn, or not a snapshot.
    """
    messages = _read(path)
    head = next(messages)[0]
    house, layout = desk.warehouse, DockLayout.from_plain(head["layout"])
    house.number, house.count = head["number"], len(layout.addresses)
    house.gone = Intervals(map(tuple, head["gone"]))
    for row, tokens, version, group, priority, turn in read_table(head["table"]).T.tolist():
        house.rows[row] = StoredRow(frozenset(), tokens, version, group, priority, turn)
    for header, data in messages:
        house.lay(unpack(header["rows"], header["columns"], data), header["turn"])
    for consumer, ids in head["consumed"].items():
        for row in read_ids(ids).tolist():
            house.rows[row].consumed.add(consumer)
    for consumer in layout.consumers:
        if consumer.name in head["controllers"]:
            desk.take_up(consumer, head["controllers"][consumer.name])
    desk.meet(layout, head["number"])


def write(messages: Iterable[Message], path: Path) -> int:
    """Write a snapshot under its name only when all of it is on disk; returns its bytes.

    Raises:
        CheckpointError: the disk does not take it; what was there before is untouched.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            size = _write(messages, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: the dock's snapshot cannot be written: {error}") from None
    return size


def _write(messages: Iterable[Message], file: BinaryIO) -> int:
    checksum, size = zlib.crc32(_MAGIC), file.write(_MAGIC)
    for header, buffers in messages:
        packed = msgpack.packb(header)
        for part in (_LENGTHS.pack(len(packed), sum(map(len, buffers))), packed, *buffers):
            checksum = zlib.crc32(part, checksum)
            size += file.write(part)
    return size + file.write(_SUM.pack(_END, checksum))


def _read(path: Path) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """The messages, after the whole file was seen to be sound."""
    try:
        data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: there is no snapshot of a dock that can be read: {error}") from None
    view = memoryview(data.numpy())
    end = len(view) - _SUM.size
    if end < len(_MAGIC) or view[:4] != _MAGIC or _SUM.unpack(view[end:]) != (_END, zlib.crc32(view[:end])):
        raise CheckpointError(f"{path}: this snapshot of a dock is torn, or is none. Resume from an older checkpoint")
    position = len(_MAGIC)
    while position < end:
        length, size = _LENGTHS.unpack(view[position : position + _LENGTHS.size])
        start = position + _LENGTHS.size + length
        header = msgpack.unpackb(view[position + _LENGTHS.size : start], strict_map_key=False)
        yield header, data[start : start + size].clone()
        position = start + size
