"""Elastic membership: which of a run's ranks each machine has, where machines come and go.

Each machine's torchrun knows of no other. They meet at a store that the user hosts (`distflow board`, or etcd), in
rendezvous rounds. A round begins when enough machines have come; each then has a block of ranks, those that train
first. A machine that only samples may be lost, and another may take its block, while all others go on. When a machine
that trains is lost, one that samples takes over its block (`Membership.successor`): the ranks that train start again
from the newest consistent state, and all others sample on. If none can be spared, the machines that are left begin the
next round. No process decides: whoever sees a loss proposes a round, and the store takes the first proposal.

    in the store
    local, run             what all machines must agree on, as the first one said
    round                  the number of the present round
    N/began                JSON: why round N began and which machines are expected, or that the run has ended
    N/came, N/waits/K      how many machines have come to round N; heartbeat and name of the K-th while it waits
    N/members              JSON: the machines that it began with, by block
    N/holder/B             the machine that has taken over block B since; vacant: it has left B for another block
    N/heartbeat/B, N/left/B  heartbeat of block B's machine; that the machine has left
    N/replicas/R           where rank R's supervisor takes copies of another machine's state, or why not
"""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from distflow.errors import DistflowError, InvalidInput
from distflow.recovery.worker_process import WorkerContext
from distflow.store.interface import Store, StoreUnavailable
from distflow.telemetry.heartbeat import Silence
from distflow.telemetry.processes import spawn

MACHINES = "machines"  # prefix of the keys in the store
HEARTBEAT_SECONDS, _POLL = 1.0, 0.1  # seconds between two heartbeats, and between two looks at the store
_NO_BLOCK = -1  # of a machine that waits for one
_VACANT = "vacant"  # holder of a block whose machine has taken over another one
_PATIENCE = 5.0  # seconds after which a machine that waits for others says so


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

    def agree(self, run: str) -> None:
        """Check that the store is this run's. Raises InvalidInput: it is not, or the run is done, or machines differ in
        number of ranks."""
        for what, mine, wrong in (
            ("run", run, "the store is of another run: it has digest {}, here it is {}. The DAG, the run file or "
             f"--machines differ; or {self.store.for_another_run}"),
            ("local", str(self.local), "each machine must start as many ranks as the others: they have {}, this one "
             "{} (torchrun's --nproc-per-node)")):
            theirs = self.store.put_if(what, mine, None)
            if theirs != mine:
                raise InvalidInput(wrong.format(theirs, mine))
        if self._round_record(self._newest_round()).get("end") == "":
            raise InvalidInput(f"the run at {self.store.address} is done, and nothing is left to do here; "
                               f"{self.store.for_another_run}")

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
        expected = [name for block, name in self.holders(round).items()
                    if block != lost and not self.left(round, block, name)]
        expected += [self.name] if self.name not in expected else []
        losses = self._round_record(round).get("losses", 0) + (lost is not None)
        if losses > self.losses:
            self.finish(round, f"{why}. That is machine {losses} that is lost, and robust.restarts is {self.losses}")
            return
        silent = 0.0 if lost is None else self.silence
        self._propose(round, {"why": why, "silent": silent, "expected": expected, "losses": losses})

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
        members = json.loads(self.store.get(f"{round}/members") or "[]")
        holders = self.store.get_all([f"{round}/holder/{block}" for block in range(self.most)])
        found = {block: holder or "".join(members[block : block + 1]) for block, holder in enumerate(holders)}
        return {block: name for block, name in found.items() if name not in ("", _VACANT)}

    def successor(self, block: int) -> int:
        """Return the block whose machine takes over another one, which trains, when that is lost; -1: none does."""
        return _NO_BLOCK if self.most == self.vital else self.vital + block % (self.most - self.vital)

    def take_over(self, round: int, block: int, lost: str, mine: int) -> None:
        """Take the block of a lost machine, and leave this machine's own to another."""
        if self._take(round, block, lost):
            self.store.put(f"{round}/holder/{mine}", _VACANT)

    def holds(self, round: int, block: int) -> bool:
        """Return whether a block is still this machine's: while it sent no heartbeat, another may have taken it."""
        return self.store.get(f"{round}/holder/{block}") in (None, self.name)

    def left(self, round: int, block: int, name: str) -> bool:
        """Return whether the machine `name`, which had the block, has ended by itself."""
        return self.store.get(f"{round}/left/{block}") == name

    def send_heartbeat(self, round: int, block: int, count: int) -> None:
        self.store.put(f"{round}/heartbeat/{block}", f"{self.name} {count}")

    def last_heartbeat(self, round: int, block: int, name: str) -> str:
        """Return the last heartbeat of a block's machine `name`; empty if the last one there is another's."""
        return _heartbeat_of(name, self.store.get(f"{round}/heartbeat/{block}") or "")

    def signs(self, round: int) -> list[tuple[str, str]]:
        """Return for each block which machine has ended by itself there, and the last heartbeat."""
        keys = [f"{round}/{kind}/{block}" for kind in ("left", "heartbeat") for block in range(self.most)]
        found = self.store.get_all(keys)
        return list(zip(found[: self.most], found[self.most :]))

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
        names, reported, since, mine, count = list[str](), list[str](), time.monotonic(), 0, 0
        while (members := self.store.get(f"{round}/members")) is None:
            if self.is_superseded(round):
                return None
            if names != reported and time.monotonic() - since > _PATIENCE:
                reported, why = names, self._round_record(round).get("why", "")
                print(f"{f'{why}; ' if why else ''}waiting for machines: {len(names)} have come, and {self.least} are "
                      "enough", flush=True)
            mine = mine or self.store.add(f"{round}/came")
            self.store.put(f"{round}/waits/{mine}", f"{(count := count + 1)} {self.name}")
            if (waiting := self._waiting(round, seen)) != names:
                names, since = waiting, time.monotonic()
            quiet = time.monotonic() - since > self.silence
            if len(names) >= self.least and (len(names) >= self.most or quiet
                                             or expected and set(expected) <= set(names)):
                ordered = sorted(names, key=lambda name: (name not in expected, expected.index(name)
                                                          if name in expected else names.index(name)))
                self.store.put_if(f"{round}/members", json.dumps(ordered[: self.most]), None)
            time.sleep(_POLL)
        return json.loads(members)

    def _waiting(self, round: int, seen: dict[int, tuple[str, Silence]]) -> list[str]:
        """Return the machines that wait for a round to begin, in the order in which they came: those whose heartbeat
        goes on. `seen`: the first heartbeat of each that this machine has seen, and how long it has been silent."""
        found = []
        for each in range(1, self.store.add(f"{round}/came", 0) + 1):
            if (waits := self.store.get(f"{round}/waits/{each}")) is not None:
                heartbeat, name = waits.split(" ", 1)
                first, silence = seen.setdefault(each, (heartbeat, Silence(self.silence / 2)))
                lives = silence.of(heartbeat) <= self.silence and (heartbeat != first or name == self.name)
                found += [name] if lives else []
        return found

    def _claim_block(self, round: int, members: list[str]) -> tuple[int, int, bool] | None:
        """Wait for a free block; return it, the number of blocks, and whether it was another machine's. None if a later
        round has begun."""
        blocks = len(members) if self.grows else self.most
        for block, holder in self.holders(round).items():
            if holder == self.name:
                return block, blocks, members[block : block + 1] != [holder]
        if self.grows and len(members) < self.most:
            self.propose(round, f"machine {host_of(self.name)} has come")
            return None
        silences = {block: Silence(self.silence / 2) for block in range(self.most)}
        reported, since = set[str](), time.monotonic()
        while not self.is_superseded(round):
            for block in range(self.vital, blocks):
                before = self._holder(round, block, members)
                silent = silences[block].of((before, self.last_heartbeat(round, block, before))) > self.silence
                free = before in ("", _VACANT) or silent or self.left(round, block, before)
                if free and not self.is_superseded(round) and self._take(round, block, before):
                    return block, blocks, bool(before)
            _report_losses(self, Rendezvous(round, _NO_BLOCK, blocks), silences, reported)  # perhaps all are lost
            if time.monotonic() - since > _PATIENCE:
                print(f"other machines have all {blocks} blocks of ranks; this one waits until one of them is lost",
                      flush=True)
                since = math.inf
            time.sleep(_POLL)
        return None

    def _take(self, round: int, block: int, before: str) -> bool:
        key = f"{round}/holder/{block}"
        holder = self.store.get(key)
        return holder in (None, before) and self.store.put_if(key, self.name, holder) == self.name

    def _holder(self, round: int, block: int, members: list[str]) -> str:
        return self.store.get(f"{round}/holder/{block}") or (members[block] if block < len(members) else "")


def _heartbeat_of(name: str, heartbeat: str) -> str:
    return heartbeat if heartbeat.startswith(f"{name} ") else ""


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
    """Replace each machine that trains and is silent, or propose the next round; say once which others are silent."""
    signs, holders = membership.signs(rendezvous.number), membership.holders(rendezvous.number)
    members = {block: name for block, name in holders.items() if signs[block][0] != name}
    silent = {block: silences[block].of((name, _heartbeat_of(name, signs[block][1])))
              for block, name in members.items() if block != rendezvous.block}
    samplers = [block for block in members if block >= membership.vital and silent.get(block, 0) <= membership.silence]
    for block, seconds in silent.items():
        name, first, successor = holders[block], block * membership.local, membership.successor(block)
        if name in reported or seconds <= membership.silence:
            continue
        what = (f"machine {host_of(name)} (ranks {first} to {first + membership.local - 1}) has given no sign "
                f"of life for {membership.silence:g} s")
        if block < membership.vital and successor in samplers and len(samplers) > 1 and \
                seconds <= 2 * membership.silence:
            if successor == rendezvous.block:
                membership.take_over(rendezvous.number, block, name, rendezvous.block)
            continue
        if block < membership.vital:
            membership.propose(rendezvous.number, what, lost=block)
        elif rendezvous.block == 0:
            print(f"{what}; the others sample on, and another may take its place", flush=True)
        reported.add(name)
