"""Transport of chunks by NIXL: the puller reads the source's memory itself (RDMA READ where there is any, else TCP).

For each request the source registers the chunks, and sends with its answer where they lie and what NIXL must know to
read them; it keeps them until it has been notified of every piece that was read. Each connection has an agent at both
ends, which its thread drives: a progress thread of NIXL's never sleeps. A peer that dies is noticed within a second;
one that hangs, or is cut off, only by the deadline without a piece.

Only an agent that is gone writes no more: a READ that is under way goes on after its handle was released and its peer
removed. So nothing that outlives `close` may refer to an agent or a handle, not even the traceback of an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy

from distflow.rpc.connection import Connection
from distflow.weights.errors import NoTransport
from distflow.weights.transport.ends import Header, Moved, PullerEnd, SourceEnd
from distflow.weights.transport.ucx import SETTINGS, STALLED, devices_of

_PIECE, _AHEAD = 2 << 20, 4
"""Bytes of a READ, and how many are under way at once: what must be read within a deadline."""
_NAP, _BUSY = 0.0002, 0.01
"""Seconds between two looks, of a source, and of a puller that has waited so long without one."""


class Nixl:
    """NIXL by the package `nixl_cu12`, for host memory, with its UCX backend. Agents listen on all interfaces, but for
    those of a `host` on loopback. Raises NoTransport: it cannot be loaded, or finds no usable device; here if it was
    requested by name (`wished`), else when it is first used."""

    name = "nixl"

    def __init__(self, host: str = "127.0.0.1", wished: bool = False) -> None:
        self.devices = devices_of(host)
        if wished:
            _NixlAgent("trial", 0.0, self.devices)

    def offer(self) -> Header:
        return {}

    def source_end(self, hello: Header) -> NixlSource:
        return NixlSource(self.devices)

    def puller_end(self, offer: Header, deadline: float) -> NixlPuller:
        return NixlPuller(deadline, self.devices)


def _library() -> tuple[Any, tuple[type[Exception], ...]]:
    """Return NIXL, and its errors. Raises: NoTransport."""
    if "ortools" in sys.modules:
        raise NoTransport("the transport `nixl` ends a process that has loaded `ortools`, as this one has. Use ortools "
                          "in a process of its own, or set  transport: tcp")
    try:
        import nixl_cu12  # type: ignore[reportMissingImports]
        from nixl_cu12 import _bindings  # type: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        raise NoTransport(f"the transport `nixl` cannot be loaded: {error}. Reinstall `nixl-cu12`, or set  "
                          "transport: tcp") from None
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl_cu12, tuple(kind for name, kind in vars(_bindings).items() if name.endswith("Error"))


class _NixlAgent:
    """Agent of one connection; the names of its two differ. Its methods raise `ConnectionError` for NIXL's errors."""

    def __init__(self, name: str, timeout: float, devices: dict[str, str]):
        self.timeout, self.peer = timeout, ""
        self.posted = deque[Any]()
        """Handles of READs under way."""
        nixl, self.errors = _library()
        given = [f"{key}={value}" for key, value in (SETTINGS | devices).items() if f"UCX_{key}" not in os.environ]
        try:
            self.agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
            self.agent.create_backend("UCX", {"engine_config": ",".join(given)} if given else {})
        except (*self.errors, RuntimeError) as error:
            own = ", ".join(f"{key}={value}" for key, value in os.environ.items() if key.startswith(("UCX_", "NIXL_")))
            raise NoTransport(f"the transport `nixl` cannot start: {error}. Its variables in the environment: "
                              f"{own or 'none'}. Correct them, or set  transport: tcp") from None

    def call(self, do: Callable[[Any], Any]) -> Any:
        try:
            return do(self.agent)
        except self.errors as error:
            why = str(error)
        raise ConnectionError(f"NIXL: {why}")  # outside: without the error, whose frames have the agent

    @contextlib.contextmanager
    def registered(self, memory: numpy.ndarray) -> Iterator[None]:
        """Have memory registered; after an error until `close`."""
        found = self.call(lambda agent: agent.register_memory([(memory.ctypes.data, len(memory), 0, "")], "DRAM"))
        yield
        self.call(lambda agent: agent.deregister_memory(found))

    def read(self, metadata: bytes, address: int, into: numpy.ndarray, moved: Moved) -> None:
        """Read memory of the agent with this metadata. Raises `OSError`: it is gone, or no piece came in time."""
        pieces = deque((begin, min(_PIECE, len(into) - begin)) for begin in range(0, len(into), _PIECE))
        asked, ours = deque[int](), into.ctypes.data
        # known anew each time: of memory that it knows it would keep the key of an earlier registration
        self.peer = self.call(lambda agent: agent.add_remote_agent(metadata))
        while pieces or asked:
            while pieces and len(asked) < _AHEAD:
                begin, size = pieces.popleft()
                self._post(ours + begin, address + begin, size)
                asked.append(size)
            self._wait()
            moved(asked.popleft())
        self.call(lambda agent: agent.remove_remote_agent(self.peer))

    def _post(self, ours: int, theirs: int, size: int) -> None:
        def post(agent: Any) -> None:
            local, remote = (agent.get_xfer_descs([(where, size, 0)], "DRAM") for where in (ours, theirs))
            self.posted.append(agent.initialize_xfer("READ", local, remote, self.peer, size.to_bytes(8, "big")))
            agent.transfer(self.posted[-1])

        self.call(post)

    def _wait(self) -> None:
        begun = time.monotonic()
        while (state := self.call(lambda agent: agent.check_xfer_state(self.posted[0]))) == "PROC":
            waited = time.monotonic() - begun
            if waited > self.timeout:
                raise TimeoutError(f"nothing moved for {self.timeout:g} s")
            time.sleep(0 if waited < _BUSY else _NAP)
        if state != "DONE":
            raise ConnectionError("NIXL: a read failed")
        self.call(lambda _: self.posted.popleft().release())

    def wait_until_read(self, size: int, connection: Connection, moved: Moved) -> None:
        """Wait until the other end has read so many bytes. Raises `OSError`: it hung up, or stands still."""
        hung_up, heard = select.poll(), time.monotonic()
        hung_up.register(connection.sock, select.POLLRDHUP)
        while size > 0:
            notices = self.call(lambda agent: agent.get_new_notifs())
            if read := sum(int.from_bytes(notice, "big") for found in notices.values() for notice in found):
                size, heard = size - read, time.monotonic()
                moved(read)
            elif hung_up.poll(0):
                raise ConnectionResetError(f"{connection.peer} hung up")
            elif time.monotonic() - heard > self.timeout:
                raise TimeoutError(f"nothing moved for {self.timeout:g} s")
            else:
                time.sleep(_NAP)

    def close(self) -> None:
        """End all transfers, so that memory of what was under way may be used for something else."""
        while self.posted:
            with contextlib.suppress(*self.errors):
                self.posted.pop().release()
        self.agent = None


class NixlSource(SourceEnd):
    def __init__(self, devices: dict[str, str]):
        self.end = _NixlAgent("source", STALLED, devices)

    def send(self, connection: Connection, header: Header, chunks: numpy.ndarray, moved: Moved) -> None:
        with self.end.registered(chunks):
            metadata = self.end.call(lambda agent: agent.get_agent_metadata())
            connection.send(header | {"metadata": metadata, "address": chunks.ctypes.data})
            self.end.wait_until_read(len(chunks), connection, moved)

    def close(self) -> None:
        self.end.close()


class NixlPuller(PullerEnd):
    run = 64 << 20

    def __init__(self, deadline: float, devices: dict[str, str]):
        self.end = _NixlAgent("puller", deadline, devices)
        self.answer: Header = {}

    def on_reply(self, answer: Header) -> None:
        self.answer = answer

    def take(self, connection: Connection, size: int, part: int, span: slice, into: numpy.ndarray,
             moved: Moved) -> None:
        with self.end.registered(into):
            self.end.read(self.answer["metadata"], self.answer["address"], into, moved)

    def close(self) -> None:
        self.end.close()
