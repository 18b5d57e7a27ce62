"""Messages: a msgpack map and raw buffers, framed alike on connections and in shared memory.

    bytes
    4     `DFM1`
    4     n, the length of the header
    8     m, the length of the payload
    n     header: a msgpack map
    m     payload: buffers, one after the other

Numbers are little-endian; lengths are checked before anything is allocated. What is then allocated takes memory only as
bytes arrive.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import Any, Protocol

import msgpack

from distflow.rpc.errors import RpcError

Buffer = bytes | bytearray | memoryview


class Scattered(Protocol):
    """Part of a payload that is not in one place yet: `copy_to` writes its `len` bytes into memory of that size."""

    def __len__(self) -> int: ...
    def copy_to(self, memory: memoryview) -> None: ...


Part = Buffer | Scattered
Header = dict[str, Any]

_MAGIC, _HEAD = b"DFM1", struct.Struct("<4sIQ")
HEAD_SIZE = _HEAD.size
_MAX_HEADER = 256 << 20
"""Metadata of some millions of rows. Only an authenticated peer can make a process allocate as much."""
MACHINE_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Bytes; nothing that arrives can be larger."""


def frame(header: Header, size: int = 0) -> bytes:
    """Return what stands before a payload of `size` bytes. Raises `RpcError` if the header is too long."""
    packed = msgpack.packb(header) or b""
    if len(packed) > _MAX_HEADER:
        raise RpcError(f"a message with {len(packed)} bytes of metadata is too long; send fewer rows at once")
    return _HEAD.pack(_MAGIC, len(packed), size) + packed


def write_parts(memory: memoryview, parts: Iterable[Part]) -> None:
    """Write a payload's parts into memory, one after the other."""
    position = 0
    for part in parts:
        end = position + len(part)
        if isinstance(part, Buffer):
            memory[position:end] = part
        elif end > position:
            part.copy_to(memory[position:end])
        position = end


def read_lengths(head: Buffer, most: int = MACHINE_MEMORY) -> tuple[int, int]:
    """Return the lengths of header and payload from the first `HEAD_SIZE` bytes; raises `ValueError` if they are not
    those of a message, or the payload has more than `most` bytes."""
    magic, length, size = _HEAD.unpack(head)
    if magic != _MAGIC or length > _MAX_HEADER:
        raise ValueError("something that is not a message of distflow")
    if size > most:
        raise ValueError(f"a payload of {size} bytes, where at most {most} are expected")
    return length, size


def read_header(packed: Buffer) -> Header:
    header = msgpack.unpackb(packed, strict_map_key=False)
    if not isinstance(header, dict):
        raise ValueError("a message without a header")
    return header
