"""Number of rollouts that work, which `distflow scale RUN rollout=N` changes while a job runs.

The target is in `scale.json`. The supervisor of a rollout that is scaled down ends its worker and waits; the worker's
leases go back to the dock. A rollout can be scaled up again at any time, and pulls the newest weights.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection
from pathlib import Path

from distflow.telemetry import files

_FILE = "scale.json"
_POLL_FILE = 1.0  # seconds between two looks at scale.json


class RolloutScale:
    """The target as the rollout with number `index` sees it. `left_out`: returns the rollouts that are not started
    again; those after them move up."""

    def __init__(self, folder: Path, index: int, left_out: Callable[[], Collection[int]] = tuple):
        self.file, self.index, self.left_out = folder / _FILE, index, left_out
        self.looked, self.answer = 0.0, True

    def should_run(self) -> bool:
        if time.monotonic() - self.looked > _POLL_FILE:
            before = self.index - sum(each < self.index for each in self.left_out())
            self.looked = time.monotonic()
            with contextlib.suppress(OSError):  # its file system is away: it is looked at again
                self.answer = before < read(self.file.parent, before + 1)
        return self.answer


def read(folder: Path, default: int) -> int:
    """Return the target number of rollouts; `default` if there is none."""
    try:
        return int(json.loads((folder / _FILE).read_text())["rollout"])
    except FileNotFoundError:
        return default


def write(folder: Path, rollouts: int) -> None:
    files.write_atomically(folder / _FILE, json.dumps({"rollout": rollouts}))


def forget(folder: Path) -> None:
    """Remove the target, so that all rollouts of a job that begins have workers."""
    (folder / _FILE).unlink(missing_ok=True)
