"""Reads the files of a run's folder, also while the run goes on: for watch, why, reports, loggers and Python.

    parsed       a line of any of these files; None for one that is torn or foreign
    Tail         new lines of a file that grows; EventTail those of events.jsonl
    RunReader    a run's files by their names: metrics by step, events, samples, settings, summary
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from distflow.config.yaml_syntax import BoundedLoader
from distflow.errors import Diagnostic, InvalidInput, listing, nearest
from distflow.telemetry.learning_series import Doubt
from distflow.telemetry.metrics import HISTOGRAMS
from distflow.telemetry.run_lock import in_use

SUMMARY = "summary.json"  # exists once a run has finished
_RENAMED_EVENTS = {"worker rests": "worker_scaled_down", "worker useful": "worker_caught_up"}
_SETTINGS = ("dag.yaml", "run.yaml")
_RANKS, _STEPS, _LATEST, _LARGEST = 2**31, 2**53, 1e11, 1e39  # what ranks, steps, times and metrics stay below
_BACK = 60.0  # seconds by which a rank's clock is set back at least; ranks record their events in order
_FIELDS: dict[str, dict[str, Any]] = {
    "failure": {"group": "", "ranks": [-1, -1], "attempt": 0, "failed_step": 0, "phase": "", "what": "", "verdict": "",
                "details": "", "seen_after": 0.0},
    "worker_started": {"attempt": 0},
    "worker_ready": {"attempt": 0, "host": "", "pid": 0, "began": 0, "seconds": {"connect": 0.0, "load": 0.0}},
    "run_stopped": {"after_step": 0}, "settings_changed": {"settings": {}}}
"""Fields of events that are read, with what stands for one that is missing or of another type."""
_DOUBT = {"text": "", "kind": "", "share": 0.0, "change": ""}
Row = dict[str, Any]


def parsed(line: bytes | str) -> Row | None:
    """Return what a line of JSON Lines holds; None if it is no object, as where a crash has torn it. Numbers that JSON
    does not have are None."""
    try:
        content = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


class Tail:
    """New whole lines of a JSON Lines file that grows. Lines that are damaged or of no step are passed over; a file
    that is missing has none. A file that a resumed run has cut is read again from its beginning."""

    def __init__(self, file: Path):
        self.file, self.read, self.inode = file, 0, 0

    def new(self) -> Iterator[Row]:
        if not self.file.is_file():
            return
        with self.file.open("rb") as stream:  # as bytes: text has more line ends than JSON Lines
            stat = os.fstat(stream.fileno())
            if stat.st_size < self.read or stat.st_ino != self.inode:
                self.read, self.inode = 0, stat.st_ino
            stream.seek(self.read)
            *whole, _ = stream.read().split(b"\n")
        self.read += sum(len(line) + 1 for line in whole)
        for line in whole:
            content = parsed(line)
            if content is not None and type(step := content.get("step")) is int and 0 <= step < _STEPS:
                yield content


class EventTail(Tail):
    """New events of a run by the names that they have now; older versions have recorded some in words. What an event
    lacks, or has of another type, has the value of `_FIELDS`. A clock that was set back continues where it was."""

    def __init__(self, file: Path):
        super().__init__(file)
        self.told: dict[int, float] = {}  # newest time of each rank, by its clock
        self.shift: dict[int, float] = {}  # seconds by which each rank's clock is corrected
        self.now = 0.0  # newest time of all ranks

    def new(self) -> Iterator[Row]:
        for line in super().new():
            rank, moment, name = line.get("rank"), line.get("time"), line.get("event")
            if type(rank) is not int or not is_number(moment) or type(name) is not str:
                continue
            if not (0 <= rank < _RANKS and 0 <= moment < _LATEST):
                continue
            name = _RENAMED_EVENTS.get(name, name.replace(" ", "_"))
            fields = {field: usual if not _is_like(line.get(field), usual) else line[field]
                      for field, usual in _FIELDS.get(name, {}).items()}
            yield {**line, **fields, "event": name, "time": self._corrected(rank, moment)}

    def _corrected(self, rank: int, moment: float) -> float:
        if moment < self.told.get(rank, moment) - _BACK:
            self.shift[rank] = self.now - moment
        self.told[rank] = moment
        corrected = moment + self.shift.get(rank, 0.0)
        self.now = max(self.now, corrected)
        return corrected


class RunReader:
    """The files of a run, which need not be there yet."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def of(cls, folder: Path, usage: str) -> RunReader:
        """Return the reader of a folder that a user has named; `usage` shows how. Raises InvalidInput: no run's."""
        if not folder.exists():
            raise no_run(folder)
        if not (folder / "launch.json").is_file():
            raise InvalidInput(Diagnostic(f"{folder} is not the folder of a run: it has no launch.json", None,
                                          f"Name the folder, as  {usage}"))
        return cls(folder)

    def tail(self, name: str) -> Tail:
        return (EventTail if name == "events" else Tail)(self.folder / f"{name}.jsonl")

    def rows(self, name: str) -> list[Row]:
        """Return the lines of `samples`, `validation` or `events`, as they are."""
        return list(self.tail(name).new())

    def steps(self) -> list[dict[str, float]]:
        """Return the numbers of each step, in one table: validation has lines of its own. `step` is among them."""
        found: dict[int, dict[str, float]] = {}
        for line in self.tail("metrics").new():
            found.setdefault(line["step"], {}).update(numbers(line))
        return [found[step] for step in sorted(found)]

    def timed_steps(self) -> list[dict[str, float]]:
        """Return the steps that are done: all but the validation before the first one."""
        return [values for values in self.steps() if "seconds" in values]

    @property
    def summary(self) -> Row:
        """Results of a run that has finished; empty before."""
        return self._json(SUMMARY)

    @property
    def plan(self) -> Row:
        return self._json("plan.json")

    @property
    def state(self) -> str:
        """What the run does: `is running`, `has finished`, or `is not running`."""
        if (self.folder / SUMMARY).is_file():
            return "has finished"
        return "is running" if in_use(self.folder) else "is not running"

    def doubts(self) -> list[Doubt]:
        """Return what was doubted of the run's inputs before it started; older versions have recorded texts alone."""
        found = (doubt for event in self.rows("events") if event["event"] == "preflight"
                 for doubt in event.get("doubts") or ())
        return [Doubt(*(doubt[key] for key in _DOUBT)) if _is_like(doubt, _DOUBT) else Doubt(str(doubt))
                for doubt in found]

    def settings(self) -> dict[str, str]:
        """Return the settings of the run as `section.key: value`."""
        found: dict[str, str] = {}
        for name in _SETTINGS:
            _flatten(self._yaml(name), "", found)
        return found

    @property
    def dag(self) -> Row:
        """The DAG of the run, with its settings."""
        return self._yaml("dag.yaml")

    def _yaml(self, name: str) -> Row:
        try:
            content = yaml.load((self.folder / name).read_text(encoding="utf-8"), BoundedLoader)
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return content if isinstance(content, dict) else {}

    def _json(self, name: str) -> Row:
        try:
            return parsed((self.folder / name).read_bytes()) or {}
        except OSError:
            return {}


def no_run(folder: Path) -> InvalidInput:
    """Return the error of a run's folder that does not exist: which was probably meant, and what lies beside it."""
    parent = Path("runs") if folder.name == str(folder) and Path("runs").is_dir() else folder.parent
    runs = sorted(file.parent.name for file in parent.glob("*/launch.json"))
    near = folder.name if folder.name in runs else nearest(folder.name, runs)
    hint = (f"Did you mean `{parent / near}`?" if near else "", listing(runs, f"Runs in {parent}"))
    return InvalidInput(Diagnostic(f"there is no run folder `{folder}`", None, " ".join(filter(None, hint))))


def numbers(line: Row) -> dict[str, float]:
    """Return the values of a line that are numbers."""
    return {name: value for name, value in line.items() if is_number(value)}


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number, no larger than any metric."""
    return type(value) in (int, float) and abs(value) < _LARGEST


def _is_like(value: Any, usual: Any) -> bool:
    """Return whether a value has the form of another one: a number, a text, a list of as many, or an object with its
    keys."""
    if isinstance(usual, dict):
        return isinstance(value, dict) and all(_is_like(value.get(key), each) for key, each in usual.items())
    if isinstance(usual, list):
        return isinstance(value, list) and len(value) == len(usual) and all(map(_is_like, value, usual))
    if type(usual) is int:
        return type(value) is int and abs(value) < _STEPS
    return is_number(value) if type(usual) is float else type(value) is type(usual)


def histograms(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Return the metrics that are no counts of `HISTOGRAMS`, and these as {name: {number: count}}."""
    plain, found = dict(values), dict[str, dict[int, float]]()
    for name in values:
        histogram, _, number = name.rpartition("/")
        if histogram in HISTOGRAMS and number.isdecimal():
            found.setdefault(histogram, {})[int(number)] = plain.pop(name)
    return plain, found


def is_validation(line: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl is of a validation, which may come after those of newer steps."""
    return any(name.startswith("validation/") for name in line)


def changed_settings(before: dict[str, str], after: dict[str, str]) -> dict[str, list[str]]:
    """Return the settings that are not as they were, as [before, after]; what is switched off has no settings."""
    return {key: [before.get(key, "unset"), after.get(key, "unset")] for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)}


def _flatten(content: Any, prefix: str, found: dict[str, str]) -> None:
    if isinstance(content, dict) and (content or not prefix):
        for key, value in content.items():
            _flatten(value, f"{prefix}.{key}" if prefix else str(key), found)
    else:
        found[prefix] = content if isinstance(content, str) else json.dumps(content, default=str)
