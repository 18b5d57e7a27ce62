"""Transports of chunks between processes. An authenticated connection (`distflow.rpc.connection`) comes first in every
case: it proves both ends and carries requests; the transport carries the bytes.

    memory    both on one machine: nothing is transferred, the puller uses the source's memory
    ucx       UCX: RDMA where there is any, TCP otherwise; needs the package that the extra `ucx` installs
    tcp       the connection itself; always available

`auto` takes the first that both ends can use, and records which. One that is requested by name is used,
or is an error: nothing falls back in silence. A new one: a module here with a `Transport` and its two ends, a line each
in `made` and `usable` below, its name in `transport` of `distflow/config/run.py`, and `make docs`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Protocol

from distflow.config.models import TRANSPORTS, missing_transport
from distflow.errors import did_you_mean
from distflow.rpc.shared_memory import SharedMemoryPool, machine_name
from distflow.weights.errors import NoTransport
from distflow.weights.transport.ends import Header, PullerEnd, SourceEnd
from distflow.weights.transport.memory import SharedMemoryTransport
from distflow.weights.transport.tcp import Tcp
from distflow.weights.transport.ucx import Ucx

WINDOW = 2
"""Runs of chunks that a puller requests ahead: while one is verified, the next is under way."""


class Transport(Protocol):
    """Way of a process to transfer bytes. `offer`: what its sources announce about it, None where it cannot be used."""

    name: str

    def offer(self) -> Header | None: ...

    def source_end(self, hello: Header) -> SourceEnd: ...

    def puller_end(self, offer: Header, deadline: float) -> PullerEnd | None:
        """Return None if the source cannot be used this way."""


def transports(requested: str, buffers: SharedMemoryPool, host: str = "127.0.0.1") -> dict[str, Transport]:
    """Return the transports that this process can use, best first. `host`: the address at which others reach it."""
    made: dict[str, Callable[[], Transport]] = {"memory": lambda: SharedMemoryTransport(buffers),
                                                "ucx": lambda: Ucx(host, wished=requested == "ucx"), "tcp": Tcp}
    if requested != "auto" and requested not in made:
        raise NoTransport(f"there is no transport `{requested}`. {did_you_mean(requested, ['auto', *made])}")
    if missing := missing_transport(requested):
        raise NoTransport(f"{missing}:  {TRANSPORTS[requested].pip}  or set  transport: auto")
    if requested == "memory" and not machine_name():
        raise NoTransport("the transport `memory` needs memfd_create and /proc, which this system does not have, or "
                          "DISTFLOW_MACHINE is set to nothing. Set  transport: auto")
    usable = {"memory": bool(machine_name()), "ucx": not missing_transport("ucx"), "tcp": True}
    return {name: make() for name, make in made.items() if name == requested or (requested == "auto" and usable[name])}


def machine_of(usable: Collection[str]) -> str:
    """Return a short name of this machine, equal for processes that can share memory by these transports; else ""."""
    return hashlib.blake2b(machine_name().encode(), digest_size=8).hexdigest() if "memory" in usable else ""
