"""Which checkpoints of a folder are whole. No torch: the command line asks before it starts anything.

A checkpoint is written as `step-NNNNNNNN.partial` and gets its name, `step-NNNNNNNN`, when all of it is there. Its
`progress.json` lists the files with their sizes, so that one which a full disk or a torn copy cut short is seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distflow.schema.errors import CheckpointError

PROGRESS = "progress.json"
FILES = "files"


def whole(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest first; those that are partial or torn are passed over."""
    return sorted(path for path in folder.glob("step-*") if not path.suffix and read_progress(path) is not None)


def step_of(checkpoint: Path) -> int:
    """The steps that were done when it was written."""
    return int(checkpoint.name.removeprefix("step-"))


def part(folder: Path, name: str) -> Path:
    """The files of a further part of the newest whole checkpoint, such as the dock's; by `Service(snapshot=…)` a
    process of the dock starts from its own before the ranks load theirs.

    Raises:
        CheckpointError: there is no whole checkpoint, or the newest has no such part.
    """
    found = whole(folder)
    if not found:
        raise CheckpointError(f"there is no whole checkpoint in {folder}")
    if not (found[-1] / name).is_dir():
        raise CheckpointError(f"{found[-1]} has no part `{name}`: the run that wrote it had none")
    return found[-1] / name


def read_progress(checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint says of itself, or None if it is not whole."""
    try:
        progress = json.loads((checkpoint / PROGRESS).read_bytes())
        files = progress.get(FILES) if isinstance(progress, dict) else None
        if not isinstance(files, dict):
            return None
        # A network file system may have shown the writer less than the file's size, never more.
        there = all((checkpoint / name).stat().st_size >= size for name, size in files.items())
    except (OSError, ValueError):
        return None
    return progress if there else None
