"""Where a run stands: after each step in the seats' memory, now and then on disk; and going on from there."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from distflow.data.exchange import gather
from distflow.observe.metrics import current
from distflow.robust.checkpoint import Checkpoints
from distflow.robust.snapshots import Snapshots
from distflow.robust.whole import step_of, whole
from distflow.schema.run import Checkpoint
from workers.roles import Role


class Source(Protocol):
    """What gives the steps their prompts."""

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...

    def settle(self, state: dict[str, int]) -> None: ...


class Standing:
    """Every rank that trains has one and calls it alike.

    Args:
        settings: of the checkpoints on disk.
        snapshots: this rank's; None if no copies are to be made in memory.
        trained: the roles whose engines have state.
    """

    def __init__(self, folder: Path, settings: Checkpoint, snapshots: Snapshots | None,
                 trained: Mapping[str, Role], source: Source):
        self.folder, self.checkpoints, self.snapshots = folder, Checkpoints(folder, settings.keep), snapshots
        self.on_disk, self.trained, self.source = settings.every > 0, trained, source
        self.before = source.state_dict()
        """Of the source, after the step before: all ranks remember that one."""
        self.from_memory = False
        """Whether it went on from a copy in memory, which is older than what concludes its step."""

    def remember(self, step: int) -> None:
        """Copy the state after `step` steps into the seat's memory. The next metrics say how long it took."""
        if not self.on_disk:
            self.source.settle(self.before)
            self.before = self.source.state_dict()
        if self.snapshots is not None:
            began = time.perf_counter()
            state = {name: role.engine.state_dict() for name, role in self.trained.items()}
            copied = self.snapshots.save(step, state, {"step": step, **self._progress()})
            current().maximum("snapshot/seconds", time.perf_counter() - began)
            current().add("snapshot/bytes", copied)

    def save(self, step: int) -> None:
        """Write it to disk."""
        progress = self._progress()
        self.checkpoints.save(step, {name: role.engine for name, role in self.trained.items()}, progress)
        self.source.settle(progress["source"])

    def restore(self) -> int:
        """Go on from the newest step that all ranks have whole, in memory or on disk; returns how many steps are done,
        0 if there is nothing to go on from.

        Raises:
            CheckpointError: what is there is of something else.
            Disagreement: the ranks do not see the same files.
        """
        found = whole(self.folder)
        on_disk = step_of(found[-1]) if found else -1
        remembered = self._remembered()
        if not found and remembered < 0:
            return 0
        self.from_memory = remembered >= on_disk
        if self.from_memory:
            state = {name: role.engine.state_dict() for name, role in self.trained.items()}
            progress = self.snapshots.load(remembered, state)
            for name, role in self.trained.items():
                role.engine.load_state_dict(state[name])
        else:
            progress = self.checkpoints.load({name: role.engine for name, role in self.trained.items()})
        self.source.load_state_dict(progress["source"])
        for name, version in progress.get("versions", {}).items():
            self.trained[name].engine.version = version
        return progress["step"]

    def _progress(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(),
                "versions": {name: role.version for name, role in self.trained.items()}}

    def _remembered(self) -> int:
        """The newest step of which every rank has its copy; -1 if there is none."""
        mine = self.snapshots.steps() if self.snapshots is not None else []
        steps = [set(json.loads(each)) for each in gather(json.dumps(mine).encode())]
        return max(set.intersection(*steps), default=-1)
