"""Records what each rank does when: `timeline/rankN.jsonl`, for `distflow report --trace`, `distflow why` and reports.

    Timeline.enter   the rank's activity from now on, until the next one: its main track
    Timeline.span    something beside it: a transfer, a sampled row, an environment's answer, a pull of weights
    read             the spans of all ranks, by one clock

A thread writes a line each second. Times are microseconds of CLOCK_MONOTONIC, which the processes of a machine share.
Clocks of several machines are aligned when the files are read: no rank leaves a collective before the last has come to
it, and no weights are pulled before they are published, so that each step bounds the difference of two clocks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Required

from pydantic import ConfigDict, Field, PositiveFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from distflow.telemetry import events
from distflow.telemetry.run_reader import parsed

FOLDER = "timeline"
MAIN, TRANSFERS, ROWS, TOOLS, PROMPTS, WEIGHTS, CHECKPOINTS = (
    "", "transfers", "rows", "tools", "prompts", "weights", "checkpoints")
"""Tracks of a rank. On the main one each span begins where the one before it ends."""
_TRACKS = {MAIN, TRANSFERS, ROWS, TOOLS, PROMPTS, WEIGHTS, CHECKPOINTS}
_NUMBERED = {ROWS, TOOLS, PROMPTS}  # whose names end with a number
FINISHING = "finishing the step"  # ends with a collective of all ranks that train
_EVERY, _RANKS = 1.0, 64  # seconds between two lines, and up to how many ranks: more of them write less often
SILENT = 10.0  # seconds without a line after which a rank gives no sign, if lines come each second
_MOST = 20_000  # spans of a line; more are dropped and counted
_STEPS = re.compile(rb'\{"steps": \[(\d{1,15}), (\d{1,15})\], ')
_SET = 60.0  # seconds by which a machine's clock has been set at least
_Time = Annotated[int, Field(gt=-(2**62), lt=2**62)]  # microseconds
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_LARGEST = 64 << 20  # bytes of a file, after which another one is begun; the one before it is kept


class Timeline:
    """Timeline of this process. Its methods may be called from any thread, but `enter` only from one."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, **facts: Any) -> None:
        """Forget what was recorded. `facts`: of this process, in each line."""
        self.facts = facts
        self.path: Path | None = None
        self.spans: list[tuple[Any, ...]] = []
        self.activity: tuple[str, str, str, int, int] | None = None  # name, phase, node, step, start
        self.step, self.dropped, self.collectives = 0, 0, ""
        self.ended = threading.Event()

    def open(self, path: Path, rank: int, ranks: int = 1) -> None:
        """Write to this file from now on, by a thread of its own. ranks: of the run."""
        self.every = _EVERY * max(1.0, ranks / _RANKS)
        self.facts |= {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "every": self.every,
                       "base": time.time_ns() // 1000 - _now()}
        self.path = path
        self.write()  # so that a run of a moment is seen while it goes on
        threading.Thread(target=self._write_often, name="timeline", daemon=True).start()

    def close(self) -> None:
        """Write what is left."""
        self.ended.set()
        if self.activity is not None:
            self.enter("", "", self.step)
            self.activity = None
        self.write()

    def enter(self, name: str, phase: str, step: int, node: str = "") -> None:
        """Begin an activity, which ends the one before it."""
        now, before, self.step = _now(), self.activity, step
        self.activity = name, phase, node, step, now
        if before is not None:
            self._add(MAIN, before[0], before[3], before[4], now, {"phase": before[1], "node": before[2]})

    @contextlib.contextmanager
    def span(self, track: str, name: str, step: int | None = None, **facts: Any) -> Iterator[dict[str, Any]]:
        """Record the time of a block. `facts` and what the block adds to the dict it gets stand beside it."""
        start = _now()
        try:
            yield facts
        finally:
            self.add(track, name, start, step, **facts)

    def add(self, track: str, name: str, start: int, step: int | None = None, **facts: Any) -> None:
        """Record a span that ends now. start: as `now` has returned it. step: default: of the activity."""
        self._add(track, name, self.step if step is None else step, start, _now(), facts)

    def _add(self, track: str, name: str, step: int, start: int, end: int, facts: dict[str, Any]) -> None:
        if len(self.spans) < _MOST:
            self.spans.append((track, name, step, start, end - start, facts))
        else:
            self.dropped += 1

    def write(self) -> None:
        """Write a line, with what goes on, once rank 0 has made the run's folder. A full disk drops it."""
        if self.path is None or not self.path.parent.parent.is_dir():
            return
        spans, self.spans = self.spans, []
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            if os.path.getsize(self.path) > _LARGEST:
                self.path.replace(self.path.with_name(f"{self.path.stem}.older.jsonl"))
        steps = [span[2] for span in spans] or [self.step]
        line = {"steps": [min(steps), max(steps)], **self.facts, "time": _now(), "memory": _resident(),
                "now": self.activity, "spans": spans} | ({"collectives": self.collectives} if self.collectives else {})
        if self.dropped:
            line["dropped"], self.dropped = self.dropped, 0
        events.add_or_drop(self.path, [json.dumps(line)])

    def _write_often(self) -> None:
        while not self.ended.wait(self.every):
            self.write()


def _resident() -> int:
    """Return the bytes of memory that this process has."""
    with contextlib.suppress(OSError):  # another system
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def _now() -> int:
    return time.monotonic_ns() // 1000


now = _now
"""Return the time, as `Timeline.add` takes it: microseconds of CLOCK_MONOTONIC."""
_current = Timeline()


def current() -> Timeline:
    return _current


@dataclass(frozen=True)
class Span:
    """Something that a rank did. start: seconds since the epoch. facts: of a main activity its phase and node."""

    rank: int
    host: str
    role: str
    attempt: int
    track: str
    name: str
    step: int
    start: float
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.start + self.seconds

    @property
    def label(self) -> str:
        return self.facts.get("node") or self.name


@dataclass(frozen=True)
class RankTimeline:
    """What a rank does at the end of its file. seen: when it wrote last, in seconds since the epoch. memory: of its
    process, in bytes. version: of the weights that it published or loaded last, as far as the line tells. every:
    seconds between two lines. collectives: those that it stands in, for `collectives.absent`."""

    rank: int
    role: str
    host: str
    pid: int
    attempt: int
    seen: float
    memory: int
    version: int | None
    every: float
    collectives: str
    doing: Span | None

    def silence(self, now: float) -> float:
        """Return for how long the rank has given no sign; 0 if that is as it should be."""
        return now - self.seen if now - self.seen > SILENT * max(1.0, self.every) else 0.0


@dataclass
class RunTimeline:
    spans: list[Span]
    ranks: dict[int, RankTimeline]
    offsets: dict[str, float]  # seconds by which each host's clock was corrected
    dropped: int = 0

    def steps(self) -> list[int]:
        return sorted({span.step for span in self.spans if span.step > 0})


def read(folder: Path, steps: Collection[int] | None = None, most: int | None = None) -> RunTimeline:
    """Return a run's timeline, or that of some `steps` only, counted from 1, and of the first `most` ranks. A run
    without one has no spans."""
    files = [(_rank_of(file), file) for file in (folder / FOLDER).glob("rank*.jsonl")]
    chosen = sorted({rank for rank, _ in files})[:most]
    lines = [line for rank, file in sorted(files) if rank in chosen for line in _lines(file, steps)]
    bases: dict[str, list[int]] = {}
    for line in lines:
        bases.setdefault(line["host"], []).append(line["base"])
    base = {host: median(each) / 1e6 for host, each in bases.items()}
    spans = [Span(line["rank"], line["host"], line["role"], line["attempt"], track, name, step,
                  base[line["host"]] + start / 1e6, took / 1e6, facts)
             for line in lines for track, name, step, start, took, facts in line["spans"]]
    offsets = _offsets(spans)
    ranks = {line["rank"]: _rank(line, base[line["host"]] + offsets.get(line["host"], 0.0)) for line in
             sorted(lines, key=lambda line: base[line["host"]] + line["time"] / 1e6)}
    wanted = [replace(span, start=span.start + offsets[span.host]) for span in spans
              if steps is None or span.step in steps]
    return RunTimeline(wanted, ranks, offsets, sum(line.get("dropped", 0) for line in lines))


def _rank(line: dict[str, Any], base: float) -> RankTimeline:
    versions = [facts["version"] for track, name, *_, facts in line["spans"]
                if track == WEIGHTS and name != "pull" and "version" in facts]
    who = (line["rank"], line["role"], line["host"], line["pid"], line["attempt"], base + line["time"] / 1e6,
           line.get("memory", 0), versions[-1] if versions else None, line.get("every", _EVERY),
           line.get("collectives", ""))
    if not line["now"]:
        return RankTimeline(*who, None)
    name, phase, node, step, start = line["now"]
    return RankTimeline(*who, Span(line["rank"], line["host"], line["role"], line["attempt"], MAIN, name, step,
                                   base + start / 1e6, (line["time"] - start) / 1e6, {"phase": phase, "node": node}))


def newest(folder: Path, most: int | None = None) -> dict[int, RankTimeline]:
    """Return what each rank, or the first `most`, does now, from the last line of its file: of a run that goes on."""
    files = sorted((folder / FOLDER).glob("rank*[0-9].jsonl"), key=_rank_of)[:most]
    lines = ((file.stat().st_mtime, _whole(_last_line(file))) for file in files)
    return {line["rank"]: _rank(line, _base(line, written)) for written, line in lines if line}


def _base(line: dict[str, Any], written: float) -> float:
    """Return the time at which the clock of the last line of a file began, in seconds since the epoch: by when the file
    was written, if the machine's clock was set since the process began."""
    seen = (line["base"] + line["time"]) / 1e6
    return line["base"] / 1e6 + (written - seen if abs(written - seen) > _SET else 0.0)


def _last_line(file: Path) -> bytes:
    """Return the last whole line of a file, whatever its length."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        for back in itertools.accumulate(itertools.repeat(1 << 16), lambda step, _: 4 * step):
            stream.seek(max(0, size - back))
            *whole, _torn = stream.read(size).split(b"\n")
            if len(whole) > 1 or (back >= size and whole):
                return whole[-1]
            if back >= size:
                return b""
    return b""


def _rank_of(file: Path) -> int:
    return int(file.name.removeprefix("rank").partition(".")[0])


def _lines(file: Path, steps: Collection[int] | None) -> Iterator[dict[str, Any]]:
    """Yield the lines with any of these steps, without reading the others, and the last one: a long run has many."""
    texts = file.read_bytes().split(b"\n")
    for number, text in enumerate(texts):
        found = _STEPS.match(text)
        if (steps is None or number >= len(texts) - 2 or not found or _meets(steps, int(found[1]), int(found[2]))) and (
                line := _whole(text)):
            yield line


def _meets(steps: Collection[int], first: int, last: int) -> bool:
    if last - first < len(steps):
        return any(step in steps for step in range(first, last + 1))
    return any(first <= step <= last for step in steps)


class _Line(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(allow_inf_nan=False)  # type: ignore[misc]
    rank: Required[_Count]
    role: Required[str]
    host: Required[str]
    pid: Required[_Count]
    attempt: Required[_Count]
    base: Required[_Time]
    time: Required[_Time]
    now: Required[tuple[str, str, str, _Time, _Time] | None]
    spans: Required[list[tuple[str, str, _Time, _Time, _Time, dict[str, Any]]]]
    memory: _Count
    every: PositiveFloat
    collectives: str
    dropped: _Count


_LINE = TypeAdapter(_Line)


def _whole(text: bytes) -> dict[str, Any] | None:
    """Return a line, with the spans that are of a known form; None for one that is torn or foreign."""
    try:
        line: Any = _LINE.validate_python(parsed(text))
    except ValidationError:
        return None
    return {**line, "spans": [span for span in line["spans"] if _is_known(span[0], span[1], span[5])]}


def _is_known(track: str, name: str, facts: dict[str, Any]) -> bool:
    if track == WEIGHTS:
        return name not in ("publish", "pull") or isinstance(facts.get("version"), int)
    return track in _TRACKS and (track not in _NUMBERED or name.rpartition(" ")[2].isdecimal())


def _offsets(spans: list[Span]) -> dict[str, float]:
    """Return by how much each host's clock is to be corrected, in seconds, by the clock of rank 0's host: not at all if
    no order of two events contradicts that, and otherwise to the middle of what is possible."""
    if not spans:
        return {}
    reference = min(spans, key=lambda span: span.rank).host
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for (host, earlier), (other, later) in _ordered(spans):
        if host == reference != other:
            low[other] = max(low.get(other, -math.inf), earlier - later)
        elif other == reference != host:
            high[host] = min(high.get(host, math.inf), later - earlier)
    return {host: _nearest(low.get(host, -math.inf), high.get(host, math.inf))
            for host in {span.host for span in spans}}


def _nearest(low: float, high: float) -> float:
    if low <= 0 <= high:
        return 0.0
    return (low + high) / 2 if math.isfinite(low + high) else low if math.isfinite(low) else high


_Moment = tuple[str, float]  # host, and time by its clock


def _ordered(spans: list[Span]) -> Iterator[tuple[_Moment, _Moment]]:
    """Yield pairs of moments of two hosts of which the first cannot have been after the second."""
    collectives: dict[tuple[int, int], list[Span]] = {}
    published: dict[Any, list[Span]] = {}
    for span in spans:
        if span.track == MAIN and span.name == FINISHING:
            collectives.setdefault((span.attempt, span.step), []).append(span)
        elif span.track == WEIGHTS and span.name == "publish":
            published.setdefault(span.facts.get("version"), []).append(span)
    for ranks in collectives.values():
        for one, other in itertools.permutations(_of_each_host(ranks), 2):
            yield (one.host, one.start), (other.host, other.end)
    for pull in (span for span in spans if span.track == WEIGHTS and span.name == "pull"):
        for publish in published.get(pull.facts.get("version"), ()):
            yield (publish.host, publish.start), (pull.host, pull.end)


def _of_each_host(spans: Iterable[Span]) -> list[Span]:
    """Return for each host the latest to begin: of it the bounds are tightest."""
    return [*{span.host: span for span in sorted(spans, key=lambda span: span.start)}.values()]
