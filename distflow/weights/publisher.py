"""The trainer's side: each rank copies its shards to host memory and serves them from there.

No rank gathers anything, and nothing waits for another rank: whoever is the last to have its part ready makes the
version known, by one exchange on the board. Until then readers see the version before, and after it this one, whole.

A process that has weights serves them: manifests and chunks, to one puller at a time (RobustRL §5.2.1).

A puller takes the lease, is told which chunks are here, and asks for some at a time. Whoever else asks is told who has
the lease, and will find the same chunks there a moment later: so pullers form a row instead of a queue. A lease without
a request for some seconds goes to the next one who asks, and that of a broken connection ends with it.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from distflow.dock.errors import Refused
from distflow.rpc.connection import Connection, ConnectionEnded
from distflow.rpc.server import Server
from distflow.telemetry.events import record
from distflow.weights.buffers import HostBuffers
from distflow.weights.chunk_store import ChunkStore, packed
from distflow.weights.directory import Directory, HeldChunks, SourceEntry
from distflow.weights.errors import WeightsError, WeightsLate
from distflow.weights.manifest import (
    ManifestDigest,
    PublishedVersion,
    RankManifest,
    checksum,
    chunk_size,
    digest,
    key,
    lay_out,
)
from distflow.weights.shard_slice import slices_of
from distflow.weights.transport import Transport, transports
from distflow.weights.transport.ends import SourceEnd

_log = logging.getLogger("distflow.weights")
_WAIT = 0.5
"""Seconds after which a puller that waits for more chunks gets an answer, if only that there are none."""
Header = dict[str, Any]


class PullerConnection:
    """A puller, as its connection shows it."""

    def __init__(self, line: Connection, who: str):
        self.line, self.who, self.heard, self.key = line, who, time.monotonic(), ""
        self.outlet: SourceEnd | None = None


class SourceServer:
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
        self.holdings: dict[str, ChunkStore] = {}
        self.tenant: PullerConnection | None = None
        self.changed = threading.Condition()
        self.sent = 0
        """Bytes of chunks."""
        self.listener = Server(token, host, 0, self._serve, _log)
        self.address = self.listener.address
        self.actions: dict[str, Callable[[PullerConnection, Header], tuple[Header, list[Any]]]] = {
            "by": self._by, "manifest": self._manifest, "lease": self._lease, "state": self._state}

    def start(self) -> None:
        self.listener.start()

    def close(self) -> None:
        self.listener.close()
        self.holdings = {}

    def offer(self, holding: ChunkStore) -> None:
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

    def _serve(self, line: Connection, hello: Header) -> None:
        client = PullerConnection(line, str(hello.get("who", line.peer)))
        offers = {name: offer for name, way in self.transports.items() if (offer := way.offer()) is not None}
        try:
            line.send({"who": self.who, "offers": offers})
            while True:
                header, size = line.receive()
                line.skip(size)
                client.heard = time.monotonic()
                self._answer(client, header)
        except (Refused, ConnectionEnded, OSError) as error:
            _log.debug("%s hung up: %s", client.who, error)
        finally:
            self._leave(client)
            if client.outlet is not None:
                client.outlet.close()

    def _answer(self, client: PullerConnection, header: Header) -> None:
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

    def _by(self, client: PullerConnection, header: Header) -> tuple[Header, list[Any]]:
        client.outlet = self.transports[header["transport"]].outlet(header["said"])
        return client.outlet.reply, []

    def _manifest(self, client: PullerConnection, header: Header) -> tuple[Header, list[Any]]:
        manifest = self._holding(header["key"]).packed.get(header["part"])
        return {"has": manifest is not None}, [manifest] if manifest is not None else []

    def _lease(self, client: PullerConnection, header: Header) -> tuple[Header, list[Any]]:
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

    def _state(self, client: PullerConnection, header: Header) -> tuple[Header, list[Any]]:
        """Answered when there are other chunks than the puller has seen, or after a while."""
        holding = self._holding(header["key"])
        with holding.changed:
            if holding.count == header["seen"]:
                holding.changed.wait(_WAIT)
        return self._have(client, holding), []

    def _have(self, client: PullerConnection, holding: ChunkStore) -> Header:
        with holding.changed:
            told = client.outlet.tell(holding.memory) if client.outlet is not None else {}
            return {"count": holding.count, "moved": holding.moved, "have": packed(holding.have),
                    "grows": holding.lacks()} | told

    def _release(self, client: PullerConnection, header: Header) -> None:
        """Not answered."""
        self._leave(client)

    def _leave(self, client: PullerConnection) -> None:
        with self.changed:
            if self.tenant is not client:
                return
            self.tenant = None
            self.changed.notify_all()
        self.told("")

    def _give(self, client: PullerConnection, header: Header) -> None:
        holding, run = self.holdings.get(header["key"]), tuple(header["run"])
        if holding is None or not holding.has(run) or client.outlet is None or self.tenant is not client:
            client.line.send({"gone": True})
            return
        place = holding.place(run)

        def moved(_: int) -> None:
            client.heard = time.monotonic()  # a slow link is no silence

        client.outlet.give(client.line, self._have(client, holding), place, moved)
        self.sent += len(place)

    def _holding(self, key: str) -> ChunkStore:
        found = self.holdings.get(key)
        if found is None:
            raise WeightsError(f"{self.who} does not have this version (any more)")
        return found


_LOOK = 0.02


class Publisher:
    """One trainer rank's part of publishing. Making one waits for the trainer's other ranks, which make theirs.

    A trainer that starts anew makes new ones: what an earlier start left half published never becomes visible.

    Args:
        store: the board.
        token: the run's, at least 16 bytes.
        host: the address at which pullers reach this process.
        transport: what pullers may choose from: `auto` offers all that this process can use.
        patience: seconds for which a puller may hold up a new version, when it is still at the one before the last.
        meeting: seconds within which all ranks must have come.

    Raises:
        WeightsLate: a rank of the trainer did not come.
        NoTransport: the transport cannot be used here.
    """

    def __init__(self, store: dist.Store, token: bytes, *, rank: int, ranks: int, host: str = "127.0.0.1",
                 transport: str = "auto", patience: float = 5.0, meeting: float = 300.0):
        self.rank, self.ranks, self.patience = rank, ranks, patience
        self.buffers = HostBuffers()
        ways = transports(transport, self.buffers, token, host)
        who = f"trainer-{rank}"
        self.source = SourceServer(token, who, host, ways, patience,
                                   lambda serving: self.directory.tell(serving=serving))
        self.directory = Directory(store, SourceEntry(who, self.source.address, rank))
        self.team = self._meet(meeting)
        self.held: list[ChunkStore] = []
        """What is served: the newest version, and the one before it."""
        self.source.start()
        self.directory.start()

    def publish(self, version: int, shards: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Copy and serve this rank's part of a version; when all ranks have done so, it is the newest.

        Args:
            shards: this rank's tensors by name, in the model's order: DTensors or whole ones. They may change as soon
                as this returns.
            dtype: in which floating-point tensors travel; None: each in its own.

        Raises:
            WeightsError: a shard is no box, or this version is not newer than the last one.
        """
        if self.held and version <= self.held[-1].version:
            raise WeightsError(f"version {version} was to be published after version {self.held[-1].version}; versions "
                               "count upwards")
        self._withdraw()
        part, memory = self._copied(shards, dtype)
        packed, holding = part.pack(), ChunkStore(version, key(version, self.team))
        holding.add(self.rank, part, packed, memory)
        self.held.append(holding)
        self.source.offer(holding)
        self.directory.tell(held=tuple(HeldChunks(held.version, held.key, held.count,
                                                  held.count) for held in self.held))
        self._count_in(version, ManifestDigest(digest(packed), part.size, len(part)))
        record("weights_published", version=version, trainer_rank=self.rank, bytes=part.size)

    @property
    def sent(self) -> int:
        """Bytes of chunks that pullers got from this rank."""
        return self.source.sent

    def close(self) -> None:
        """Stop serving; pullers go on from relays."""
        self.directory.close()
        self.source.close()

    def _withdraw(self) -> None:
        """Versions that are older than the one which readers see: their memory is needed."""
        newest = next((head.version for head in self.directory.heads() if head.team == self.team), -1)
        for holding in [held for held in self.held if held.version < newest]:
            self.source.withdraw(holding.key, self.patience)
            self.held.remove(holding)

    @torch.no_grad()
    def _copied(self, shards: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[RankManifest, numpy.ndarray]:
        found = slices_of(shards)
        kinds = [dtype if dtype is not None and box.dtype.is_floating_point else box.dtype for box, _ in found]
        orders = {name: order for order, name in enumerate(shards)}
        contents, size = lay_out([replace(box, dtype=kind) for (box, _), kind in zip(found, kinds)],
                                 [orders[box.name] for box, _ in found])
        memory, chunk = self.buffers.take(size), chunk_size(size)
        whole = torch.from_numpy(memory)
        sums: list[bytes] = []
        for content, (box, local) in zip(contents, found):
            part = whole[content.offset : content.offset + content.box.nbytes]
            part.view(content.box.dtype).view(box.size).copy_(local)
            ready = (content.offset + content.box.nbytes) // chunk  # while they are in the cache
            sums += [checksum(memory[index * chunk : (index + 1) * chunk]) for index in range(len(sums), ready)]
        if size > len(sums) * chunk:
            sums.append(checksum(memory[len(sums) * chunk :]))
        return RankManifest(size, chunk, contents, b"".join(sums)), memory

    def _count_in(self, version: int, share: ManifestDigest) -> None:
        """This rank is ready; the last one makes the version the newest."""
        store, base = self.directory.store, f"parts/{self.team}/{version}"
        store.set(f"{base}/{self.rank}", json.dumps(share))
        if store.add(f"{base}/count", 1) < self.ranks:
            return
        keys = [f"{base}/{rank}" for rank in range(self.ranks)]
        shares = tuple(ManifestDigest(*json.loads(text)) for text in store.multi_get(keys))
        head, revealed = PublishedVersion(version, self.team, shares), False
        while not revealed:
            old = self.directory.heads()
            if self.directory.read("team") != self.team:
                raise WeightsError(f"version {version} stays unpublished: the trainer has been started anew, and this "
                                   "is a process of the start before. End it")
            revealed = self.directory.reveal(head, old)
        for name in [f"{base}/count", *keys]:
            store.delete_key(name)

    def _meet(self, limit: float) -> str:
        """What this start of the trainer is called. Rank 0 proposes all ranks' nonces; those of an earlier start cannot
        agree to a proposal with this one's."""
        store, mine, deadline = self.directory.store, secrets.token_hex(8), time.monotonic() + limit
        store.set(f"meeting/{self.rank}", mine)
        while True:
            present = [self.directory.read(f"meeting/{rank}") for rank in range(self.ranks)]
            if self.rank == 0 and all(present):
                store.set("proposal", json.dumps(present))
            proposal = self.directory.read("proposal")
            if proposal and len(agreed := json.loads(proposal)) == self.ranks and agreed[self.rank] == mine:
                team = digest(proposal.encode())
                store.set(f"agrees/{self.rank}", team)
                if self.rank == 0 and all(self.directory.read(f"agrees/{rank}") == team for rank in range(self.ranks)):
                    store.set("team", team)
                if self.directory.read("team") == team:
                    return team
            if time.monotonic() > deadline:
                missing = [rank for rank, nonce in enumerate(present) if not nonce] or "one that began earlier"
                raise WeightsLate(f"rank {self.rank} of the trainer has waited {limit:.0f} s for the others to make "
                                  f"their Publisher; missing: {missing}. All ranks of a trainer start together")
            time.sleep(_LOOK)
