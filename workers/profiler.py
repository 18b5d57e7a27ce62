"""Records the steps that `profile` of the run file names with the PyTorch profiler: `profile/rankN-stepM.json.gz`.

Each file is a Chrome trace, which Perfetto opens. A node of the DAG is a range `node NAME` in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from distflow.telemetry import events


class StepProfiler:
    """Profiler of some of a rank's steps. What is not named costs nothing."""

    def __init__(self, steps: Collection[int], run: Path, rank: int):
        self.steps, self.run, self.rank = frozenset(steps), run, rank

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Surround step `step`, counted from 1. A step that is cut off leaves no file."""
        if step not in self.steps:
            yield
            return
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as profiler:
            yield
        file = self.run / "profile" / f"rank{self.rank}-step{step}.json.gz"
        file.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(file))
        events.record("profiled", of_step=step, file=file.name, megabytes=round(file.stat().st_size / 1e6, 1))
