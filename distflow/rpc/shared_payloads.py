"""Payloads through shared memory, for a connection whose two ends are on one machine.

The memory is the server's heap. A client asks for room, writes a request's payload there once, and the server keeps it
where it is. What a server has stored, clients read in place: the server holds it until the client says that it has read
it, or asks for anything else, or its connection ends. Headers go over the socket, and so do small payloads.

That both ends share a machine is proved by opening the heap, under a name that only a process with the run's token can
have given it. No process writes anywhere but where it was given room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from distflow.rpc.errors import Refused
from distflow.rpc.messages import MACHINE_MEMORY, write_parts
from distflow.rpc.shared_heap import SharedHeap, free_addresses
from distflow.rpc.shared_memory import MappedMemory, MemoryAddress, machine_name, memory_name

LEAST = 256 << 10
"""Bytes from which on shared memory costs less than the socket: as much at 200 kB, a third less at 3 MB."""
Header = dict[str, Any]
Parts = Sequence[Any]


class MappedHeap:
    """Client's end: the server's heap, mapped here."""

    def __init__(self, memory: numpy.ndarray):
        self.whole, self.room = memory, (0, 0)  # where the server has given room, and how much
        self.memory = memory.view()
        self.memory.flags.writeable = False

    @classmethod
    def of_server(cls, offer: Header | None, token: bytes) -> MappedHeap | None:
        """Map the heap that a server offers; None if it is on another machine, cannot be opened, or would take more
        than half of the addresses that the limits of this process leave."""
        if offer is None or offer["machine"] != machine_name():
            return None
        address = MemoryAddress.of(offer["address"])
        if address.size > free_addresses() // 2:
            return None
        try:
            return cls(MappedMemory(heap_name(token), writable=True).open(address))
        except OSError:
            return None

    def write(self, ask: Callable[[Header], Header], header: Header, parts: Parts, size: int) -> tuple[Header, Parts]:
        """Write a request's payload into the heap if it is large, and the server, which `ask` asks, has room; return
        the header, and the parts for the socket."""
        if size >= LEAST and self.room[1] != size:
            self.take_room(ask({"op": "reserve", "size": size}), size)
        (at, given), self.room = self.room, (0, 0)  # a request that does not use it has given it up
        if size < LEAST:
            return header | {"in_place": True}, parts
        if given != size:
            return header, parts
        write_parts(self.whole[at : at + size].data, parts)
        return header | {"reserved": True}, []

    def take_room(self, reply: Header, size: int) -> None:
        """Take the reply to a request for room, which may be an error: then the payload goes over the socket."""
        at = reply.get("at")
        if at is not None and not 0 <= at <= len(self.whole) - size:
            raise Refused(f"a server gave room for {size} bytes at {at}, but its memory has {len(self.whole)}")
        self.room = (0, 0) if at is None else (at, size)


class ServedHeap:
    """Server's end: its heap, and what it has promised to one connection."""

    def __init__(self, heap: SharedHeap):
        self.heap = heap
        self.reserved = heap.memory[:0]
        self.held: list[numpy.ndarray] = []  # that the client reads in place

    def offer(self) -> Header | None:
        return {"machine": machine_name(), "address": self.heap.address} if self.heap.address else None

    def reserve(self, size: int) -> int:
        """Give the client room for its next request's payload; return where that is."""
        if not LEAST <= size <= MACHINE_MEMORY:
            raise Refused(f"a payload of {size} bytes, where at most {MACHINE_MEMORY} are expected")
        self.reserved = self.heap.take(size)
        return self.heap.offset_of(self.reserved)

    def locate(self, header: Header) -> int:
        """Return the bytes of a request's payload that are in the heap. The client has read what was held for it."""
        self.held = []
        if not header.pop("reserved", False):
            self.reserved = self.heap.memory[:0]
        return len(self.reserved)

    def payload(self) -> numpy.ndarray:
        found, self.reserved = self.reserved, self.heap.memory[:0]
        return found


def heap_name(token: bytes) -> str:
    return memory_name("dock", token)
