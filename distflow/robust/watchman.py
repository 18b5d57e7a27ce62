"""A machine's watchman: a process that gives the signs of life of its machine, and misses those of others.

It is a process of its own, since a seat may be busy for a while, and has no threads.
"""

from __future__ import annotations

import os
import select
import signal
import traceback
from dataclasses import replace

import torch.distributed as dist

from distflow.robust.machines import BEAT, Era, Machines, Silence, host_of


class Watchman:
    """Of one era. It ends with the process that has set it out, at the latest."""

    def __init__(self, machines: Machines, era: Era):
        master = os.getpid()
        self.process = os.fork()
        if not self.process:
            try:
                _watch(replace(machines, store=machines.store.clone()), era, os.pidfd_open(master))
            except dist.DistError:
                pass  # without the board nothing can be said; the seats find that out too
            except BaseException:  # noqa: BLE001 - or a sound machine would fall silent without a word
                traceback.print_exc()
            finally:
                os._exit(0)

    def end(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


def _watch(machines: Machines, era: Era, master: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ended = select.poll()
    ended.register(master, select.POLLIN)
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
