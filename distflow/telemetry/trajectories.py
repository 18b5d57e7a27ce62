"""Conversations, written down turn by turn: `trajectories/rankN.jsonl` of the run folder."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from distflow.telemetry import events
from distflow.telemetry.run_folder import finite, forget_after

_NODES = 1024
"""Of so many, over all steps, it is known how many rows are written."""


class Trajectories:
    """One rank's file, for any number of threads. It only grows, and has a turn's line as soon as the turn is over.

    A line: `step` (from 1, as in metrics.jsonl), `row` (id), `turn` (from 1), `text`, `observation`, `tokens` (that
    the model sampled in this turn), `reward`, `done`, `seconds` (of the environment), and `failed` where it did.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.rows = 0
        self.written: dict[tuple[int, int], int] = {}
        """Rows by step and node."""
        self.lock = threading.Lock()

    def open(self, path: Path, rows: int, resumed_at: int | None = None) -> None:
        """Write to `path`. `rows`: of so many of the rows of a step and node, the first ones, turns are written.

        A resumed run writes its steps anew.
        """
        if resumed_at is not None:
            forget_after(path, resumed_at)
        self.path, self.rows = path, rows

    def claim(self, step: int, node: int, rows: int) -> int:
        """How many of these rows have their turns written; they count as such. `node` numbers those of a step."""
        with self.lock:
            before = self.written.pop((step, node), 0)
            self.written[step, node] = before + rows
            if len(self.written) > _NODES:
                del self.written[next(iter(self.written))]
            return min(max(self.rows - before, 0), rows)

    def write(self, step: int, row: int, turn: dict[str, Any]) -> None:
        """Add a turn, of a step counted from 0; does nothing outside a run."""
        if self.path is None:
            return
        line = json.dumps({"step": step + 1, "row": row, **finite(turn)}, ensure_ascii=False)
        with self.lock:
            if not self.path.parent.is_dir():
                with contextlib.suppress(OSError):  # the line is dropped then, which is said
                    self.path.parent.mkdir(parents=True, exist_ok=True)
            events.add_or_drop(self.path, [line])


_trajectories = Trajectories()


def trajectories() -> Trajectories:
    """Those of this rank; node functions report here."""
    return _trajectories
