"""Index of one consumer: which rows are ready, which are leased to whom, and which are committed.

    a row: known → ready → leased → committed → released
                     ▲        │          │
                     └────────┴──────────┘  its lease expired, or its step was rolled back

A row is known when a shard lists it, ready when it has all columns that the consumer reads. A committed row of a step
that can still be rolled back stays in its shard until it is released; other commits are final at once.

Metadata only, and pure: the time is an argument (seconds of any clock that never goes back), and `shard.py` holds its
lock around every call. Leases, commits and rollbacks are ours, not MindSpeed RL's.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy
from torch import Tensor

from distflow.dock.errors import DockError, LeaseLost
from distflow.dock.selection import Consumer, Ids, ReadyRows, Room, RowGroup, RowState, deal


class Intervals:
    """Set of whole numbers, kept as ranges: memory and time grow with the number of gaps, not of members."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()):
        self.starts: list[int] = []
        self.ends: list[int] = []  # exclusive
        for start, end in ranges:
            self.starts.append(start)
            self.ends.append(end)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.starts, number) - 1
        return at >= 0 and number < self.ends[at]

    def __len__(self) -> int:
        return sum(self.ends) - sum(self.starts)

    def among(self, numbers: Ids) -> numpy.ndarray:
        """Return which of `numbers` are members, [numbers] bool."""
        at = numpy.searchsorted(self.starts, numbers, side="right") - 1
        return (at >= 0) & (numbers < numpy.array([*self.ends, 0])[at])

    def add(self, start: int, end: int | None = None) -> None:
        """Add one number, or all of start…end (exclusive)."""
        end = start + 1 if end is None else end
        first, last = bisect_left(self.ends, start), bisect_right(self.starts, end)  # the ranges that it joins
        if first < last:
            start, end = min(start, self.starts[first]), max(end, self.ends[last - 1])
        self.starts[first:last], self.ends[first:last] = [start], [end]

    def update(self, numbers: Ids) -> None:
        """Add all of `numbers`."""
        numbers = numpy.unique(numbers)
        edges = numpy.flatnonzero(numpy.diff(numbers, prepend=numbers[:1] - 2, append=numbers[-1:] + 2) > 1)
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
            self.add(int(numbers[begin]), int(numbers[end - 1]) + 1)

    def remove(self, number: int) -> None:
        at = bisect_right(self.starts, number) - 1
        if at < 0 or number >= self.ends[at]:
            return
        start, end = self.starts.pop(at), self.ends.pop(at)
        rest = [(first, last) for first, last in ((start, number), (number + 1, end)) if first < last]
        self.starts[at:at] = [first for first, _ in rest]
        self.ends[at:at] = [last for _, last in rest]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(start, exclusive end) of each range, ascending."""
        return list(zip(self.starts, self.ends))


@dataclass(frozen=True, eq=False)
class Lease:
    """Lease as its holder sees it, valid for `seconds` from now and from every `renew`.

    `ids` [rows] are those of the holder's share, ascending, and the other tensors are in their order; turn -1: none
    saved. `all_ids` are those of all shares, which a commit covers.
    """

    consumer: str
    number: int
    step: int | None
    seconds: float
    ids: Tensor
    tokens: Tensor
    versions: Tensor
    turns: Tensor
    all_ids: Tensor

    def __len__(self) -> int:
        return len(self.ids)


SHOWN = 8  # ids of a long list that a message names
_EXPIRED_KEPT = 512  # expired leases that are remembered, to say who has their rows now


@dataclass
class GrantedLease:
    """Lease as the index keeps it: rows dealt into shares, one for each rank of the group that asked."""

    number: int
    shares: list[list[RowState]]
    step: int | None
    since: float
    request: int
    expires: float = 0.0
    holders: set[str] = field(default_factory=set)  # sessions that have asked for a share
    last: str = ""  # session that asked last, for messages

    def __post_init__(self) -> None:
        self.rows = [row for share in self.shares for row in share]

    @functools.cached_property
    def ids(self) -> bytes:
        """Ids of all shares, int64: every rank of the group asks for them."""
        return numpy.array([row.id for row in self.rows], numpy.int64).tobytes()


class ConsumerIndex:
    """Ready rows, leases and commits of one consumer.

    Its group's ranks restart together, and each attempt begins with a rollback. Then the leases of the attempt before
    end, and what a process of that attempt asks for is refused.

    Args:
        epoch: start of the process; it makes the lease numbers of an index differ from those of the one before.
        room: of the dock; shared with other indexes.
    """

    def __init__(self, consumer: Consumer, epoch: int = 1, room: Room | None = None):
        self.consumer, self.room = consumer, room or Room()
        self.reads = set(consumer.reads)
        self.rows: dict[int, RowState] = {}  # known and not committed
        self.ready = ReadyRows(consumer)
        self.done, self.finished, self.steps = Intervals(), Intervals(), Intervals()  # committed rows, leases and steps
        self.retained: dict[int, list[RowState]] = {}  # by step; can still be rolled back, so stay in their shards
        self.first_retained = 0
        self.leases: OrderedDict[int, GrantedLease] = OrderedDict()  # in the order in which they expire
        self.by_step: dict[int, GrantedLease] = {}
        self.by_request: dict[int, GrantedLease] = {}
        self.expired: dict[int, GrantedLease] = {}
        self.n_leased = 0  # rows
        self.epoch, self.number = epoch, epoch << 32
        self.attempt = 0  # of the consumer's group, that rolled back last
        self.required = 0  # others wait for rows of this step
        self.opens = 0.0  # before, rows of no step are not leased: whoever holds them may renew its lease first

    def learn(self, table: Ids, columns: Iterable[str]) -> list[int]:
        """Add columns of rows that a shard stores (`StorageShard.table`); return the ids that are committed already."""
        names, (first, end) = frozenset(columns), self.consumer.ids
        table = table[:, (table[0] >= first) & (table[0] < end)]
        committed = self.done.among(table[0])
        for number, tokens, version, turn in table[:, ~committed].T.tolist():
            row = self.rows.get(number)
            if row is None:
                row = self.rows[number] = RowState(number, names)
            else:
                row.columns = row.columns | names
            row.tokens, row.version, row.turn = tokens, version, turn
            if not row.held and self.reads <= row.columns:
                self.ready.add(row)
        return table[0, committed].tolist()

    def relearn(self, listed: Mapping[int, Iterable[str]], lives_there: Callable[[int], bool],
                replaced: bool = True) -> None:
        """Forget the rows that a shard does not list any more, ahead of `learn`. Committed rows whose results were lost
        with a shard become ready again, but only if the shard was `replaced`: a listing that was long on its way may
        lack results that have come since."""
        for number in [each for each in self.rows if each not in listed and lives_there(each)]:
            self.ready.discard(number)
            self.rows.pop(number)
        for number, names in listed.items():
            if replaced and number in self.done and not set(self.consumer.writes) <= set(names):
                self.done.remove(number)
            if number in self.rows:
                self.rows[number].columns = frozenset(names)
                if not self.reads <= set(names):
                    self.ready.discard(number)

    def lease(self, count: int, now: float, session: str, *, least: int = 1, step: int | None = None, share: int = 0,
              shares: int = 1, request: int = 0, attempt: int = 0) -> GrantedLease | None:
        """Lease up to `count` rows, or return None if fewer than `least` are ready.

        A session that asks for a leased step joins that lease: the ranks of a group get their shares of one draw. The
        same `request` always gets the same lease. Raises DockError: the step is committed, or the group asks with
        another number of shares than before."""
        if not 0 <= share < shares:
            raise DockError(f"`{self.consumer.name}` was asked for share {share} of {shares}; shares count from 0")
        self.check_attempt(attempt)
        self.expire(now)
        if not self.has_rows(least, step, attempt, request) or (step is None and now < self.opens):
            return None
        granted = self._same(step, request)
        if granted is None:
            groups = self._choose(count, step)
            if sum(map(len, groups)) < max(least, 1):
                return None
            self.number += 1
            granted = GrantedLease(self.number, deal(groups, shares), step, now, request)
            self._hold(granted)
        if len(granted.shares) != shares:
            raise DockError(f"step {step} of `{self.consumer.name}` was leased in {len(granted.shares)} shares; share "
                            f"{share} of {shares} does not exist. Wait until that lease runs out, or ask as before")
        self._touch(granted, now, session)
        return granted

    def look(self, count: int, now: float, *, least: int, step: int, attempt: int = 0) -> list[RowState] | None:
        """Return the rows that `lease` would hand out for a step, by id, or None; no state changes."""
        self.check_attempt(attempt)
        self.expire(now)
        if not self.has_rows(least, step, attempt):
            return None
        granted = self._same(step, 0)
        groups = granted.shares if granted else self._choose(count, step)
        rows = sorted((row for group in groups for row in group), key=lambda row: row.id)
        return rows if len(rows) >= max(least, 1) else None

    def has_rows(self, least: int, step: int | None, attempt: int = 0, request: int = 0) -> bool:
        """Return whether there is something to answer: enough rows are ready, or their step has a lease or is committed
        already. An attempt that has not rolled back yet waits for that; one that is over is told so."""
        if attempt != self.attempt:
            return attempt < self.attempt
        if request in self.by_request or (step is not None and (step in self.by_step or step in self.steps)):
            return True
        return self.ready.count(step) >= max(least, 1) and not self.lacks_room(step)

    def lacks_room(self, step: int | None = None) -> bool:
        """Return whether rows are ready that cannot be leased, for want of room in the dock."""
        first = next(self.ready.groups(step), None)
        return first is not None and not self._may_begin(first[0], len(first))

    def check_attempt(self, attempt: int) -> None:
        """Raise `LeaseLost` for a process that a restart of its group has left behind."""
        if attempt < self.attempt:
            raise LeaseLost(f"this process is of attempt {attempt} of `{self.consumer.name}`, but attempt "
                            f"{self.attempt} has begun and rolled back: the rows are its own now. End this process, "
                            "whose group was started again without it")

    def renew(self, number: int, now: float, session: str, ids: Collection[int] = ()) -> float:
        """Extend a lease and return its seconds. An expired one is revived, and one of a lost process that had the rows
        `ids`, unless these were given to others; rows of other shards may be heard of later."""
        self.expire(now)
        granted = self.leases.get(number)
        if granted is None:
            granted = self.expired.get(number) or self._adopted(number, ids, now)
            if granted is None or not granted.rows or any(self._gone(row, number) for row in granted.rows):
                raise LeaseLost(self._lost(number, [row.id for row in granted.rows] if granted else []))
            self.expired.pop(number, None)
            self._hold(granted)
        self._touch(granted, now, session)
        return self.consumer.seconds

    def commit(self, number: int, step: int | None, ids: list[int], now: float) -> bool:
        """Mark rows as consumed for good; return False if this very commit was made before.

        A late commit stands if no other holder was given any of the rows. A lease of an earlier epoch is void, since
        another holder may have committed its rows.

        Raises:
            LeaseLost: another holder may have committed the rows; nothing is committed.
            DockError: the lease does not hold these rows, or is of another step.
        """
        self.expire(now)
        if number in self.finished:
            return False
        self._check_held(number, step, ids)
        done = self.done.among(numpy.array(ids, numpy.int64)).tolist()
        taken = [row for row, gone in zip(ids, done) if gone or self._leased_to_other(row, number)]
        if taken or (step is not None and step in self.steps):
            raise LeaseLost(self._lost(number, taken or ids, step))
        if granted := self.leases.get(number):
            self._end(granted)
        self.expired.pop(number, None)
        self.finished.add(number)
        if step is not None:
            self.steps.add(step)
            if self.consumer.can_roll_back and step >= self.first_retained:
                self.retained[step] = [self.rows[row] for row in ids if row in self.rows]
        self._finish(ids)
        return True

    def dropped(self, session: str, now: float) -> bool:
        """End the leases of a session without connections, unless others share them; return whether any ended."""
        mine = [granted for granted in self.leases.values() if session in granted.holders]
        for granted in reversed(mine):
            granted.holders.discard(session)
            if not granted.holders:
                granted.expires = now
                self.leases.move_to_end(granted.number, last=False)
        return self.expire(now) > 0

    @property
    def next_expiry(self) -> float:
        return next(iter(self.leases.values())).expires if self.leases else math.inf

    def expire(self, now: float) -> int:
        """Make the rows of expired leases ready again, ahead of all others; return how many."""
        over: list[GrantedLease] = []
        while self.next_expiry <= now:
            over.append(next(iter(self.leases.values())))
            self._end(over[-1])
            self.expired[over[-1].number] = over[-1]
        for row in (row for granted in reversed(over) for row in reversed(granted.rows)):
            row.held = False
            if self.rows.get(row.id) is row and self.reads <= row.columns:
                self.ready.add(row, first=True)
        while len(self.expired) > _EXPIRED_KEPT:
            self.expired.pop(next(iter(self.expired)))
        return sum(len(granted.rows) for granted in over)

    def finish(self, ids: Iterable[int]) -> None:
        """Mark rows as committed that a shard remembers as such."""
        self._finish([row for row in ids if row not in self.done])

    def rollback(self, step: int, attempt: int = 0) -> int:
        """Make the committed rows of all steps from `step` on ready again; return how many. A new attempt's rollback
        also ends the leases of the one before."""
        if attempt > self.attempt:
            self.attempt = attempt
            for granted in self.leases.values():
                granted.expires = -math.inf
            self.expire(-math.inf)
        back = {row.id: row for number in sorted(self.retained) if number >= step for row in self.retained[number]}
        for number in [number for number in self.retained if number >= step]:
            del self.retained[number]
            self.steps.remove(number)
        for row in reversed(back.values()):
            row.held = False
            self.done.remove(row.id)
            self.rows[row.id] = row
            self.ready.add(row, first=True)
        return len(back)

    def check_rollback(self, step: int) -> None:
        """Raise `DockError` if rows that were committed in a step from `step` on have left."""
        for first, end in self.steps.ranges:
            if gone := [number for number in range(max(first, step), end) if number not in self.retained]:
                raise DockError(f"step {gone[0]} of `{self.consumer.name}` is committed already, and its rows have "
                                f"left: a group that was set back to step {step} cannot do it again. Start everything "
                                "again from the checkpoint (torchrun --max-restarts)")

    def release_before(self, step: int) -> list[int]:
        """Make all commits of steps before this one final; return the retained rows, which may leave."""
        self.first_retained = max(self.first_retained, step)
        return [row.id for number in sorted(self.retained) if number < step for row in self.retained.pop(number)]

    def release_oldest(self) -> list[int]:
        """Release the oldest retained step, but none of the newest two: the last state's copies may be incomplete."""
        return self.release_before(min(self.retained) + 1) if len(self.retained) > 2 else []

    def release_torn(self, listed: Collection[int], lives_there: Callable[[int], bool]) -> list[int]:
        """Release the steps of which a shard has lost rows, given all rows that it lists; return their other rows."""
        torn = [number for number, rows in self.retained.items()
                if any(row.id not in listed and lives_there(row.id) for row in rows)]
        return [row.id for number in torn for row in self.retained.pop(number)]

    def final(self, rows: Iterable[int]) -> list[int]:
        """Return those of committed rows that are not retained."""
        retained = {row.id for step in self.retained.values() for row in step}
        return [row for row in rows if row not in retained]

    def final_ranges(self) -> list[tuple[int, int]]:
        """Return all committed rows that are not retained, as `Intervals.ranges`."""
        result = Intervals(self.done.ranges)
        for rows in self.retained.values():
            for row in rows:
                result.remove(row.id)
        return result.ranges

    def _same(self, step: int | None, request: int) -> GrantedLease | None:
        found = self.by_request.get(request)
        if found is None and step is not None:
            found = self.by_step.get(step)
            if found is None and step in self.steps:
                raise DockError(f"step {step} of `{self.consumer.name}` is committed already, and was not rolled back")
        return found

    def _choose(self, count: int, step: int | None) -> list[RowGroup]:
        """Return the groups to lease, in order: all before the first that does not fit into `count` rows, or into the
        dock's room. Groups after that are not looked at."""
        chosen: list[RowGroup] = []
        rows = 0
        for group in self.ready.groups(step):
            rows += len(group)
            if rows > count or not self._may_begin(group[0], rows):
                break
            chosen.append(group)
        return chosen

    def _may_begin(self, row: RowState, rows: int) -> bool:
        """Return whether a row may be leased as the last of `rows` more: there is room for what is written of them, or
        others wait for it. They could else wait for ever, since only what is complete leaves the dock."""
        return (not self.consumer.row_bytes or self.ready.step_of(row.id) <= self.required
                or self.room.fits(self.n_leased + rows, self.consumer.row_bytes))

    def _check_held(self, number: int, step: int | None, ids: list[int]) -> None:
        granted = self.leases.get(number) or self.expired.get(number)
        if granted is None:
            raise LeaseLost(self._lost(number, ids, step))
        if step != granted.step or set(ids) != {row.id for row in granted.rows}:
            wrong = sorted(set(ids) ^ {row.id for row in granted.rows})[:SHOWN]
            what = f"commits other rows than it holds: {wrong}" if wrong else f"is of step {granted.step}, not {step}"
            raise DockError(f"lease {number} of `{self.consumer.name}` {what}. Nothing is committed. Commit the lease "
                            "as `lease` has returned it")

    def _adopted(self, number: int, ids: Collection[int], now: float) -> GrantedLease | None:
        """Return a lease that a lost process had granted; None if its rows are committed, leased or not there. Until
        the index `opens`, their shards may still list them."""
        free = not any(row in self.done or self._leased_to_other(row, number) for row in ids)
        if number >> 32 == self.epoch or not free or not (now < self.opens or self.rows.keys() >= {*ids}):
            return None
        rows = [self.rows.setdefault(row, RowState(row, frozenset())) for row in ids]
        return GrantedLease(number, [rows], None, now, 0)

    def _hold(self, granted: GrantedLease) -> None:
        self.leases[granted.number] = granted
        self.n_leased += len(granted.rows)
        if granted.step is not None:
            self.by_step.setdefault(granted.step, granted)
        if granted.request:
            self.by_request[granted.request] = granted
        for row in granted.rows:
            row.lease, row.held = granted.number, True
            self.ready.discard(row.id)

    def _end(self, granted: GrantedLease) -> None:
        del self.leases[granted.number]
        self.n_leased -= len(granted.rows)
        self.by_request.pop(granted.request, None)
        if granted.step is not None and self.by_step.get(granted.step) is granted:
            del self.by_step[granted.step]

    def _touch(self, granted: GrantedLease, now: float, session: str) -> None:
        granted.expires = now + self.consumer.seconds
        self.leases.move_to_end(granted.number)
        granted.holders.add(session)
        granted.last = session

    def _gone(self, row: RowState, number: int) -> bool:
        """Return whether a row was committed, given to another holder, or lost with its shard and stored again."""
        return row.id in self.done or self._leased_to_other(row.id, number) or self.rows.get(row.id) is not row

    def _leased_to_other(self, number: int, lease: int) -> bool:
        row = self.rows.get(number)
        return row is not None and row.lease not in (0, lease)

    def _finish(self, ids: list[int]) -> None:
        self.done.update(numpy.array(ids, numpy.int64))
        for number in ids:
            self.rows.pop(number, None)
            self.ready.discard(number)

    def _lost(self, number: int, ids: list[int], step: int | None = None) -> str:
        leases = {row.lease for row in map(self.rows.get, ids) if row is not None} - {0, number}
        done = [row for row in ids if row in self.done]
        if number >> 32 != self.epoch:
            return (f"lease {number} of `{self.consumer.name}` is of an earlier process of its index, which has ended: "
                    f"its rows {ids[:SHOWN]} may have been committed by others since. Throw away what was made of them")
        fate = []
        if leases:
            fate.append(f"were given to another lease ({', '.join(map(str, sorted(leases)[:SHOWN]))})")
        if done:
            fate.append(f"rows {done[:SHOWN]} are committed by another")
        if step is not None and step in self.steps:
            fate.append(f"step {step} is committed with other rows")
        return (f"lease {number} of `{self.consumer.name}` is over: its holder's connection ended, or it gave no sign "
                f"of life for {self.consumer.seconds:g} s. Its rows {ids[:SHOWN]} "
                f"{'; '.join(fate) or 'may be others by now'}. Throw away what was made of them; renew leases more "
                "often if this work takes longer")
