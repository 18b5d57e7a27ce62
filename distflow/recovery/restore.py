"""From which of the states in memory a trainer goes on, and who brings each rank its piece (RobustRL §2.3).

A rank has its own pieces in its seat's memory, unless its machine is a new one, and those of which its seat keeps
copies for another machine (`neighbour.py`). Where machines were lost, the ranks that are left may have other numbers
than before. All tell what they have; the newest state of which every piece is somewhere is the one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import msgpack
import torch
import torch.distributed as dist

from distflow.data.exchange import attended, gather, meet
from distflow.recovery.snapshots import HEAD, Moment, Piece, Slot, Snapshots, end_of

_PART = 64 << 20
"""Bytes of a piece that travel before all ranks meet: whoever waits does not wait for a whole piece."""


@dataclass(frozen=True)
class ConsistentState:
    """A state that is whole. holders: for each rank, the one that has its piece; itself if it has."""

    moment: Moment
    holders: tuple[int, ...]

    def piece(self, rank: int) -> Piece:
        return Piece(*self.moment, rank, len(self.holders))


@dataclass(frozen=True)
class FoundPiece:
    """A rank's piece, in its own memory. source: where it was: `own memory`, or `neighbour`, a copy that was kept for
    another machine's rank. holder: the rank that had it."""

    slot: Slot
    source: str
    holder: int


def choices(told: Sequence[Collection[Piece]]) -> list[ConsistentState]:
    """The states that are whole, newest first.

    Args:
        told: what each rank has. Pieces of other numbers of ranks, as before a machine was lost for good, are no use.
    """
    there: dict[Moment, dict[int, int]] = {}
    for rank, pieces in enumerate(told):
        for piece in pieces:
            if piece.ranks == len(told):
                holders = there.setdefault(piece.moment, {})
                holders[piece.rank] = rank if rank == piece.rank else holders.get(piece.rank, rank)
    return [ConsistentState(moment, tuple(holders[rank] for rank in range(len(told))))
            for moment, holders in sorted(there.items(), reverse=True) if len(holders) == len(told)]


def bring(copies: Snapshots, kept: Snapshots, least: int) -> FoundPiece | None:
    """This rank's piece of the newest whole state that has at least `least` steps; None on every rank if there is none.
    What comes torn counts for nothing. Collective.

    Args:
        copies, kept: this rank's own pieces, and those that its seat keeps for another.

    Raises:
        RankMissing: a rank ended meanwhile.
    """
    mine = {**kept.whole(), **copies.whole()}
    texts = [json.loads(text) for text in gather(json.dumps([least, [*mine]]).encode())]
    least = max(their_least for their_least, _ in texts)
    for whole in choices([[Piece(*piece) for piece in pieces] for _, pieces in texts]):
        if whole.moment[-1] >= least:
            slot = _fetched(whole, mine, copies)
            if all(json.loads(there) for there in gather(json.dumps(slot is not None).encode())):
                copies.newest = slot
                rank = dist.get_rank()
                own = mine.get(whole.piece(rank)) is slot
                return FoundPiece(slot, "own memory" if own else "neighbour", whole.holders[rank])
    return None


def _fetched(whole: ConsistentState, mine: dict[Piece, Slot], copies: Snapshots) -> Slot | None:
    """Give others their pieces, and take this rank's into its own memory; None if it came torn, or if a piece of any
    rank was overwritten by a newer one that came torn."""
    rank = dist.get_rank()
    held = {owner: mine[whole.piece(owner)] for owner, holder in enumerate(whole.holders) if holder == rank}
    images = {owner: slot.image() for owner, slot in held.items() if slot.piece == whole.piece(owner)}
    told = gather(msgpack.packb({owner: head for owner, (head, _) in images.items()}))
    heads = {owner: head for part in told for owner, head in msgpack.unpackb(part, strict_map_key=False).items()}
    if len(heads) < len(whole.holders):
        return None
    rests = {owner: rest for owner, (_, rest) in images.items()}
    if rank not in held:
        slot = _spare(whole, mine, copies)
        return slot if slot.paste(heads[rank], partial(_travel, whole.holders, heads, rests)) else None
    _travel(whole.holders, heads, rests)
    return held[rank] if held[rank] in copies.slots else _pasted(_spare(whole, mine, copies), *images[rank])


def _travel(holders: Sequence[int], heads: dict[int, bytes], rests: dict[int, memoryview],
            room: memoryview | None = None) -> None:
    """The pieces of all that lack theirs, this rank's into `room`. All ranks go through them in one order, so that none
    waits for another that waits for it, and meet after each part of them, so that none waits long.

    Args:
        heads, rests: what is in the slots, by owner: the first bytes of all, and the others of those that are here.
    """
    rank = dist.get_rank()
    sizes = {owner: end_of(heads[owner]) - HEAD for owner, holder in enumerate(holders) if owner != holder}
    for start in range(0, max(sizes.values(), default=0), _PART):
        for owner in (owner for owner, size in sizes.items() if start < size):
            part = slice(start, start + _PART)
            with attended():
                if rank == holders[owner]:
                    dist.send(torch.frombuffer(rests[owner][part], dtype=torch.uint8), owner)
                elif rank == owner:
                    dist.recv(torch.frombuffer(room[part], dtype=torch.uint8), holders[owner])
        meet()


def _spare(whole: ConsistentState, mine: dict[Piece, Slot], copies: Snapshots) -> Slot:
    """One that has nothing of this moment: best what came after it, which is void now, else an empty one, else the
    oldest."""
    moments = {slot: slot.piece.moment for slot in mine.values() if slot.piece is not None}

    def use(slot: Slot) -> tuple[bool, bool, tuple[int, ...]]:
        moment = moments.get(slot, ())
        return bool(moment) and moment < whole.moment, not moment, moment

    return min((slot for slot in copies.slots if moments.get(slot) != whole.moment), key=use)


def _pasted(slot: Slot, head: bytes, rest: memoryview) -> Slot | None:
    def fill(room: memoryview) -> None:
        room[:] = rest

    return slot if slot.paste(head, fill) else None
