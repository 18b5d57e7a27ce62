"""Commits that can be taken back: a trainer that is set back to an older state asks again for what came after it.

Rows that such a consumer has committed in a step stay in their warehouses until it says that it will never go back
behind it (`settle`), or until there is no room for new ones. Pure, as the controller is.

A set of whole numbers as the ranges that they fill: what a run has consumed, in a few words however long it runs.

What a holder knows of its lease.

A controller: which rows are ready for one consumer, who has leased which, and which it has committed.

Metadata only, and pure: the time is an argument (seconds of any clock that never goes back), and `service.py` holds
its lock around every call. MindSpeed RL §"Distributed Transfer Dock Strategy"; leases and commits are ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from distflow.dock.errors import DockError, LeaseLost
from distflow.dock.selection import DEALS, Consumer, Ids, LeaseRequest, RowState, choose


class Intervals:
    """Numbers that mostly follow each other. Memory and time go with the number of gaps, not of members."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()):
        self.starts: list[int] = []
        self.ends: list[int] = []
        """Of each range, the first number behind it."""
        for start, end in ranges:
            self.starts.append(start)
            self.ends.append(end)

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self.starts, number) - 1
        return place >= 0 and number < self.ends[place]

    def __len__(self) -> int:
        """How many numbers are in it."""
        return sum(self.ends) - sum(self.starts)

    def add(self, number: int) -> None:
        place = bisect_right(self.starts, number)
        if place and number < self.ends[place - 1]:
            return
        joins_left = place > 0 and self.ends[place - 1] == number
        joins_right = place < len(self.starts) and self.starts[place] == number + 1
        if joins_left and joins_right:
            self.ends[place - 1] = self.ends.pop(place)
            self.starts.pop(place)
        elif joins_left:
            self.ends[place - 1] = number + 1
        elif joins_right:
            self.starts[place] = number
        else:
            self.starts.insert(place, number)
            self.ends.insert(place, number + 1)

    def remove(self, number: int) -> None:
        """Take a member out."""
        place = bisect_right(self.starts, number) - 1
        if place < 0 or number >= self.ends[place]:
            return
        start, end = self.starts.pop(place), self.ends.pop(place)
        kept = [(first, last) for first, last in ((start, number), (number + 1, end)) if first < last]
        self.starts[place:place] = [first for first, _ in kept]
        self.ends[place:place] = [last for _, last in kept]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(first, first behind) of each range, ascending."""
        return list(zip(self.starts, self.ends))


@dataclass(frozen=True, eq=False)
class Lease:
    """Rows that are this holder's for `seconds` from now, and again with every `renew`.

    `ids` [rows] are its share, ascending; the other tensors stand in their order: tokens, weight version, group (-1:
    of its own), and the last saved turn (-1: none). `all_ids` are those of all shares, which a commit covers.
    """

    consumer: str
    number: int
    step: int | None
    seconds: float
    ids: Tensor
    tokens: Tensor
    versions: Tensor
    groups: Tensor
    turns: Tensor
    all_ids: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def granted(cls, consumer: str, step: int | None, reply: Mapping[str, Any]) -> Lease:
        """From a controller's answer."""
        marks = {name: numpy.frombuffer(data, numpy.int64) for name, data in reply["marks"].items()}
        order = numpy.argsort(marks["id"])
        columns = [torch.from_numpy(marks[name][order]) for name in ("id", "tokens", "version", "group", "turn")]
        everyone = torch.from_numpy(numpy.frombuffer(reply["all"], numpy.int64).copy())
        return cls(consumer, reply["lease"], step, reply["seconds"], *columns, everyone)


_SHOWN = 8
_REMEMBERED = 512
"""Leases that ran out, kept to say who has their rows now."""


@dataclass
class GrantedLease:
    """A lease. Its rows are dealt into shares, one for each rank of the group that asked."""

    number: int
    shares: list[list[RowState]]
    step: int | None
    since: float
    expires: float
    request: int
    holders: set[str] = field(default_factory=set)
    """Sessions that have asked for a share of it."""
    last: str = ""
    """The session that spoke last, for messages."""

    @property
    def rows(self) -> list[RowState]:
        return [row for share in self.shares for row in share]


class ConsumerIndex:
    """Of one consumer.

    Args:
        epoch: makes the lease numbers of a restored controller differ from those before.
        lives: the epochs before of which it knows every commit, since a journal has them.
    """

    def __init__(self, consumer: Consumer, epoch: int = 1, lives: Iterable[int] = ()):
        self.consumer = consumer
        self.reads = set(consumer.reads)
        self.rows: dict[int, RowState] = {}
        """All that are known and not committed."""
        self.ready: dict[int, RowState] = {}
        """Those that can be leased, in the order in which they became so."""
        self.done, self.finished, self.steps = Intervals(), Intervals(), Intervals()
        """Committed rows, leases and steps."""
        self.kept: dict[int, list[RowState]] = {}
        """Rows of the steps whose commits can be taken back (`recall.py`)."""
        self.settled = 0
        """The first of those steps."""
        self.leases: dict[int, GrantedLease] = {}
        self.expired: dict[int, GrantedLease] = {}
        self.epoch, self.number, self.lives = epoch, epoch << 32, {epoch, *lives}
        self.discarded = self.returned = self.refused = 0
        """Rows that a rule dropped; rows that leases gave back; commits that came too late."""

    def learn(self, table: Ids, columns: Iterable[str]) -> list[int]:
        """Warehouses have got columns of rows (`Warehouse.table`); may be told twice. Returns the committed."""
        names, committed = set(columns), []
        for number, tokens, version, group, priority, turn in table.T.tolist():
            if number in self.done:
                committed.append(number)
                continue
            row = self.rows.get(number)
            if row is None:
                row = self.rows[number] = RowState(number, set())
            row.columns |= names
            row.tokens, row.version, row.group, row.priority, row.turn = tokens, version, group, priority, turn
            if not row.held and self.reads <= row.columns:
                self.ready.setdefault(number, row)
        return committed

    def relearn(self, listed: Mapping[int, Iterable[str]], warehouse: int, warehouses: int,
                replaced: bool = True) -> list[int]:
        """A warehouse has listed all that it holds, ahead of `learn`: forget what it has lost, and return those ids.

        Rows that were committed here but whose results a lost warehouse took with it are opened again; only if it was
        `replaced`, for a list that was long on its way may lack results that have come since.
        """
        lost = [number for number in self.rows if number % warehouses == warehouse and number not in listed]
        for number in lost:
            self.ready.pop(number, None)
            self.rows.pop(number)
        for number, names in listed.items():
            if replaced and number in self.done and not set(self.consumer.writes) <= set(names):
                self.done.remove(number)
            if number in self.rows:
                self.rows[number].columns = set(names)
                if not self.reads <= set(names):
                    self.ready.pop(number, None)
        return lost

    def lease(self, ask: LeaseRequest, now: float, session: str, *, least: int = 1, step: int | None = None,
              share: int = 0,
              shares: int = 1, request: int = 0) -> GrantedLease | None:
        """Hand out up to `ask.count` rows, or None if fewer than `least` are ready.

        Rows in `ask.discarded` afterwards are not wanted by a rule and count as committed.

        Whoever asks for a step that is leased joins that lease: the ranks of a group get their shares of one draw,
        and a restarted group gets the rows that it had. The same `request` always gets the same lease.

        Raises:
            DockError: the step is committed, or the group asks with another number of shares than before.
        """
        if not 0 <= share < shares:
            raise DockError(f"`{self.consumer.name}` was asked for share {share} of {shares}; shares count from 0")
        self.expire(now)
        granted = self._same(step, request)
        if granted is None:
            units = choose(self.ready.values(), self.consumer.rules, ask)
            self.discarded += len(ask.discarded)
            self._finish([row.id for row in ask.discarded])
            if not units or sum(map(len, units)) < least:
                return None
            dealt = DEALS[self.consumer.deal](units, shares) if shares > 1 else [[row for one in units for row in one]]
            self.number += 1
            granted = GrantedLease(self.number, dealt, step, now, now, request)
            self.leases[granted.number] = granted
            self._hold(granted)
        if len(granted.shares) != shares:
            raise DockError(f"step {step} of `{self.consumer.name}` was leased in {len(granted.shares)} shares; share "
                            f"{share} of {shares} does not exist. Wait until that lease runs out, or ask as before")
        self._touch(granted, now, session)
        return granted

    def look(self, ask: LeaseRequest, now: float, least: int) -> list[RowState] | None:
        """The rows that `lease` would hand out for a step, by id, or None. Nobody holds or loses any for that."""
        self.expire(now)
        granted = self._same(ask.step, 0)
        units = granted.shares if granted else choose(self.ready.values(), self.consumer.rules, ask)
        rows = sorted((row for unit in units for row in unit), key=lambda row: row.id)
        return rows if len(rows) >= max(least, 1) else None

    def renew(self, number: int, now: float, session: str) -> float:
        """A holder is alive: the lease lasts on. One that ran out is revived if nobody has its rows. Returns seconds.

        Raises:
            LeaseLost: they were given to another.
        """
        self.expire(now)
        granted = self.leases.get(number)
        if granted is None:
            granted = self.expired.get(number)
            if granted is None or any(self._gone(row, number) for row in granted.rows):
                raise LeaseLost(self._lost(number, [row.id for row in granted.rows] if granted else []))
            self.leases[number] = self.expired.pop(number)
            self._hold(granted)
        self._touch(granted, now, session)
        return self.consumer.seconds

    def commit(self, number: int, step: int | None, ids: list[int], now: float, *, told: bool = False,
               keep: Callable[[], None] = lambda: None) -> bool:
        """The rows are consumed for good; False if this very commit was made before.

        A late commit stands if nobody else was given any of the rows. A lease of an earlier life of this controller,
        whose commits it may have forgotten, is void: another may have been given its rows and committed them. Only
        a commit that was answered in that life stands, and is told again.

        Args:
            told: it was answered before this controller was restored; counts more than a lease that was given since.
            keep: called when it is sure that it stands, before anything is changed; may refuse by an error.

        Raises:
            LeaseLost: somebody else may have committed the rows; nothing is committed then.
        """
        self.expire(now)
        if number in self.finished:
            return False
        taken = [row for row in ids if row in self.done or (not told and self._other(row, number))]
        unsure = number >> 32 not in self.lives and not told
        if taken or unsure or (step is not None and step in self.steps):
            self.refused += 1
            raise LeaseLost(self._lost(number, taken or ids, step))
        keep()
        self.leases.pop(number, None)
        self.expired.pop(number, None)
        self.finished.add(number)
        if step is not None:
            self.steps.add(step)
            if self.consumer.recalls and step >= self.settled:
                self.kept[step] = [self.rows[row] for row in ids if row in self.rows]
        self._finish(ids)
        return True

    def release(self, number: int, now: float) -> None:
        """The holder gives its rows back before the time."""
        if number in self.leases:
            self.leases[number].expires = now
            self.expire(now)

    def dropped(self, session: str, now: float) -> bool:
        """A holder's last connection is gone: its leases end, unless another holds them too. True if any ended."""
        mine = [granted for granted in self.leases.values() if session in granted.holders]
        for granted in mine:
            granted.holders.discard(session)
            if not granted.holders:
                granted.expires = now
        return self.expire(now) > 0

    def expire(self, now: float) -> int:
        """Take back the rows of leases that have run out, ahead of all others; returns how many."""
        over = [granted for granted in self.leases.values() if granted.expires <= now]
        back: dict[int, RowState] = {}
        for granted in over:
            self.expired[granted.number] = self.leases.pop(granted.number)
            for row in granted.rows:
                row.held = False
                if self.rows.get(row.id) is row and self.reads <= row.columns:
                    back[row.id] = row
        if over:
            self.ready = back | self.ready
        while len(self.expired) > _REMEMBERED:
            self.expired.pop(next(iter(self.expired)))
        self.returned += (count := sum(len(granted.rows) for granted in over))
        return count

    def finish(self, ids: Iterable[int]) -> None:
        """These rows are known to be committed, by a warehouse that remembers it."""
        self._finish([row for row in ids if row not in self.done])

    def replay(self, commits: Iterable[tuple[int, int | None, list[int]]]) -> None:
        """Commits (lease, step, ids) of a journal, some of which may be known."""
        for number, step, ids in commits:
            if number in self.finished:
                continue
            self.finished.add(number)
            if step is not None:
                self.steps.add(step)
            self._finish(ids)

    def state(self) -> dict[str, Any]:
        """What a snapshot keeps: what is committed. Rows are told again by warehouses, and leases are void."""
        return {name: getattr(self, name).ranges for name in ("done", "finished", "steps")}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in ("done", "finished", "steps"):
            setattr(self, name, Intervals(map(tuple, state[name])))

    def _same(self, step: int | None, request: int) -> GrantedLease | None:
        found = [granted for granted in self.leases.values()
                 if (step is not None and granted.step == step) or (request and granted.request == request)]
        if not found and step is not None and step in self.steps:
            raise DockError(f"step {step} of `{self.consumer.name}` is committed already, and was not taken back")
        return found[0] if found else None

    def _hold(self, granted: GrantedLease) -> None:
        for row in granted.rows:
            row.lease, row.held = granted.number, True
            self.ready.pop(row.id, None)

    def _touch(self, granted: GrantedLease, now: float, session: str) -> None:
        granted.expires = now + self.consumer.seconds
        granted.holders.add(session)
        granted.last = session

    def _gone(self, row: RowState, number: int) -> bool:
        """Committed, given to another, or lost with its warehouse: what is there now came anew."""
        return row.id in self.done or self._other(row.id, number) or self.rows.get(row.id) is not row

    def _other(self, number: int, lease: int) -> bool:
        row = self.rows.get(number)
        return row is not None and row.lease not in (0, lease)

    def _finish(self, ids: Iterable[int]) -> None:
        for number in ids:
            self.done.add(number)
            self.rows.pop(number, None)
            self.ready.pop(number, None)

    def _lost(self, number: int, ids: list[int], step: int | None = None) -> str:
        leases = {row.lease for row in map(self.rows.get, ids) if row is not None} - {0, number}
        done = [row for row in ids if row in self.done]
        if number >> 32 not in self.lives:
            return (f"lease {number} of `{self.consumer.name}` is of an earlier life of its controller, which was "
                    f"restored without a journal: its rows {ids[:_SHOWN]} may have been committed by others since. "
                    "Throw away what was made of them")
        fate = []
        if leases:
            fate.append(f"were given to another lease ({', '.join(map(str, sorted(leases)[:_SHOWN]))})")
        if done:
            fate.append(f"rows {done[:_SHOWN]} are committed by another")
        if step is not None and step in self.steps:
            fate.append(f"step {step} is committed with other rows")
        return (f"lease {number} of `{self.consumer.name}` is over: its holder's connection ended, or it gave no sign "
                f"of life for {self.consumer.seconds:g} s. Its rows {ids[:_SHOWN]} "
                f"{'; '.join(fate) or 'may be others by now'}. Throw away what was made of them; renew leases more "
                "often if this work takes longer")


def check(controller: ConsumerIndex, step: int) -> None:
    """
    Raises:
        DockError: rows that were committed in a step from `step` on have left, so that it cannot be done again.
    """
    for first, end in controller.steps.ranges:
        if gone := [number for number in range(max(first, step), end) if number not in controller.kept]:
            raise DockError(f"step {gone[0]} of `{controller.consumer.name}` is committed already, and its rows have "
                            f"left: a group that was set back to step {step} cannot do it again. Start everything "
                            "again from the checkpoint (torchrun --max-restarts)")


def take_back(controller: ConsumerIndex, step: int) -> int:
    """Make the rows of all steps from `step` on ready again; returns how many."""
    back = {row.id: row for number in sorted(controller.kept) if number >= step for row in controller.kept[number]}
    for number in [number for number in controller.kept if number >= step]:
        del controller.kept[number]
        controller.steps.remove(number)
    for row in back.values():
        row.held = False
        controller.done.remove(row.id)
    controller.rows |= back
    controller.ready = back | controller.ready
    return len(back)


def settle(controller: ConsumerIndex, before: int) -> list[int]:
    """What was and will be committed in steps before this one is not taken back; the rows that may leave."""
    controller.settled = max(controller.settled, before)
    return [row.id for number in sorted(controller.kept) if number < before for row in controller.kept.pop(number)]


def settle_oldest(controller: ConsumerIndex) -> list[int]:
    """The same for the oldest step that is kept, but not for the newest two: of the last one's state the copies may be
    under way, or turn out torn."""
    return settle(controller, min(controller.kept) + 1) if len(controller.kept) > 2 else []


def lose(controller: ConsumerIndex, listed: Collection[int], warehouse: int, warehouses: int) -> list[int]:
    """A warehouse has listed all that it holds: steps of which it has lost rows cannot be taken back any more; returns
    their other rows, which may leave."""
    torn = [number for number, rows in controller.kept.items()
            if any(row.id % warehouses == warehouse and row.id not in listed for row in rows)]
    return [row.id for number in torn for row in controller.kept.pop(number)]


def settled(controller: ConsumerIndex, rows: Iterable[int]) -> list[int]:
    """Those of committed rows that are not kept."""
    kept = {row.id for some in controller.kept.values() for row in some}
    return [row for row in rows if row not in kept]


def settled_ranges(controller: ConsumerIndex) -> list[tuple[int, int]]:
    """All committed rows that are not kept, as `Intervals.ranges`."""
    result = Intervals(controller.done.ranges)
    for rows in controller.kept.values():
        for row in rows:
            result.remove(row.id)
    return result.ranges
