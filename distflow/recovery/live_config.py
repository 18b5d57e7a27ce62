"""Live configuration: settings that `distflow set RUN KEY=VALUE` changes while a job runs.

The groups that a change concerns reload: the trainer at the end of a step, each rollout at once. `run.yaml` always has
the settings in force, so that a resume keeps them; `changes.jsonl` lists the changes and their groups.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distflow.telemetry import events

_FILE = "changes.jsonl"
_POLL = 1.0  # seconds between two looks at the file


@dataclass(frozen=True)
class Change:
    """A change of settings. groups: that reload. settings: the old and the new value of each key, as
    `roles.actor.learning_rate`."""

    groups: list[str]
    settings: dict[str, list[Any]]


class LiveConfig:
    """A group's view of the changes. They are numbered from 1; those that concern other groups count too."""

    def __init__(self, folder: Path, group: str):
        self.file, self.group = folder / _FILE, group
        self.read_at, self.size = -math.inf, 0
        self.changes: list[Change] = []

    def newest(self) -> int:
        """Return the number of the newest change that concerns this group; 0 if there is none."""
        return max((number for number, change in enumerate(self._read(), 1) if self.group in change.groups), default=0)

    def changes_since(self, number: int) -> dict[str, list[Any]]:
        """Return the old and new values of what has changed for this group after change `number`."""
        after = [change.settings for change in self._read()[number:] if self.group in change.groups]
        return {key: [next(each[key][0] for each in after if key in each), values[1]]
                for settings in after for key, values in settings.items()}

    def _read(self) -> list[Change]:
        if time.monotonic() - self.read_at < _POLL:
            return self.changes
        self.read_at = time.monotonic()
        with contextlib.suppress(OSError):  # there is none, or its file system is away: it is looked at again
            if (size := self.file.stat().st_size) != self.size:
                text = self.file.read_text(encoding="utf-8").rpartition("\n")[0]
                self.size, self.changes = size, [Change(**json.loads(line)) for line in text.splitlines()]
        return self.changes


def write(folder: Path, groups: Sequence[str], settings: dict[str, list[Any]]) -> None:
    """Announce a change to the groups of a run; `run.yaml` must have it already."""
    events.add(folder / _FILE, json.dumps(asdict(Change([*groups], settings)), ensure_ascii=False))
