"""Faults to order: what `faults:` in the run file asks for happens in this worker, once in a run.

Ways to break a process that no signal has; each says what it is, and what it is not.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.config.run import Fault, Phase, Run
from distflow.errors import DistflowError
from distflow.recovery.out_of_memory import limit
from distflow.telemetry.events import record
from distflow.telemetry.processes import end_at_once, family, parent

if TYPE_CHECKING:
    from distflow.recovery.snapshots import Snapshots  # loads torch, and `distflow inject` answers at once

ROOM = 64 << 10
"""Bytes up to which a file can grow on a disk that is `fill`ed: lines still fit, checkpoints do not."""
_SPARE, _PIECE = 64 << 20, 16 << 20


class NoLimit(DistflowError):
    """Nothing protects the rest of the machine, or of the run."""


def fill(process: int, room: int = ROOM) -> None:
    """From now on no file of a process can grow beyond `room` bytes, as on a disk that is all but full. It is no disk
    that does that but RLIMIT_FSIZE: the error is EFBIG in place of ENOSPC, and growing shared memory fails too."""
    _, most = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (room, most))


def free(process: int) -> None:
    """Files can grow again."""
    fill(process, resource.prlimit(process, resource.RLIMIT_FSIZE)[1])


def fill_for(seconds: float) -> None:
    """`fill` this process for so long."""
    fill(os.getpid())
    timer = threading.Timer(seconds, free, (os.getpid(),))
    timer.daemon = True
    timer.start()


def exhaust_memory() -> None:
    """Take memory until there is none to be had, by RLIMIT_AS. The kernel's own end of a process that takes too much
    is a SIGKILL.

    Raises:
        MemoryError: always.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _SPARE, most))
    taken = []
    while True:
        taken.append(bytearray(_PIECE))


def take_memory() -> None:
    """Take memory, really, until the kernel ends this process. Does not return.

    Raises:
        NoLimit: no control group bounds what this process can take, so that it would be the memory of all others too.
    """
    if limit() is None:
        raise NoLimit("the fault `oom` takes memory until the kernel ends the worker, which would be all that the "
                      "machine has: start the run in a control group with a limit (systemd-run -p MemoryMax=8G, or a "
                      "container with one), or take  kind: memory")
    taken = []
    while True:
        taken.append(b"\1" * _PIECE)


def lose_machine() -> None:
    """End torchrun here and all that it has started, at once, as when the power of this machine fails. Does not return.

    Its last processes are this one and its seat.
    """
    seat = os.getppid()
    end_at_once(each for each in family(parent(seat)) if each not in (seat, os.getpid()))
    os.kill(seat, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def cut() -> int:
    """Shut down all TCP connections of this process but those to the board, once; new ones can be made. Those to other
    ranks of its group are among them. Returns how many."""
    board, found = int(os.environ.get("MASTER_PORT", 0)), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is connected to nobody
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as line:
                    if line.family in (socket.AF_INET, socket.AF_INET6) and line.getpeername()[1] != board:
                        line.shutdown(socket.SHUT_RDWR)
                        found += 1
    return found


class Injected(RuntimeError):
    """An exception that was asked for."""


class FaultInjector:
    """A worker's view of the faults; called at the beginning of each phase.

    Args:
        group: of this rank.
        ranks: of the group.
        folder: of the run, which knows what has happened before this worker lived.
        apart: whether machines start apart, so that one can be lost.

    Raises:
        NoLimit: a machine is to be lost that is all of the run.
    """

    def __init__(self, run: Run, group: str, rank: int, ranks: range, folder: Path, snapshots: Snapshots,
                 apart: bool = False):
        if not apart and any(fault.kind == "machine" for fault in run.faults):
            raise NoLimit("the fault `machine` ends all processes that a torchrun has started, which would be "
                          "this run: start the machines apart (--board and --machines), or take  kind: kill")
        self.run, self.group, self.rank, self.ranks = run, group, rank, ranks
        self.folder, self.snapshots = folder / "faults", snapshots
        self.began, self.seconds, self.last = time.monotonic(), 0.0, 0
        self.due: Exception | None = None

    def __call__(self, phase: Phase, step: int) -> None:
        if self.due:
            raise self.due
        new = step != self.last
        if new:
            now = time.monotonic()
            self.began, self.seconds, self.last = now, now - self.began if self.last else 0.0, step
        for number, fault, draw in self._of(step):
            if fault.phase is None and new:
                delay = draw.random() * self.seconds
                timer = threading.Timer(delay, self._break_later, (number, fault, step))
                timer.daemon = True
                timer.start()
            elif fault.phase == phase:
                self._break(number, fault, step)

    def _of(self, step: int) -> Iterator[tuple[int, Fault, random.Random]]:
        """The faults of a step on this rank."""
        for number, fault in enumerate(self.run.faults):
            draw = random.Random(f"{self.run.seed} {number} {step}")
            chance, rank = draw.random(), draw.choice(self.ranks)
            hits = fault.step == step if fault.share is None else step > 1 and chance < fault.share
            rank = rank if fault.rank is None else fault.rank
            if hits and rank == self.rank and fault.group == self.group:
                yield number, fault, draw

    def _break_later(self, number: int, fault: Fault, step: int) -> None:
        try:
            self._break(number, fault, step)
        except (Injected, MemoryError, NoLimit) as error:
            self.due = error  # of the worker, not of this thread

    def _break(self, number: int, fault: Fault, step: int) -> None:
        self.folder.mkdir(exist_ok=True)
        try:
            (self.folder / f"{number}-step-{step}").touch(exist_ok=False)
        except FileExistsError:
            return
        record("fault injected", what=fault.kind, fault=number, at_step=step)
        if fault.kind == "raise":
            raise Injected(f"fault {number} of the run file was to be raised in step {step}")
        if fault.kind == "corrupt":
            self.snapshots.corrupt()
        elif fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "cut":
            record("connections cut", count=cut())
        elif fault.kind == "fill":
            fill_for(fault.seconds)
        elif fault.kind == "memory":
            exhaust_memory()
        elif fault.kind == "oom":
            take_memory()
        elif fault.kind == "machine":
            lose_machine()
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
