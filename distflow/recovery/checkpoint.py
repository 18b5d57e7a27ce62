"""Checkpoints by torch.distributed.checkpoint, whole or not there: a folder gets its name when all of it is written.

Reads checkpoints of torch.distributed.checkpoint without running code that may stand in them.

Torch writes `.metadata` and values that are no tensors as pickles, and loads both by a plain unpickler, which calls
whatever a file names. Here a file can name torch's metadata classes and nothing else.
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
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem

from distflow.data.exchange import gather
from distflow.errors import CheckpointError, Disagreement, DistflowError
from distflow.recovery.checkpoint_files import (
    CHECKSUM,
    CHECKSUMS,
    FILES,
    PROGRESS,
    checksum,
    damage,
    finished,
    read_progress,
    step_of,
    whole,
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
"""What an unpickler raises on bytes that are no pickle, or another one."""


class SafeReader(FileSystemReader):
    """A `FileSystemReader` whose metadata cannot run code."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """
        Raises:
            CheckpointError: the file is missing or damaged, or names something that is no metadata.
        """
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
            checksums = self._checksums(partial)
            self._on_first(final, lambda: self._conclude(partial, {"step": step, **progress}, parts or {}, checksums))
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

    def _checksums(self, partial: Path) -> dict[str, str]:
        """Read back what was written, on the rank that has it in its machine's memory still. Collective."""
        mine, trouble = {}, ""
        try:
            mine = {path.name: checksum(path) for path in partial.glob(f"__{dist.get_rank()}_*")}
        except OSError as error:
            trouble = f"{partial} could not be read back: {error}"
        self._require_none(trouble)
        return {name: each for part in gather(json.dumps(mine).encode(), self.group)
                for name, each in json.loads(part).items()}

    def _conclude(self, partial: Path, progress: dict[str, Any], parts: Mapping[str, Callable[[Path], Any]],
                  checksums: dict[str, str]) -> None:
        for name, write in parts.items():
            try:
                (partial / name).mkdir()
                write(partial / name)
            except (OSError, DistflowError) as error:
                raise CheckpointError(f"{name} could not be written into {partial}: {error}") from error
        write_progress(partial, progress, checksums)
        final = partial.with_suffix("")
        _remove(final)
        partial.rename(final)
        with contextlib.suppress(CheckpointError):  # one cannot be read now: they are thinned out after the next save
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
        _raise_first(each.decode() for each in gather(trouble.encode(), self.group))

    def load(self, sharded: dict[str, Stateful], checkpoint: Path | None = None) -> dict[str, Any]:
        """Load a checkpoint that `newest` has found (default: ask it) into the engines, for any number of ranks, and
        return its progress. Collective.

        Raises:
            CheckpointError: there is none, or it is not one of these engines.
            Disagreement: the ranks do not see the same files.
        """
        checkpoint = checkpoint or self.newest()
        if checkpoint is None:
            raise CheckpointError(f"there is no whole checkpoint in {self.folder}")
        for name, engine in sharded.items():
            state = {name: engine.state_dict()}
            try:
                dcp.load(state, storage_reader=SafeReader(checkpoint), planner=_Exact())
            except CheckpointException as error:
                raise CheckpointError(f"{checkpoint} cannot be loaded into role `{name}`: {_first(error)}. Was the "
                                      "model, its engine or the DAG changed since?") from error
            engine.load_state_dict(state[name])
        progress = read_progress(checkpoint)
        return {name: value for name, value in progress.items() if name not in (FILES, CHECKSUMS, CHECKSUM)}

    def newest(self) -> Path | None:
        """Return the newest checkpoint of which every file is as it was written; None if none was ever written. Each
        rank reads its share of the files. Those that are damaged are passed over, with an event and a word on the
        screen, and get another name, so that they count nowhere. Collective.

        Raises:
            CheckpointError: on every rank: all are damaged, or a rank cannot read what may be whole.
            Disagreement: the ranks do not see the same files.
        """
        passed_over: dict[Path, str] = {}
        names = self._seen()
        for checkpoint in (self.folder / name for name in names):
            wrong = self._wrong(checkpoint)
            if not wrong:
                if dist.get_rank() == 0:
                    _set_aside(passed_over)
                return checkpoint
            passed_over[checkpoint] = f"{checkpoint} is damaged: {wrong}"
            if dist.get_rank() == 0:
                record("checkpoint damaged", of_step=step_of(checkpoint), why=passed_over[checkpoint])
                print(f"warning: {passed_over[checkpoint]}. It is passed over for the one before it.",
                      file=sys.stderr, flush=True)
        if not names:
            return None
        raise CheckpointError("\n".join([f"there is no whole checkpoint in {self.folder}", *passed_over.values()]))

    def _wrong(self, checkpoint: Path) -> str:
        """Return what is damaged in a checkpoint, by what all ranks say; nothing if it is whole. Collective."""
        wrong, unread, seal = "", "", ""
        try:
            seal = (read_progress(checkpoint) or {CHECKSUM: "damaged"}).get(CHECKSUM)
            wrong = damage(checkpoint, dist.get_rank(), dist.get_world_size()) or _misread(checkpoint)
        except CheckpointError as error:
            unread = str(error)
        told = [json.loads(each) for each in gather(json.dumps([wrong, unread, seal]).encode())]
        _raise_first(text for _, text, _ in told)
        if any(each != told[0][2] for _, _, each in told):
            raise Disagreement(f"the ranks see different contents of {checkpoint / PROGRESS}. The folder must be on a "
                               "file system that all machines share.")
        return next((each for each, _, _ in told if each), "")

    def _seen(self) -> list[str]:
        """Return the names of all checkpoints, newest first, as rank 0 sees them."""
        names, unread = [], ""
        try:
            names = [each.name for each in finished(self.folder)]
        except CheckpointError as error:
            unread = str(error)
        told = [json.loads(each) for each in gather(json.dumps([names, unread]).encode())]
        _raise_first(text for _, text in told)
        newest = [names[-1] if names else "none" for names, _ in told]
        if len(set(newest)) > 1:
            seen = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(newest))
            raise Disagreement(f"the ranks see different checkpoints in {self.folder}: {seen}. The folder must be on a "
                               "file system that all machines share.")
        return told[0][0][::-1]


def _raise_first(told: Iterable[str]) -> None:
    """Raise what the first of the ranks that are in trouble says."""
    if trouble := next(filter(None, told), ""):
        raise CheckpointError(trouble)


def _set_aside(damaged: Iterable[Path]) -> None:
    """Give damaged checkpoints a name that is none of a checkpoint; the next save removes them."""
    for each in damaged:
        with contextlib.suppress(OSError):  # it is damaged under its own name too
            each.rename(each.with_suffix(".damaged"))


def _misread(checkpoint: Path) -> str:
    """What is wrong with a checkpoint's metadata on the rank that answers for it, rank 0."""
    if dist.get_rank() > 0:
        return ""
    try:
        SafeReader(checkpoint).read_metadata()
    except CheckpointError as error:
        return str(error)
    return ""


class _Exact(dcp.DefaultLoadPlanner):
    """Refuses a checkpoint of something else, and code in one. The default reads what is asked for, and so takes the
    first layers of a deeper model for the whole of a shallower one; and it unpickles whatever is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn],
                    torch.load(value, weights_only=True))

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


def _remove(checkpoint: Path) -> None:
    """Under another name first: a kill on the way must not leave half of it under its own."""
    if checkpoint.exists():
        shutil.rmtree(checkpoint.rename(checkpoint.with_suffix(".old")))


def _first(error: CheckpointException) -> str:
    """What the lowest rank that failed says."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    return str(cause) if isinstance(cause, DistflowError) else f"{type(cause).__name__} on rank {rank}: {cause}"
