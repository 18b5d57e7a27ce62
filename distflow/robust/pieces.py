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

import torch
import torch.distributed as dist

from distflow.data.exchange import attended, gather
from distflow.robust.snapshots import HEAD, Moment, Piece, Slot, Snapshots


@dataclass(frozen=True)
class Whole:
    """A state that is whole. holders: for each rank, the one that has its piece; itself if it has."""

    moment: Moment
    holders: tuple[int, ...]

    def piece(self, rank: int) -> Piece:
        return Piece(*self.moment, rank, len(self.holders))


@dataclass(frozen=True)
class Found:
    """A rank's piece, in its own memory. source: where it was: `own memory`, or `neighbour`, a copy that was kept for
    another machine's rank. holder: the rank that had it."""

    slot: Slot
    source: str
    holder: int


def choices(told: Sequence[Collection[Piece]]) -> list[Whole]:
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
    return [Whole(moment, tuple(holders[rank] for rank in range(len(told))))
            for moment, holders in sorted(there.items(), reverse=True) if len(holders) == len(told)]


def bring(copies: Snapshots, kept: Snapshots, least: int) -> Found | None:
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
                return Found(slot, "own memory" if own else "neighbour", whole.holders[rank])
    return None


def _fetched(whole: Whole, mine: dict[Piece, Slot], copies: Snapshots) -> Slot | None:
    """Give others their pieces, and take this rank's into its own memory; None if it came torn. All ranks go through
    the pieces in one order, so that none waits for another that waits for it."""
    rank, found = dist.get_rank(), None
    for owner, holder in enumerate(whole.holders):
        slot = mine.get(whole.piece(owner)) if rank == holder else None
        if owner == holder == rank:
            found = slot if slot in copies.slots else _pasted(_spare(whole, mine, copies), *slot.image())
        elif rank == holder:
            _send(slot, owner)
        elif rank == owner:
            found = _received(_spare(whole, mine, copies), holder)
    return found


def _spare(whole: Whole, mine: dict[Piece, Slot], copies: Snapshots) -> Slot:
    """One that has nothing of this moment: best what came after it, which is void now, else an empty one."""
    moments = {slot: piece.moment for piece, slot in mine.items()}
    return max((slot for slot in copies.slots if moments.get(slot) != whole.moment),
               key=lambda slot: moments.get(slot, whole.moment))


def _pasted(slot: Slot, head: bytes, rest: memoryview) -> Slot | None:
    def fill(room: memoryview) -> None:
        room[:] = rest

    return slot if slot.paste(head, fill) else None


def _send(slot: Slot, rank: int) -> None:
    head, rest = slot.image()
    with attended():
        for part in (bytearray(head), rest):
            dist.send(torch.frombuffer(part, dtype=torch.uint8), rank)


def _received(slot: Slot, rank: int) -> Slot | None:
    head = bytearray(HEAD)
    _receive(rank, head)
    return slot if slot.paste(bytes(head), partial(_receive, rank)) else None


def _receive(rank: int, room: bytearray | memoryview) -> None:
    with attended():
        dist.recv(torch.frombuffer(room, dtype=torch.uint8), rank)
