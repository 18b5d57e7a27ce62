"""Persists training state: a snapshot in memory after each step, a checkpoint on disk every N steps; restores the
newest consistent one.

A worker that is killed while it saves leaves a folder `step-N.GENERATION.partial`, which nothing loads and the next
save removes; its group goes on from the snapshots in memory, else from the newest complete checkpoint.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distflow.config.run import Checkpoint
from distflow.data.exchange import gather_values
from distflow.errors import CheckpointError
from distflow.recovery.checkpoint import Checkpoints
from distflow.recovery.checkpoint_files import complete_checkpoints, step_of
from distflow.recovery.object_store import Uploads
from distflow.recovery.restore import FetchedShard, fetch_shard
from distflow.recovery.snapshots import Slot, Snapshots, StateShard
from distflow.recovery.worker_process import WorkerContext
from distflow.telemetry import events, timeline
from distflow.telemetry.events import record
from distflow.telemetry.metrics import current
from workers.dock_source import Source
from workers.engines.role_engines import RoleEngines


class TrainState:
    """State of the engines and the prompts. Collective over the trainer. Snapshots are copied, and checkpoints written,
    while the work goes on. Without a `worker_context` no snapshots outlive this worker."""

    def __init__(self, folder: Path, settings: Checkpoint, worker_context: WorkerContext | None,
                 roles: Mapping[str, RoleEngines], source: Source, limit: float,
                 frozen: Collection[str] = ()):
        """`roles`: those whose weights change; `frozen`: roles of the run whose weights do not."""
        self.frozen = frozen
        self.folder, self.every, self.roles, self.source = folder, settings.every, roles, source
        timeout = datetime.timedelta(seconds=limit)
        group = dist.new_group(backend="gloo", timeout=timeout) if settings.every else None  # for a thread of its own
        assert not isinstance(group, int), "all ranks are in it"
        self.checkpoints = Checkpoints(folder, settings.keep, group)
        self.uploads = Uploads(folder.parent, settings.to) if settings.to and dist.get_rank() == 0 else None
        if self.uploads:
            self.checkpoints.spared = lambda uploads=self.uploads: uploads.current
        self.to, self.in_memory = settings.to, worker_context is not None
        self.worker_context = worker_context or WorkerContext(snapshots=Snapshots(slots=1))
        self.snapshots, self.replica = self.worker_context.snapshots, self.worker_context.peer_replica
        self.swaps = any(role.engine_swap is not None and role.engine_swap.swap for role in roles.values())
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.writing: tuple[Future[dict[str, Any]], Slot] | None = None
        self.source_states = dict.fromkeys((-1, 0), source.state_dict())
        """States of the source by steps done; of two steps before, the snapshot is complete on all ranks."""
        self.from_memory = False  # restored from memory: the last step may lack validation and checkpoint

    def report(self) -> None:
        """Report the replication of snapshots, before the metrics of a step are gathered."""
        if self.replica is not None:
            self.replica.report()

    def snapshot(self, step: int) -> None:
        """Begin to copy the state after `step` steps into the supervisor's memory."""
        if self.writing and self.writing[0].done():
            self.finish()
        sends = self.in_memory and self.replica is not None and self.replica.release(step, self.snapshots)
        if not self.every:
            self._release_rows(step)
        if self.in_memory:
            replica = self.replica if sends else None
            self._copy(step)
            if replica:
                replica.send(self.snapshots)

    def _release_rows(self, step: int) -> None:
        """Release the rows of steps to which no worker goes back, on another machine either."""
        arrived = self.replica.arrived_from_all if self.replica else -1
        kept = step - 2 if arrived < 0 else min(step - 2, arrived)
        self.source_states = {each: state for each, state in self.source_states.items() if each >= kept}
        if kept in self.source_states:
            self.source.release_before(self.source_states[kept])
        self.source_states[step] = self.source.state_dict()

    def before_update(self) -> None:
        """Wait until the snapshot is complete: the weights are about to change."""
        with _blocked("snapshot/waited_seconds"):
            self.snapshots.wait()

    def save(self, step: int) -> None:
        """Begin to write a checkpoint, after the one that is still being written."""
        with _blocked("checkpoint/seconds"):
            self.finish()
            slot = self.snapshots.newest
            if slot is None or slot.shard is None or slot.shard.step != step:
                slot = self._copy(step)
            self.snapshots.held.append(slot)
            self.writing = self.pool.submit(self._write, step, slot, self._state(), self._progress()), slot

    def finish(self) -> None:
        """Wait until the checkpoint is on disk. A write that fails loses only this one: the older ones are complete."""
        if self.writing is None:
            return
        (job, slot), self.writing = self.writing, None
        try:
            self.source.release_before(job.result()["source"])
        except CheckpointError as error:
            record("checkpoint_failed", why=str(error))
            if dist.get_rank() == 0:
                print(f"warning: {error}\nThe run goes on; the next checkpoint is tried when it is due.",
                      file=sys.stderr, flush=True)
        self.snapshots.held.remove(slot)

    def upload(self) -> None:
        """Begin to copy the newest checkpoint to the object store, if the run has one and this is its first rank."""
        if self.uploads:
            self.uploads.begin(self.checkpoints.generation)

    def settle_uploads(self) -> None:
        """Wait for the last upload. Collective; no rank waits long in one collective, whose time is limited."""
        if self.uploads and not self.uploads.job:  # this worker has restarted after the last checkpoint
            self.upload()
        while self.to and not all(gather_values(not self.uploads or self.uploads.over(1.0))):
            continue

    def stop_uploads(self) -> None:
        """End the upload in progress, unless it ends in a few seconds: this worker has no more time."""
        if self.uploads:
            self.uploads.stop()

    def restore(self) -> int:
        """Load the newest state that is complete on all ranks, in memory or on disk. Return how many steps are done, 0
        if there is no state. Raises CheckpointError; Disagreement if the ranks do not see the same files."""
        on_disk = complete_checkpoints(self.folder)
        checkpoint, found = None, self._newest_in_memory(on_disk[-1] if on_disk else None)
        if found is None:
            checkpoint = self.checkpoints.newest()
            if checkpoint is None:
                return 0
            found = self._newest_in_memory(checkpoint)  # newer than this one, if damaged checkpoints were passed over
        self.from_memory = found is not None
        if found is not None:
            state = self._state()
            progress = self.snapshots.load(found.slot, state)
            for name, own in state.items():
                self.roles[name].engine.load_state_dict(own)
            if self.replica is not None:
                self.replica.begin(self.snapshots)
            record("state_restored", of_step=progress["step"], source=found.source, holder=found.holder)
        else:
            progress = self.load(checkpoint)
            record("state_restored", of_step=progress["step"], source="disk")
        events.current().step = progress["step"] + 1
        self.source.load_state_dict(progress["source"])
        for name, version in progress.get("versions", {}).items():
            if name in self.roles:
                self.roles[name].version = version
        self.source_states = dict.fromkeys((progress["step"] - 1, progress["step"]), progress["source"])
        return progress["step"]

    def load(self, checkpoint: Path | None) -> dict[str, Any]:
        """Load a checkpoint (default: the newest); return its progress. Collective; raises as `Checkpoints.load`."""
        return self.checkpoints.load({name: role.engine if role.has_engine else _AbsentEngine()
                                      for name, role in self.roles.items()}, checkpoint, self.frozen)

    def _newest_in_memory(self, checkpoint: Path | None) -> FetchedShard | None:
        return fetch_shard(self.snapshots, self.worker_context.replicas, step_of(checkpoint) if checkpoint else -1)

    def _copy(self, step: int) -> Slot:
        with _blocked("snapshot/seconds"):
            shard = StateShard(self.worker_context.round, self.worker_context.attempt.number, step, dist.get_rank(),
                               dist.get_world_size())
            copied = self.snapshots.begin(shard, self._state(), {"step": step, **self._progress()})
            if self.swaps:  # the tensors that are copied would move
                self.snapshots.wait()
        current().add("snapshot/bytes", copied)
        assert self.snapshots.newest is not None
        return self.snapshots.newest

    def _write(self, step: int, slot: Slot, state: dict[str, Any], progress: dict[str, Any]) -> dict[str, Any]:
        """Write a checkpoint from a snapshot of `state`, whose values are not read; in a thread of its own."""
        began = timeline.now()
        self.snapshots.wait()
        self.checkpoints.save(step, self.snapshots.view(slot, state), progress)
        timeline.current().add(timeline.CHECKPOINTS, "checkpoint", began, step)
        record("checkpoint_written", of_step=step, seconds=round((timeline.now() - began) / 1e6, 3))
        self.upload()
        return progress

    def _state(self) -> dict[str, Any]:
        """Return this rank's part of the state: of the roles of which it has a model."""
        return {name: role.engine.state_dict() for name, role in self.roles.items() if role.has_engine}

    def _progress(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(),
                "versions": {name: role.version for name, role in self.roles.items()}}


class _AbsentEngine:
    """Part of a role's state on a rank without a model of it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@contextlib.contextmanager
def _blocked(metric: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    current().maximum(metric, time.perf_counter() - began)
