"""Shows a run on a terminal: how far it is, what it learns, what each rank does, and what has failed.

It reads the run's folder, so that it may be started anywhere where the folder can be read, at any time, and costs the
run nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distflow.telemetry import timeline
from distflow.telemetry.progress import Terminal, typical_seconds
from distflow.telemetry.run_reader import RunReader, is_validation, numbers
from distflow.telemetry.timeline import RankTimeline

_EVERY = 1.0  # seconds between two looks
_CURVES = (("reward/mean", "reward"), ("environment/reward", "reward"), ("loss", "loss"), ("response/length", "length"),
           ("policy/entropy", "entropy"), ("tokens_per_second", "tokens/s"))
_BARS = "▁▂▃▄▅▆▇█"
_SPARK = 30  # columns of a curve
_RANKS = 24  # most ranks that have a row
_FAILURES = 6  # newest events that are shown
_SHOWN = {"failure", "fault_injected", "left_out", "worker_started", "settings_changed", "checkpoint_damaged",
          "checkpoint_upload_failed",
          "reward_failed", "environment_failed", "weights_source_lost", "weights_late"}


@dataclass
class RunView:
    """What is known of a run, from its files."""

    folder: Path
    curves: dict[str, deque[tuple[int, float]]] = field(default_factory=dict)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_FAILURES))
    versions: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, RankTimeline] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        self.reader = RunReader.of(self.folder, "distflow watch runs/grpo-1")
        self.metrics, self.event_lines = self.reader.tail("metrics"), self.reader.tail("events")
        steps = self.reader.settings().get("steps", "")
        self.steps = int(steps) if steps.isdecimal() else 0

    def look(self) -> None:
        for line in self.metrics.new():
            for name, value in numbers(line).items():
                curve = self.curves.setdefault(name, deque(maxlen=10_000))
                while curve and curve[-1][0] >= line["step"]:  # a resumed run does them again
                    curve.pop()
                curve.append((line["step"], value))
            self.step = max(self.step, line["step"]) if is_validation(line) else line["step"]
        self.events.extend(event for event in self.event_lines.new() if event["event"] in _SHOWN and (
            event["event"] != "worker_started" or event.get("attempt")))
        self.ranks = timeline.newest(self.folder, _RANKS)
        self.versions |= {number: rank.version for number, rank in self.ranks.items() if rank.version is not None}

    @property
    def state(self) -> str:
        state = self.reader.state
        return f"{state}: it was stopped or has failed" if state == "is not running" else state

    def seconds_left(self) -> float | None:
        seconds = [value for _, value in list(self.curves.get("seconds", ()))[-20:]]
        return typical_seconds(seconds) * (self.steps - self.step) if seconds else None


def sparkline(values: list[float]) -> str:
    """Draw values as bars of eight heights, each the mean of as many values."""
    if not values:
        return ""
    parts = [values[len(values) * part // _SPARK : len(values) * (part + 1) // _SPARK] for part in range(_SPARK)] \
        if len(values) > _SPARK else [[value] for value in values]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def page(view: RunView) -> Group:
    """Return the page as it stands, for any width from 80 columns on."""
    return Group(_head(view), _curves(view), Text(), _ranks(view), *_failures(view))


def _head(view: RunView) -> RenderableType:
    left = view.seconds_left()
    remaining = f"left {_duration(left)}" if left and view.state == "is running" else view.state
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(view.folder.name, style="bold"), f"step {view.step}/{view.steps}",
                 ProgressBar(total=max(view.steps, 1), completed=view.step, width=20), remaining)
    return head


def _curves(view: RunView) -> Table:
    names = [(name, f"validation {name.partition('/')[2]}") for name in view.curves if name.startswith("validation/")]
    table = Table.grid(padding=(0, 2))
    seen: set[str] = set()
    for name, label in (*names, *_CURVES):
        values = [value for _, value in view.curves.get(name, ())]
        if values and label not in seen:
            seen.add(label)
            table.add_row(Text(label, style="dim"), Text(f"{values[-1]:,.4g}", justify="right"), sparkline(values))
    return table


def _ranks(view: RunView) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "role", "doing", "for", "step", "weights", "memory"):
        table.add_column(name, no_wrap=name != "doing", overflow="ellipsis")
    now, running = time.time(), view.state == "is running"
    for number, rank in view.ranks.items():
        silent = running and rank.silence(now) > 0
        doing = rank.doing.name.replace("computing node ", "") if rank.doing else \
            "idle" if running else "has ended"
        spent = _duration(rank.seen - rank.doing.start) if rank.doing else ""
        version = view.versions.get(number)
        if silent:
            doing = f"no sign for {_duration(now - rank.seen)}; was: {doing}"
        table.add_row(str(number), rank.role, doing, spent,
                      str(rank.doing.step) if rank.doing else "", "" if version is None else f"v{version}",
                      f"{rank.memory / 2**30:.2f} GiB", style="red" if silent else "")
    return table


def _failures(view: RunView) -> Iterator[RenderableType]:
    if view.events:
        yield Text()
    for event in view.events:
        at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        facts = str(event.get("what") or event.get("reason") or event.get("why") or "")
        kind = f"{event['event'].replace('_', ' ')}{' again' * (event['event'] == 'worker_started')}"
        yield Text(f"{at}  rank {event['rank']}  {kind}{': ' if facts else ''}{facts.splitlines()[0] if facts else ''}",
                   style="yellow", no_wrap=True, overflow="ellipsis")


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d} min"


def watch(folder: Path, once: bool = False, console: Console | None = None) -> None:
    """Show a run until it ends, or its state once. Raises InvalidInput: it is no run's folder."""
    view, console = RunView(folder), console or Terminal()
    view.look()
    if once or not console.is_terminal:
        console.print(page(view))
        return
    with Live(page(view), console=console, auto_refresh=False) as live:
        while view.state == "is running":
            time.sleep(_EVERY)
            view.look()
            live.update(page(view), refresh=True)
