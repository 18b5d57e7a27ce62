"""Finds the complete checkpoints of a folder, without torch: the command line asks before it starts anything.

A checkpoint is written as `step-NNNNNNNN.GENERATION.partial` and renamed to `step-NNNNNNNN` when it is complete
(`generations.py`). Its commit record, `progress.json`, lists the files with their sizes, which shows at once what a
full disk or a torn copy cut short, and with their checksums, by which `find_damage` finds every flipped bit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import xxhash

from distflow.errors import CheckpointError

PROGRESS = "progress.json"
FILES, CHECKSUMS, CHECKSUM, GENERATION = "files", "checksums", "checksum", "generation"
_NAME = re.compile(r"step-\d+")
_PART = 16 << 20  # bytes of one read


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder` that were written to their end, oldest first, even if damaged since. Raises
    CheckpointError: the folder exists and cannot be read; `Path.glob` would return nothing."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if _NAME.fullmatch(name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(folder, error) from error


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first; partial and torn ones are passed over. Raises
    CheckpointError: a checkpoint cannot be read, so that it is unknown whether it is complete."""
    return [path for path in checkpoint_folders(folder) if read_progress(path) is not None]


def set_aside(folder: Path, step: int) -> int:
    """Rename the checkpoints of `step` and later ones, so that a resume begins before; return the step of the newest
    that is left, 0 if none is."""
    left = 0
    for path in complete_checkpoints(folder):
        if step_of(path) < step:
            left = step_of(path)
        else:
            path.rename(path.with_name(f"{path.name}.set_aside"))
    return left


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def read_progress(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's commit record; None if it is not complete. Raises CheckpointError: it cannot be read."""
    try:
        progress = parse_progress((checkpoint / PROGRESS).read_bytes())
        # A network file system may have shown the writer less than the file's size, never more.
        there = progress and all((checkpoint / name).stat().st_size >= size for name, size in progress[FILES].items())
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None
    except OSError as error:
        raise _unreadable(checkpoint, error) from error
    return progress if there else None


def parse_progress(content: bytes) -> dict[str, Any] | None:
    """Return the commit record that a file contains; None if it is damaged."""
    try:
        progress = json.loads(content)
    except ValueError:
        return None
    if not isinstance(progress, dict) or not isinstance(progress.get(FILES), dict):
        return None
    sealed = CHECKSUM in progress or CHECKSUMS in progress  # older versions wrote neither
    return None if sealed and progress.get(CHECKSUM) != _sealed(progress) else progress


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint that may be complete: to pass it over would lose its steps."""
    return CheckpointError(f"{path} cannot be read: {error}. Nothing was changed. Resume when it can be read again; "
                           "if it never can, move it away, and the run goes on from the checkpoint before it.")


def write_progress(checkpoint: Path, progress: dict[str, Any], checksums: dict[str, str]) -> None:
    """Write the commit record. `checksums`: of files that their writers have read back; the others are read here."""
    paths = {str(path.relative_to(checkpoint)): path for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    record = {**progress, FILES: {name: path.stat().st_size for name, path in paths.items()},
              CHECKSUMS: {name: checksums.get(name) or checksum(path) for name, path in paths.items()}}
    with (checkpoint / PROGRESS).open("w") as file:
        json.dump({**record, CHECKSUM: _sealed(record)}, file)
        file.flush()
        os.fsync(file.fileno())  # else a power cut could leave the final name over an empty file


def find_damage(checkpoint: Path, share: int = 0, shares: int = 1, moved: Callable[[], None] = lambda: None) -> str:
    """Return what is damaged in a checkpoint; empty if nothing is. Each rank reads its `share` of the files, and calls
    `moved` after each block. Raises CheckpointError: a file cannot be read, which is no damage."""
    progress = read_progress(checkpoint)
    if progress is None:
        return f"{PROGRESS} is missing or damaged, or a file that it lists is missing or cut short"
    checksums = progress.get(CHECKSUMS, {})  # older versions wrote none
    return _first_damaged(checkpoint, sorted(checksums.items())[share::shares], moved)


def _first_damaged(checkpoint: Path, checksums: Iterable[tuple[str, str]], moved: Callable[[], None]) -> str:
    for name, expected in checksums:
        try:
            if checksum(checkpoint / name, moved) != expected:
                return f"{name} is not what was written: its checksum differs"
        except OSError as error:
            raise _unreadable(checkpoint, error) from error
    return ""


def checksum(path: Path, moved: Callable[[], None] = lambda: None) -> str:
    """Return the checksum of a file, by xxh3 in 128 bits: against accidents, not against forgery."""
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_PART):
            state.update(part)
            moved()
    return state.hexdigest()


def _sealed(record: dict[str, Any]) -> str:
    rest = {name: value for name, value in record.items() if name != CHECKSUM}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())
