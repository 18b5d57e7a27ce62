"""Reads checkpoints of torch.distributed.checkpoint without running code that may stand in them.

Torch writes `.metadata` and values that are no tensors as pickles, and loads both by a plain unpickler, which calls
whatever a file names. Here a file can name torch's metadata classes and nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from distflow.schema.errors import CheckpointError

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
