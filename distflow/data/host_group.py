"""Short messages between all ranks of a group; where they share a machine, without the network.

Collectives of gloo pass a message round a ring, and each hop wakes a process: milliseconds on a busy machine. Here a
rank leaves its message in a memory file and rings its neighbours' doorbells (pipes); all these descriptors are opened
through /proc, as in `warehouse`. Between machines the first rank of each speaks for its neighbours. A neighbour that
dies is noticed at once, by its process descriptor, and named. Where processes may not open each other's files, each
counts as a machine of its own.
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
from dataclasses import dataclass

import msgpack
import torch.distributed as dist

from distflow.data.exchange import gather as gather_far
from distflow.data.exchange import meet as meet_far
from distflow.errors import RankMissing
from distflow.rpc.shared_memory import machine_name

_RING = struct.Struct("<IIQ")
"""Rank, round and the message's size; short enough for a pipe to take whole."""


_MORE = 10.0
"""Seconds longer that a neighbour waits for its leader, who waits for other machines and knows whom it misses."""
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Lines of leaders that were made in a group."""


@dataclass(frozen=True)
class HostPeer:
    """A rank of this machine: its two mailboxes, used in turn, its doorbell, and what becomes readable when it dies."""

    rank: int
    mailboxes: tuple[int, int]
    bell: int
    death: int


class HostGroup:
    """One rank's line to all others. Every rank of the group creates one and makes the same calls in the same order.

    machines: for each rank of the group, the first rank of its machine.

    Raises:
        RankMissing: from any call: a rank died, or did not come within `limit` seconds. A neighbour's is named.
    """

    def __init__(self, rank: int, limit: float, group: dist.ProcessGroup | None = None):
        self.rank, self.limit, self.round = rank, limit, 0
        self.heard: dict[tuple[int, int], int] = {}
        """(rank, round): the size of a message that a neighbour has left."""
        self.open = _Descriptors()
        name, secret = machine_name(), secrets.token_bytes(16)
        self.boxes = tuple(self.open.keep(os.memfd_create("distflow")) for _ in range(2)) if name else ()
        for box in self.boxes:
            os.pwrite(box, secret, 0)
        self.ear, bell = map(self.open.keep, os.pipe())
        mine = [name, os.getpid(), self.boxes, bell, secret]
        said = [msgpack.unpackb(raw) for raw in gather_far(msgpack.packb(mine), group)]
        names = [name or f"rank {number}" for number, (name, *_) in enumerate(said)]
        found = self._meet_all({number: contact for number, (other, *contact) in enumerate(said)
                                if other == name != "" and number != rank})
        shut = {names[number] for number, raw in enumerate(gather_far(bytes([found is None]), group)) if raw != b"\0"}
        names = [f"rank {number}" if name in shut else name for number, name in enumerate(names)]
        self.near = found if found and name not in shut else {}
        self.machines = [names.index(name) for name in names]
        self.here = sorted([rank, *self.near])
        leaders = sorted(set(self.machines))
        self.alone = len(leaders) == 1
        self.leaders = None if self.alone or rank not in leaders else self._group(leaders, group or dist.group.WORLD)
        meet_far(group)  # nobody closes what another has yet to open

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank."""
        messages = self._gather_here(payload)
        if self.alone:
            return [messages[rank] for rank in self.here]
        leader, whole = self.here[0], b""
        if self.rank == leader:
            whole = self._gather_leaders(messages)
        error, everyone = msgpack.unpackb(self._gather_here(whole, self.limit + _MORE)[leader], strict_map_key=False)
        if error:
            raise RankMissing(error)
        return [everyone[rank] for rank in range(len(everyone))]

    def _gather_leaders(self, messages: dict[int, bytes]) -> bytes:
        """[error, message by rank]: of all machines; the neighbours learn an error as well."""
        try:
            parts = [msgpack.unpackb(raw, strict_map_key=False)
                     for raw in gather_far(msgpack.packb(messages), self.leaders)]
        except RankMissing as error:
            return msgpack.packb([f"on another machine, {error}", {}])
        return msgpack.packb(["", {rank: message for part in parts for rank, message in part.items()}])

    def meet(self) -> None:
        """Wait until every rank of this machine has come here."""
        self._gather_here(b"")

    def _gather_here(self, payload: bytes, limit: float | None = None) -> dict[int, bytes]:
        """The payloads of this machine's ranks."""
        self.round += 1
        turn = self.round % 2  # the other box may still be read: by those who have not heard all of the last round
        if payload and self.near:
            os.pwrite(self.boxes[turn], payload, 0)
        ring = _RING.pack(self.rank, self.round, len(payload))
        for neighbour in self.near.values():
            with contextlib.suppress(BrokenPipeError):  # it died; if that matters, `_listen` says so
                os.write(neighbour.bell, ring)
        self._listen(limit or self.limit)
        sizes = {rank: self.heard.pop((rank, self.round)) for rank in self.near}
        messages = {rank: os.pread(self.near[rank].mailboxes[turn], size, 0) if size else b""
                    for rank, size in sizes.items()}
        return messages | {self.rank: payload}

    def _listen(self, limit: float) -> None:
        """Until every neighbour has rung in this round."""
        end = time.monotonic() + limit
        while missing := [rank for rank in self.near if (rank, self.round) not in self.heard]:
            deaths = {self.near[rank].death: rank for rank in missing}
            watched = select.poll()
            for descriptor in (self.ear, *deaths):
                watched.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in watched.poll(max(0.0, 1000 * (end - time.monotonic())))]
            if self.ear in ready:
                for rank, number, size in _RING.iter_unpack(os.read(self.ear, 256 * _RING.size)):
                    self.heard[rank, number] = size
            elif ready:
                raise RankMissing(f"rank {deaths[ready[0]]} ended while others waited for it", [deaths[ready[0]]])
            else:
                raise RankMissing(f"rank {', '.join(map(str, missing))} did not come within the wait limit of "
                                  f"{limit:g} s", missing)

    def _meet_all(self, contacts: dict[int, list]) -> dict[int, HostPeer] | None:
        """The neighbours by rank; None if this process may not open what is theirs."""
        try:
            return {rank: self._meet(rank, *contact) for rank, contact in contacts.items()}
        except OSError as error:
            print(f"rank {self.rank} shares no memory with its neighbours: {error}", file=sys.stderr, flush=True)
            return None

    def _meet(self, rank: int, process: int, boxes: list[int], bell: int, secret: bytes) -> HostPeer:
        opened = [self.open.keep(os.open(f"/proc/{process}/fd/{number}", how | os.O_CLOEXEC))
                  for number, how in ((boxes[0], os.O_RDONLY), (boxes[1], os.O_RDONLY), (bell, os.O_WRONLY))]
        if any(os.pread(box, len(secret), 0) != secret for box in opened[:2]):
            raise OSError(f"process {process} is not rank {rank}: two machines have the same name")
        return HostPeer(rank, (opened[0], opened[1]), opened[2], self.open.keep(os.pidfd_open(process)))

    def _group(self, leaders: list[int], group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The leaders' own line. Not by `new_group`, which all processes of the run would have to call."""
        number = _made[group] = _made.get(group, 0) + 1
        store = dist.PrefixStore(f"leaders/{number}", dist.distributed_c10d._get_process_group_store(group))
        limit = datetime.timedelta(seconds=self.limit)
        return dist.ProcessGroupGloo(store, leaders.index(self.rank), len(leaders), limit)


class _Descriptors:
    """Closed when nothing needs them."""

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
