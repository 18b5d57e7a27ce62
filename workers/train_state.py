"""Where a run stands: after each step in the seats' memory, now and then on disk; and going on from there."""

from __future__ import annotations

import contextlib
import datetime
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from distflow.config.run import Checkpoint
from distflow.errors import CheckpointError
from distflow.recovery.checkpoint import Checkpoints
from distflow.recovery.checkpoint_files import step_of, whole
from distflow.recovery.restore import FoundPiece, bring
from distflow.recovery.snapshots import Piece, Slot, Snapshots
from distflow.recovery.worker_process import WorkerContext
from distflow.telemetry.events import record
from distflow.telemetry.metrics import current
from workers.roles import RoleEngines


class PromptSource(Protocol):
    """What gives the steps their prompts."""

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...

    def settle(self, state: dict[str, int]) -> None: ...


class TrainState:
    """Every rank that trains has one and calls it alike. Copies are made, and written to disk, while the work goes on.

    Args:
        settings: of the checkpoints on disk.
        berth: with the memory for copies; None if none are to be made there.
        trained: the roles whose engines have state.
        limit: seconds that a rank waits for the others' parts of a checkpoint.
    """

    def __init__(self, folder: Path, settings: Checkpoint, berth: WorkerContext | None,
                 trained: Mapping[str, RoleEngines], source: PromptSource, limit: float):
        self.folder, self.every, self.trained, self.source = folder, settings.every, trained, source
        patience = datetime.timedelta(seconds=limit)
        group = dist.new_group(backend="gloo", timeout=patience) if settings.every else None  # for a thread of its own
        self.checkpoints = Checkpoints(folder, settings.keep, group)
        self.remembers, self.berth = berth is not None, berth or WorkerContext(snapshots=Snapshots(slots=1))
        self.copies, self.neighbour = self.berth.snapshots, self.berth.neighbour
        self.written: Slot | None = None
        """From which it is written to disk."""
        self.swaps = any(role.handover is not None and role.handover.swap for role in trained.values())
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[dict[str, Any]] | None = None
        self.before: deque[dict[str, int]] = deque([source.state_dict()] * 2, maxlen=2)
        """Of the source, after the last two steps; all ranks have the older one whole."""
        self.from_memory = False
        """Whether it went on from a copy in memory, which is older than what concludes its step."""

    def report(self) -> None:
        """Before the metrics of a step are gathered."""
        if self.neighbour is not None:
            self.neighbour.report()

    def remember(self, step: int) -> None:
        """Begin to copy the state after `step` steps into the seat's memory. The next metrics say how long the work
        waited for it."""
        if self.writing is not None and self.writing.done():
            self.finish()
        if not self.every:
            self.source.settle(self.before[0])
            self.before.append(self.source.state_dict())
        if self.remembers:
            goes_on = self.neighbour is not None and self.neighbour.settle(step, self.copies)
            self._copy(step)
            if goes_on:
                self.neighbour.send(self.copies)

    def before_update(self) -> None:
        """The weights are about to change: what is being copied must be whole."""
        with _blocked("snapshot/waited_seconds"):
            self.copies.wait()

    def save(self, step: int) -> None:
        """Begin to write it to disk. One that is still being written is waited for."""
        with _blocked("checkpoint/seconds"):
            self.finish()
            if self.copies.newest is None or self.copies.newest.piece.step != step:
                self._copy(step)
            self.written = self.copies.newest
            self.copies.held.append(self.written)
            self.writing = self.pool.submit(self._write, step, self.written, self._state(), self._progress())

    def finish(self) -> None:
        """Wait until what was begun is on disk. A write that fails, as on a full disk, costs no more than itself: the
        older checkpoints are whole, and the next is tried."""
        if self.writing is None:
            return
        job, self.writing = self.writing, None
        try:
            self.source.settle(job.result()["source"])
        except CheckpointError as error:
            record("checkpoint failed", why=str(error))
            if dist.get_rank() == 0:
                print(f"warning: {error}\nThe run goes on; the next checkpoint is tried when it is due.",
                      file=sys.stderr, flush=True)
        self.copies.held.remove(self.written)

    def restore(self) -> int:
        """Go on from the newest step that all ranks have whole, in memory or on disk; returns how many steps are done,
        0 if no step was ever kept.

        Raises:
            CheckpointError: what is there is of something else, damaged, or cannot be read.
            Disagreement: the ranks do not see the same files.
        """
        on_disk = whole(self.folder)
        checkpoint, remembered = None, self._remembered(on_disk[-1] if on_disk else None)
        if remembered is None:
            checkpoint = self.checkpoints.newest()
            if checkpoint is None:
                return 0
            remembered = self._remembered(checkpoint)  # it may be newer than this one, if others were passed over
        self.from_memory = remembered is not None
        if remembered is not None:
            state = self._state()
            progress = self.copies.load(remembered.slot, state)
            for name, role in self.trained.items():
                role.engine.load_state_dict(state[name])
            if self.neighbour is not None:
                self.neighbour.begin(self.copies)
            record("state restored", of_step=progress["step"], source=remembered.source, holder=remembered.holder)
        else:
            progress = self.checkpoints.load({name: role.engine for name, role in self.trained.items()}, checkpoint)
            record("state restored", of_step=progress["step"], source="disk")
        self.source.load_state_dict(progress["source"])
        for name, version in progress.get("versions", {}).items():
            self.trained[name].engine.version = version
        self.before.extend([progress["source"]] * 2)
        return progress["step"]

    def _remembered(self, checkpoint: Path | None) -> FoundPiece | None:
        """This rank's piece of the newest state in memory that is not older than a checkpoint. Collective."""
        return bring(self.copies, self.berth.kept, step_of(checkpoint) if checkpoint else -1)

    def _copy(self, step: int) -> None:
        with _blocked("snapshot/seconds"):
            piece = Piece(self.berth.era, self.berth.life.number, step, dist.get_rank(), dist.get_world_size())
            copied = self.copies.begin(piece, self._state(), {"step": step, **self._progress()})
            if self.swaps:  # what is copied would move
                self.copies.wait()
        current().add("snapshot/bytes", copied)

    def _write(self, step: int, slot: Slot, state: dict[str, Any], progress: dict[str, Any]) -> dict[str, Any]:
        """In a thread of its own, from the copy. `state`: of which it is one; only its form is looked at."""
        began = time.monotonic()
        self.copies.wait()
        self.checkpoints.save(step, self.copies.view(slot, state), progress)
        record("checkpoint written", of_step=step, seconds=round(time.monotonic() - began, 3))
        return progress

    def _state(self) -> dict[str, Any]:
        return {name: role.engine.state_dict() for name, role in self.trained.items()}

    def _progress(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(),
                "versions": {name: role.version for name, role in self.trained.items()}}


@contextlib.contextmanager
def _blocked(metric: str) -> Iterator[None]:
    """Add to a metric how long the work stands still."""
    began = time.perf_counter()
    yield
    current().maximum(metric, time.perf_counter() - began)
