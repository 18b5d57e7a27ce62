"""Payloads through shared memory, for a connection whose two ends are on one machine.

The memory is the client's. A request's header says in which buffer its payload is, and offers one for the reply, as
large as recent replies; the client uses the reply in place. Headers go over the socket, and so do payloads that are
small or do not fit.

Buffers belong to one connection: a server that was stopped may still write into them. That both ends share a machine
is proved by opening the memory that the client offers: only a process with the run's token can have made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from distflow.rpc.errors import Refused
from distflow.rpc.messages import write_parts
from distflow.rpc.shared_memory import MappedMemory, MemoryAddress, SharedMemoryPool, machine_name, memory_name

LEAST = 256 << 10
"""Bytes from which on shared memory costs less than the socket: as much at 200 kB, a third less at 3 MB."""
_SLACK, _SMALLEST, _SPARE = 1.25, 1 << 20, 4
Header = dict[str, Any]
Parts = Sequence[Any]


class Segments:
    """Client's end: the owner of the memory."""

    def __init__(self, token: bytes) -> None:
        self.pool = SharedMemoryPool(_name(token), _SMALLEST, _SPARE, _SLACK)
        self.largest = 0
        self.sent = self.offered = numpy.empty(0, numpy.uint8)

    def offer(self) -> Header | None:
        machine = machine_name()
        return {"machine": machine, "address": self.pool.add(_SMALLEST)} if machine else None

    def write(self, header: Header, parts: Parts, size: int) -> tuple[Header, Parts]:
        """Write a request's payload into memory if it is large; return the header and the parts for the socket."""
        if size >= LEAST:
            self.sent = self.pool.take(size)
            write_parts(self.sent.data, parts)
            header, parts = header | {"payload_at": self.pool.address_of(self.sent), "payload_size": size}, []
        if self.largest >= LEAST:
            self.offered = self.pool.take(int(self.largest * _SLACK), whole=True)
            header = header | {"reply_at": self.pool.address_of(self.offered)}
        return header, parts

    def locate(self, header: Header, on_wire: int) -> int:
        """Return the bytes of a reply's payload that are in memory; the server has read the request's."""
        size = header.pop("payload_size", 0)
        if size + on_wire >= LEAST:
            self.largest = max(size + on_wire, self.largest * 3 // 4)
        if not 0 <= size <= len(self.offered):
            raise Refused(f"a reply of {size} bytes does not fit into the {len(self.offered)} that were offered for it")
        self.sent = numpy.empty(0, numpy.uint8)
        self.offered = self.offered[:size] if size else numpy.empty(0, numpy.uint8)
        return size

    def payload(self, size: int) -> Tensor:
        """Return the payload in place, [size] uint8; the buffer is used again when the last view of it is gone."""
        found, self.offered = torch.from_numpy(self.offered), numpy.empty(0, numpy.uint8)
        return found

    def allocate(self, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return [size] uint8 for rows out of several replies: fresh memory costs many times what a copy does."""
        return torch.from_numpy(self.pool.take(size)) if size >= LEAST else torch.empty(size, dtype=dtype)


class MappedSegments:
    """Server's end: the memory of a client that it has mapped."""

    def __init__(self, token: bytes) -> None:
        self.mapped = MappedMemory(_name(token), writable=True)
        self.payload_bytes = numpy.empty(0, numpy.uint8)
        self.reply_at: MemoryAddress | None = None

    @classmethod
    def of_client(cls, offer: Header | None, token: bytes) -> MappedSegments | None:
        """Map the memory that a client offers; None if it is on another machine, or cannot be opened."""
        if offer is None or offer["machine"] != machine_name():
            return None
        found = cls(token)
        try:
            found.mapped.open(MemoryAddress.of(offer["address"]))
        except OSError:
            return None
        return found

    def write(self, header: Header, parts: Parts, size: int) -> tuple[Header, Parts]:
        """Write a reply's payload into the offered buffer if it fits; return header and parts for the socket."""
        if self.reply_at is None or not LEAST <= size <= self.reply_at.size:
            return header, parts
        write_parts(self.mapped.open(self.reply_at).data, parts)
        return header | {"payload_size": size}, []

    def locate(self, header: Header, on_wire: int) -> int:
        """Return the bytes of a request's payload that are in memory."""
        reply_at, at, size = header.pop("reply_at", None), header.pop("payload_at", None), header.pop("payload_size", 0)
        self.reply_at = MemoryAddress.of(reply_at) if reply_at else None
        if at is not None:
            self.payload_bytes = self.mapped.open(MemoryAddress.of(at))[:size]
        if not 0 <= size <= len(self.payload_bytes):
            raise Refused(f"a payload of {size} bytes does not fit into the memory that holds it")
        return size

    def payload(self, size: int) -> Tensor:
        result = torch.empty(size, dtype=torch.uint8)
        result.numpy()[:] = self.payload_bytes
        return result


def _name(token: bytes) -> str:
    return memory_name("dock", token)

