"""Shows a run's progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import atexit
import statistics
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.segment import Segment
from rich.table import Column

from distflow.telemetry import events
from distflow.telemetry.screen import printable, terminal

_SHOWN = (("reward/mean", "reward", ".3f"), ("environment/reward", "reward", ".3f"), ("loss", "loss", "+.4f"),
          ("response/length", "length", ".1f"), ("tokens_per_second", "tok/s", ",.0f"))
_LARGE = 1e7
"""Numbers from which on their digits would push the others off the line."""
_BAR, _BESIDE = 10, 12  # columns of the bar itself, and of the time left with the space between all parts
_RECENT, _OUTAGE = 20, 3.0
"""Steps by which the time left is estimated, and how many times the median one of them may take to count."""
_LONG, _EVERY, _SILENCE = 100, 10, 10.0
"""Without a terminal a run of more steps than `_LONG` has a line each tenth step, and one after so many seconds."""


def typical_seconds(recent: Collection[float]) -> float:
    """Return the mean duration of recent steps, without those that an outage or a slow start has stretched."""
    longest = _OUTAGE * statistics.median_low(recent)
    return statistics.mean(seconds for seconds in recent if seconds <= longest)


class Terminal(Console):
    """Console on standard output whose texts are `printable`; what moves its cursor is rich's own."""

    def __init__(self) -> None:
        super().__init__(file=terminal(), markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class StepProgress:
    def __init__(self, title: str, steps: int, done: int):
        self.title, self.steps, self.done = title, steps, done
        self.first, self.shown = done, time.monotonic()
        self.ended = 0.0  # when the last step was done; 0.0 before the first
        self.seconds, self.between = deque[float](maxlen=_RECENT), deque[float](maxlen=5 * _RECENT)
        """Durations of recent steps, and the times between two of them: validations, checkpoints."""
        self.bar = self._bar() if sys.stdout.isatty() else None

    def _bar(self) -> Progress:
        column = Column(no_wrap=True)
        name, numbers, left = (TextColumn(f"{{task.{each}}}", table_column=column, markup=False)
                               for each in ("description", "fields[numbers]", "fields[left]"))
        columns = (name, BarColumn(_BAR), MofNCompleteColumn(table_column=column), numbers, left)
        bar = Progress(*columns, console=Terminal())
        self.task = bar.add_task(self.title, total=self.steps, completed=self.done, numbers="", left="")
        bar.start()
        atexit.register(bar.stop)  # a run that fails must give the terminal its cursor back
        return bar

    def say(self, text: str) -> None:
        if self.bar:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            events.show(text)

    def step(self, metrics: dict[str, float]) -> None:
        self.done += 1
        left = f"left {_clock(self._left(metrics.get('seconds', 0.0)))}"
        numbers = [f"{label} {format(value, form if abs(value) < _LARGE else '.3g')}"
                   for name, label, form in _SHOWN if (value := metrics.get(name)) is not None]
        if self.bar:
            self.bar.update(self.task, completed=self.done, left=left,
                            numbers=self._fitting(numbers, self.bar.console.width - len(left) + 7))
        elif self._is_due():
            self.shown = time.monotonic()
            events.show(f"{self.title}  step {self.done}/{self.steps}  {'  '.join(numbers)}  {left}")

    def _left(self, seconds: float) -> float:
        """Return the seconds that the steps left will take, after one of `seconds`."""
        now = time.monotonic()
        if self.ended:
            self.between.append(max(0.0, now - self.ended - seconds))
        self.ended = now
        self.seconds.append(seconds)
        pauses = statistics.mean(self.between) if self.between else 0.0
        return (typical_seconds(self.seconds) + pauses) * (self.steps - self.done)

    def _fitting(self, numbers: list[str], width: int) -> str:
        counts = 2 * len(str(self.steps)) + 1
        room = width - len(self.title) - _BAR - counts - _BESIDE
        while numbers and len("  ".join(numbers)) > room:
            numbers = numbers[:-1]
        return "  ".join(numbers)

    def _is_due(self) -> bool:
        return (self.steps <= _LONG or self.done % _EVERY == 0 or self.done in (self.first + 1, self.steps)
                or time.monotonic() - self.shown >= _SILENCE)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
