"""A machine's watchman: a process that gives the signs of life of its machine, and misses those of others.

It is a process of its own, since a seat may be busy for a while, and has no threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from distflow.robust.berth import end_beside, start_beside
from distflow.robust.machines import BEAT, Era, Machines, Silence, host_of


class Watchman:
    """Of one era. It ends with the process that has set it out, at the latest."""

    def __init__(self, machines: Machines, era: Era):
        self.process = start_beside(partial(_watch, machines, era, os.getpid()))

    def end(self) -> None:
        end_beside(self.process)


def _watch(machines: Machines, era: Era, seat: int) -> None:
    with contextlib.suppress(dist.DistError):  # without the board nothing can be said; the seats find that out too
        _listen(replace(machines, store=machines.store.clone()), era, os.pidfd_open(seat))


def _listen(machines: Machines, era: Era, seat: int) -> None:
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
