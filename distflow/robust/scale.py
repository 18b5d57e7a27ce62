"""How many rollouts a running job has: `distflow scale RUN rollout=N` writes it down, and their seats read it.

A seat that is not wanted ends its worker and waits; what the worker had under way goes back to the dock. It can come
back at any time, with the newest weights of its neighbours.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from pathlib import Path

_FILE = "scale.json"
_LOOK = 1.0
"""Seconds between two looks at the file."""


class Scale:
    """A rollout's view: it is the `place`-th one.

    Args:
        left_out: which rollouts are not started again; those behind them take their places.
    """

    def __init__(self, folder: Path, place: int, left_out: Callable[[], Collection[int]] = tuple):
        self.file, self.place, self.left_out = folder / _FILE, place, left_out
        self.looked, self.answer = 0.0, True

    def wanted(self) -> bool:
        """Whether this rollout is to work now."""
        if time.monotonic() - self.looked > _LOOK:
            before = self.place - sum(each < self.place for each in self.left_out())
            self.looked, self.answer = time.monotonic(), before < read(self.file.parent, before + 1)
        return self.answer


def read(folder: Path, default: int) -> int:
    """How many rollouts are wanted; `default` if nobody has said."""
    try:
        return int(json.loads((folder / _FILE).read_text())["rollout"])
    except FileNotFoundError:
        return default


def write(folder: Path, rollouts: int) -> None:
    """From now on so many are wanted."""
    partial = folder / f"{_FILE}.partial"
    partial.write_text(json.dumps({"rollout": rollouts}))
    partial.replace(folder / _FILE)


def forget(folder: Path) -> None:
    """A job that begins, perhaps on other ranks, has all its rollouts work."""
    (folder / _FILE).unlink(missing_ok=True)
