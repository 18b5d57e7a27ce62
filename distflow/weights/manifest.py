"""What a version of weights consists of: parts, one for each trainer rank, cut into chunks with checksums.

A part is one flat buffer: the rank's boxes, one after the other. Its manifest says where each box lies, and the
checksum of each chunk; the digest of the manifest stands in the version's head, and the head is what the board shows.
So whoever trusts the head can trust every byte, whoever it came from.

Checksums are XXH3 with 128 bits: 25 GB/s on one core, where CRC-32 of zlib has 4 and a copy 12, so that they do not
hold up a transfer; and long enough that equal checksums mean equal contents, which spares chunks that did not change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy
import torch
import xxhash

from distflow.weights.errors import WeightsError
from distflow.weights.shard_slice import ShardSlice

SUM = 16
"""Bytes of a checksum."""
ALIGNMENT = 64
"""Bytes on whose multiples boxes begin: contents can then be used where they lie."""
_LEAST, _MOST, _PIECES = 256 << 10, 16 << 20, 64
Chunk = tuple[int, int]
"""Part, and place in it."""
Run = tuple[int, int, int]
"""Chunks that lie one after the other: part, the first of them, how many."""


def chunk_size(size: int) -> int:
    """Bytes of a chunk for a part of `size` bytes: a power of two, 1/64 of it or more, between 256 KiB and 16 MiB.

    Each relay in a row costs one chunk of time; each chunk costs a request.
    """
    return min(max(1 << (max(size // _PIECES, 1) - 1).bit_length(), _LEAST), _MOST)


def checksum(data: numpy.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(data)


class SliceEntry(NamedTuple):
    """A box, where it lies in its part, and its tensor's place in the order of the model."""

    box: ShardSlice
    offset: int
    order: int


@dataclass(frozen=True)
class RankManifest:
    """One trainer rank's share: `sums` are the checksums of its chunks, joined."""

    size: int
    chunk: int
    contents: tuple[SliceEntry, ...]
    sums: bytes

    def __len__(self) -> int:
        return len(self.sums) // SUM

    def sum(self, index: int) -> bytes:
        return self.sums[index * SUM : (index + 1) * SUM]

    def span(self, first: int, count: int = 1) -> slice:
        """The bytes of a chunk, or of several."""
        return slice(first * self.chunk, min((first + count) * self.chunk, self.size))

    def touching(self, content: SliceEntry, box: ShardSlice) -> range:
        """The chunks with what `content` and `box` have in common."""
        common = content.box.overlap(box)
        if common is None or not common.numel:
            return range(0)
        first, last = common.reach(content.box)
        return range((content.offset + first) // self.chunk, (content.offset + last - 1) // self.chunk + 1)

    def pack(self) -> bytes:
        contents = [[box.name, box.shape, box.start, box.size, str(box.dtype).removeprefix("torch."), offset, order]
                    for box, offset, order in self.contents]
        return msgpack.packb([self.size, self.chunk, contents, self.sums])

    @classmethod
    def unpack(cls, packed: bytes) -> RankManifest:
        size, chunk, contents, sums = msgpack.unpackb(packed)
        found = tuple(SliceEntry(ShardSlice(name, tuple(shape), tuple(start), tuple(count), _dtype(dtype)), offset,
                                 order)
                      for name, shape, start, count, dtype, offset, order in contents)
        return cls(size, chunk, found, sums)


def lay_out(boxes: Sequence[ShardSlice], orders: Sequence[int]) -> tuple[tuple[SliceEntry, ...], int]:
    """One after the other; and the bytes of all."""
    contents, end = [], 0
    for box, order in zip(boxes, orders):
        contents.append(SliceEntry(box, end, order))
        end += -(-box.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(contents), end


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def key(version: int, team: str) -> str:
    """What a version is called between processes: a trainer that starts anew may use a number again."""
    return f"{version}.{team}"


def version_of(key: str) -> int:
    """The number in a key; -1 if that is empty."""
    return int(key.partition(".")[0] or -1)


class ManifestDigest(NamedTuple):
    """A part as the head names it: the digest of its manifest, bytes, chunks."""

    digest: str
    size: int
    chunks: int


@dataclass(frozen=True)
class PublishedVersion:
    """A version as the board shows it. `team`: which start of the trainer made it."""

    version: int
    team: str
    shares: tuple[ManifestDigest, ...]

    @property
    def key(self) -> str:
        return key(self.version, self.team)

    @property
    def chunks(self) -> int:
        return sum(share.chunks for share in self.shares)

    @property
    def nbytes(self) -> int:
        return sum(share.size for share in self.shares)

    def pack(self) -> str:
        return json.dumps([self.version, self.team, self.shares])

    @classmethod
    def unpack(cls, text: str) -> PublishedVersion:
        version, team, shares = json.loads(text)
        return cls(version, team, tuple(ManifestDigest(*share) for share in shares))


def _dtype(name: str) -> torch.dtype:
    found: Any = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise WeightsError(f"a manifest has the dtype `{name}`, which this torch does not know; install the same torch "
                           "on all machines")
    return found
