"""Conversations, written down turn by turn: `trajectories/rankN.jsonl` of the run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from distflow.observe.folder import append, finite, forget_after


class Trajectories:
    """One rank's file. It only grows, and has a turn's line as soon as the turn is over.

    A line: `step` (from 1, as in metrics.jsonl), `row` (id), `turn` (from 1), `text`, `observation`, `tokens` (that
    the model sampled in this turn), `reward`, `done`, `seconds` (of the environment), and `failed` where it did.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.file: TextIO | None = None
        self.rows, self.step = 0, 0

    def open(self, path: Path, rows: int, resumed_at: int | None = None) -> None:
        """Write to `path`. `rows`: of so many of a step's rows, its first ones, functions should write the turns.

        A resumed run writes its steps anew.
        """
        if resumed_at is not None:
            forget_after(path, resumed_at)
        self.path, self.rows = path, rows

    def start(self, step: int) -> None:
        """`step` counts from 0."""
        self.step = step + 1

    def write(self, row: int, turn: dict[str, Any]) -> None:
        """Add a turn; does nothing outside a run."""
        if self.path is None:
            return
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = append(self.path)
        self.file.write(json.dumps({"step": self.step, "row": row, **finite(turn)}, ensure_ascii=False) + "\n")
        self.file.flush()


_trajectories = Trajectories()


def trajectories() -> Trajectories:
    """Those of this rank; node functions report here."""
    return _trajectories
