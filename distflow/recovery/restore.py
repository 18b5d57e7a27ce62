"""Finds the newest consistent state in the memory of all machines, and fetches each rank's shard (RobustRL §2.3).

A rank's shards are in its supervisor's memory, unless its machine is a new one, and copies may be in the memory of
another machine (`peer_replica.py`). After the loss of a machine the other ranks may have other numbers than before. All
ranks report their shards; the newest state of which every shard is somewhere is restored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import msgpack
import torch
import torch.distributed as dist

from distflow.data.exchange import barrier, gather, peer_errors
from distflow.recovery.snapshots import HEAD, Slot, Snapshots, StateId, StateShard, end_of

_PART = 64 << 20  # bytes of a shard that are sent between two barriers, so that no rank waits for a whole shard


@dataclass(frozen=True)
class ConsistentState:
    """A state of which every shard is somewhere. holders: by rank, the rank that has its shard; itself if it has."""

    state_id: StateId
    holders: tuple[int, ...]

    def shard(self, rank: int) -> StateShard:
        return StateShard(*self.state_id, rank, len(self.holders))


@dataclass(frozen=True)
class FetchedShard:
    """A rank's shard, in its own memory. source: `own memory`, or `peer replica` for a copy in another machine's
    memory. holder: the rank that had it."""

    slot: Slot
    source: str
    holder: int


def consistent_states(reported: Sequence[Collection[StateShard]]) -> list[ConsistentState]:
    """Return the consistent states, newest first, by what each rank has `reported`. Shards for another number of ranks,
    as before a machine was lost, do not count."""
    there: dict[StateId, dict[int, int]] = {}
    for rank, shards in enumerate(reported):
        for shard in shards:
            if shard.ranks == len(reported) and shard.rank in range(shard.ranks):
                holders = there.setdefault(shard.state_id, {})
                holders[shard.rank] = rank if rank == shard.rank else holders.get(shard.rank, rank)
    return [ConsistentState(state_id, tuple(holders[rank] for rank in range(len(reported))))
            for state_id, holders in sorted(there.items(), reverse=True) if len(holders) == len(reported)]


def fetch_shard(snapshots: Snapshots, replicas: Snapshots, least_steps: int) -> FetchedShard | None:
    """Return this rank's shard of the newest consistent state with at least `least_steps` steps; None on every rank if
    there is none. A shard that arrives torn does not count. Collective.

    `replicas`: copies for another machine's rank. Raises RankMissing: a rank ended meanwhile.
    """
    mine = {**replicas.complete(), **snapshots.complete()}
    texts = [json.loads(text) for text in gather(json.dumps([least_steps, [*mine]]).encode())]
    least_steps = max(their_least for their_least, _ in texts)
    for state in consistent_states([[StateShard(*shard) for shard in shards] for _, shards in texts]):
        if state.state_id[-1] >= least_steps:
            slot = _exchange(state, mine, snapshots)
            if all(json.loads(there) for there in gather(json.dumps(slot is not None).encode())) and slot is not None:
                snapshots.newest = slot
                rank = dist.get_rank()
                own = mine.get(state.shard(rank)) is slot
                return FetchedShard(slot, "own memory" if own else "peer replica", state.holders[rank])
    return None


def _exchange(state: ConsistentState, mine: dict[StateShard, Slot], snapshots: Snapshots) -> Slot | None:
    """Send others their shards, and receive this rank's into its own memory; None if it came torn, or if the shard of
    any rank was overwritten by a newer one that came torn."""
    rank = dist.get_rank()
    held = {owner: mine[state.shard(owner)] for owner, holder in enumerate(state.holders) if holder == rank}
    images = {owner: slot.content() for owner, slot in held.items() if slot.shard == state.shard(owner)}
    reported = gather(msgpack.packb({owner: head for owner, (head, _) in images.items()}) or b"")
    heads = {owner: head for part in reported for owner, head in msgpack.unpackb(part, strict_map_key=False).items()}
    if len(heads) < len(state.holders):
        return None
    tails = {owner: rest for owner, (_, rest) in images.items()}
    if rank not in held:
        slot = _spare_slot(state, mine, snapshots)
        return slot if slot.paste(heads[rank], partial(_transfer, state.holders, heads, tails)) else None
    _transfer(state.holders, heads, tails)
    return held[rank] if held[rank] in snapshots.slots else _paste(_spare_slot(state, mine, snapshots), *images[rank])


def _transfer(holders: Sequence[int], heads: dict[int, bytes], tails: dict[int, memoryview],
              room: memoryview | None = None) -> None:
    """Send the shards of all ranks that lack theirs, this rank's into `room`. All ranks go through them in one order,
    which cannot deadlock, and meet after each part, so that none waits long. `heads`: the first bytes of all slots, by
    owner; `tails`: the others of those that are here."""
    rank = dist.get_rank()
    sizes = {owner: end_of(heads[owner]) - HEAD for owner, holder in enumerate(holders) if owner != holder}
    for start in range(0, max(sizes.values(), default=0), _PART):
        for owner in (owner for owner, size in sizes.items() if start < size):
            part = slice(start, start + _PART)
            with peer_errors():
                if rank == holders[owner]:
                    dist.send(torch.frombuffer(tails[owner][part], dtype=torch.uint8), owner)
                elif rank == owner and room is not None:
                    dist.recv(torch.frombuffer(room[part], dtype=torch.uint8), holders[owner])
        barrier()


def _spare_slot(state: ConsistentState, mine: dict[StateShard, Slot], snapshots: Snapshots) -> Slot:
    """Return a slot without a shard of this state: best one of a later state, void now, else empty, else the oldest."""
    state_ids = {slot: slot.shard.state_id for slot in mine.values() if slot.shard is not None}

    def use(slot: Slot) -> tuple[bool, bool, tuple[int, ...]]:
        state_id = state_ids.get(slot, ())
        return bool(state_id) and state_id < state.state_id, not state_id, state_id

    return min((slot for slot in snapshots.slots if state_ids.get(slot) != state.state_id), key=use)


def _paste(slot: Slot, head: bytes, rest: memoryview) -> Slot | None:
    def fill(room: memoryview) -> None:
        room[:] = rest

    return slot if slot.paste(head, fill) else None
