"""Exports a timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) opens.

A rank is a process with a thread for each track; where spans of a track overlap it has several. An arrow leads from a
publication of weights to each pull of it. Events of the run, such as failures, are marks over all ranks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from distflow.telemetry import timeline
from distflow.telemetry.timeline import MAIN, WEIGHTS, RunTimeline, Span

_TRACKS = (MAIN, timeline.TRANSFERS, timeline.PROMPTS, timeline.ROWS, timeline.TOOLS, WEIGHTS, timeline.CHECKPOINTS)
_MANY = (timeline.ROWS, timeline.TOOLS)
_THREADS = 1000  # most threads of a track
_MARKS = {"worker_started", "worker_ended", "worker_ready", "failure", "fault_injected", "left_out",
          "settings_changed", "state_restored", "reward_failed", "environment_failed",
          "weights_source_lost", "weights_late", "lease_lost"}
"""Kinds of events that are marked; the others are spans already."""
Event = dict[str, Any]


def write_trace(run: RunTimeline, events: Iterable[Event], file: Path) -> int:
    """Write the trace, compressed; return the number of its spans."""
    zero = min(span.start for span in run.spans)
    last = max(span.end for span in run.spans)
    marks = [event for event in events if event["event"] in _MARKS and zero <= event["time"] <= last]
    content = {"traceEvents": [*_names(run), *_slices(run, zero), *_arrows(run, zero), *_marks(marks, zero)],
               "displayTimeUnit": "ms", "otherData": {"begin": zero, "clock_offsets": run.offsets}}
    with gzip.open(file, "wt", encoding="utf-8") as out:
        json.dump(content, out)
    return len(run.spans)


def _names(run: RunTimeline) -> Iterator[Event]:
    for rank in sorted({(span.rank, span.role, span.host) for span in run.spans}):
        number, role, host = rank
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"rank {number} · {role} · {host}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
    for number, track, thread in sorted({(span.rank, span.track, thread) for span, thread in _threads(run.spans)}):
        name = {"name": (track or "activity") + (f" {thread % _THREADS + 1}" if track in _MANY else "")}
        yield {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": name}


def _threads(spans: list[Span]) -> Iterator[tuple[Span, int]]:
    """Yield each span with a thread in which it overlaps no other."""
    ends: dict[tuple[int, str], list[float]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        busy = ends.setdefault((span.rank, span.track), [])
        free = next((number for number, end in enumerate(busy) if end <= span.start), len(busy))
        busy[free:free + 1] = [span.end]
        yield span, _THREADS * _TRACKS.index(span.track) + free


def _slices(run: RunTimeline, zero: float) -> Iterator[Event]:
    for span, thread in _threads(run.spans):
        facts = {name: value for name, value in span.facts.items() if value not in ("", None)}
        yield {"ph": "X", "name": span.name or "between activities", "cat": span.facts.get("phase") or span.track,
               "pid": span.rank, "tid": thread, "ts": _microseconds(span.start - zero),
               "dur": _microseconds(span.seconds), "args": {"step": span.step, "attempt": span.attempt, **facts}}


def _arrows(run: RunTimeline, zero: float) -> Iterator[Event]:
    weights = [(span, thread) for span, thread in _threads(run.spans) if span.track == WEIGHTS]
    published = {span.facts["version"]: (span, thread) for span, thread in weights if span.name == "publish"}
    for pull, thread in weights:
        if pull.name == "pull" and pull.facts["version"] in published:
            publish, its_thread = published[pull.facts["version"]]
            arrow = {"name": "weights", "cat": WEIGHTS, "id": f"{pull.facts['version']}/{pull.rank}"}
            yield {**arrow, "ph": "s", "pid": publish.rank, "tid": its_thread,
                   "ts": _microseconds(publish.start - zero)}
            yield {**arrow, "ph": "f", "bp": "e", "pid": pull.rank, "tid": thread,
                   "ts": _microseconds(pull.end - zero)}


def _marks(events: Iterable[Event], zero: float) -> Iterator[Event]:
    for event in events:
        facts = {name: value for name, value in event.items() if name not in ("time", "event")}
        yield {"ph": "i", "s": "g", "name": event["event"], "pid": event["rank"], "tid": 0,
               "ts": _microseconds(event["time"] - zero), "args": facts}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)
