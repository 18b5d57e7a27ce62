"""What happens in a run beside its numbers: `events.jsonl`, one object a line, which every rank appends to."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from distflow.observe import lines

_LONGEST = 3000
"""Characters of one value."""


class Events:
    """One rank's way to the file."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.rank = self.step = 0

    def open(self, path: Path, rank: int) -> None:
        """From now on events are written to this file."""
        self.path, self.rank = path, rank

    def record(self, kind: str, **facts: Any) -> None:
        """Append an event; does nothing outside a run."""
        if self.path is None:
            return
        short = {name: value[:_LONGEST] if isinstance(value, str) else value for name, value in facts.items()}
        event = {"time": round(time.time(), 3), "step": self.step, "rank": self.rank, "event": kind, **short}
        lines.add_or_drop(self.path, [json.dumps(event, ensure_ascii=False)])


_current = Events()


def current() -> Events:
    """The events of this rank's run."""
    return _current


def record(kind: str, **facts: Any) -> None:
    """Append an event to those of this rank's run."""
    _current.record(kind, **facts)
