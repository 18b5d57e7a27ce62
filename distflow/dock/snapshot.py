"""Snapshot of one shard process as a file: whole or absent, and without pickle.

    bytes
    4     `DFS1`
    …     messages, each as on a connection: lengths (4 and 8 bytes), a msgpack header, buffers
    4     0xffffffff, then the CRC-32 of all that stands before

The first header has the rows' metadata and the consumers' commits; each other message is one record batch. The state
is captured under the lock, by reference; it is written without the lock.
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
LiveRows = dict[int, tuple[int, list[str]]]
"""See `StorageShard.live_rows`."""


def capture(state: ShardState) -> tuple[dict[str, Any], list[tuple[RecordBatch, LiveRows]]]:
    """Return the head of a snapshot, and each batch with its live rows; batches never change, so are packed later."""
    storage = state.storage
    consumed: dict[str, list[int]] = {}
    for row, stored in storage.rows.items():
        for consumer in stored.consumed:
            consumed.setdefault(consumer, []).append(row)
    head = {"layout": state.configured().to_plain(), "number": storage.number,
            "table": storage.table(storage.rows).tobytes(), "gone": storage.gone.ranges,
            "consumed": {name: numpy.array(rows, numpy.int64).tobytes() for name, rows in consumed.items()},
            "indexes": {name: index.state() for name, index in state.indexes.items()}}
    return head, [(records, storage.live_rows(records)) for records in storage.batches]


def messages(head: dict[str, Any], batches: Iterable[tuple[RecordBatch, LiveRows]]) -> Iterator[Message]:
    """Yield all messages of a snapshot; needs no lock."""
    yield head, []
    for records, live in batches:
        yield from _messages_of(records, live)


def _messages_of(records: RecordBatch, live: LiveRows) -> Iterator[Message]:
    """Yield the live rows of a batch: the finished ones, then the saved turns."""
    names = list(records.batch.columns)
    for turn in (False, True):
        local = [row for row, (_, found) in live.items() if bool(found) != turn]
        if local:
            ids = records.batch.ids.numpy()[local]
            spans = [(records, row, row + 1) for row in local]
            schema, buffers = pack(ids, [(name, spans) for name in names])
            yield {"rows": len(local), "columns": schema, "turn": turn}, buffers


def restore(state: ShardState, path: Path) -> None:
    """Fill a new state from a file, and configure it with the file's layout.

    Raises:
        CheckpointError: the file is not there, torn, or not a snapshot.
    """
    messages = _read(path)
    head = next(messages)[0]
    storage, layout = state.storage, DockLayout.from_plain(head["layout"])
    storage.number, storage.count = head["number"], len(layout.addresses)
    storage.gone = Intervals(map(tuple, head["gone"]))
    for row, tokens, version, group, turn in read_table(head["table"]).T.tolist():
        storage.rows[row] = StoredRow(frozenset(), tokens, version, group, turn)
    for header, data in messages:
        storage.restore_rows(unpack(header["rows"], header["columns"], data), header["turn"])
    for consumer, ids in head["consumed"].items():
        for row in read_ids(ids).tolist():
            storage.rows[row].consumed.add(consumer)
    for consumer in layout.consumers:
        if consumer.name in head["indexes"]:
            state.add_index(consumer, head["indexes"][consumer.name])
    state.configure(layout, head["number"])


def write(messages: Iterable[Message], path: Path) -> int:
    """Write a snapshot, under its name only when all of it is on disk; return the bytes.

    Raises:
        CheckpointError: the disk cannot store it; an earlier file is untouched.
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
    """Yield the messages, after the checksum of the whole file."""
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
