"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import atexit
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SHOWN = (("reward/mean", "reward", ".3f"), ("environment/reward", "reward", ".3f"), ("loss", "loss", "+.4f"),
          ("response/length", "length", ".1f"), ("tokens_per_second", "tok/s", ",.0f"))


class StepProgress:
    """Reports each step of a run."""

    def __init__(self, title: str, steps: int, done: int):
        self.title, self.steps, self.done = title, steps, done
        self.first, self.started = done, time.monotonic()
        self.bar = self._bar() if sys.stdout.isatty() else None

    def _bar(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TextColumn("{task.fields[numbers]}"), TimeRemainingColumn())
        bar = Progress(*columns, console=Console())
        self.task = bar.add_task(self.title, total=self.steps, completed=self.done, numbers="")
        bar.start()
        atexit.register(bar.stop)  # a run that fails must give the terminal its cursor back
        return bar

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self.bar:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def step(self, metrics: dict[str, float]) -> None:
        """One more step is done."""
        self.done += 1
        numbers = "  ".join(f"{label} {format(metrics[name], form)}" for name, label, form in _SHOWN if name in metrics)
        if self.bar:
            self.bar.update(self.task, completed=self.done, numbers=numbers)
        else:
            left = (time.monotonic() - self.started) / (self.done - self.first) * (self.steps - self.done)
            print(f"{self.title}  step {self.done}/{self.steps}  {numbers}  left {_clock(left)}", flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar:
            self.bar.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
