"""Publishes weights: each trainer rank copies its shards to host memory and serves them from there (RobustRL §5.2.1).

The way of a version from the trainer to the rollouts:

    Publisher    (here)      each trainer rank lays out its slices, sums their chunks (`manifest`) and serves them; the
                             last rank to be ready makes the version the newest in the store. None waits for another:
                             only `workers/weight_sync.py`, which publishes after a step, has all ranks meet
    Directory    directory   the store's view: the newest versions, and which process holds how much of which
    Puller       puller      chooses a version and its `sources`, leases one, pulls and verifies chunks, until complete
    ChunkStore   chunk_store the chunks that have come; relays serve them while the rest is on its way
    SourceServer (here)      serves manifests and chunks, in trainers and in relays, to one puller at a time

A puller takes the lease, learns which chunks are there, and requests some at a time. Any other puller is told who has
the lease, and will find the same chunks there a moment later: so pullers form a chain instead of a queue. A lease
without a request for some seconds goes to the next puller that asks, and that of a broken connection ends with it.
Pullers on the source's machine, which use its memory, need not wait for each other, nor for one elsewhere.
"""

from __future__ import annotations

import contextlib
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
from torch import Tensor

from distflow.rpc.connection import Connection, ConnectionEnded
from distflow.rpc.errors import Refused
from distflow.rpc.server import Server
from distflow.rpc.shared_memory import SharedMemoryPool, memory_name
from distflow.store.interface import Store, StoreUnavailable
from distflow.telemetry.events import record
from distflow.weights.chunk_store import ChunkStore, pack_masks
from distflow.weights.directory import Directory, HeldChunks, SourceEntry
from distflow.weights.errors import WeightsError, WeightsLate
from distflow.weights.fingerprint import Sums
from distflow.weights.host_copy import HostCopy
from distflow.weights.manifest import (
    ManifestDigest,
    PublishedVersion,
    RankManifest,
    checksum,
    chunk_size,
    digest,
    key,
    place_slices,
)
from distflow.weights.shard_slice import WHOLE, Split, slices_of
from distflow.weights.transport import Transport, machine_of, transports
from distflow.weights.transport.ends import SourceEnd

_log = logging.getLogger("distflow.weights")
_WAIT = 0.5
"""Seconds after which a puller that waits for more chunks gets an answer, even if there are none."""
Header = dict[str, Any]


class PullerConnection:
    """Connection of a puller: when it was heard last, the version that it pulls, and how chunks are sent to it."""

    def __init__(self, connection: Connection, who: str):
        self.connection, self.who, self.heard, self.key = connection, who, time.monotonic(), ""
        self.source_end: SourceEnd | None = None

    def hear(self) -> None:
        self.heard = time.monotonic()


class SourceServer:
    """Server of the chunk stores in `stores`, from `start` to `close`.

    transports: those that pullers may choose from. timeout: seconds without a request after which a lease may go to
    another puller. on_lease: called with the name of the puller that has the lease, or "", whenever that changes.
    """

    def __init__(self, token: bytes, who: str, host: str, transports: dict[str, Transport], timeout: float,
                 on_lease: Callable[[str], None]):
        self.who, self.transports, self.timeout, self.on_lease = who, transports, timeout, on_lease
        self.stores: dict[str, ChunkStore] = {}
        self.leaseholder: PullerConnection | None = None
        self.sharing = set[PullerConnection]()
        """Those that use memory of this process."""
        self.changed = threading.Condition()
        self.sent = 0
        """Bytes of chunks."""
        self.server = Server(token, host, 0, self._serve, _log)
        self.address = self.server.address
        self.actions: dict[str, Callable[[PullerConnection, Header], tuple[Header, list[Any]]]] = {
            "transport": self._choose_transport, "manifest": self._manifest, "lease": self._lease, "state": self._state}

    def start(self) -> None:
        self.server.start()

    def close(self) -> None:
        self.server.close()
        self.stores = {}

    def offer(self, chunks: ChunkStore) -> None:
        self.stores = {**self.stores, chunks.key: chunks}

    def withdraw(self, key: str, timeout: float = 0.0) -> None:
        """Stop serving a version; wait up to `timeout` seconds for the puller that has its lease."""
        deadline = time.monotonic() + timeout
        with self.changed:
            while self._is_pulled(key) and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)
            self.stores = {other: chunks for other, chunks in self.stores.items() if other != key}

    def _is_pulled(self, key: str) -> bool:
        return any(client is not None and client.key == key and time.monotonic() - client.heard < self.timeout
                   for client in (self.leaseholder, *self.sharing))

    def _serve(self, connection: Connection, hello: Header) -> None:
        client = PullerConnection(connection, str(hello.get("who", connection.peer)))
        offers = {name: offer for name, way in self.transports.items() if (offer := way.offer()) is not None}
        try:
            connection.send({"who": self.who, "offers": offers})
            while True:
                header, size = connection.receive()
                connection.skip(size)
                client.hear()
                self._answer(client, header)
        except (Refused, ConnectionEnded, OSError) as error:
            _log.debug("%s hung up: %s", client.who, error)
        finally:
            if client.source_end is not None:
                client.source_end.close()
            self._end_lease(client)

    def _answer(self, client: PullerConnection, header: Header) -> None:
        try:
            if header["op"] == "chunks":
                self._send_chunks(client, header)
                return
            if header["op"] == "release":
                self._end_lease(client)
                return
            reply, buffers = self.actions[header["op"]](client, header)
        except WeightsError as error:
            reply, buffers = {"error": str(error)}, []
        except (LookupError, TypeError, ValueError) as error:
            _log.exception("%s sent a request that cannot be answered", client.who)
            reply, buffers = {"error": f"{self.who} cannot answer `{header.get('op')}`: {error!r}"}, []
        client.connection.send(reply, buffers)

    def _choose_transport(self, client: PullerConnection, header: Header) -> tuple[Header, list[Any]]:
        client.source_end = self.transports[header["name"]].source_end(header["hello"])
        return client.source_end.reply, []

    def _manifest(self, client: PullerConnection, header: Header) -> tuple[Header, list[Any]]:
        manifest = self._store(header["key"]).packed.get(header["part"])
        return {"has": manifest is not None}, [manifest] if manifest is not None else []

    def _lease(self, client: PullerConnection, header: Header) -> tuple[Header, list[Any]]:
        chunks = self._store(header["key"])
        if client.source_end is not None and client.source_end.shared:
            with self.changed:
                client.key = chunks.key
                self.sharing.add(client)
            return self._have(client, chunks), []
        with self.changed:
            other = self.leaseholder
            if other is not None and other is not client:
                if other.who != client.who and time.monotonic() - other.heard < self.timeout:
                    return {"busy": other.who}, []
                other.connection.shut_down()
            self.leaseholder, client.key = client, chunks.key
        self._announce(client.who)
        return self._have(client, chunks), []

    def _state(self, client: PullerConnection, header: Header) -> tuple[Header, list[Any]]:
        chunks = self._store(header["key"])
        with chunks.changed:
            if chunks.count == header["seen"]:
                chunks.changed.wait(_WAIT)
        return self._have(client, chunks), []

    def _have(self, client: PullerConnection, chunks: ChunkStore) -> Header:
        with chunks.changed:
            extra = client.source_end.describe(chunks.memory) if client.source_end is not None else {}
            return {"count": chunks.count, "moved": chunks.moved, "have": pack_masks(chunks.have),
                    "grows": chunks.is_missing()} | extra

    def _is_served(self, client: PullerConnection) -> bool:
        return client is self.leaseholder or client in self.sharing

    def _end_lease(self, client: PullerConnection) -> None:
        with self.changed:
            self.sharing.discard(client)
            self.changed.notify_all()
            if self.leaseholder is not client:
                return
            self.leaseholder = None
        self._announce("")

    def _announce(self, leaseholder: str) -> None:
        with contextlib.suppress(StoreUnavailable):  # the next heartbeat has it
            self.on_lease(leaseholder)

    def _send_chunks(self, client: PullerConnection, header: Header) -> None:
        chunks, run = self.stores.get(header["key"]), tuple(header["run"])
        if chunks is None or not chunks.has(run) or client.source_end is None or not self._is_served(client):
            client.connection.send({"gone": True})
            return
        data = chunks.view(run)

        def moved(_: int) -> None:
            client.hear()  # a slow link is no silence

        client.source_end.send(client.connection, self._have(client, chunks), data, moved)
        self._count(len(data))

    def _count(self, sent: int) -> None:
        with self.changed:  # connections are served by threads of their own
            self.sent += sent

    def _store(self, key: str) -> ChunkStore:
        found = self.stores.get(key)
        if found is None:
            raise WeightsError(f"{self.who} does not have this version (any more)")
        return found


_POLL_INTERVAL, _OTHERS_POLL_INTERVAL = 0.02, 1.0  # seconds between two looks at who has come, of rank 0 and of others
_MEETING_LIMIT = 300.0  # seconds within which all ranks must have come


class Publisher:
    """One trainer rank's part of publishing. The constructor waits for the trainer's other ranks, which make theirs.
    A trainer that restarts makes new ones: what an earlier attempt left half published never becomes visible.

    Args:
        host: the address at which pullers reach this process.
        transport: what pullers may choose from: `auto` offers all that this process can use.
        timeout: seconds for which a puller may delay a new version while it pulls the one before the last.

    Raises:
        WeightsLate: not all ranks have come within 300 s.
    """

    def __init__(self, store: Store, token: bytes, *, rank: int, ranks: int, host: str = "127.0.0.1",
                 transport: str = "auto", timeout: float = 5.0):
        self.rank, self.ranks, self.timeout = rank, ranks, timeout
        self.buffers = SharedMemoryPool(memory_name("weights", token))
        available = transports(transport, self.buffers, host)
        who = f"trainer-{rank}"
        self.source = SourceServer(token, who, host, available, timeout,
                                   lambda serving: self.directory.update(serving=serving))
        self.directory = Directory(store, SourceEntry(who, self.source.address, rank, machine=machine_of(available)),
                                   ranks=ranks)
        self.attempt = self._agree_on_attempt(_MEETING_LIMIT)
        self.host_copy = HostCopy()
        self.held: list[ChunkStore] = []
        """Served versions: the newest, and the one before it."""
        self.source.start()
        self.directory.start()

    def publish(self, version: int, shards: Mapping[str, Tensor], dtype: torch.dtype | None = None,
                values: Sums | None = None, split: Split = WHOLE) -> None:
        """Copy and serve this rank's part of a version; when all ranks have done so, it is the newest.

        Args:
            shards: tensors by name, in the model's order: DTensors or whole ones. They may change afterwards.
            dtype: in which floating-point tensors travel; None: each in its own.
            values: sums of the whole weights in that dtype, by which engines prove what they hold.
            split: over the ranks of engines that pull no more than they read: what one reads then lies together.
        """
        if self.held and version <= self.held[-1].version:
            raise WeightsError(f"version {version} was to be published after version {self.held[-1].version}; versions "
                               "count upwards")
        self._withdraw()
        part, memory = self._copy_shards(shards, dtype, values if values and self.rank == 0 else {}, split)
        packed, chunks = part.pack(), ChunkStore(version, key(version, self.attempt))
        chunks.add(self.rank, part, packed, memory)
        self.held.append(chunks)
        self.source.offer(chunks)
        self.directory.update(held=tuple(HeldChunks(held.version, held.key, held.count, held.count)
                                         for held in self.held))
        self._publish_part(version, ManifestDigest(digest(packed), part.size, len(part)))
        record("weights_published", version=version, trainer_rank=self.rank, bytes=part.size)

    @property
    def sent(self) -> int:
        return self.source.sent

    def close(self) -> None:
        self.directory.close()
        self.source.close()

    def _withdraw(self) -> None:
        newest = self.directory.newest_of(self.attempt)
        for chunks in [held for held in self.held if held.version < newest]:
            self.source.withdraw(chunks.key, self.timeout)
            self.held.remove(chunks)

    @torch.no_grad()
    def _copy_shards(self, shards: Mapping[str, Tensor], dtype: torch.dtype | None,
                     values: Sums, split: Split) -> tuple[RankManifest, numpy.ndarray]:
        pieces = [piece for each in slices_of(shards) for piece in split.pieces(*each)]
        found = [(each, local) for _, each, local in sorted(pieces, key=lambda piece: piece[0])]
        kinds = [dtype if dtype is not None and shard_slice.dtype.is_floating_point else shard_slice.dtype
                 for shard_slice, _ in found]
        orders = {name: order for order, name in enumerate(shards)}
        contents, size = place_slices(
            [replace(shard_slice, dtype=kind) for (shard_slice, _), kind in zip(found, kinds)],
            [orders[shard_slice.name] for shard_slice, _ in found])
        memory, chunk = self.buffers.take(size), chunk_size(size, split.ranks)
        whole = torch.from_numpy(memory)
        sums: list[bytes] = []
        pairs = ((whole[content.offset : content.offset + content.slice.nbytes], local.to(content.slice.dtype))
                 for content, (_, local) in zip(contents, found))
        for content, _ in zip(contents, self.host_copy.copy(pairs)):
            ready = (content.offset + content.slice.nbytes) // chunk  # while they are in the cache
            sums += [checksum(memory[index * chunk : (index + 1) * chunk]) for index in range(len(sums), ready)]
        if size > len(sums) * chunk:
            sums.append(checksum(memory[len(sums) * chunk :]))
        return RankManifest(size, chunk, contents, b"".join(sums), values), memory

    def _publish_part(self, version: int, share: ManifestDigest) -> None:
        """Store this rank's part of a version; the last rank to do so announces the version."""
        store, base = self.directory.store, f"parts/{self.attempt}/{version}"
        store.put(f"{base}/{self.rank}", json.dumps(share))
        if store.add(f"{base}/count") < self.ranks:
            return
        keys = [f"{base}/{rank}" for rank in range(self.ranks)]
        found = store.get_all(keys)
        if not all(found):  # the store has counted a rank twice; the last one has all
            return
        shares = tuple(ManifestDigest(*json.loads(text)) for text in found)
        if not self.directory.announce_version(PublishedVersion(version, self.attempt, shares)):
            raise WeightsError(f"version {version} stays unpublished: the trainer has been restarted, and this is "
                               "a process of an earlier attempt. End it")
        store.delete(f"{base}/count", *keys)

    def _agree_on_attempt(self, limit: float) -> str:
        """Return the id of this attempt of the trainer. Rank 0 proposes one to the nonces of all ranks; ranks of an
        earlier attempt have other nonces. Whoever agrees last begins it."""
        store, mine, agreed, deadline = self.directory.store, secrets.token_hex(8), "", time.monotonic() + limit
        store.put(f"meeting/{self.rank}", mine)
        pause = (_POLL_INTERVAL if self.rank == 0 else _OTHERS_POLL_INTERVAL) * (1 + self.ranks / 100)
        present = list[str]()
        while time.monotonic() < deadline:
            if self.rank == 0:
                present = self._propose(present)
            if store.wait([f"proposal/{mine}"], pause) and (attempt := store.get(f"proposal/{mine}")) != agreed:
                agreed = attempt or ""
                if store.add(f"agrees/{agreed}") >= self.ranks:
                    self.directory.begin_attempt(agreed)
                    store.put(f"met/{agreed}", "")
            if agreed and store.wait([f"met/{agreed}"], pause):
                return agreed
        present = store.get_all([f"meeting/{rank}" for rank in range(self.ranks)])
        missing = [rank for rank, nonce in enumerate(present) if not nonce] or "one that began earlier"
        raise WeightsLate(f"rank {self.rank} of the trainer has waited {limit:.0f} s for the others to make "
                          f"their Publisher; missing: {missing}. All ranks of a trainer start together")

    def _propose(self, before: list[str]) -> list[str]:
        """Propose an attempt to all ranks if they are not those of `before`; return their nonces."""
        present = self.directory.store.get_all([f"meeting/{rank}" for rank in range(self.ranks)])
        if present != before and all(present):
            attempt = digest(json.dumps(present).encode())
            self.directory.store.put_all({f"proposal/{nonce}": attempt for nonce in present})
        return present
