"""Writes and loads checkpoints by torch.distributed.checkpoint: complete or absent, checked, and without running code.

A folder gets its name when all of it is written, and only if no newer trainer has claimed the run (`generations.py`).
Torch writes `.metadata` and values that are no tensors as pickles, and loads both by a plain unpickler, which calls
whatever a file names; `SafeReader` admits only torch's metadata.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PosixPath
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from distflow.data.exchange import gather
from distflow.errors import CheckpointError, Disagreement, DistflowError, Superseded
from distflow.recovery import generations
from distflow.recovery.checkpoint_files import (
    CHECKSUM,
    CHECKSUMS,
    FILES,
    GENERATION,
    PROGRESS,
    checkpoint_folders,
    checkpoint_of,
    checksum,
    complete_checkpoints,
    find_damage,
    read_progress,
    step_of,
    write_progress,
)
from distflow.telemetry.events import record

_CLASSES = (metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING, _StorageInfo, torch.Size, OrderedDict, PosixPath)
_KNOWN: dict[tuple[str, str], Any] = {(each.__module__, each.__qualname__): each for each in _CLASSES} | {
    (module, "PosixPath"): PosixPath for module in ("pathlib", "pathlib._local")}  # as versions of Python name it
_KNOWN["torch.serialization", "_get_layout"] = torch.serialization._get_layout  # looks a name up, and no more
_BROKEN = (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, ImportError,
           RuntimeError, MemoryError, OverflowError)
"""What an unpickler raises on bytes that are no pickle of a checkpoint."""


class SafeReader(FileSystemReader):
    """A `FileSystemReader` whose metadata cannot run code."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """Raises CheckpointError: the file is missing or damaged, or names something that is no metadata."""
        path = Path(self.path) / ".metadata"
        try:
            found = _Unpickler(io.BytesIO(path.read_bytes())).load()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        except _BROKEN as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise CheckpointError(f"{path} is no metadata of a checkpoint but a {type(found).__name__}")
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch":
            value = getattr(torch, name, None)
            known = value if isinstance(value, torch.dtype | torch.layout | torch.memory_format) else None
        if known is None:
            raise pickle.UnpicklingError(f"it names `{module}.{name}`, which is no metadata, and is not loaded: "
                                         "whoever wrote this file may have wanted to run code here")
        return known


class Stateful(Protocol):
    """Object that can be checkpointed, by torch's convention."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpoints:
    """Checkpoints of one run, under `folder`; the `keep` (at least 1) newest stay.

    Args:
        group: of all ranks, for `save`: one of its own if that is called in a thread; default: the usual one.
    """

    def __init__(self, folder: Path, keep: int, group: dist.ProcessGroup | None = None):
        self.folder, self.keep, self.group = folder, keep, group
        self.generation = generations.TrainerGeneration()
        self.spared: Callable[[], Path | None] = lambda: None
        """Returns a checkpoint that is being read, and is not removed before the next save."""

    def claim(self, job: str, round: int, attempt: int) -> None:
        """Claim the folder for this trainer. Collective; raises Superseded or CheckpointError on every rank."""
        self._run_on_first_rank(self.folder, lambda: setattr(
            self, "generation", generations.claim(self.folder, job, round, attempt)))
        self.generation = generations.TrainerGeneration(*json.loads(gather(json.dumps(self.generation).encode())[0]))

    def save(self, step: int, sharded: Mapping[str, Any] | None, progress: dict[str, Any]) -> None:
        """Write the state after `step` steps. Collective.

        Args:
            sharded: the states of engines by role; each rank writes its shards. None on a rank that has lost them.
            progress: what is alike on all ranks, as JSON: dataloader position and the like.

        Raises:
            CheckpointError: on every rank, if one has lost or could not write its part; the older checkpoints are
                untouched.
            Superseded: on every rank, if a newer trainer has claimed the folder.
        """
        final = checkpoint_of(self.folder, step)
        partial = generations.partial_folder(final, self.generation)
        try:
            self._raise_if_any_failed("" if sharded is not None else f"{final} could not be written: the copy of it in "
                                   f"the memory of rank {dist.get_rank()} has changed since it was made")
            self._run_on_first_rank(final, lambda: self._prepare(partial))
            state_dict_saver.save(dict[str, Any](sharded or {}), checkpoint_id=partial, process_group=self.group)
            checksums = self._checksums(partial)
            self._run_on_first_rank(final, lambda: self._commit(final, {"step": step, **progress}, checksums))
        except (CheckpointException, CheckpointError, Superseded) as error:
            room = _room(self.folder)
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)  # others may need the room
            # what a newer trainer took away looks like a broken disk
            self._run_on_first_rank(final, lambda: generations.require_newest(self.folder, self.generation))
            if not isinstance(error, CheckpointException):
                raise
            raise CheckpointError(f"{final} could not be written: {_first_error(error)}{room}") from error

    def _prepare(self, partial: Path) -> None:
        generations.require_newest(self.folder, self.generation)
        generations.clear(self.folder, self.generation)
        partial.mkdir(parents=True)

    def _checksums(self, partial: Path) -> dict[str, str]:
        """Return the checksums of all files; each rank reads its own, which its machine has cached. Collective."""
        mine, trouble = {}, ""
        try:
            mine = {path.name: checksum(path) for path in partial.glob(f"__{dist.get_rank()}_*")}
        except OSError as error:
            trouble = f"{partial} could not be read back: {error}"
        self._raise_if_any_failed(trouble)
        return {name: each for part in gather(json.dumps(mine).encode(), self.group)
                for name, each in json.loads(part).items()}

    def _commit(self, final: Path, progress: dict[str, Any], checksums: dict[str, str]) -> None:
        write_progress(generations.partial_folder(final, self.generation),
                       {**progress, GENERATION: list(self.generation)}, checksums)
        generations.commit(final, self.generation)
        with contextlib.suppress(CheckpointError):  # one cannot be read now: old ones are removed after the next save
            for old in complete_checkpoints(self.folder)[: -self.keep]:
                if old != self.spared():
                    _remove(old)

    def _run_on_first_rank(self, final: Path, act: Callable[[], None]) -> None:
        trouble, kind = "", CheckpointError
        if dist.get_rank() == 0:
            try:
                act()
            except Superseded as error:
                trouble, kind = str(error), Superseded
            except (OSError, DistflowError) as error:
                trouble = f"{final} could not be written: {error}"
        self._raise_if_any_failed(trouble, kind)

    def _raise_if_any_failed(self, trouble: str, kind: type[DistflowError] = CheckpointError) -> None:
        """Raise the trouble of one rank on every rank, or the others would wait. Collective."""
        for each in gather(json.dumps([trouble, kind is Superseded]).encode(), self.group):
            text, superseded = json.loads(each)
            if text:
                raise Superseded(text) if superseded else CheckpointError(text)

    def load(self, sharded: dict[str, Stateful], checkpoint: Path | None = None,
             frozen: Iterable[str] = ()) -> dict[str, Any]:
        """Load a checkpoint (default: that of `newest`) on any number of ranks, and return its progress. Collective.

        Args:
            sharded: the engines to load into, by role.
            frozen: roles whose weights do not change in this run, so that none of a checkpoint are loaded.

        Raises:
            CheckpointError: there is none, or it is not one of these engines, or has weights of a `frozen` role.
            Disagreement: the ranks do not see the same files.
        """
        checkpoint = checkpoint or self.newest()
        if checkpoint is None:
            raise CheckpointError(f"there is no whole checkpoint in {self.folder}")
        _require_frozen(checkpoint, frozen)
        for name, engine in sharded.items():
            state = {name: engine.state_dict()}
            try:
                state_dict_loader.load(state, storage_reader=SafeReader(checkpoint), planner=_Exact())
            except CheckpointException as error:
                raise CheckpointError(f"{checkpoint} cannot be loaded into role `{name}`: {_first_error(error)}. Was "
                                      "the model, its engine or `freeze`, or the DAG changed since, as `trained` and "
                                      "`follow` of its roles?") from error
            engine.load_state_dict(state[name])
        if (progress := read_progress(checkpoint)) is None:
            raise CheckpointError(f"{checkpoint} does not say how far its run was")
        return {name: value for name, value in progress.items() if name not in (FILES, CHECKSUMS, CHECKSUM, GENERATION)}

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint; None if none was ever written. Each rank reads a share of the files.
        Damaged checkpoints are passed over with an event and a warning, and renamed. Collective.

        Raises:
            CheckpointError: on every rank: all are damaged, or a rank cannot read one that may be complete.
            Disagreement: the ranks do not see the same files.
        """
        passed_over: dict[Path, str] = {}
        names = self._seen()
        for checkpoint in (self.folder / name for name in names):
            wrong = self.damage_in(checkpoint)
            if not wrong:
                if dist.get_rank() == 0:
                    _set_aside(passed_over)
                return checkpoint
            passed_over[checkpoint] = f"{checkpoint} is damaged: {wrong}"
            if dist.get_rank() == 0:
                record("checkpoint_damaged", of_step=step_of(checkpoint), why=passed_over[checkpoint])
                print(f"warning: {passed_over[checkpoint]}. It is passed over for the one before it.",
                      file=sys.stderr, flush=True)
        if not names:
            return None
        raise CheckpointError("\n".join([f"there is no whole checkpoint in {self.folder}", *passed_over.values()]))

    def damage_in(self, checkpoint: Path) -> str:
        """Return what any rank finds damaged in a checkpoint; empty if nothing is. Collective."""
        wrong, unread, seal = "", "", ""
        try:
            seal = (read_progress(checkpoint) or {CHECKSUM: "damaged"}).get(CHECKSUM)
            wrong = find_damage(checkpoint, dist.get_rank(), dist.get_world_size()) or _metadata_error(checkpoint)
        except CheckpointError as error:
            unread = str(error)
        reported = [json.loads(each) for each in gather(json.dumps([wrong, unread, seal]).encode())]
        _raise_first(text for _, text, _ in reported)
        if any(each != reported[0][2] for _, _, each in reported):
            raise Disagreement(f"the ranks see different contents of {checkpoint / PROGRESS}. The folder must be on a "
                               "file system that all machines share.")
        return next((each for each, _, _ in reported if each), "")

    def _seen(self) -> list[str]:
        names, unread = [], ""
        try:
            names = [each.name for each in checkpoint_folders(self.folder)]
        except CheckpointError as error:
            unread = str(error)
        reported = [json.loads(each) for each in gather(json.dumps([names, unread]).encode())]
        _raise_first(text for _, text in reported)
        newest = [names[-1] if names else "none" for names, _ in reported]
        if len(set(newest)) > 1:
            seen = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(newest))
            raise Disagreement(f"the ranks see different checkpoints in {self.folder}: {seen}. The folder must be on a "
                               "file system that all machines share.")
        return reported[0][0][::-1]


def holds(checkpoint: Path, role: str) -> bool:
    """Return whether a role's state is in a checkpoint."""
    saved = SafeReader(checkpoint).read_metadata().planner_data or {}
    return any(path[0] == role for path in saved.values())


def _require_frozen(checkpoint: Path, roles: Iterable[str]) -> None:
    """Refuse a checkpoint with weights of a role that does not change now: it would have those of its model folder."""
    for role in roles:
        if holds(checkpoint, role):
            raise CheckpointError(
                f"{checkpoint} has weights of role `{role}`, which changed in training when it was written. Now "
                "the DAG has neither its `trained` nor `follow`, and it would have those of its model again. Put back "
                f"`trained`, or `follow`:  --set 'roles.{role}.follow={{every: N, mix: M}}'  , which keeps the weights "
                "of the checkpoint where `every` is above `steps`")


def _raise_first(reported: Iterable[str]) -> None:
    if trouble := next(filter(None, reported), ""):
        raise CheckpointError(trouble)


def _set_aside(damaged: Iterable[Path]) -> None:
    """Rename damaged checkpoints, so that they do not count; the next save removes them."""
    for each in damaged:
        with contextlib.suppress(OSError):  # it is damaged under its own name too
            each.rename(each.with_suffix(".damaged"))


def _metadata_error(checkpoint: Path) -> str:
    """Return on rank 0 what is wrong with a checkpoint's metadata; empty on the other ranks."""
    if dist.get_rank() > 0:
        return ""
    try:
        SafeReader(checkpoint).read_metadata()
    except CheckpointError as error:
        return str(error)
    return ""


class _Exact(DefaultLoadPlanner):
    """Load planner that refuses a checkpoint of something else, and code in one. Torch's default takes the first layers
    of a deeper model for all of a shallower one, and unpickles every value that is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn],
                    torch.load(value, weights_only=True))

    def create_local_plan(self) -> LoadPlan:
        """Raises CheckpointError: the checkpoint has other tensors than those that this rank asks for."""
        heads = {path[:2] for path in self.mappings.values()}
        saved, asked = self.metadata and self.metadata.planner_data or {}, set(self.mappings)
        written = {path[:2] for path in saved.values() if path[0] in self.original_state_dict}
        if written and heads and written.isdisjoint(heads):
            raise CheckpointError(f"it was written as {_some(_dotted_names(written))}, and this rank reads "
                                  f"{_some(_dotted_names(heads))}. Set `engine:` and `layouts:` as they were then")
        there = {key for key, path in saved.items() if path[:2] in heads}
        odd = [f"only {where} has {_some(keys)}" for where, keys in
               (("the checkpoint", there - asked), ("the run", asked - there)) if keys]
        if odd:
            raise CheckpointError(", ".join(odd))
        return super().create_local_plan()


def _dotted_names(paths: Iterable[tuple[str | int, ...]]) -> Iterator[str]:
    return (".".join(map(str, path)) for path in paths)


def _some(names: Iterable[str]) -> str:
    first, *more = sorted(names)
    return ", ".join(f"`{name}`" for name in (first, *more[:2])) + (f" and {len(more) - 2} more" if more[2:] else "")


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint and remove it: a kill on the way must not leave half of it under its own name."""
    if checkpoint.exists():
        shutil.rmtree(checkpoint.rename(checkpoint.with_suffix(".old")))


def _room(folder: Path) -> str:
    """Return how much room there is, as torch's writer does not say that a disk is full."""
    with contextlib.suppress(OSError):
        return f"; {shutil.disk_usage(folder).free >> 20} MiB were free there"
    return ""


def _first_error(error: CheckpointException) -> str:
    rank = min(error.failures)
    cause = error.failures[rank][0]
    return str(cause) if isinstance(cause, DistflowError) else f"{type(cause).__name__} on rank {rank}: {cause}"
