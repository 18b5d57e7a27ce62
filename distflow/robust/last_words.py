"""What a run that was told to end says: what is kept of it, and how to go on."""

from __future__ import annotations

from pathlib import Path

from distflow.robust.whole import step_of, whole
from distflow.schema.errors import CheckpointError


def last_words(folder: Path, step: int) -> str:
    """Return the last line on the screen.

    Args:
        folder: of the run; it may not exist.
        step: after which the run has ended in order; 0 if it was cut off.
    """
    ended = f"{folder} was stopped after step {step}" if step else f"{folder} was stopped in the middle of a step"
    if not folder.is_dir():
        return f"{folder} was stopped before it began; nothing is kept"
    try:
        found = whole(folder / "checkpoints")
    except CheckpointError as error:
        return f"{ended}; {error}"
    if not found:
        return f"{ended}; it has no checkpoint to go on from (`checkpoint.every` in the run file)"
    return f"{ended}; its checkpoint of step {step_of(found[-1])} is kept. Go on:  distflow resume {folder}"
