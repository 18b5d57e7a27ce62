"""Faults to order: what `faults:` in the run file asks for happens in this worker, once in a run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from distflow.observe.events import record
from distflow.robust import breaking
from distflow.robust.snapshots import Snapshots
from distflow.schema.robust import Fault, Phase
from distflow.schema.run import Run


class Injected(RuntimeError):
    """An exception that was asked for."""


class Faults:
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
            raise breaking.NoLimit("the fault `machine` ends all processes that a torchrun has started, which would be "
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
        except (Injected, MemoryError, breaking.NoLimit) as error:
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
            record("connections cut", count=breaking.cut())
        elif fault.kind == "fill":
            breaking.fill_for(fault.seconds)
        elif fault.kind == "memory":
            breaking.exhaust_memory()
        elif fault.kind == "oom":
            breaking.take_memory()
        elif fault.kind == "machine":
            breaking.lose_machine()
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
