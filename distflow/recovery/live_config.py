"""Settings that change while a job runs: `distflow set RUN KEY=VALUE` writes them down, and the groups that they
concern start again with them, the trainer at the end of a step and each rollout at once.

What is in force always stands in the run's `run.yaml`, so that a resume keeps it. `changes.jsonl` says beside it what
was changed, and for whom.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distflow.telemetry import events

_FILE = "changes.jsonl"
_LOOK = 1.0
"""Seconds between two looks at the file."""


@dataclass(frozen=True)
class Change:
    """groups: that take it up. settings: the old and the new value of each key, as `roles.actor.learning_rate`."""

    groups: list[str]
    settings: dict[str, list[Any]]


class LiveConfig:
    """A group's view. Changes have numbers from 1 on; those that concern other groups count too."""

    def __init__(self, folder: Path, group: str):
        self.file, self.group = folder / _FILE, group
        self.looked, self.size = -math.inf, 0
        self.found: list[Change] = []

    def newest(self) -> int:
        """The number of the newest change that concerns this group; 0 if there is none."""
        return max((number for number, change in enumerate(self._read(), 1) if self.group in change.groups), default=0)

    def since(self, number: int) -> dict[str, list[Any]]:
        """What has changed for this group after the change of this number."""
        after = [change.settings for change in self._read()[number:] if self.group in change.groups]
        return {key: [next(each[key][0] for each in after if key in each), values[1]]
                for settings in after for key, values in settings.items()}

    def _read(self) -> list[Change]:
        if time.monotonic() - self.looked < _LOOK:
            return self.found
        self.looked, size = time.monotonic(), self.file.stat().st_size if self.file.exists() else 0
        if size != self.size:
            whole = self.file.read_text(encoding="utf-8").rpartition("\n")[0]
            self.size, self.found = size, [Change(**json.loads(line)) for line in whole.splitlines()]
        return self.found


def write(folder: Path, groups: Sequence[str], settings: dict[str, list[Any]]) -> None:
    """The run's files say it already; from now on its groups may know."""
    events.add(folder / _FILE, json.dumps(asdict(Change([*groups], settings)), ensure_ascii=False))
