"""Index of one consumer: which rows are ready, which are leased to whom, and which are committed.

Metadata only, and pure: the time is an argument (seconds of any clock that never goes back), and `shard.py` holds its
lock around every call. Leases, commits and rollbacks are ours, not MindSpeed RL's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from distflow.dock.errors import DockError, LeaseLost
from distflow.dock.selection import Consumer, Ids, RowState, choose, deal


class Intervals:
    """Set of whole numbers, kept as ranges: memory and time grow with the number of gaps, not of members."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()):
        self.starts: list[int] = []
        self.ends: list[int] = []  # exclusive
        for start, end in ranges:
            self.starts.append(start)
            self.ends.append(end)

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Intervals:
        result = cls()
        for number in numbers:
            result.add(number)
        return result

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.starts, number) - 1
        return at >= 0 and number < self.ends[at]

    def __len__(self) -> int:
        return sum(self.ends) - sum(self.starts)

    def add(self, number: int) -> None:
        at = bisect_right(self.starts, number)
        if at and number < self.ends[at - 1]:
            return
        joins_left = at > 0 and self.ends[at - 1] == number
        joins_right = at < len(self.starts) and self.starts[at] == number + 1
        if joins_left and joins_right:
            self.ends[at - 1] = self.ends.pop(at)
            self.starts.pop(at)
        elif joins_left:
            self.ends[at - 1] = number + 1
        elif joins_right:
            self.starts[at] = number
        else:
            self.starts.insert(at, number)
            self.ends.insert(at, number + 1)

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

    `ids` [rows] are those of the holder's share, ascending, and the other tensors are in their order; group -1 is a
    group of its own, turn -1 none saved. `all_ids` are those of all shares, which a commit covers.
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


SHOWN = 8  # ids of a long list that a message names
_EXPIRED_KEPT = 512  # expired leases that are remembered, to say who has their rows now


@dataclass
class GrantedLease:
    """Lease as the index keeps it: rows dealt into shares, one for each rank of the group that asked."""

    number: int
    shares: list[list[RowState]]
    step: int | None
    since: float
    expires: float
    request: int
    holders: set[str] = field(default_factory=set)  # sessions that have asked for a share
    last: str = ""  # session that asked last, for messages

    @property
    def rows(self) -> list[RowState]:
        return [row for share in self.shares for row in share]


class ConsumerIndex:
    """Ready rows, leases and commits of one consumer.

    Args:
        epoch: start of the process; it makes the lease numbers of a restored index differ from those before.
        epochs: earlier epochs of which every commit is known, since a journal has them.
    """

    def __init__(self, consumer: Consumer, epoch: int = 1, epochs: Iterable[int] = ()):
        self.consumer = consumer
        self.reads = set(consumer.reads)
        self.rows: dict[int, RowState] = {}  # known and not committed
        self.ready: dict[int, RowState] = {}  # can be leased, in the order in which they became ready
        self.done, self.finished, self.steps = Intervals(), Intervals(), Intervals()  # committed rows, leases and steps
        self.retained: dict[int, list[RowState]] = {}  # by step; can still be rolled back, so stay in their shards
        self.first_retained = 0
        self.leases: dict[int, GrantedLease] = {}
        self.expired: dict[int, GrantedLease] = {}
        self.epoch, self.number, self.epochs = epoch, epoch << 32, {epoch, *epochs}

    def learn(self, table: Ids, columns: Iterable[str]) -> list[int]:
        """Add columns of rows that a shard stores (`StorageShard.table`); return the ids that are committed already."""
        names, committed = set(columns), []
        for number, tokens, version, group, turn in table.T.tolist():
            if number in self.done:
                committed.append(number)
                continue
            row = self.rows.get(number)
            if row is None:
                row = self.rows[number] = RowState(number, set())
            row.columns |= names
            row.tokens, row.version, row.group, row.turn = tokens, version, group, turn
            if not row.held and self.reads <= row.columns:
                self.ready.setdefault(number, row)
        return committed

    def relearn(self, listed: Mapping[int, Iterable[str]], shard: int, shards: int,
                replaced: bool = True) -> None:
        """Forget the rows that a shard does not list any more, ahead of `learn`. Committed rows whose results were lost
        with a shard become ready again, but only if the shard was `replaced`: a listing that was long on its way may
        lack results that have come since."""
        for number in [each for each in self.rows if each % shards == shard and each not in listed]:
            self.ready.pop(number, None)
            self.rows.pop(number)
        for number, names in listed.items():
            if replaced and number in self.done and not set(self.consumer.writes) <= set(names):
                self.done.remove(number)
            if number in self.rows:
                self.rows[number].columns = set(names)
                if not self.reads <= set(names):
                    self.ready.pop(number, None)

    def lease(self, count: int, now: float, session: str, *, least: int = 1, step: int | None = None,
              share: int = 0, shares: int = 1, request: int = 0) -> GrantedLease | None:
        """Lease up to `count` rows, or return None if fewer than `least` are ready.

        A session that asks for a leased step joins that lease: the ranks of a group get their shares of one draw, and a
        restarted group gets the rows that it had. The same `request` always gets the same lease. Raises DockError: the
        step is committed, or the group asks with another number of shares than before."""
        if not 0 <= share < shares:
            raise DockError(f"`{self.consumer.name}` was asked for share {share} of {shares}; shares count from 0")
        self.expire(now)
        granted = self._same(step, request)
        if granted is None:
            groups = choose(self.ready.values(), self.consumer, count, step)
            if not groups or sum(map(len, groups)) < least:
                return None
            self.number += 1
            granted = GrantedLease(self.number, deal(groups, shares), step, now, now, request)
            self.leases[granted.number] = granted
            self._hold(granted)
        if len(granted.shares) != shares:
            raise DockError(f"step {step} of `{self.consumer.name}` was leased in {len(granted.shares)} shares; share "
                            f"{share} of {shares} does not exist. Wait until that lease runs out, or ask as before")
        self._touch(granted, now, session)
        return granted

    def look(self, count: int, now: float, *, least: int, step: int) -> list[RowState] | None:
        """Return the rows that `lease` would hand out for a step, by id, or None; no state changes."""
        self.expire(now)
        granted = self._same(step, 0)
        groups = granted.shares if granted else choose(self.ready.values(), self.consumer, count, step)
        rows = sorted((row for group in groups for row in group), key=lambda row: row.id)
        return rows if len(rows) >= max(least, 1) else None

    def renew(self, number: int, now: float, session: str) -> float:
        """Extend a lease and return its seconds; an expired one is revived, unless its rows were given to others."""
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

    def commit(self, number: int, step: int | None, ids: list[int], now: float, *, answered: bool = False,
               keep: Callable[[], None] = lambda: None) -> bool:
        """Mark rows as consumed for good; return False if this very commit was made before.

        A late commit stands if no other holder was given any of the rows. A lease of an earlier epoch whose commits
        may be forgotten is void, since another holder may have committed its rows.

        Args:
            answered: a client repeats a commit that was answered in an earlier epoch; it outweighs newer leases.
            keep: called before anything changes, once the commit is valid; may refuse by raising.

        Raises:
            LeaseLost: another holder may have committed the rows; nothing is committed.
        """
        self.expire(now)
        if number in self.finished:
            return False
        taken = [row for row in ids if row in self.done or (not answered and self._leased_to_other(row, number))]
        unsure = number >> 32 not in self.epochs and not answered
        if taken or unsure or (step is not None and step in self.steps):
            raise LeaseLost(self._lost(number, taken or ids, step))
        keep()
        self.leases.pop(number, None)
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
        for granted in mine:
            granted.holders.discard(session)
            if not granted.holders:
                granted.expires = now
        return self.expire(now) > 0

    def expire(self, now: float) -> int:
        """Make the rows of expired leases ready again, ahead of all others; return how many."""
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
        while len(self.expired) > _EXPIRED_KEPT:
            self.expired.pop(next(iter(self.expired)))
        return sum(len(granted.rows) for granted in over)

    def finish(self, ids: Iterable[int]) -> None:
        """Mark rows as committed that a shard remembers as such."""
        self._finish([row for row in ids if row not in self.done])

    def replay(self, commits: Iterable[tuple[int, int | None, list[int]]]) -> None:
        """Apply commits (lease, step, ids) of a journal, some of which may be known."""
        for number, step, ids in commits:
            if number in self.finished:
                continue
            self.finished.add(number)
            if step is not None:
                self.steps.add(step)
            self._finish(ids)

    def state(self) -> dict[str, Any]:
        """Return the commits, for a snapshot: shards list their rows again, and leases are void."""
        return {name: getattr(self, name).ranges for name in ("done", "finished", "steps")}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in ("done", "finished", "steps"):
            setattr(self, name, Intervals(state[name]))

    def rollback(self, step: int) -> int:
        """Make the committed rows of all steps from `step` on ready again; return how many."""
        back = {row.id: row for number in sorted(self.retained) if number >= step for row in self.retained[number]}
        for number in [number for number in self.retained if number >= step]:
            del self.retained[number]
            self.steps.remove(number)
        for row in back.values():
            row.held = False
            self.done.remove(row.id)
        self.rows |= back
        self.ready = back | self.ready
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
        """Release the oldest retained step, but none of the newest two: copies of the last one's state may be under
        way, or turn out torn."""
        return self.release_before(min(self.retained) + 1) if len(self.retained) > 2 else []

    def release_torn(self, listed: Collection[int], shard: int, shards: int) -> list[int]:
        """Release the steps of which a shard has lost rows, given all rows that it lists; return their other rows."""
        torn = [number for number, rows in self.retained.items()
                if any(row.id % shards == shard and row.id not in listed for row in rows)]
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
        found = [granted for granted in self.leases.values()
                 if (step is not None and granted.step == step) or (request and granted.request == request)]
        if not found and step is not None and step in self.steps:
            raise DockError(f"step {step} of `{self.consumer.name}` is committed already, and was not rolled back")
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
        """Whether the row was committed, given to another holder, or lost with its shard and stored again."""
        return row.id in self.done or self._leased_to_other(row.id, number) or self.rows.get(row.id) is not row

    def _leased_to_other(self, number: int, lease: int) -> bool:
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
        if number >> 32 not in self.epochs:
            return (f"lease {number} of `{self.consumer.name}` is of an earlier epoch of its index, which was "
                    f"restored without a journal: its rows {ids[:SHOWN]} may have been committed by others since. "
                    "Throw away what was made of them")
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
