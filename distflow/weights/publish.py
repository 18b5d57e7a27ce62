"""The trainer's side: each rank copies its shards to host memory and serves them from there.

No rank gathers anything, and nothing waits for another rank: whoever is the last to have its part ready makes the
version known, by one exchange on the board. Until then readers see the version before, and after it this one, whole.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from distflow.observe.events import record
from distflow.weights.boxes import boxes_of
from distflow.weights.buffers import Buffers
from distflow.weights.directory import Directory, Entry, Held
from distflow.weights.errors import WeightsError, WeightsLate
from distflow.weights.holding import Holding
from distflow.weights.manifest import Head, Part, Share, checksum, chunk_size, digest, key, lay_out
from distflow.weights.source import Source
from distflow.weights.transport import transports

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
        self.buffers = Buffers()
        ways = transports(transport, self.buffers, token, host)
        who = f"trainer-{rank}"
        self.source = Source(token, who, host, ways, patience, lambda serving: self.directory.tell(serving=serving))
        self.directory = Directory(store, Entry(who, self.source.address, rank))
        self.team = self._meet(meeting)
        self.held: list[Holding] = []
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
        packed, holding = part.pack(), Holding(version, key(version, self.team))
        holding.add(self.rank, part, packed, memory)
        self.held.append(holding)
        self.source.offer(holding)
        self.directory.tell(held=tuple(Held(held.version, held.key, held.count, held.count) for held in self.held))
        self._count_in(version, Share(digest(packed), part.size, len(part)))
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
    def _copied(self, shards: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[Part, numpy.ndarray]:
        found = boxes_of(shards)
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
        return Part(size, chunk, contents, b"".join(sums)), memory

    def _count_in(self, version: int, share: Share) -> None:
        """This rank is ready; the last one makes the version the newest."""
        store, base = self.directory.store, f"parts/{self.team}/{version}"
        store.set(f"{base}/{self.rank}", json.dumps(share))
        if store.add(f"{base}/count", 1) < self.ranks:
            return
        keys = [f"{base}/{rank}" for rank in range(self.ranks)]
        shares = tuple(Share(*json.loads(text)) for text in store.multi_get(keys))
        head, revealed = Head(version, self.team, shares), False
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
