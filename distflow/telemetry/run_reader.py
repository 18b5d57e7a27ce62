"""Reads the files of a run's folder, also while the run goes on: for watch, why, reports, loggers and Python.

    Tail         new lines of a file that grows; EventTail those of events.jsonl
    RunReader    a run's files by their names: metrics by step, events, samples, settings, summary
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from distflow.errors import Diagnostic, InvalidInput, listing, nearest
from distflow.telemetry.run_lock import in_use

SUMMARY = "summary.json"  # exists once a run has finished
_AGE = re.compile(r"staleness/tokens/\d+")
_RENAMED_EVENTS = {"worker rests": "worker_scaled_down", "worker useful": "worker_caught_up"}
_SETTINGS = ("dag.yaml", "run.yaml")
Row = dict[str, Any]


class Tail:
    """New whole lines of a JSON Lines file that grows. Damaged lines are passed over; a file that is missing has none.
    A file that a resumed run has cut is read again from its beginning."""

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
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, dict):
                yield content


class EventTail(Tail):
    """New events of a run by the names that they have now; older versions have recorded some in words."""

    def new(self) -> Iterator[Row]:
        for event in super().new():
            name = str(event.get("event"))
            yield {**event, "event": _RENAMED_EVENTS.get(name, name.replace(" ", "_"))}


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
            content = yaml.safe_load((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return content if isinstance(content, dict) else {}

    def _json(self, name: str) -> Row:
        try:
            content = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def no_run(folder: Path) -> InvalidInput:
    """Return the error of a run's folder that does not exist: which was probably meant, and what lies beside it."""
    parent = Path("runs") if folder.name == str(folder) and Path("runs").is_dir() else folder.parent
    runs = sorted(file.parent.name for file in parent.glob("*/launch.json"))
    near = folder.name if folder.name in runs else nearest(folder.name, runs)
    hint = (f"Did you mean `{parent / near}`?" if near else "", listing(runs, f"Runs in {parent}"))
    return InvalidInput(Diagnostic(f"there is no run folder `{folder}`", None, " ".join(filter(None, hint))))


def numbers(line: Row) -> dict[str, float]:
    """Return the values of a line of metrics.jsonl that are finite numbers."""
    return {name: value for name, value in line.items() if isinstance(value, int | float) and math.isfinite(value)}


def histograms(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Return the metrics that are no counts by age, and these as {name: {age: count}}."""
    plain, found = dict(values), dict[str, dict[int, float]]()
    for name in filter(_AGE.fullmatch, values):
        ages, _, age = name.rpartition("/")
        found.setdefault(ages, {})[int(age)] = plain.pop(name)
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
