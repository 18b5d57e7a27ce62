"""Checkpoints by torch.distributed.checkpoint, whole or not there: a folder gets its name when all of it is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from distflow.data.exchange import gather
from distflow.robust.whole import FILES, PROGRESS, read_progress, whole
from distflow.schema.errors import CheckpointError, Disagreement, DistflowError


class Stateful(Protocol):
    """What can be checkpointed: torch's convention."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpoints:
    """The checkpoints of one run, under `folder`; `keep` (at least 1) of the newest stay.

    Args:
        group: of all ranks, for `save`: one of its own if that is called in a thread; default: the usual one.
    """

    def __init__(self, folder: Path, keep: int, group: dist.ProcessGroup | None = None):
        self.folder, self.keep, self.group = folder, keep, group

    def save(self, step: int, sharded: Mapping[str, Any] | None, progress: dict[str, Any],
             parts: Mapping[str, Callable[[Path], Any]] | None = None) -> None:
        """Write the state after `step` steps. Collective.

        Args:
            sharded: the states of engines by role; each rank writes its shards. None on a rank that has lost them.
            progress: what is alike on all ranks, as JSON: dataloader position and the like.
            parts: what else belongs to the run at this step, by name; rank 0 calls each with a folder for its files,
                as `{"dock": dock.snapshot}`. They count from the moment when the whole checkpoint does, and
                `whole.part` finds them again.

        Raises:
            CheckpointError: on every rank, if one has lost or could not write its part; the older checkpoints are
                untouched.
        """
        final = self.folder / f"step-{step:08d}"
        partial = final.with_suffix(".partial")
        try:
            self._require_none("" if sharded is not None else f"{final} could not be written: the copy of it in the "
                               f"memory of rank {dist.get_rank()} has changed since it was made")
            self._on_first(final, lambda: self._prepare(partial))
            dcp.save(dict(sharded), checkpoint_id=partial, process_group=self.group)
            self._on_first(final, lambda: self._conclude(partial, {"step": step, **progress}, parts or {}))
        except (CheckpointException, CheckpointError) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)  # others may need the room
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{final} could not be written: {_first(error)}") from error

    def _prepare(self, partial: Path) -> None:
        for left in self.folder.glob("step-*.*"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)

    def _conclude(self, partial: Path, progress: dict[str, Any], parts: Mapping[str, Callable[[Path], Any]]) -> None:
        for name, write in parts.items():
            try:
                (partial / name).mkdir()
                write(partial / name)
            except (OSError, DistflowError) as error:
                raise CheckpointError(f"{name} could not be written into {partial}: {error}") from error
        _write_progress(partial, progress)
        final = partial.with_suffix("")
        _remove(final)
        partial.rename(final)
        for old in whole(self.folder)[: -self.keep]:
            _remove(old)

    def _on_first(self, final: Path, act: Callable[[], None]) -> None:
        """On rank 0."""
        trouble = ""
        if dist.get_rank() == 0:
            try:
                act()
            except (OSError, DistflowError) as error:
                trouble = f"{final} could not be written: {error}"
        self._require_none(trouble)

    def _require_none(self, trouble: str) -> None:
        """What is wrong on one rank is raised on every rank, or the others would wait."""
        if found := [each.decode() for each in gather(trouble.encode(), self.group) if each]:
            raise CheckpointError(found[0])

    def load(self, sharded: dict[str, Stateful]) -> dict[str, Any]:
        """Load the newest whole checkpoint into the engines, for any number of ranks, and return its progress.

        Raises:
            CheckpointError: there is none, or it is not one of these engines.
            Disagreement: the ranks do not see the same files.
        """
        newest = self._newest()
        for name, engine in sharded.items():
            state = {name: engine.state_dict()}
            try:
                dcp.load(state, checkpoint_id=newest, planner=_Exact())
            except CheckpointException as error:
                raise CheckpointError(f"{newest} cannot be loaded into role `{name}`: {_first(error)}. Was the model, "
                                      "its engine or the DAG changed since?") from error
            engine.load_state_dict(state[name])
        progress = read_progress(newest)
        del progress[FILES]
        return progress

    def _newest(self) -> Path:
        found = whole(self.folder)
        names = [name.decode() for name in gather(found[-1].name.encode() if found else b"")]
        if len(set(names)) > 1:
            seen = ", ".join(f"rank {rank}: {name or 'none'}" for rank, name in enumerate(names))
            raise Disagreement(f"the ranks see different checkpoints in {self.folder}: {seen}. The folder must be on a "
                               "file system that all machines share.")
        if not found:
            raise CheckpointError(f"there is no whole checkpoint in {self.folder}")
        return found[-1]


class _Exact(dcp.DefaultLoadPlanner):
    """Refuses a checkpoint of something else. The default reads what is asked for, and so takes the first layers of a
    deeper model for the whole of a shallower one."""

    def create_local_plan(self) -> dcp.LoadPlan:
        """
        Raises:
            CheckpointError: under what this rank asks for, the checkpoint has other tensors.
        """
        heads = {path[:2] for path in self.mappings.values()}
        saved, asked = self.metadata.planner_data, set(self.mappings)
        written = {path[:2] for path in saved.values() if path[0] in self.original_state_dict}
        if written and heads and written.isdisjoint(heads):
            raise CheckpointError(f"it was written as {_some(_joined(written))}, and this rank reads "
                                  f"{_some(_joined(heads))}. Set `engine:` and `layouts:` as they were then")
        there = {key for key, path in saved.items() if path[:2] in heads}
        odd = [f"only {where} has {_some(keys)}" for where, keys in
               (("the checkpoint", there - asked), ("the run", asked - there)) if keys]
        if odd:
            raise CheckpointError(", ".join(odd))
        return super().create_local_plan()


def _joined(paths: Iterable[tuple[str, ...]]) -> Iterator[str]:
    return (".".join(path) for path in paths)


def _some(names: Iterable[str]) -> str:
    first, *more = sorted(names)
    return ", ".join(f"`{name}`" for name in (first, *more[:2])) + (f" and {len(more) - 2} more" if more[2:] else "")


def _write_progress(folder: Path, progress: dict[str, Any]) -> None:
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    with (folder / PROGRESS).open("w") as file:
        json.dump({**progress, FILES: sizes}, file)
        file.flush()
        os.fsync(file.fileno())  # else a power cut could leave the final name over an empty file


def _remove(checkpoint: Path) -> None:
    """Under another name first: a kill on the way must not leave half of it under its own."""
    if checkpoint.exists():
        shutil.rmtree(checkpoint.rename(checkpoint.with_suffix(".old")))


def _first(error: CheckpointException) -> str:
    """What the lowest rank that failed says."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    return str(cause) if isinstance(cause, DistflowError) else f"{type(cause).__name__} on rank {rank}: {cause}"
