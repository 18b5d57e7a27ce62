"""Reads what the PyTorch profiler has written of a run's steps, for `distflow report --trace`; loads no torch."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from distflow.telemetry.run_reader import parsed
from distflow.telemetry.timeline import RunTimeline

_PROCESSES = 1_000_000  # process ids of profiles in a trace: this and the rank, so that none is a rank's own
Event = dict[str, Any]


def profile_file(run: Path, rank: int, step: int) -> Path:
    return run / "profile" / f"rank{rank}-step{step}.json.gz"


def profiled_events(run: Path, spans: RunTimeline, steps: Collection[int], zero: float) -> Iterator[Event]:
    """Yield the events of all profiles of `steps`, each rank's as a process of its own, by the clock of `spans`.
    `zero`: seconds since the epoch at which the trace begins."""
    hosts = {span.rank: span.host for span in spans.spans}
    for rank, host in sorted(hosts.items()):
        process, threads = _PROCESSES + rank, dict[Any, int]()
        whole = ((step, found) for step in steps if (found := _read(profile_file(run, rank, step))))
        for index, (step, content) in enumerate(whole):
            if not index:
                yield {"ph": "M", "name": "process_name", "pid": process,
                       "args": {"name": f"rank {rank} · PyTorch profiler"}}
                yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": rank}}
            shift = content.get("baseTimeNanoseconds", 0) / 1e3 + 1e6 * (spans.offsets.get(host, 0.0) - zero)
            yield from _moved(content.get("traceEvents", []), process, threads, f"{rank}/{step}", shift)


def _read(file: Path) -> dict[str, Any]:
    """Return a profile; nothing of one that is missing, or that its rank has not written whole."""
    with contextlib.suppress(OSError, EOFError), gzip.open(file) as content:
        return parsed(content.read()) or {}
    return {}


def _moved(events: list[Event], process: int, threads: dict[Any, int], prefix: str, shift: float) -> Iterator[Event]:
    """Yield a profile's events as those of one process. `threads`: ids of its threads and of the streams of its GPU,
    which the profiler counts as another process. Ids of arrows are told apart by `prefix`."""
    for event in events:
        if event["ph"] == "M" and event["name"] != "thread_name" or "tid" not in event:
            continue
        thread = threads.setdefault((event["pid"], event["tid"]), len(threads))
        moved = {**event, "pid": process, "tid": thread}
        if "ts" in event:
            moved["ts"] = round(event["ts"] + shift, 3)
        if "id" in event:
            moved["id"] = f"{prefix}/{event['id']}"
        yield moved
