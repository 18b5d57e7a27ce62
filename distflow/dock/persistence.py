"""Files from which a process of the dock is restored, both of sealed messages (`rpc/messages.py`) and without pickle.

    journal     {"epoch"} of a process that starts, {"consumer", "lease", "step", "rows": ranges} of a commit, or
                {"consumer", "back": step} where commits of steps from that one on were rolled back
    snapshot    the shard's metadata and the consumers' commits; then record batches; then {"end": true}

A snapshot is as old as its checkpoint, and whole or absent. The journal is up to date: each record is written before
its answer is sent, so it outlives the process, but not a machine that loses its power. A record that was cut off at the
end is dropped. No run switches these on yet.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from distflow.dock.errors import DockError
from distflow.dock.index import Intervals
from distflow.dock.storage import Message
from distflow.errors import CheckpointError
from distflow.rpc.messages import Header, read_sealed, sealed

_END = {"end": True}


class Journal:
    """Commits that this or an earlier process of the dock has answered. Raises `CheckpointError`: it cannot be read."""

    def __init__(self, path: Path):
        self.path, self.size = path, 0
        self.records: list[Header] = []
        try:
            self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for record, _, self.size in read_sealed(path.read_bytes()):
                self.records.append(record)
            os.ftruncate(self.file, self.size)
        except OSError as error:
            raise CheckpointError(f"{path}: the dock's journal cannot be opened: {error}") from None

    @property
    def epochs(self) -> frozenset[int]:
        return frozenset(record["epoch"] for record in self.records if "epoch" in record)

    def begin(self, epoch: int) -> None:
        self._write({"epoch": epoch})

    def commit(self, consumer: str, lease: int, step: int | None, ids: Iterable[int]) -> None:
        """Record a commit; raises `DockError` if it cannot be written, and then it must not count."""
        self._write({"consumer": consumer, "lease": lease, "step": step, "rows": Intervals.of(ids).ranges})

    def rollback(self, consumer: str, step: int) -> None:
        """Record that the commits of steps from this one on are rolled back; raises `DockError` as `commit` does."""
        self._write({"consumer": consumer, "back": step})

    def commits(self, consumer: str) -> Iterator[tuple[int, int | None, list[int]]]:
        """Yield (lease, step, ids) of each commit of a consumer that was not rolled back, oldest first."""
        standing: list[Header] = []
        for record in (record for record in self.records if record.get("consumer") == consumer):
            if "back" in record:
                standing = [each for each in standing if each["step"] is None or each["step"] < record["back"]]
            else:
                standing.append(record)
        for record in standing:
            yield record["lease"], record["step"], [row for start, end in record["rows"] for row in range(start, end)]

    def close(self) -> None:
        os.close(self.file)

    def _write(self, record: Header) -> None:
        whole = b"".join(sealed(record))
        try:
            if os.pwrite(self.file, whole, self.size) < len(whole):
                raise OSError("the disk is full")
        except OSError as error:
            raise DockError(f"{self.path}: a commit cannot be written, so it does not count: {error}") from None
        self.size += len(whole)
        self.records.append(record)


def write_snapshot(messages: Iterable[Message], path: Path) -> int:
    """Write a snapshot, under its name only when all of it is on disk; return the bytes. Raises `CheckpointError` if
    the disk cannot store it; an earlier file is untouched."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            for header, buffers in itertools.chain(messages, [(_END, [])]):
                file.writelines(sealed(header, buffers))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: the dock's snapshot cannot be written: {error}") from None
    return size


def read_snapshot(path: Path) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield header and payload ([bytes] uint8) of each message. Raises `CheckpointError`: no file, or torn later."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: there is no snapshot of a dock that can be read: {error}") from None
    for header, payload, _ in read_sealed(data):
        if header == _END:
            return
        yield header, torch.from_numpy(numpy.array(payload))
    raise CheckpointError(f"{path}: this snapshot of a dock is torn, or is none. Resume from an older checkpoint")
