"""Injects faults into this worker, each once in a run: what `faults:` in the run file asks for."""

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

import psutil

from distflow.config.memory_limit import limited_command, why_unbounded
from distflow.config.robust import Fault, Phase
from distflow.config.run import Run
from distflow.errors import DistflowError
from distflow.telemetry.events import record
from distflow.telemetry.processes import kill_tree, parent

if TYPE_CHECKING:
    from distflow.recovery.snapshots import Snapshots  # loads torch, and `distflow inject` answers at once

ROOM = 64 << 10  # bytes up to which a file can grow on a "full" disk: lines still fit, checkpoints do not
_SPARE, _BLOCK = 64 << 20, 16 << 20


class UnboundedFault(DistflowError):
    """Error: nothing would protect the rest of the machine, or of the run, from a fault."""


def limit_file_size(process: int, room: int = ROOM) -> None:
    """Let no file of a process grow beyond `room` bytes, as on a disk that is all but full. Done by RLIMIT_FSIZE: the
    error is EFBIG instead of ENOSPC, and growing shared memory fails too."""
    _, most = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (room, most))


def lift_file_size_limit(process: int) -> None:
    limit_file_size(process, resource.prlimit(process, resource.RLIMIT_FSIZE)[1])


def limit_file_size_for(seconds: float) -> None:
    limit_file_size(os.getpid())
    timer = threading.Timer(seconds, lift_file_size_limit, (os.getpid(),))
    timer.daemon = True
    timer.start()


def exhaust_memory() -> None:
    """Allocate memory up to RLIMIT_AS; unlike in `take_memory` the kernel kills nothing. Raises MemoryError."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _SPARE, most))
    taken = []
    while True:
        taken.append(bytearray(_BLOCK))


def take_memory() -> None:
    """Allocate memory until the kernel kills this process; does not return. Raises UnboundedFault: no control group
    bounds what it can take, as on a machine that others have filled since the run file was checked."""
    if why := why_unbounded():
        raise UnboundedFault(f"the fault `oom` takes memory until the kernel ends the worker; as {why}, that would be "
                             f"all that the machine has. Write  kind: memory  , or begin with a lower limit, as  "
                             f"{limited_command()}")
    taken = []
    while True:
        taken.append(b"\1" * _BLOCK)


def lose_machine() -> None:
    """Kill torchrun and all that it has started, as when power fails; this process and its supervisor last."""
    kill_tree(parent(os.getppid()), last=(os.getppid(), os.getpid()))


def cut_connections() -> int:
    """Shut down all TCP connections of this process but those to the store; return how many. New ones can be made."""
    store_port, found = int(os.environ.get("MASTER_PORT", 0)), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is connected to no peer
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as peer:
                    if peer.family in (socket.AF_INET, socket.AF_INET6) and peer.getpeername()[1] != store_port:
                        peer.shutdown(socket.SHUT_RDWR)
                        found += 1
    return found


class Injected(RuntimeError):
    """Exception of the fault `raise`."""


class FaultInjector:
    """Injects the run's faults into this worker; called at the beginning of each phase.

    Args:
        group, ranks: this rank's group, and the ranks of it.
        folder: of the run, where the faults of earlier workers are marked.
        elastic: whether machines come and go, so that one can be lost.

    Raises:
        UnboundedFault: a machine should be lost that is all of the run.
    """

    def __init__(self, run: Run, group: str, rank: int, ranks: range, folder: Path, snapshots: Snapshots,
                 elastic: bool = False):
        if not elastic and any(fault.kind == "machine" for fault in run.faults):
            raise UnboundedFault("the fault `machine` ends all processes that a torchrun has started, which would be "
                                 "this run: start the machines by themselves (--store and --machines), or take  "
                                 "kind: kill")
        self.run, self.group, self.rank, self.ranks = run, group, rank, ranks
        self.folder, self.snapshots = folder / "faults", snapshots
        self.began, self.seconds, self.last = time.monotonic(), 0.0, 0
        self.pending: Exception | None = None

    def __call__(self, phase: Phase, step: int) -> None:
        if self.pending:
            raise self.pending
        new = step != self.last
        if new:
            now = time.monotonic()
            self.began, self.seconds, self.last = now, now - self.began if self.last else 0.0, step
        for number, fault, moment in self._faults_at(step):
            if fault.phase is None and new:
                timer = threading.Timer(moment * self.seconds, self._inject_later, (number, fault, step))
                timer.daemon = True
                timer.start()
            elif fault.phase == phase:
                self._inject(number, fault, step)

    def _faults_at(self, step: int) -> Iterator[tuple[int, Fault, float]]:
        for number, fault in enumerate(self.run.faults):
            draw = random.Random(f"{self.run.seed} {number} {step}")
            moment, rank = draw.random(), draw.choice(self.ranks)  # the same on all ranks
            rank = rank if fault.rank is None else fault.rank
            if fault.step == step and rank == self.rank and fault.group == self.group:
                yield number, fault, moment

    def _inject_later(self, number: int, fault: Fault, step: int) -> None:
        try:
            self._inject(number, fault, step)
        except (Injected, MemoryError, UnboundedFault) as error:
            self.pending = error  # of the worker, not of this thread

    def _inject(self, number: int, fault: Fault, step: int) -> None:
        self.folder.mkdir(exist_ok=True)
        try:
            (self.folder / f"{number}-step-{step}").touch(exist_ok=False)
        except FileExistsError:
            return
        record("fault_injected", what=fault.kind, fault=number, at_step=step)
        if fault.kind == "raise":
            raise Injected(f"faults[{number}] of the run file was to be raised in step {step}")
        if fault.kind == "corrupt":
            self.snapshots.corrupt()
        elif fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "cut":
            record("connections_cut", count=cut_connections())
        elif fault.kind == "fill":
            limit_file_size_for(fault.seconds)
        elif fault.kind == "memory":
            exhaust_memory()
        elif fault.kind == "oom":
            take_memory()
        elif fault.kind == "machine":
            lose_machine()
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
