"""The rollout's side: pull the newest weights from whoever has them, at any time, and serve them to others as well."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch.distributed as dist

from distflow.observe.events import record
from distflow.weights.assembled import Weights
from distflow.weights.boxes import Box
from distflow.weights.buffers import Buffers
from distflow.weights.choice import can_be_had
from distflow.weights.directory import Directory, Entry, Held
from distflow.weights.errors import WeightsLate, WeightsLost
from distflow.weights.gather import Gather
from distflow.weights.holding import Holding
from distflow.weights.manifest import Head, Part, version_of
from distflow.weights.source import Source
from distflow.weights.supplier import Connections, Supplier
from distflow.weights.transport import transports

_LOOK = 0.1


class Puller:
    """A process that pulls weights, and is a relay from its first chunk on. One thread calls its methods.

    Args:
        store: the board.
        token: the run's.
        who: the process's name; no two living processes of a run have the same.
        host: the address at which other rollouts reach this process.
        transport: `auto`, or the one that must be used.
        deadline: seconds without a byte after which a source is left for the next.

    Raises:
        NoTransport: the transport cannot be used here.
    """

    def __init__(self, store: dist.Store, token: bytes, who: str, *, host: str = "127.0.0.1", transport: str = "auto",
                 deadline: float = 3.0):
        self.who, self.deadline, self.buffers = who, deadline, Buffers()
        ways = transports(transport, self.buffers, token, host)
        self.connections = Connections(lambda entry, head: Supplier(entry, head, who, token, ways, transport, deadline))
        self.source = Source(token, who, host, ways, deadline,
                             lambda serving: self.directory.tell(serving=serving))
        self.directory = Directory(store, Entry(who, self.source.address))
        self.whole: Weights | None = None
        self.filling: tuple[Holding, Mapping[str, Box]] | None = None
        """What was begun and can be gone on with."""
        self.source.start()
        self.directory.start()

    def newest(self) -> int:
        """The version on the board, -1 if none. It may fall when a trainer goes back to a checkpoint."""
        return version_of(self.newest_key())

    def newest_key(self) -> str:
        """The same as a key, which differs where another start of the trainer has used the number again."""
        return self.directory.newest()

    def wait(self, version: int, seconds: float) -> int:
        """Until the board has at least this version; returns which.

        Raises:
            WeightsLate: it did not come within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while (newest := self.newest()) < version:
            if time.monotonic() > deadline:
                raise WeightsLate(f"version {version} was not published within {seconds:g} s; the newest is {newest}. "
                                  "The trainer may be down, or slower than this limit")
            time.sleep(_LOOK)
        return newest

    def pull(self, version: int | None = None, *, least: int = -1, wanted: Mapping[str, Box] | None = None,
             seconds: float = 600.0) -> Weights:
        """A version, whole, verified and in this process's memory.

        Without `version`: the newest that living processes have all of, which may be the one that is here already. When
        such a pull fails because the last holder of it died, the next best begins, or the next that is published. What
        was pulled of a version stays until another one is begun.

        Args:
            least: wait for a version that is no older than this.
            wanted: parts of tensors, by name, for a rank that needs no more; all others are pulled whole. Only chunks
                with something of them move.

        Raises:
            WeightsLost: `version` is not on the board, or no living process has all of it.
            WeightsLate: no version could be pulled within `seconds`.
        """
        until, trouble = time.monotonic() + seconds, ""
        while True:
            for head in self._choices(version, least):
                try:
                    return self._one(head, dict(wanted or {}), until)
                except WeightsLost as error:
                    record("weights_lost", version=head.version, why=str(error))
                    trouble = f": {error}"
                    if version is not None:
                        raise
            if time.monotonic() > until:
                raise WeightsLate(f"no version of the weights could be pulled in {seconds:g} s; the newest on the "
                                  f"board is {self.newest()}{trouble}. The trainer may be down: start it again")
            time.sleep(_LOOK)

    @property
    def sent(self) -> int:
        """Bytes of chunks that others got from here."""
        return self.source.sent

    def close(self) -> None:
        """Stop serving. What was pulled stays where it is."""
        self.connections.close()
        self.directory.close()
        self.source.close()

    def _choices(self, version: int | None, least: int) -> list[Head]:
        """What may be pulled, the newest first."""
        heads = [head for head in self.directory.heads() if head.version >= least]
        if version is not None:
            found = [head for head in heads if head.version == version][:1]
            if not found:
                there = ", ".join(str(head.version) for head in heads) or "none"
                raise WeightsLost(f"version {version} is not on the board, which has {there}")
            return found
        mine = self.whole.version if self.whole is not None else -1
        living = self.directory.holders()
        return [head for number, head in enumerate(heads) if self._is_here(head) or
                ((not number or head.version > mine) and
                 can_be_had(living, head.key, range(len(head.shares))))]

    def _is_here(self, head: Head) -> bool:
        return self.whole is not None and self.whole.holding.key == head.key

    def _one(self, head: Head, wanted: dict[str, Box], until: float) -> Weights:
        if self._is_here(head) and self.whole.wanted == wanted:
            return self.whole
        begun, holding = time.monotonic(), self._holding(head, wanted)
        gather = Gather(self.directory, head, holding, self.whole and self.whole.holding, self.buffers.take,
                        self.connections, self.deadline, until)
        gather.manifests(lambda number, packed: holding.add(number, Part.unpack(packed), packed))
        holding.want(wanted)
        self.source.offer(holding)
        self._tell(holding)
        gather.chunks()
        old, self.whole, self.filling = self.whole, Weights(holding, wanted), None
        if old is not None and old.holding.key != holding.key:
            self.source.withdraw(old.holding.key)
        self.directory.tell(held=(_held(holding),), source="")
        record("weights_pulled", version=head.version, who=self.who, bytes=holding.moved,
               unchanged_bytes=holding.unchanged, seconds=round(time.monotonic() - begun, 3),
               sources=dict(gather.came), transports=sorted(gather.ways))
        return self.whole

    def _holding(self, head: Head, wanted: dict[str, Box]) -> Holding:
        """That of this version which was begun, or a new one."""
        if self.filling is not None and (self.filling[0].key, self.filling[1]) == (head.key, wanted):
            return self.filling[0]
        if self.filling is not None:
            self.source.withdraw(self.filling[0].key)
        self.filling = Holding(head.version, head.key), wanted
        return self.filling[0]

    def _tell(self, holding: Holding) -> None:
        whole = (_held(self.whole.holding),) if self.whole is not None else ()
        self.directory.tell(held=(*whole, _held(holding)))


def _held(holding: Holding) -> Held:
    return Held(holding.version, holding.key, holding.count, holding.awaited, holding.entire)
