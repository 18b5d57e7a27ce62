"""Journal of the commits that a process of the dock has answered: a process that is restored forgets none of them.

    bytes
    4     n, the length of the record
    4     its CRC-32
    n     a msgpack map: {"epoch"} of a process that starts, {"consumer", "lease", "step", "rows": ranges} of a commit,
          or {"consumer", "back": step} where commits of steps from that one on were rolled back

A snapshot is as old as its checkpoint; the journal is up to date. Each record is written before its answer is sent, so
it outlives the process, but not a machine that loses its power. A record that was cut off at the end is dropped.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy

from distflow.dock.errors import DockError
from distflow.dock.selection import Ids
from distflow.errors import CheckpointError

_HEAD = struct.Struct("<II")
Record = dict[str, Any]


class Journal:
    """Journal of one process and of those that replace it; raises `CheckpointError` if it cannot be opened."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: the dock's journal cannot be opened: {error}") from None
        self.size, self.records = 0, []
        for record, end in _records(data):
            self.records.append(record)
            self.size = end
        os.ftruncate(self.file, self.size)

    @property
    def epochs(self) -> frozenset[int]:
        return frozenset(record["epoch"] for record in self.records if "epoch" in record)

    def begin(self, epoch: int) -> None:
        self._write({"epoch": epoch})

    def commit(self, consumer: str, lease: int, step: int | None, ids: Ids) -> None:
        """Record a commit; raises `DockError` if it cannot be written, and then it must not count."""
        self._write({"consumer": consumer, "lease": lease, "step": step, "rows": _ranges(ids)})

    def rollback(self, consumer: str, step: int) -> None:
        """Record that the commits of steps from this one on are rolled back; raises `DockError` as `commit` does."""
        self._write({"consumer": consumer, "back": step})

    def commits(self, consumer: str) -> Iterator[tuple[int, int | None, list[int]]]:
        """Yield (lease, step, ids) of each commit of a consumer, oldest first."""
        standing: list[Record] = []
        for record in (record for record in self.records if record.get("consumer") == consumer):
            if "back" in record:
                standing = [each for each in standing if each["step"] is None or each["step"] < record["back"]]
            else:
                standing.append(record)
        for record in standing:
            rows = [row for first, end in record["rows"] for row in range(first, end)]
            yield record["lease"], record["step"], rows

    def close(self) -> None:
        os.close(self.file)

    def _write(self, record: Record) -> None:
        packed = msgpack.packb(record)
        whole = _HEAD.pack(len(packed), zlib.crc32(packed)) + packed
        try:
            if os.pwrite(self.file, whole, self.size) < len(whole):
                raise OSError("the disk is full")
        except OSError as error:
            raise DockError(f"{self.path}: a commit cannot be written, so it does not count: {error}") from None
        self.size += len(whole)
        self.records.append(record)


def _records(data: bytes) -> Iterator[tuple[Record, int]]:
    position = 0
    while position + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, position)
        position += _HEAD.size + length
        packed = data[position - length : position]
        if len(packed) < length or zlib.crc32(packed) != checksum:
            return
        yield msgpack.unpackb(packed), position


def _ranges(ids: Ids) -> list[tuple[int, int]]:
    rows = numpy.unique(ids)
    edges = numpy.flatnonzero(numpy.diff(rows) != 1)
    if not len(rows):
        return []
    return list(zip(rows[[0, *(edges + 1)]].tolist(), (rows[[*edges, -1]] + 1).tolist()))
