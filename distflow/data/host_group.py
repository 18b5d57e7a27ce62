"""Exchanges short messages between ranks, all or some; without the network where ranks share a machine.

Collectives of gloo pass a message round a ring, and each hop wakes a process: milliseconds on a busy machine. Here:

    mailbox     memory file into which a rank writes its message; two, used in turn
    doorbell    pipe that tells the other ranks of the machine that a message is there
    leader      first rank of each machine; it exchanges messages with other machines for its peers

Mailboxes carry a name that only this group knows (`distflow.rpc.shared_memory`), and a peer's mailbox says which pipe
is its doorbell, so that nothing else is ever opened. A peer that dies is noticed at once, by its process descriptor,
and named. Where processes may not open each other's files, each counts as a machine.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import select
import struct
import sys
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from distflow.data.exchange import barrier as barrier_far
from distflow.data.exchange import default_group, gather_values, pack, unpack
from distflow.errors import RankMissing
from distflow.rpc.shared_memory import (
    MemoryAddress,
    create_memory,
    machine_name,
    memory_name,
    open_memory,
    open_verified,
)

_OWNER = struct.Struct("<III")
"""What a mailbox says at first: whose it is, the descriptor of that rank's doorbell, and the pipe's inode."""
_MESSAGE = struct.Struct("<IIQ")
"""Rank, round and the message's size; short enough for a pipe to take whole."""
_EXTRA_SECONDS = 10.0
"""Seconds longer that a rank waits for its leader, who waits for other machines and can name the ranks it misses."""
_group_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""Number of process groups that were made of the same ranks within a group."""


@dataclass(frozen=True)
class HostPeer:
    """Another rank of this machine: its mailboxes, its doorbell, and a descriptor that is readable once it has died."""

    rank: int
    mailboxes: tuple[int, int]
    bell: int
    death: int


class HostGroup:
    """One rank's access to others: all, or `ranks`. Each creates one and makes the same calls in the same order.

    machines: by rank of all, the first rank of its machine, of ranks outside their own; local_ranks: those of this
    machine. secret: for the names of what ranks share. `group` has them as a group of torch's. Any call raises
    `RankMissing` if a rank died, or did not come within `limit` seconds.
    """

    def __init__(self, rank: int, limit: float, ranks: Sequence[int] | None = None):
        self.rank, self.limit, self.round = rank, limit, 0
        self.machines = [*range(default_group().size())]
        self.ranks = [*(ranks or self.machines)]
        self.group = self._group_of(self.ranks) if len(self.ranks) < len(self.machines) else default_group()
        self.received: dict[tuple[int, int], int] = {}
        """(rank, round): the size of a message that a peer has left."""
        self.descriptors = _Descriptors()
        self.secret = b"".join(gather_values(secrets.token_bytes(16), self.group))
        self.memory, name = memory_name("mailbox", self.secret), machine_name()
        mine = [create_memory(self.memory, 0) for _ in range(2)] if name else []
        self.mailboxes = [self.descriptors.keep(address.descriptor) for address in mine]
        self.doorbell, bell = map(self.descriptors.keep, os.pipe())
        for mailbox in self.mailboxes:
            os.pwrite(mailbox, _OWNER.pack(rank, bell, os.fstat(bell).st_ino), 0)
        announced = dict(zip(self.ranks, gather_values([name, mine], self.group)))
        names = {number: name or f"rank {number}" for number, (name, _) in announced.items()}
        found = self._open_peers({number: mailboxes for number, (other, mailboxes) in announced.items()
                                  if other == name != "" and number != rank})
        failures = zip(self.ranks, gather_values(found is None, self.group))
        isolated = {names[number] for number, failed in failures if failed}
        names = {number: f"rank {number}" if name in isolated else name for number, name in names.items()}
        self.peers = found if found and name not in isolated else {}
        first = {name: number for number, name in reversed(names.items())}
        for number in self.ranks:
            self.machines[number] = first[names[number]]
        self.local_ranks = sorted([rank, *self.peers])
        leaders = sorted({self.machines[number] for number in self.ranks})
        self.on_one_machine = len(leaders) == 1
        leads = rank in leaders and not self.on_one_machine
        self.leaders = self._group_of(leaders) if leads else None
        barrier_far(self.group)  # no rank closes what another has yet to open

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of `ranks`: whatever msgpack knows."""
        return [unpack(message) for message in self.gather_bytes(pack(value))]

    def gather_on_host(self, value: Any) -> dict[int, Any]:
        """Return the value of each rank of this machine, all of which must call it: whatever msgpack knows."""
        return {rank: unpack(message) for rank, message in sorted(self._gather_on_host(pack(value)).items())}

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Return every rank's message, in the order of `ranks`."""
        messages = self._gather_on_host(message)
        if self.on_one_machine:
            return [messages[rank] for rank in self.local_ranks]
        leader, combined = self.local_ranks[0], b""
        if self.rank == leader:
            combined = self._gather_leaders(messages)
        error, everyone = unpack(self._gather_on_host(combined, self.limit + _EXTRA_SECONDS)[leader])
        if error:
            raise RankMissing(error)
        return [everyone[rank] for rank in self.ranks]

    def _gather_leaders(self, messages: dict[int, bytes]) -> bytes:
        """Return [error, message by rank] of all machines, packed; peers learn an error as well."""
        try:
            parts = gather_values(messages, self.leaders)
        except RankMissing as error:
            return pack([f"on another machine, {error}", {}])
        return pack(["", {rank: message for part in parts for rank, message in part.items()}])

    def barrier(self) -> None:
        self._gather_on_host(b"")

    def _gather_on_host(self, payload: bytes, limit: float | None = None) -> dict[int, bytes]:
        self.round += 1
        turn = self.round % 2  # the other mailbox may still be read, by ranks that have not finished the last round
        if payload and self.peers:
            os.pwrite(self.mailboxes[turn], payload, 0)
        message = _MESSAGE.pack(self.rank, self.round, len(payload))
        for peer in self.peers.values():
            with contextlib.suppress(BrokenPipeError):  # it died; if that matters, `_wait` says so
                os.write(peer.bell, message)
        self._wait(limit or self.limit)
        sizes = {rank: self.received.pop((rank, self.round)) for rank in self.peers}
        messages = {rank: os.pread(self.peers[rank].mailboxes[turn], size, 0) if size else b""
                    for rank, size in sizes.items()}
        return messages | {self.rank: payload}

    def _wait(self, limit: float) -> None:
        end = time.monotonic() + limit
        while missing := [rank for rank in self.peers if (rank, self.round) not in self.received]:
            deaths = {self.peers[rank].death: rank for rank in missing}
            watched = select.poll()
            for descriptor in (self.doorbell, *deaths):
                watched.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in watched.poll(max(0.0, 1000 * (end - time.monotonic())))]
            if self.doorbell in ready:
                for rank, number, size in _MESSAGE.iter_unpack(os.read(self.doorbell, 256 * _MESSAGE.size)):
                    self.received[rank, number] = size
            elif ready:
                raise RankMissing(f"rank {deaths[ready[0]]} ended while others waited for it", [deaths[ready[0]]])
            else:
                raise RankMissing(f"rank {', '.join(map(str, missing))} did not come within the wait limit of "
                                  f"{limit:g} s", missing)

    def _open_peers(self, mailboxes: dict[int, list[list[int]]]) -> dict[int, HostPeer] | None:
        try:
            return {rank: self._open_peer(rank, *(MemoryAddress(*address) for address in addresses))
                    for rank, addresses in mailboxes.items()}
        except OSError as error:
            print(f"rank {self.rank} shares no memory with the other ranks of its machine: {error}", file=sys.stderr,
                  flush=True)
            return None

    def _open_peer(self, rank: int, first: MemoryAddress, second: MemoryAddress) -> HostPeer:
        one, other = (self.descriptors.keep(open_memory(each, self.memory, os.O_RDONLY)) for each in (first, second))
        owners = {_OWNER.unpack(os.pread(mailbox, _OWNER.size, 0)) for mailbox in (one, other)}
        owner, bell, pipe = owners.pop()
        if owners or owner != rank:
            raise OSError(f"process {first.process} is not rank {rank}: two machines have the same name")
        bell = open_verified(first.process, bell, pipe, f"pipe:[{pipe}]", os.O_WRONLY)
        return HostPeer(rank, (one, other), self.descriptors.keep(bell),
                        self.descriptors.keep(os.pidfd_open(first.process)))

    def _group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Make a group of some ranks. Not by `new_group`, which all processes of the run would have to call."""
        group, name = default_group(), " ".join(map(str, ranks))
        counts = _group_counts.setdefault(group, Counter())
        counts[name] += 1
        store = PrefixStore(f"ranks {name}/{counts[name]}", _get_process_group_store(group))
        limit = datetime.timedelta(seconds=self.limit)
        made: Any = dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), limit)
        return made  # a ProcessGroup, which torch's stub does not say


class _Descriptors:

    def __init__(self) -> None:
        self.numbers: list[int] = []
        weakref.finalize(self, _close, self.numbers)

    def keep(self, number: int) -> int:
        self.numbers.append(number)
        return number


def _close(numbers: list[int]) -> None:
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(number)
