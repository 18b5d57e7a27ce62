"""Machines that start apart, and come and go: which of a run's ranks each has, until all begin anew.

Each machine's torchrun knows of no other. They meet on a board that somebody keeps (`distflow board`), in eras. An era
begins when enough machines have come; each then has a block of ranks, those that train first. A machine that only
samples may be lost, and another may take its block, while all others go on. When one that trains is lost, the machines
that are left begin the next era: those that sampled fill its place, and the run goes on from the newest state that is
whole. No process decides: whoever sees a loss proposes an era, and the board takes the first proposal.

    on the board
    local, run             what all machines must agree on, as the first one said
    era                    the number of the present one
    N/began                JSON: why it began, or that there is nothing more to do, and who is expected in it
    N/came, N/name/K       how many machines have come to it, and each of them
    N/members              JSON: those that it began with, by block
    N/holder/B             who has taken block B over since; N/beat/B, N/left/B: its signs of life, and that it has left
    N/keeper/R             where rank R's seat takes copies of another machine's state, or why not (`keeper.py`)

A machine's watchman: a process that gives the signs of life of its machine, and misses those of others.

It is a process of its own, since a seat may be busy for a while, and has no threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch.distributed as dist

from distflow.errors import DistflowError, InvalidInput
from distflow.recovery.worker_process import WorkerContext, end_beside, start_beside


class MachineHeartbeat:
    """Of one era. It ends with the process that has set it out, at the latest."""

    def __init__(self, machines: Membership, era: Rendezvous):
        self.process = start_beside(partial(_watch, machines, era, os.getpid()))

    def end(self) -> None:
        end_beside(self.process)


def _watch(machines: Membership, era: Rendezvous, seat: int) -> None:
    with contextlib.suppress(dist.DistError):  # without the board nothing can be said; the seats find that out too
        _listen(replace(machines, store=machines.store.clone()), era, os.pidfd_open(seat))


def _listen(machines: Membership, era: Rendezvous, seat: int) -> None:
    """Until this process's seat ends, whose descriptor this is, or the machine's part of the era."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ended = select.poll()
    ended.register(seat, select.POLLIN)
    silences = {block: Silence(machines.silence) for block in range(era.blocks) if block != era.block}
    count, told = 0, set()
    while not ended.poll(BEAT * 1000) and not machines.begun_anew(era.number) \
            and machines.holds(era.number, era.block):
        machines.beat(era.number, era.block, count := count + 1)
        for block, name in machines.holders(era.number).items():
            if block == era.block or not silences[block].of(machines.heard(era.number, block)) \
                    or name in told or machines.left(era.number, block, name):
                continue
            told.add(name)
            first = block * machines.local
            what = (f"machine {host_of(name)} (ranks {first} to {first + machines.local - 1}) has given no sign "
                    f"of life for {machines.silence:g} s")
            if block < machines.vital:
                machines.propose(era.number, what, lost=block)
            elif era.block == 0:
                print(f"{what}; the others sample on, and another may take its place", flush=True)


MACHINES = "machines"
"""The prefix of all this on the board."""
BEAT, _LOOK = 1.0, 0.1
"""Seconds between two signs of life, and between two looks at the board."""
_PATIENCE = 5.0
"""Seconds after which one that waits for others says so."""


class MembershipChanged(Exception):
    """All machines begin the next era; what this process did in the present one is void."""


class ElasticMember(Protocol):
    """What a seat knows of all this. `replaces`: its machine has another's place. `berth`: with memory that outlives an
    era."""

    replaces: bool
    berth: WorkerContext

    def look(self) -> None:
        """Raises BegunAnew: all machines begin a later era."""

    def reprieve(self) -> None:
        """Wait until it is known whether a failure is due to the loss of a machine; raises BegunAnew if so."""


@dataclass(frozen=True)
class Rendezvous:
    """A machine's part of an era: its block of ranks, of `blocks`.

    replaces: the block was another machine's before. why: the era began; empty for the first one. silent: for how many
    seconds a machine had given no sign of life then.
    """

    number: int
    block: int
    blocks: int
    replaces: bool = False
    why: str = ""
    silent: float = 0.0


@dataclass
class Membership:
    """One machine's view.

    Args:
        store: the board.
        me: names this machine's torchrun, and no other.
        local: ranks of each machine.
        least, most: machines with which the run may go on, and those that it has a place for.
        vital: blocks whose machines train, from the first on; without one of them nothing can go on.
        grows: whether the ranks are those of the machines that are there (mode sync); else they are those of `most`,
            and some that sample may be missing.
        silence: seconds without a sign of life after which a machine counts as lost.
        losses: of machines that train, after which the run ends when there is another.
    """

    store: dist.Store
    me: str
    local: int
    least: int
    most: int
    vital: int
    grows: bool
    silence: float
    losses: int

    def agree(self, run: str) -> None:
        """Make sure that the board is this run's.

        Raises:
            InvalidInput: it is another's, or its machines have other numbers of ranks.
        """
        for what, mine, wrong in (
            ("run", run, "the board is of another run: it has digest {}, here it is {}. The DAG, the run file or "
             "--machines differ; or each run needs a board of its own:  distflow board --port …"),
            ("local", str(self.local), "each machine must start as many ranks as the others: they have {}, this one "
             "{} (torchrun's --nproc-per-node)")):
            theirs = self.store.compare_set(what, "", mine).decode()
            if theirs != mine:
                raise InvalidInput(wrong.format(theirs, mine))

    def join(self) -> Rendezvous | None:
        """This machine's part of the present era, or of a later one: waits for a place. None if the run is over.

        Raises:
            DistflowError: the run has ended by a failure.
        """
        while True:
            number = self._newest()
            began = self._began(number)
            if "end" in began:
                if began["end"]:
                    raise DistflowError(began["end"])
                return None
            members = self._gathered(number, began.get("expected", []))
            if members is None:
                continue
            found = self._place(number, members)
            if found is not None:
                return Rendezvous(number, *found, began.get("why", ""), began.get("silent", 0.0))

    def propose(self, era: int, why: str, lost: int | None = None) -> None:
        """The next era, for all but the machine of block `lost`, and for this one."""
        expected = [name for block, name in self.holders(era).items()
                    if block != lost and not self.left(era, block, name)]
        expected += [self.me] if self.me not in expected else []
        losses = self._began(era).get("losses", 0) + (lost is not None)
        if losses > self.losses:
            self.end(era, f"{why}. That is machine {losses} that is lost, and robust.restarts is {self.losses}")
            return
        silent = 0.0 if lost is None else self.silence
        self._next(era, {"why": why, "silent": silent, "expected": expected, "losses": losses})

    def end(self, era: int, failure: str = "") -> None:
        """There is nothing more to do for any machine: because of a failure, or because all is done."""
        self._next(era, {"end": failure})

    def leave(self, era: int, block: int) -> None:
        """This machine ends by itself, and is not to be missed."""
        self.store.set(f"{era}/left/{block}", self.me)

    def begun_anew(self, era: int) -> bool:
        """Whether there is a later era."""
        return self.store.check([f"{era + 1}/began"])

    def holders(self, era: int) -> dict[int, str]:
        """The machine of each block that has, or had, one."""
        members = json.loads(self.store.get(f"{era}/members"))
        found = {block: self._holder(era, block, members) for block in range(self.most)}
        return {block: name for block, name in found.items() if name}

    def holds(self, era: int, block: int) -> bool:
        """Whether a block is this machine's still: while it gave no sign of life, another may have taken it."""
        key = f"{era}/holder/{block}"
        return not self.store.check([key]) or self.store.get(key).decode() == self.me

    def left(self, era: int, block: int, name: str) -> bool:
        """Whether this machine, which had the block, has ended by itself."""
        key = f"{era}/left/{block}"
        return self.store.check([key]) and self.store.get(key).decode() == name

    def beat(self, era: int, block: int, count: int) -> None:
        """A sign of life."""
        self.store.set(f"{era}/beat/{block}", f"{self.me} {count}")

    def heard(self, era: int, block: int) -> str:
        """The newest sign of life of a block's machine; empty if there was none."""
        key = f"{era}/beat/{block}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _next(self, era: int, began: dict) -> None:
        self.store.compare_set(f"{era + 1}/began", "", json.dumps(began))
        self._newest()

    def _newest(self) -> int:
        """The present era; `era` says so too, except between the two lines of whoever proposes one."""
        number = self.store.add("era", 0)
        while self.begun_anew(number):
            self.store.compare_set("era", str(number), str(number + 1))
            number += 1
        return number

    def _began(self, era: int) -> dict:
        return json.loads(self.store.get(f"{era}/began")) if era else {}

    def _gathered(self, era: int, expected: list[str]) -> list[str] | None:
        """The machines with which an era begins, once it does; None if a later one has begun first."""
        if not self.store.check([f"{era}/members"]):
            mine = self.store.add(f"{era}/came", 1)
            self.store.set(f"{era}/name/{mine}", self.me)
        seen, since, told = 0, time.monotonic(), 0
        while not self.store.check([f"{era}/members"]):
            if self.begun_anew(era):
                return None
            if seen != told and time.monotonic() - since > _PATIENCE:
                told, why = seen, self._began(era).get("why", "")
                print(f"{f'{why}; ' if why else ''}waiting for machines: {seen} have come, and {self.least} are enough",
                      flush=True)
            if (came := self.store.add(f"{era}/came", 0)) != seen:
                seen, since = came, time.monotonic()
            names = [self.store.get(f"{era}/name/{each + 1}").decode() for each in range(seen)]
            quiet = time.monotonic() - since > self.silence
            if len(names) >= self.least and (len(names) >= self.most or quiet
                                             or expected and set(expected) <= set(names)):
                ordered = sorted(names, key=lambda name: (name not in expected, expected.index(name)
                                                          if name in expected else names.index(name)))
                self.store.compare_set(f"{era}/members", "", json.dumps(ordered[: self.most]))
            time.sleep(_LOOK)
        return json.loads(self.store.get(f"{era}/members"))

    def _place(self, era: int, members: list[str]) -> tuple[int, int, bool] | None:
        """This machine's block, how many there are, and whether it was another's; waits for one to become free. None if
        a later era has begun."""
        blocks = len(members) if self.grows else self.most
        if self.me in members and self.holds(era, members.index(self.me)):
            return members.index(self.me), blocks, False
        if self.grows and len(members) < self.most:
            self.propose(era, f"machine {host_of(self.me)} has come")
            return None
        silent = {block: Silence(self.silence) for block in range(self.most)}
        while not self.begun_anew(era):
            for block in range(self.vital, blocks):
                before = self._holder(era, block, members)
                free = not before or self.left(era, block, before) or silent[block].of(self.heard(era, block))
                if free and not self.begun_anew(era) and self._take(era, block, before):
                    return block, blocks, bool(before)
            time.sleep(_LOOK)
        return None

    def _take(self, era: int, block: int, before: str) -> bool:
        key = f"{era}/holder/{block}"
        if not self.store.check([key]):
            before = ""
        self.beat(era, block, 0)  # first, so that whoever finds this machine there finds it alive
        return self.store.compare_set(key, before, self.me).decode() == self.me

    def _holder(self, era: int, block: int, members: list[str]) -> str:
        key = f"{era}/holder/{block}"
        if self.store.check([key]):
            return self.store.get(key).decode()
        return members[block] if block < len(members) else ""


def host_of(name: str) -> str:
    """Of a machine's torchrun, as `observe.folder.agent` names it."""
    return name.split()[1]


class Silence:
    """How long nothing new was heard of a machine, by this process's clock. While this process stood still itself,
    nobody was silent."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic):
        self.limit, self.clock = limit, clock
        self.last, self.since, self.asked = "", clock(), clock()

    def of(self, heard: str) -> bool:
        """Whether a machine of which `heard` is the newest sign of life is lost."""
        now = self.clock()
        if heard != self.last or now - self.asked > self.limit / 2:
            self.last, self.since = heard, now
        self.asked = now
        return now - self.since > self.limit
