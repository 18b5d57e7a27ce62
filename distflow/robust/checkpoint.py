"""Checkpoints by torch.distributed.checkpoint, whole or not there: a folder gets its name when all of it is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from distflow.schema.errors import CheckpointError

_PROGRESS = "progress.json"


class Stateful(Protocol):
    """What can be checkpointed: torch's convention."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpoints:
    """The checkpoints of one run, under `folder`; `keep` of the newest stay."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def save(self, step: int, sharded: dict[str, Stateful], progress: dict[str, Any]) -> None:
        """Write the state after `step` steps. Collective.

        Args:
            sharded: engines by role; each rank writes its shards.
            progress: what is alike on all ranks, as JSON: dataloader position and the like.
        """
        final = self.folder / f"step-{step:08d}"
        partial = final.with_suffix(".partial")
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        dcp.save({name: engine.state_dict() for name, engine in sharded.items()}, checkpoint_id=partial)
        if dist.get_rank() == 0:
            (partial / _PROGRESS).write_text(json.dumps({"step": step, **progress}))
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in whole(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        dist.barrier()

    def load(self, sharded: dict[str, Stateful]) -> dict[str, Any]:
        """Load the newest whole checkpoint into the engines, for any number of ranks, and return its progress.

        Raises:
            CheckpointError: there is none.
        """
        found = whole(self.folder)
        if not found:
            raise CheckpointError(f"there is no whole checkpoint in {self.folder}")
        for name, engine in sharded.items():
            state = {name: engine.state_dict()}
            dcp.load(state, checkpoint_id=found[-1])
            engine.load_state_dict(state[name])
        return json.loads((found[-1] / _PROGRESS).read_text())


def whole(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest first. A kill while saving leaves only a `.partial` folder."""
    return sorted(path for path in folder.glob("step-*")
                  if not path.suffix and (path / ".metadata").is_file() and (path / _PROGRESS).is_file())
