"""Messages: a msgpack map and raw buffers, framed alike on connections, in shared memory and in files.

    bytes
    4     `DFM1`
    4     n, the length of the header
    8     m, the length of the payload
    n     header: a msgpack map
    m     payload: buffers, one after the other
    16    xxh3 of all that stands before, of a sealed message only

Numbers are little-endian; lengths are checked before anything is allocated. What is then allocated takes memory only as
bytes arrive.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import msgpack
import xxhash

from distflow.rpc.errors import RpcError

Buffer = bytes | bytearray | memoryview
Header = dict[str, Any]

_MAGIC, _HEAD, _SEAL = b"DFM1", struct.Struct("<4sIQ"), 16
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


def sealed(header: Header, buffers: Iterable[Buffer] = ()) -> list[Buffer]:
    """Return the parts of a message with its checksum, for memory and files that may be read when they are torn."""
    buffers = list(buffers)
    parts = [frame(header, sum(map(len, buffers))), *buffers]
    checksum = xxhash.xxh3_128()
    for part in parts:
        checksum.update(part)
    return [*parts, checksum.digest()]


def read_sealed(data: Any) -> Iterator[tuple[Header, memoryview, int]]:
    """Yield header, payload and end of each sealed message in a buffer, up to the first that is torn."""
    view, start = memoryview(data), 0
    while start + HEAD_SIZE <= len(view):
        try:
            length, size = read_lengths(view[start : start + HEAD_SIZE])
        except ValueError:
            return
        body = start + HEAD_SIZE + length
        end = body + size
        if xxhash.xxh3_128_digest(view[start:end]) != view[end : end + _SEAL]:
            return
        header, start = read_header(view[start + HEAD_SIZE : body]), end + _SEAL
        yield header, view[body:end], start
