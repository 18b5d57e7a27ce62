"""Index of one consumer: which rows are ready, which are leased to whom, and which are committed.

    a row: known → ready → leased → committed → released
                     ▲        │          │
                     └────────┴──────────┘  its lease expired, or its step was rolled back

A row is known when a shard lists it, ready when it has all columns that the consumer reads. A committed row of a step
that can still be rolled back stays in its shard until it is released; other commits are final at once.

The index is soft state: by which lease and in which step a row is leased or committed is also written to the row in its
shard. An index that takes the place of a lost one reads it there (`restore`).

Metadata only, and pure: the time is an argument (seconds of any clock that never goes back), and `shard.py` holds its
lock around every call. Leases, commits and rollbacks are ours, not MindSpeed RL's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy

from distflow.dock.errors import DockError, LeaseLost
from distflow.dock.intervals import Intervals
from distflow.dock.selection import Consumer, ReadyRows, StorageBudget, split_groups
from distflow.dock.slots import Ids, SlotTable

if TYPE_CHECKING:
    from torch import Tensor


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


def _marks(ids: Ids, lease: int = 0, step: int | None = None, committed: bool = False) -> Ids:
    """Return what is written to rows in their shards, as `ConsumerIndex.marks` does."""
    number = 0 if step is None else -step - 1 if committed else step + 1
    return numpy.stack([ids, numpy.full(len(ids), lease), numpy.full(len(ids), number)])


SHOWN = 8  # ids of a long list that a message names
_NO_IDS = numpy.empty(0, numpy.int64)
_EXPIRED_KEPT = 512  # expired leases that are remembered, to say who has their rows now


@dataclass
class GrantedLease:
    """Lease as the index keeps it: ids of rows dealt into shares, one for each rank of the group that asked. births: of
    the rows [rows], in the order of `ids`; a row that was lost and came again has another one."""

    number: int
    shares: list[Ids]
    births: Ids
    step: int | None
    since: float
    request: int
    expires: float = 0.0
    holders: set[str] = field(default_factory=set)  # sessions that have asked for a share
    last: str = ""  # session that asked last, for messages
    restored: bool = False  # from what the shards have: without the rows of lost shards

    def __post_init__(self) -> None:
        self.ids = numpy.concatenate(self.shares)
        self.packed = self.ids.tobytes()  # every rank of the group asks for them


class CommittedRows(NamedTuple):
    """Committed rows of a step that can be rolled back: their ids and metadata, [rows] each."""

    ids: Ids
    metadata: dict[str, numpy.ndarray]


_METADATA = ("tokens", "version", "turn", "columns", "birth", "lease")


class KnownRows(SlotTable):
    """Metadata of the rows that a consumer may still take, by slot.

        tokens, version, turn   as the shard has them
        columns                 number of the set of columns that a row has
        birth                   number that no other row has had, nor this one before it was lost
        lease                   last lease that had the row; 0: none
        held, ready             whether a lease has it now, or one may
    """

    def __init__(self, reads: Iterable[str]) -> None:
        super().__init__(*_METADATA, "held", "ready")
        self.sets: list[frozenset[str]] = [frozenset()]
        self.reads, self.born = frozenset(reads), 0

    def add(self, ids: Ids) -> Ids:
        slots = super().add(ids)
        self["birth"][slots] = numpy.arange(self.born + 1, self.born + 1 + len(slots))
        self.born += len(slots)
        return slots

    def add_columns(self, slots: Ids, names: frozenset[str]) -> None:
        kinds = self["columns"][slots]
        for kind in numpy.flatnonzero(numpy.bincount(kinds, minlength=1)).tolist():
            self["columns"][slots[kinds == kind]] = self._number_of(self.sets[kind] | names)

    def set_columns(self, slots: Ids, names: frozenset[str]) -> None:
        self["columns"][slots] = self._number_of(names)

    def is_complete(self, slots: Ids) -> numpy.ndarray:
        """Return which rows have all columns that the consumer reads, [slots] bool."""
        return numpy.array([self.reads <= each for each in self.sets])[self["columns"][slots]]

    def columns_of(self, slot: int) -> frozenset[str]:
        return self.sets[self["columns"][slot]]

    def find_unchanged(self, ids: Ids, births: Ids) -> tuple[Ids, numpy.ndarray]:
        """Return the slots of rows, and which of them are here since they had these `births`, [rows] bool."""
        slots = self.find(ids)
        return slots, (slots >= 0) & (self["birth"][slots] == births if len(self) else False)

    def _number_of(self, names: frozenset[str]) -> int:
        if names not in self.sets:
            self.sets.append(names)
        return self.sets.index(names)


class ConsumerIndex:
    """Ready rows, leases and commits of one consumer.

    Its group's ranks restart together, and each attempt begins with a rollback. Then the leases of the attempt before
    end, and what a process of that attempt asks for is refused.

    Args:
        epoch: start of the process; it makes the lease numbers of an index differ from those of the one before.
        room: of the dock; shared with other indexes.
    """

    def __init__(self, consumer: Consumer, epoch: int = 1, room: StorageBudget | None = None):
        self.consumer, self.room = consumer, room or StorageBudget()
        self.rows = KnownRows(consumer.reads)  # known and not committed
        self.ready = ReadyRows(consumer)
        self.done, self.finished, self.steps = Intervals(), Intervals(), Intervals()  # committed rows, leases and steps
        self.retained: dict[int, CommittedRows] = {}  # by step; can still be rolled back, so stay in their shards
        self.first_retained = 0
        self.leases: OrderedDict[int, GrantedLease] = OrderedDict()  # in the order in which they expire
        self.by_step: dict[int, GrantedLease] = {}
        self.by_request: dict[int, GrantedLease] = {}
        self.expired: dict[int, GrantedLease] = {}
        self.n_leased = 0  # rows
        self.epoch, self.number = epoch, epoch << 32
        self.attempt = 0  # of the consumer's group, that rolled back last
        self.required = 0  # others wait for rows of this step
        self.changes: list[Ids] = []  # tables of marks that the shards do not have yet

    def add_rows(self, table: Ids, columns: Iterable[str], new: bool = False) -> Ids:
        """Add columns of rows that a shard stores (`StorageShard.table`); return the ids that are committed already.
        `new`: the shard had none of the rows, so if they were committed, it has lost them."""
        first, end = self.consumer.ids
        table = table[:, (table[0] >= first) & (table[0] < end)]
        if new:
            self._reopen(table[0], columns)
        committed = self.done.contains_each(table[0])
        ids, *metadata = table[:, ~committed]
        rows, slots = self.rows, self.rows.find_or_add(ids)
        for name, values in zip(("tokens", "version", "turn"), metadata):
            rows[name][slots] = values
        rows.add_columns(slots, frozenset(columns))
        self._make_ready(slots[(rows["held"][slots] == 0) & rows.is_complete(slots)])
        return table[0, committed]

    def rebuild(self, listed: Sequence[tuple[Iterable[str], Ids]], stored_there: Callable[[Ids], numpy.ndarray],
                replaced: bool = True) -> None:
        """Forget the rows that a shard does not list any more, ahead of `add_rows`. Committed rows whose results were
        lost with a shard become ready again, but only if the shard was `replaced`: a listing that was long on its way
        may lack results that have come since. `listed`: ids by the columns that they have."""
        known = self.rows["ids"][self.rows.all()]
        there = numpy.concatenate([numpy.empty(0, numpy.int64), *(ids for _, ids in listed)])
        self._forget(self.rows.find(known[stored_there(known) & ~numpy.isin(known, there)]))
        for names, ids in listed:
            if replaced:
                self._reopen(ids, names)
            slots = self.rows.find_present(ids)
            self.rows.set_columns(slots, frozenset(names))
            self._make_unready(slots[~self.rows.is_complete(slots)])

    def _reopen(self, ids: Ids, columns: Iterable[str]) -> None:
        """Forget that rows are committed which lack what the consumer has written."""
        if not set(self.consumer.writes) <= set(columns):
            self.done.remove_all(ids[self.done.contains_each(ids)])

    def restore(self, marks: Ids, now: float) -> None:
        """Take up the leases and commits that a shard has of an index that is lost, after `add_rows`. A lease's rows
        may come from several shards; one that any of them has as committed is."""
        ids, leases, steps = marks[:, marks[1] > 0]
        for number in numpy.unique(leases).tolist():
            rows, step = ids[leases == number], int(numpy.abs(steps[leases == number]).max()) - 1
            known = self.leases.get(number)
            if known is not None:
                self._end_lease(known)
                rows = numpy.concatenate([known.ids, rows])
            if number in self.finished or (steps[leases == number] < 0).any():
                self._retain(number, step, rows)
                continue
            rows = numpy.sort(rows[self.rows.find(rows) >= 0])
            slots = self.rows.find(rows)
            granted = GrantedLease(number, [rows], self.rows["birth"][slots], None if step < 0 else step, now, 0,
                                   restored=True)
            self._add_lease(granted, slots)
            granted.expires = now + self.consumer.seconds

    def marks(self) -> Ids:
        """Return the leases and retained commits of all rows, [3, rows]: id, lease, and step + 1, negative where it is
        committed; 0 for none."""
        held = [_marks(granted.ids, granted.number, granted.step) for granted in self.leases.values()]
        done = [numpy.stack([rows.ids, rows.metadata["lease"], numpy.full(len(rows.ids), -step - 1)])
                for step, rows in self.retained.items()]
        return numpy.concatenate([_marks(_NO_IDS), *held, *done], axis=1)

    def take_changes(self) -> Ids:
        """Return the marks that have changed since the last call."""
        changes, self.changes = self.changes, []
        return numpy.concatenate([_marks(_NO_IDS), *changes], axis=1)

    def lease(self, count: int, now: float, session: str, *, least: int = 1, step: int | None = None, share: int = 0,
              shares: int = 1, request: int = 0, attempt: int = 0,
              near: Callable[[Ids], numpy.ndarray] | None = None) -> GrantedLease | None:
        """Lease up to `count` rows, or return None if fewer than `least` are ready.

        A session that asks for a leased step joins that lease: the ranks of a group get their shares of one draw. The
        same `request` always gets the same lease. Rows that `near` returns True of are leased first, within a step.
        Raises DockError: the step is committed, or the group asks with
        another number of shares than before."""
        if not 0 <= share < shares:
            raise DockError(f"`{self.consumer.name}` was asked for share {share} of {shares}; shares count from 0")
        self.check_attempt(attempt)
        self.expire(now)
        if not self.has_rows(least, step, attempt, request):
            return None
        granted = self._find_lease(step, request)
        if granted is None:
            chosen = self._choose_groups(count, step, near)
            rows = numpy.sort(self._rows_of(chosen))
            if len(rows) < max(least, 1):
                return None
            for each, groups in chosen:
                self.ready.pop(each, len(groups))
            self.rows["ready"][slots := self.rows.find(rows)] = 0
            dealt = self._deal([rows], shares)
            slots = slots[numpy.searchsorted(rows, numpy.concatenate(dealt))] if shares > 1 else slots
            self.number += 1
            granted = self._add_lease(GrantedLease(self.number, dealt, self.rows["birth"][slots], step, now, request),
                                      slots)
        if granted.restored and len(granted.shares) != shares:
            granted.shares = self._deal(granted.shares, shares)
        if len(granted.shares) != shares:
            raise DockError(f"step {step} of `{self.consumer.name}` was leased in {len(granted.shares)} shares; share "
                            f"{share} of {shares} does not exist. Wait until that lease runs out, or ask as before")
        self._extend(granted, now, session)
        return granted

    def peek(self, count: int, now: float, *, least: int, step: int, attempt: int = 0) -> Ids | None:
        """Return the ids of the rows that `lease` would hand out for a step, ascending, or None; no state changes."""
        self.check_attempt(attempt)
        self.expire(now)
        if not self.has_rows(least, step, attempt):
            return None
        granted = self._find_lease(step, 0)
        rows = numpy.sort(granted.ids if granted else self._rows_of(self._choose_groups(count, step)))
        return rows if len(rows) >= max(least, 1) else None

    def describe(self, ids: Ids, *names: str) -> Ids:
        """Return the metadata of rows, [names, rows]; those of a row that was lost are 0."""
        slots = self.rows.find(ids)
        known = (slots >= 0) & (len(self.rows) > 0)
        found = numpy.zeros((len(names), len(ids)), numpy.int64)
        for values, name in zip(found, names):
            values[known] = self.rows[name][slots[known]]
        return found

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
        steps = self.ready.steps(step)[:1]
        return bool(steps) and self._room_for(steps[0]) < self.consumer.group_size

    def check_attempt(self, attempt: int) -> None:
        """Raise `LeaseLost` for a process that a restart of its group has left behind."""
        if attempt < self.attempt:
            raise LeaseLost(f"this process is of attempt {attempt} of `{self.consumer.name}`, but attempt "
                            f"{self.attempt} has begun and rolled back: the rows are its own now. End this process, "
                            "whose group was started again without it")

    def renew(self, number: int, now: float, session: str) -> float:
        """Extend a lease and return its seconds. An expired one is revived, unless its rows were given to others."""
        self.expire(now)
        granted = self.leases.get(number)
        if granted is None:
            granted = self.expired.get(number)
            if granted is None or not len(granted.ids) or self._has_lost_rows(granted):
                raise LeaseLost(self._lost_message(number, granted.ids if granted else _NO_IDS))
            self.expired.pop(number, None)
            self._add_lease(granted, self.rows.find(granted.ids))
        self._extend(granted, now, session)
        return self.consumer.seconds

    def commit(self, number: int, step: int | None, ids: Ids, now: float) -> bool:
        """Mark rows as consumed for good; return False if this very commit was made before.

        A late commit stands if no other holder was given any of the rows.

        Raises:
            LeaseLost: another holder may have committed the rows; nothing is committed.
            DockError: the lease does not hold these rows, or is of another step.
        """
        self.expire(now)
        if number in self.finished:
            return False
        self._check_held(number, step, ids)
        taken = ids[self.done.contains_each(ids) | self._leased_to_other(ids, number)]
        if len(taken) or (step is not None and step in self.steps):
            raise LeaseLost(self._lost_message(number, taken if len(taken) else ids, step))
        if granted := self.leases.get(number):
            self._end_lease(granted)
        self.expired.pop(number, None)
        self.finished.add(number)
        if step is not None:
            self.steps.add(step)
            if self.consumer.can_roll_back and step >= self.first_retained:
                self._retain(number, step, ids)
        self._mark_committed(ids)
        return True

    def _retain(self, number: int, step: int, ids: Ids) -> None:
        """Commit rows of a step that can be rolled back."""
        slots = self.rows.find_present(ids)
        kept = CommittedRows(self.rows["ids"][slots], {name: self.rows[name][slots] for name in _METADATA})
        if (before := self.retained.get(step)) is not None:
            kept = CommittedRows(*(numpy.concatenate([before.ids, kept.ids]), {
                name: numpy.concatenate([before.metadata[name], kept.metadata[name]]) for name in _METADATA}))
        kept.metadata["lease"][:] = number
        self.retained[step] = kept
        self.finished.add(number)
        self.steps.add(step)
        self.changes.append(_marks(kept.ids, number, step, committed=True))
        self._mark_committed(ids)

    def end_session(self, session: str, now: float) -> bool:
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
            self._end_lease(over[-1])
            self.expired[over[-1].number] = over[-1]
        for granted in reversed(over):
            slots, same = self.rows.find_unchanged(granted.ids, granted.births)
            self.changes.append(_marks(granted.ids[same]))
            self.rows["held"][slots[same]] = 0
            self._make_ready(slots[same][self.rows.is_complete(slots[same])], first=True)
        while len(self.expired) > _EXPIRED_KEPT:
            self.expired.pop(next(iter(self.expired)))
        return sum(len(granted.ids) for granted in over)

    def mark_committed(self, ids: Ids) -> None:
        """Mark rows as committed that a shard remembers as such."""
        self._mark_committed(ids[~self.done.contains_each(ids)])

    def rollback(self, step: int, attempt: int = 0) -> int:
        """Make the committed rows of all steps from `step` on ready again; return how many. A new attempt's rollback
        also ends the leases of the one before."""
        if attempt > self.attempt:
            self.attempt = attempt
            for granted in self.leases.values():
                granted.expires = -math.inf
            self.expire(-math.inf)
        back = 0
        for number in sorted((number for number in self.retained if number >= step), reverse=True):
            ids, metadata = self.retained.pop(number)
            self.steps.remove(number)
            self.done.remove_all(ids)
            slots = self.rows.find_or_add(ids)
            for name, values in metadata.items():
                self.rows[name][slots] = values
            self._make_ready(slots, first=True)
            self.changes.append(_marks(ids))
            back += len(ids)
        return back

    def check_rollback(self, step: int) -> None:
        """Raise `DockError` if rows that were committed in a step from `step` on have left."""
        for first, end in self.steps.ranges:
            if gone := [number for number in range(max(first, step), end) if number not in self.retained]:
                raise DockError(f"step {gone[0]} of `{self.consumer.name}` is committed already, and its rows have "
                                f"left: a group that was set back to step {step} cannot do it again. Start everything "
                                "again from the checkpoint (torchrun --max-restarts)")

    def release_before(self, step: int) -> Ids:
        """Make all commits of steps before this one final; return the retained rows, which may leave."""
        self.first_retained = max(self.first_retained, step)
        return self._release(number for number in sorted(self.retained) if number < step)

    def release_oldest(self) -> Ids:
        """Release the oldest retained step, but none of the newest two: the last state's copies may be incomplete."""
        return self.release_before(min(self.retained) + 1) if len(self.retained) > 2 else _NO_IDS

    def release_incomplete(self, listed: Ids, stored_there: Callable[[Ids], numpy.ndarray]) -> Ids:
        """Release the steps of which a shard has lost rows, given all rows that it lists; return their other rows."""
        return self._release([number for number, rows in self.retained.items()
                              if (stored_there(rows.ids) & ~numpy.isin(rows.ids, listed)).any()])

    def final_rows(self, rows: Ids) -> Ids:
        """Return those of committed rows that are not retained."""
        return rows[~numpy.isin(rows, numpy.concatenate([_NO_IDS, *(step.ids for step in self.retained.values())]))]

    def final_ranges(self) -> list[tuple[int, int]]:
        """Return all committed rows that are not retained, as `Intervals.ranges`."""
        result = Intervals(self.done.ranges)
        for rows in self.retained.values():
            result.remove_all(rows.ids)
        return result.ranges

    def _release(self, steps: Iterable[int]) -> Ids:
        return numpy.concatenate([_NO_IDS, *[self.retained.pop(number).ids for number in [*steps]]])

    def _find_lease(self, step: int | None, request: int) -> GrantedLease | None:
        found = self.by_request.get(request)
        if found is None and step is not None:
            found = self.by_step.get(step)
            if found is None and step in self.steps:
                raise DockError(f"step {step} of `{self.consumer.name}` is committed already, and was not rolled back")
        return found

    def _choose_groups(self, count: int, step: int | None,
                       near: Callable[[Ids], numpy.ndarray] | None = None) -> list[tuple[int, Ids]]:
        """Return the groups to lease by step, in order: all before the first that does not fit into `count` rows, or
        into the dock's room. Groups after that are not looked at."""
        chosen: list[tuple[int, Ids]] = []
        rows = 0
        for each in self.ready.steps(step):
            if near is not None:
                self.ready.bring_forward(each, near)
            fits = min(count, self._room_for(each)) - rows
            groups = self.ready.first_groups(each, int(fits) // self.consumer.group_size)
            chosen.append((each, groups))
            rows += len(groups) * self.consumer.group_size
            if len(groups) < self.ready.counts[each]:
                break
        return chosen

    def _rows_of(self, chosen: list[tuple[int, Ids]]) -> Ids:
        return self.ready.rows_of(numpy.concatenate([_NO_IDS, *(groups for _, groups in chosen)]))

    def _room_for(self, step: int) -> float:
        """Return how many more rows of a step may be leased: there is room for what is written of them, or others wait
        for it. They could else wait for ever, since only what is complete leaves the dock."""
        if not self.consumer.row_bytes or step <= self.required:
            return math.inf
        return max(self.room.rows_that_fit(self.consumer.row_bytes) - self.n_leased, 0)

    def _check_held(self, number: int, step: int | None, ids: Ids) -> None:
        granted = self.leases.get(number) or self.expired.get(number)
        if granted is None:
            raise LeaseLost(self._lost_message(number, ids, step))
        known = ids[self.rows.find(ids) >= 0] if granted.restored else ids  # others were lost with the index
        wrong = numpy.setxor1d(known, granted.ids)[:SHOWN].tolist()
        if step != granted.step or wrong:
            what = f"commits other rows than it holds: {wrong}" if wrong else f"is of step {granted.step}, not {step}"
            raise DockError(f"lease {number} of `{self.consumer.name}` {what}. Nothing is committed. Commit the lease "
                            "as `lease` has returned it")

    def _deal(self, dealt: list[Ids], shares: int) -> list[Ids]:
        rows = numpy.sort(numpy.concatenate(dealt))
        return split_groups(rows, self.rows["tokens"][self.rows.find(rows)], self.consumer.group_size, shares)

    def _add_lease(self, granted: GrantedLease, slots: Ids) -> GrantedLease:
        self.leases[granted.number] = granted
        self.n_leased += len(granted.ids)
        if granted.step is not None:
            self.by_step.setdefault(granted.step, granted)
        if granted.request:
            self.by_request[granted.request] = granted
        self.rows["lease"][slots], self.rows["held"][slots] = granted.number, 1
        self.changes.append(_marks(granted.ids, granted.number, granted.step))
        self._make_unready(slots)
        return granted

    def _make_ready(self, slots: Ids, first: bool = False) -> None:
        slots = slots[self.rows["ready"][slots] == 0]
        self.rows["ready"][slots] = 1
        self.ready.add(self.rows["ids"][slots], first)

    def _make_unready(self, slots: Ids) -> None:
        if len(slots := slots[self.rows["ready"][slots] > 0]):
            self.rows["ready"][slots] = 0
            self.ready.discard(self.rows["ids"][slots])

    def _end_lease(self, granted: GrantedLease) -> None:
        del self.leases[granted.number]
        self.n_leased -= len(granted.ids)
        self.by_request.pop(granted.request, None)
        if granted.step is not None and self.by_step.get(granted.step) is granted:
            del self.by_step[granted.step]

    def _extend(self, granted: GrantedLease, now: float, session: str) -> None:
        granted.expires = now + self.consumer.seconds
        self.leases.move_to_end(granted.number)
        granted.holders.add(session)
        granted.last = session

    def _has_lost_rows(self, granted: GrantedLease) -> bool:
        """Return whether a row was committed, given to another holder, or lost with its shard and stored again."""
        _, same = self.rows.find_unchanged(granted.ids, granted.births)
        taken = self.done.contains_each(granted.ids) | self._leased_to_other(granted.ids, granted.number)
        return bool((~same | taken).any())

    def _leased_to_other(self, ids: Ids, lease: int) -> numpy.ndarray:
        last, = self.describe(ids, "lease")
        return (last != 0) & (last != lease)

    def _mark_committed(self, ids: Ids) -> None:
        self.done.update(ids)
        self._forget(self.rows.find_present(ids))

    def _forget(self, slots: Ids) -> None:
        self._make_unready(slots)
        self.rows.remove(slots)

    def _lost_message(self, number: int, ids: Ids, step: int | None = None) -> str:
        leases = {*self.describe(ids, "lease")[0].tolist()} - {0, number}
        done, ids = ids[self.done.contains_each(ids)].tolist(), ids.tolist()
        if number >> 32 != self.epoch:
            return (f"lease {number} of `{self.consumer.name}` is of an earlier process of its index, which has ended "
                    f"before it was written to the shards: its rows {ids[:SHOWN]} may have been given to others. Throw "
                    "away what was made of them")
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
