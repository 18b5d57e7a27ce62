"""A process that has weights serves them: manifests and chunks, to one puller at a time (RobustRL §5.2.1).

A puller takes the lease, is told which chunks are here, and asks for some at a time. Whoever else asks is told who has
the lease, and will find the same chunks there a moment later: so pullers form a row instead of a queue. A lease without
a request for some seconds goes to the next one who asks, and that of a broken connection ends with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from distflow.data.dock.errors import Refused
from distflow.data.dock.line import Closed, Line
from distflow.data.dock.listener import Listener
from distflow.weights.errors import WeightsError
from distflow.weights.holding import Holding, packed
from distflow.weights.transport import Transport
from distflow.weights.transport.ends import Outlet

_log = logging.getLogger("distflow.weights")
_WAIT = 0.5
"""Seconds after which a puller that waits for more chunks gets an answer, if only that there are none."""
Header = dict[str, Any]


class Client:
    """A puller, as its connection shows it."""

    def __init__(self, line: Line, who: str):
        self.line, self.who, self.heard, self.key = line, who, time.monotonic(), ""
        self.outlet: Outlet | None = None


class Source:
    """Serves `holdings` from `start` to `close`.

    Args:
        transports: the ways that pullers may choose from.
        patience: seconds without a request after which a lease may go to another.
        told: called with the name of the puller that has the lease, or an empty one, whenever that changes.

    Raises:
        DockError: the port is taken, or the token is too short.
    """

    def __init__(self, token: bytes, who: str, host: str, transports: dict[str, Transport], patience: float,
                 told: Callable[[str], None]):
        self.who, self.transports, self.patience, self.told = who, transports, patience, told
        self.holdings: dict[str, Holding] = {}
        self.tenant: Client | None = None
        self.changed = threading.Condition()
        self.sent = 0
        """Bytes of chunks."""
        self.listener = Listener(token, host, 0, self._serve, _log)
        self.address = self.listener.address
        self.actions: dict[str, Callable[[Client, Header], tuple[Header, list[Any]]]] = {
            "by": self._by, "manifest": self._manifest, "lease": self._lease, "state": self._state}

    def start(self) -> None:
        self.listener.start()

    def close(self) -> None:
        self.listener.close()
        self.holdings = {}

    def offer(self, holding: Holding) -> None:
        """Serve this version too; it may still be filling."""
        self.holdings = {**self.holdings, holding.key: holding}

    def withdraw(self, key: str, patience: float = 0.0) -> None:
        """Stop serving a version, but let the puller that is at it come to an end for `patience` seconds."""
        deadline = time.monotonic() + patience
        with self.changed:
            while self._pulled == key and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)
            self.holdings = {other: holding for other, holding in self.holdings.items() if other != key}

    @property
    def _pulled(self) -> str:
        """The version that the lease is for, if its puller is at it."""
        tenant = self.tenant
        return tenant.key if tenant is not None and time.monotonic() - tenant.heard < self.patience else ""

    def _serve(self, line: Line, hello: Header) -> None:
        client = Client(line, str(hello.get("who", line.peer)))
        offers = {name: offer for name, way in self.transports.items() if (offer := way.offer()) is not None}
        try:
            line.send({"who": self.who, "offers": offers})
            while True:
                header, size = line.receive()
                line.skip(size)
                client.heard = time.monotonic()
                self._answer(client, header)
        except (Refused, Closed, OSError) as error:
            _log.debug("%s hung up: %s", client.who, error)
        finally:
            self._leave(client)
            if client.outlet is not None:
                client.outlet.close()

    def _answer(self, client: Client, header: Header) -> None:
        try:
            if header["op"] in ("chunks", "release"):
                (self._give if header["op"] == "chunks" else self._release)(client, header)
                return
            reply, buffers = self.actions[header["op"]](client, header)
        except WeightsError as error:
            reply, buffers = {"error": str(error)}, []
        except (LookupError, TypeError, ValueError) as error:
            _log.exception("%s sent a request that cannot be answered", client.who)
            reply, buffers = {"error": f"{self.who} cannot answer `{header.get('op')}`: {error!r}"}, []
        client.line.send(reply, buffers)

    def _by(self, client: Client, header: Header) -> tuple[Header, list[Any]]:
        client.outlet = self.transports[header["transport"]].outlet(header["said"])
        return client.outlet.reply, []

    def _manifest(self, client: Client, header: Header) -> tuple[Header, list[Any]]:
        manifest = self._holding(header["key"]).packed.get(header["part"])
        return {"has": manifest is not None}, [manifest] if manifest is not None else []

    def _lease(self, client: Client, header: Header) -> tuple[Header, list[Any]]:
        holding = self._holding(header["key"])
        with self.changed:
            other = self.tenant
            if other is not None and other is not client:
                if other.who != client.who and time.monotonic() - other.heard < self.patience:
                    return {"busy": other.who}, []
                other.line.hang_up()
            self.tenant, client.key = client, holding.key
        self.told(client.who)
        return self._have(client, holding), []

    def _state(self, client: Client, header: Header) -> tuple[Header, list[Any]]:
        """Answered when there are other chunks than the puller has seen, or after a while."""
        holding = self._holding(header["key"])
        with holding.changed:
            if holding.count == header["seen"]:
                holding.changed.wait(_WAIT)
        return self._have(client, holding), []

    def _have(self, client: Client, holding: Holding) -> Header:
        with holding.changed:
            told = client.outlet.tell(holding.memory) if client.outlet is not None else {}
            return {"count": holding.count, "moved": holding.moved, "have": packed(holding.have),
                    "grows": holding.lacks()} | told

    def _release(self, client: Client, header: Header) -> None:
        """Not answered."""
        self._leave(client)

    def _leave(self, client: Client) -> None:
        with self.changed:
            if self.tenant is not client:
                return
            self.tenant = None
            self.changed.notify_all()
        self.told("")

    def _give(self, client: Client, header: Header) -> None:
        holding, run = self.holdings.get(header["key"]), tuple(header["run"])
        if holding is None or not holding.has(run) or client.outlet is None or self.tenant is not client:
            client.line.send({"gone": True})
            return
        place = holding.place(run)

        def moved(_: int) -> None:
            client.heard = time.monotonic()  # a slow link is no silence

        client.outlet.give(client.line, self._have(client, holding), place, moved)
        self.sent += len(place)

    def _holding(self, key: str) -> Holding:
        found = self.holdings.get(key)
        if found is None:
            raise WeightsError(f"{self.who} does not have this version (any more)")
        return found
