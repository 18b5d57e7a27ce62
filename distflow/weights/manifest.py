"""Manifest of a version of weights: one part per trainer rank, cut into chunks with checksums.

A part is one flat buffer: the rank's slices, one after the other. Its manifest holds the offset of each slice and the
checksum of each chunk; the digest of the manifest is in the `PublishedVersion` in the store. So whoever trusts the
store can trust every byte, whichever process sent it.

Checksums are XXH3 with 128 bits: 25 GB/s on one core, where CRC-32 of zlib has 4 and a copy 12, so that they do not
slow a transfer; and long enough that equal checksums mean equal contents, which spares chunks that did not change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack
import numpy
import xxhash

from distflow.data.column_buffers import dtype_of, tensor_entry
from distflow.data.columns import ColumnEntry, lay_out, read_schema
from distflow.weights.fingerprint import Sums
from distflow.weights.shard_slice import Box, ShardSlice

SUM = 16
"""Bytes of a checksum."""
_LEAST, _MOST, _PIECES = 256 << 10, 16 << 20, 64
Chunk = tuple[int, int]
"""Part, and index in it."""
Run = tuple[int, int, int]
"""Consecutive chunks: part, first chunk, number of chunks."""


def chunk_size(size: int, ranks: int = 1) -> int:
    """Return the bytes of a chunk for a part of `size` bytes, of which each of so many ranks needs its own: a power of
    two, 1/64 of that or more, 256 KiB to 16 MiB. Each relay in a chain costs one chunk of time; each chunk costs a
    request."""
    return min(max(1 << (max(size // ranks // _PIECES, 1) - 1).bit_length(), _LEAST), _MOST)


def checksum(data: numpy.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(data.data)


class SliceEntry(NamedTuple):
    """Slice, its offset in its part, and its tensor's index in the order of the model."""

    slice: ShardSlice
    offset: int
    order: int


@dataclass(frozen=True)
class RankManifest:
    """Manifest of one trainer rank's part: `sums` are the checksums of its chunks, joined; `values` are those of the
    whole weights of all parts (`fingerprint`), if the trainer gives them."""

    size: int
    chunk: int
    contents: tuple[SliceEntry, ...]
    sums: bytes
    values: Sums = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sums) // SUM

    def sum(self, index: int) -> bytes:
        return self.sums[index * SUM : (index + 1) * SUM]

    def span(self, first: int, count: int = 1) -> slice:
        """Return the bytes of a chunk, or of several."""
        return slice(first * self.chunk, min((first + count) * self.chunk, self.size))

    def chunks_of(self, content: SliceEntry, boxes: Sequence[Box] | None = None) -> list[slice]:
        """Return the chunks with bytes of a slice; with `boxes`, of the rows of it that meet one."""
        each, size = content.slice, content.slice.nbytes
        spans = [(0, size)] if boxes is None else [
            (rows.start * size // each.size[0], rows.stop * size // each.size[0])
            for rows in map(each.rows_in, boxes) if rows]
        return [slice((content.offset + begin) // self.chunk, -(-(content.offset + end) // self.chunk))
                for begin, end in spans]

    def pack(self) -> bytes:
        schema = [_entry(content.slice) for content in self.contents]
        cuts = [[content.slice.shape, content.slice.start, content.order] for content in self.contents]
        return msgpack.packb([self.size, self.chunk, schema, cuts, self.sums, self.values]) or b""

    @classmethod
    def unpack(cls, packed: bytes) -> RankManifest:
        size, chunk, schema, cuts, sums, values = msgpack.unpackb(packed)
        contents = tuple(
            SliceEntry(ShardSlice(name, tuple(shape), tuple(start), form.shape, dtype_of(name, form)), begin, order)
            for ((name, form, _), (begin,)), (shape, start, order) in zip(read_schema(schema, size), cuts, strict=True))
        return cls(size, chunk, contents, sums, values)


def place_slices(slices: Sequence[ShardSlice], orders: Sequence[int]) -> tuple[tuple[SliceEntry, ...], int]:
    """Place slices one after the other; return their entries and the bytes of all."""
    placed, size = lay_out(map(_entry, slices))
    return tuple(SliceEntry(shard_slice, begins[0], order)
                 for shard_slice, (_, begins), order in zip(slices, placed, orders)), size


def _entry(shard_slice: ShardSlice) -> ColumnEntry:
    return tensor_entry(shard_slice.name, shard_slice.dtype, shard_slice.size)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def key(version: int, attempt: str) -> str:
    """Return the identity of a version between processes: a trainer that restarts may use a number again."""
    return f"{version}.{attempt}"


def version_of(key: str) -> int:
    """Return the number in a key; -1 for an empty one."""
    return int(key.partition(".")[0] or -1)


class ManifestDigest(NamedTuple):
    """Part as `PublishedVersion` names it: the digest of its manifest, bytes, chunks."""

    digest: str
    size: int
    chunks: int


@dataclass(frozen=True)
class PublishedVersion:
    """Published version, as it is in the store. `attempt`: identifies the attempt of the trainer that made it."""

    version: int
    attempt: str
    shares: tuple[ManifestDigest, ...]

    @property
    def key(self) -> str:
        return key(self.version, self.attempt)

    @property
    def chunks(self) -> int:
        return sum(share.chunks for share in self.shares)

    def pack(self) -> str:
        return json.dumps([self.version, self.attempt, self.shares])

    @classmethod
    def unpack(cls, text: str) -> PublishedVersion:
        version, attempt, shares = json.loads(text)
        return cls(version, attempt, tuple(ManifestDigest(*share) for share in shares))
