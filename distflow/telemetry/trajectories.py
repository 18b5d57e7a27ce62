"""Writes conversations turn by turn: `trajectories/rankN.jsonl` of the run folder."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from distflow.telemetry import events
from distflow.telemetry.run_folder import finite, forget_after

_NODES = 1024  # nodes, over all steps, of which the number of written rows is remembered
_TAIL = 1 << 20  # bytes at the end of the file of an earlier worker, whose turns may be sampled again


class Trajectories:
    """Trajectory file of one rank, for any number of threads. A line is appended at the end of a turn.

    A line: `step` (from 1, as in metrics.jsonl), `row` (id), `turn` (from 1), `text`, `observation`, `tokens` (that
    the model sampled in this turn), `reward`, `done`, `seconds` (of the environment), and `failed` where it did. A line
    of turn 0 has only the `observation` that begins the conversation.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.rows = 0
        self.written: dict[tuple[int, int], int] = {}  # rows by step and node
        self.there: set[str] = set()  # lines of an earlier worker, without their seconds
        self.lock = threading.Lock()

    def open(self, path: Path, rows: int, resumed_at: int | None = None) -> None:
        """Write to `path` the turns of the first `rows` rows of each step and node. A resumed run writes the steps
        after `resumed_at` again."""
        if resumed_at is not None:
            forget_after(path, resumed_at)
        self.path, self.rows, self.there = path, rows, set()
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL, 0))
            self.there = {_without_seconds(line) for line in file.read(_TAIL).decode(errors="replace").split("\n")}

    def claim(self, step: int, node: int, rows: int) -> int:
        """Return how many of these rows have their turns written, and count them. `node`: its number in the step."""
        with self.lock:
            before = self.written.pop((step, node), 0)
            self.written[step, node] = before + rows
            if len(self.written) > _NODES:
                del self.written[next(iter(self.written))]
            return min(max(self.rows - before, 0), rows)

    def write(self, step: int, row: int, turn: dict[str, Any]) -> None:
        """Append a turn, of a step counted from 0; does nothing outside a run, or if an earlier worker has."""
        if self.path is None:
            return
        line = json.dumps({"step": step + 1, "row": row, **finite(turn)}, ensure_ascii=False)
        if _without_seconds(line) in self.there:
            return
        with self.lock:
            if not self.path.parent.is_dir():
                with contextlib.suppress(OSError):  # the line is dropped then, which is said
                    self.path.parent.mkdir(parents=True, exist_ok=True)
            events.add_or_drop(self.path, [line])


def _without_seconds(line: str) -> str:
    return line.strip().partition(', "seconds"')[0]  # no text has this: its quotes are escaped


_trajectories = Trajectories()


def trajectories() -> Trajectories:
    return _trajectories
