"""Elastic membership: which of a run's ranks each machine has, where machines come and go.

Each machine's torchrun knows of no other. They meet at an etcd, in rendezvous rounds. A round begins when enough
machines have come; each then has a block of ranks, those that train first. A machine that only samples may be lost, and
another may take its block, while all others go on. When a machine that trains is lost, one that samples takes over its
block (`Membership.heirs`): the ranks that train start again from the newest consistent state, and all others sample
on. If none can be spared, the machines that are left begin the next round. No process decides: whoever sees a loss
proposes a round, and the store takes the first proposal.

    in the store
    local, run             what all machines must agree on, as the first one said
    round                  the number of the present round
    N/began                JSON: why round N began and which machines are expected, or that the run has ended
    N/came, N/waits/K      how many machines have come to round N; heartbeat and name of the K-th while it waits
    N/members              JSON: the machines that it began with, by block
    N/holder/B             the machine that has taken over block B since; vacant: it has left B for another block;
                           leaving: so it will, once its workers have ended
    N/heartbeat/B, N/left/B  heartbeat of block B's machine; that the machine has left
    N/replicas/R           where rank R's supervisor takes copies of another machine's state, or why not
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from distflow.errors import DistflowError, InvalidInput
from distflow.recovery.worker_process import WorkerContext
from distflow.store.interface import ETCD, Store, StoreUnavailable, poll_interval
from distflow.telemetry.heartbeat import Silence
from distflow.telemetry.processes import spawn

MACHINES = "machines"  # prefix of the keys in the store
HEARTBEAT_SECONDS, _POLL = 1.0, 0.1  # seconds between two heartbeats, and between two looks at the store
_NO_BLOCK = -1  # of a machine that waits for one
_VACANT, _LEAVING = "vacant", "leaving"  # holders of a block whose machine has taken over another one
_REPORT_AFTER = 5.0  # seconds after which a machine that waits for others says so
_WATCHED = 3  # machines whose heartbeats a machine looks at


class MembershipChanged(Exception):
    """All machines begin the next round; what this process did in the present one is void."""


class ElasticMember(Protocol):
    """Membership of a supervisor's machine. replaces: the machine has taken over another's block. takeover: names that.
    silence: seconds after which a machine counts as lost. worker_context: with memory that outlives a round."""

    @property
    def replaces(self) -> bool: ...

    @property
    def takeover(self) -> str: ...

    @property
    def silence(self) -> float: ...

    @property
    def worker_context(self) -> WorkerContext: ...

    def poll(self) -> None:
        """Raises MembershipChanged: all machines begin a later round."""

    def wait_for_loss(self) -> None:
        """Wait until it is known whether a failure is due to the loss of a machine; raises MembershipChanged if so."""


@dataclass(frozen=True)
class Rendezvous:
    """A machine's part of a rendezvous round: its block of ranks, of `blocks`. replaces: the block was another
    machine's before. why: the round began; empty for the first one. silent: seconds without a heartbeat of the machine
    whose loss began it."""

    number: int
    block: int
    blocks: int
    replaces: bool = False
    why: str = ""
    silent: float = 0.0


@dataclass
class Membership:
    """One machine's view of the membership of a run.

    Args:
        name: of this machine's torchrun, and of no other.
        local: ranks of each machine.
        least, most: machines that the run needs, and that it has blocks for.
        vital: number of blocks whose machines train, the first ones; the run cannot go on without one of them.
        grows: whether the ranks are those of the machines that are there (mode sync); else they are those of `most`,
            and some that sample may be missing.
        silence: seconds without a heartbeat after which a machine counts as lost.
        losses: of machines that train; one more ends the run.
    """

    store: Store
    name: str
    local: int
    least: int
    most: int
    vital: int
    grows: bool
    silence: float
    losses: int
    began_with: dict[int, list[str]] = field(default_factory=dict)
    """Machines by block of the rounds that this process has seen begin."""

    def agree(self, run: str) -> None:
        """Raise InvalidInput: the store is another run's, the run is done, or machines differ in ranks."""
        another = f"each run needs a name of its own there:  --store {ETCD}{self.store.address}/ANOTHER"
        for what, mine, wrong in (
            ("run", run, "the store is of another run: it has digest {}, here it is {}. The DAG, the run file, the "
             f"commit of a model or --machines differ; or {another}"),
            ("local", str(self.local), "each machine must start as many ranks as the others: they have {}, this one "
             "{} (torchrun's --nproc-per-node)")):
            theirs = self.store.put_if(what, mine, None)
            if theirs != mine:
                raise InvalidInput(wrong.format(theirs, mine))
        if self._round_record(self._newest_round()).get("end") == "":
            raise InvalidInput(f"the run at {self.store.address} is done, and nothing is left to do here; "
                               f"{another}")

    def join(self) -> Rendezvous | None:
        """Wait for a block of this or a later round; None if the run is done. Raises DistflowError: it has failed."""
        while True:
            number = self._newest_round()
            began = self._round_record(number)
            if "end" in began:
                if began["end"]:
                    raise DistflowError(began["end"])
                return None
            members = self._wait_for_members(number, began.get("expected", []))
            if members is None:
                continue
            found = self._claim_block(number, members)
            if found is not None:
                return Rendezvous(number, *found, began.get("why", ""), began.get("silent", 0.0))

    def propose(self, round: int, why: str, lost: int | None = None) -> None:
        """Propose the next round, for this machine and all others but that of block `lost`."""
        blocks = range(self.most)
        expected = [name for block, (name, left, _) in zip(blocks, self.signs_of_life(round, blocks))
                    if name and block != lost and not left]
        expected += [self.name] if self.name not in expected else []
        losses = self._round_record(round).get("losses", 0) + (lost is not None)
        if losses > self.losses:
            self.finish(round, f"{why}. That is machine {losses} that is lost, and robust.restarts is {self.losses}")
            return
        self._propose(round, {"why": why, "silent": 0.0 if lost is None else self.silence, "expected": expected,
                              "losses": losses})

    def finish(self, round: int, failure: str = "") -> None:
        """End the run on all machines: because of a failure, or because all is done."""
        self._propose(round, {"end": failure})

    def leave(self, round: int, block: int) -> None:
        """Report that this machine ends by itself, and is not lost."""
        self.store.put(f"{round}/left/{block}", self.name)

    def is_superseded(self, round: int) -> bool:
        return self.store.has(f"{round + 1}/began")

    def holders(self, round: int) -> dict[int, str]:
        """Return the machine of each block that has, or had, one."""
        blocks = range(self.most)
        return {block: name for block, (name, _, _) in zip(blocks, self.signs_of_life(round, blocks)) if name}

    def heirs(self, block: int) -> Iterator[int]:
        """Yield the blocks of which the first one with a living machine takes over another one, which trains, when
        that is lost."""
        count = self.most - self.vital
        return (self.vital + (block + step) % count for step in range(count))

    def take_over(self, round: int, block: int, lost: str, mine: int) -> None:
        """Take the block of a lost machine. This machine's own is left to another when it calls `vacate`."""
        if self._take(round, block, lost) is not None:
            self.store.put(f"{round}/holder/{mine}", _LEAVING)

    def vacate(self, round: int, block: int) -> None:
        """Leave a block to another machine, after `take_over`: the workers here have ended."""
        self.store.put_if(f"{round}/holder/{block}", _VACANT, _LEAVING)

    def is_leaving(self, round: int, block: int) -> bool:
        """Return whether this machine's block is to be vacated, since it has taken over another one's."""
        return self.store.get(f"{round}/holder/{block}") == _LEAVING

    def holds(self, round: int, block: int) -> bool:
        """Return whether a block is still this machine's: while it sent no heartbeat, another may have taken it."""
        return self.store.get(f"{round}/holder/{block}") in (None, self.name)

    def send_heartbeat(self, round: int, block: int, count: int) -> None:
        self.store.put(f"{round}/heartbeat/{block}", f"{self.name} {count}")

    def named(self, block: int, name: str) -> str:
        return f"machine {host_of(name)} (ranks {block * self.local} to {(block + 1) * self.local - 1})"

    def signs_of_life(self, round: int, blocks: Sequence[int]) -> list[tuple[str, bool, str]]:
        """Return for each of the blocks its machine, whether that has ended by itself, and its last heartbeat; empty
        where there is none, or the last one there is another machine's."""
        members = self._members(round) or []
        keys = [f"{round}/{kind}/{block}" for kind in ("holder", "left", "heartbeat") for block in blocks]
        found, count = self.store.get_all(keys), len(blocks)
        signs = list[tuple[str, bool, str]]()
        for block, holder, left, heartbeat in zip(blocks, found, found[count:], found[2 * count :]):
            name = "" if holder in (_VACANT, _LEAVING) else holder or "".join(members[block : block + 1])
            signs.append((name, bool(name) and left == name, heartbeat if heartbeat.startswith(f"{name} ") else ""))
        return signs

    def _members(self, round: int) -> list[str] | None:
        """Return the machines that a round began with, by block; None before it has begun."""
        if round not in self.began_with and (text := self.store.get(f"{round}/members")) is not None:
            self.began_with[round] = json.loads(text)
        return self.began_with.get(round)

    def _propose(self, round: int, began: dict) -> None:
        self.store.put_if(f"{round + 1}/began", json.dumps(began), None)
        self._newest_round()

    def _newest_round(self) -> int:
        """Return the present round. Key `round` has it too, except in the middle of a proposal."""
        number = self.store.add("round", 0)
        while self.is_superseded(number):
            self.store.put_if("round", str(number + 1), str(number))
            number += 1
        return number

    def _round_record(self, round: int) -> dict:
        return json.loads(self.store.get(f"{round}/began") or "{}")

    def _wait_for_members(self, round: int, expected: list[str]) -> list[str] | None:
        """Wait until a round begins, and return its machines; None if a later round has begun first."""
        seen: dict[int, tuple[str, Silence]] = {}
        names, reported, since, mine, count = list[str](), False, time.monotonic(), 0, 0
        while (members := self._members(round)) is None:
            if self.is_superseded(round):
                return None
            if not reported and time.monotonic() - since > _REPORT_AFTER:
                self._report_waiting(round)
            reported = time.monotonic() - since > _REPORT_AFTER
            mine = mine or self.store.add(f"{round}/came")
            self.store.put(f"{round}/waits/{mine}", f"{(count := count + 1)} {self.name}")
            if not self._is_first(round, mine, seen):  # that one looks at the others
                self.store.wait([f"{round}/members"],
                                poll_interval(min(_POLL * count, HEARTBEAT_SECONDS, self.silence / 4), mine))
                continue
            if (waiting := self._waiting(round, seen)) != names:
                names, since = waiting, time.monotonic()
            quiet = time.monotonic() - since > self.silence
            if len(names) >= self.least and (len(names) >= self.most or quiet
                                             or expected and set(expected) <= set(names)):
                ordered = sorted(names, key=lambda name: (name not in expected, expected.index(name)
                                                          if name in expected else names.index(name)))
                self.store.put_if(f"{round}/members", json.dumps(ordered[: self.most]), None)
            time.sleep(_POLL)
        return members

    def _report_waiting(self, round: int) -> None:
        why, count = self._round_record(round).get("why", ""), self.store.add(f"{round}/came", 0)
        print(f"{f'{why}; ' if why else ''}waiting for machines: {count} have come, and {self.least} are enough",
              flush=True)

    def _is_first(self, round: int, mine: int, seen: dict[int, tuple[str, Silence]]) -> bool:
        """Return whether all machines that came before the one with number `mine` are silent. Of these only the last
        ones are looked at, and those before them once they are silent. `seen`: as in `_waiting`."""
        for last in range(mine - 1, 0, -_WATCHED):
            numbers = range(last, max(0, last - _WATCHED), -1)
            for number, entry in zip(numbers, self.store.get_all([f"{round}/waits/{each}" for each in numbers])):
                if seen.setdefault(number, (entry, Silence(self.silence / 2)))[1].of(entry) <= self.silence:
                    return False
        return True

    def _waiting(self, round: int, seen: dict[int, tuple[str, Silence]]) -> list[str]:
        """Return the machines that wait for a round to begin, in the order in which they came: those whose heartbeat
        goes on. `seen`: the first heartbeat of each that this machine has seen, and how long it has been silent."""
        found, numbers = list[str](), range(1, self.store.add(f"{round}/came", 0) + 1)
        for number, entry in zip(numbers, self.store.get_all([f"{round}/waits/{each}" for each in numbers])):
            if entry:
                _, name = entry.split(" ", 1)
                first, silence = seen.setdefault(number, (entry, Silence(self.silence / 2)))
                is_alive = silence.of(entry) <= self.silence and (entry != first or name == self.name)
                found += [name] if is_alive else []
        return found

    def _claim_block(self, round: int, members: list[str]) -> tuple[int, int, bool] | None:
        """Wait for a free block; return it, the number of blocks, and whether it had a machine. None: a round later."""
        blocks = len(members) if self.grows else self.most
        if self.name in members and self.holds(round, members.index(self.name)):
            return members.index(self.name), blocks, False
        for block, holder in self.holders(round).items():
            if holder == self.name:
                return block, blocks, True
        if self.grows and len(members) < self.most:
            self.propose(round, f"machine {host_of(self.name)} has come")
            return None
        silences = {block: Silence(self.silence / 2) for block in range(self.most)}
        reported, since, candidates = set[str](), time.monotonic(), range(self.vital, blocks)
        while not self.is_superseded(round):
            for block, (before, left, heartbeat) in zip(candidates, self.signs_of_life(round, candidates)):
                silent = silences[block].of((before, heartbeat)) > self.silence
                if (not before or silent or left) and not self.is_superseded(round) and \
                        (replaces := self._take(round, block, before, silent)) is not None:
                    return block, blocks, replaces
            _report_losses(self, Rendezvous(round, _NO_BLOCK, blocks), silences, reported)  # perhaps all are lost
            if time.monotonic() - since > _REPORT_AFTER:
                print(f"other machines have all {blocks} blocks of ranks; this one waits until one of them is lost",
                      flush=True)
                since = math.inf
            time.sleep(_POLL)
        return None

    def _take(self, round: int, block: int, before: str, silent: bool = False) -> bool | None:
        """Take the block that machine `before` had, if any. Return whether one had it; None if another was faster, or
        the block's machine is still leaving it, and not `silent`: it would be lost then."""
        key = f"{round}/holder/{block}"
        holder, free = self.store.get(key), (None, before or _VACANT, *([_LEAVING] if silent and not before else ()))
        if holder not in free or self.store.put_if(key, self.name, holder) != self.name:
            return None
        return bool(before or holder)


def host_of(name: str) -> str:
    """Return the host of a machine's torchrun, from its name by `run_folder.agent`."""
    return name.split()[1]


class MachineHeartbeat:
    """Process that sends this machine's heartbeat in one round, and misses those of others. The supervisor cannot: it
    may be busy for a while, and has no threads."""

    def __init__(self, membership: Membership, rendezvous: Rendezvous):
        self.process = spawn(partial(_watch, membership, rendezvous))

    def end(self) -> None:
        self.process.end()


def _watch(membership: Membership, rendezvous: Rendezvous) -> None:
    """Send and check heartbeats until this machine's part of the round ends, or there is no store any more."""
    silences, reported = {block: Silence(membership.silence / 2) for block in range(rendezvous.blocks)}, set[str]()
    for count in itertools.count(1):
        try:
            if membership.is_superseded(rendezvous.number) or not membership.holds(rendezvous.number, rendezvous.block):
                return
            membership.send_heartbeat(rendezvous.number, rendezvous.block, count)
            _report_losses(membership, rendezvous, silences, reported)
        except StoreUnavailable as error:
            if error.gone:  # the supervisors find out too
                return
        time.sleep(HEARTBEAT_SECONDS)


def _report_losses(membership: Membership, rendezvous: Rendezvous, silences: dict[int, Silence],
                   reported: set[str]) -> None:
    """Propose the next round for each machine that trains and is silent, unless one that samples takes its place; the
    first block's says once which others are. Every other machine looks at those whose place it would take, as first or
    second heir, and at the next ones in a ring, and at those after them once these are silent."""
    first, blocks = rendezvous.block == 0, rendezvous.blocks
    ring = [(rendezvous.block + step) % blocks for step in range(1, blocks + (rendezvous.block == _NO_BLOCK))]
    width = max(1, len(ring)) if first else _WATCHED
    inherits = [block for block in range(membership.vital)
                if rendezvous.block in itertools.islice(membership.heirs(block), 2)]
    inherits += {next(membership.heirs(block)) for block in inherits} - {rendezvous.block}
    for near in (inherits, *(ring[at : at + width] for at in range(0, len(ring), width))):
        lives = False
        for block, (name, left, heartbeat) in zip(near, membership.signs_of_life(rendezvous.number, near)):
            if not name or left or name in reported:
                continue
            seconds = silences[block].of((name, heartbeat))
            if seconds <= membership.silence:
                lives = True
                continue
            if seconds <= 2 * membership.silence and _is_taken_over(membership, rendezvous, block, name, silences):
                continue
            what = f"{membership.named(block, name)} has given no sign of life for {membership.silence:g} s"
            if block < membership.vital:
                membership.propose(rendezvous.number, what, lost=block)
            elif first:
                print(f"{what}; the others sample on, and another may take its place", flush=True)
            reported.add(name)
        if lives and near is not inherits:
            return


def _is_taken_over(membership: Membership, rendezvous: Rendezvous, block: int, name: str,
                   silences: dict[int, Silence]) -> bool:
    """Return whether a machine that samples takes the place of a silent one that trains, while another one samples on.
    This one does so, if it is that machine."""
    samplers = range(membership.vital, rendezvous.blocks)
    signs = membership.signs_of_life(rendezvous.number, samplers) if block < membership.vital else []
    living = [each for each, (sampler, left, heartbeat) in zip(samplers, signs) if sampler and not left
              and (each == rendezvous.block or silences[each].of((sampler, heartbeat)) <= membership.silence)]
    if len(living) < 2:
        return False
    if next(heir for heir in membership.heirs(block) if heir in living) == rendezvous.block:
        membership.take_over(rendezvous.number, block, name, rendezvous.block)
    return True
