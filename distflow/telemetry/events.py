"""Appends events to `events.jsonl`, one JSON object a line, from every rank; and lines to other files of a run.

A full disk does not end a run: lines that cannot be written are dropped and counted, and the files stay valid JSON
Lines. Files that are no such log are written by `files.write_atomically`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from distflow.telemetry.screen import fitting, printable

_dropped: Counter[Path] = Counter()
_SCREEN = Path("standard output")


def add(path: Path, *texts: str) -> None:
    """Append lines at once, all or none: processes do not mix theirs. Raises OSError: they cannot be written."""
    # Half of a surrogate pair, which UTF-8 cannot hold, becomes `\udXXX`: JSON's own way to write it.
    data = memoryview("".join(f"{text}\n" for text in texts).encode(errors="backslashreplace"))
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    written = 0
    try:
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        _undo(file, written)
        raise
    finally:
        os.close(file)


def add_or_drop(path: Path, texts: Iterable[str]) -> None:
    """Append lines at once, or drop them where they cannot be written, at first with a warning."""
    lines = [*texts]
    try:
        add(path, *lines)
    except OSError as error:
        if not _dropped[path]:
            show(f"warning: {path} cannot be written: {error.strerror}. Until it can, its lines are dropped; the run "
                 "goes on.", sys.stderr)
        _dropped[path] += len(lines)


def dropped() -> int:
    return _dropped.total()


def show(text: str, stream: TextIO | None = None) -> None:
    """Print a text if possible, without control characters: standard output may be a file on a full disk, or closed."""
    stream = stream or sys.stdout
    try:
        print(fitting(printable(text), stream), file=stream, flush=True)
    except OSError:
        _dropped[_SCREEN] += 1


def leave(code: int) -> NoReturn:
    """End this process with an exit code, even if its last lines cannot be printed."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        os._exit(code)  # Python would try again, and exit with 120
    gc.freeze()  # Python looks for cycles once more as it ends: seconds, where torch is loaded
    sys.exit(code)


def _undo(file: int, written: int) -> None:
    """Remove a partial line, unless another process has written after it."""
    end = os.lseek(file, 0, os.SEEK_CUR)
    if written and os.fstat(file).st_size == end:
        os.ftruncate(file, end - written)


_LONGEST = 12_000  # characters of one value: whole tracebacks


class Events:
    def __init__(self) -> None:
        self.path: Path | None = None
        self.rank = self.step = 0

    def open(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank

    def record(self, kind: str, **facts: Any) -> None:
        """Append an event; does nothing outside a run."""
        if self.path is None:
            return
        short = {name: value[:_LONGEST] if isinstance(value, str) else value for name, value in facts.items()}
        event = {"time": round(time.time(), 3), "step": self.step, "rank": self.rank, "event": kind, **short}
        add_or_drop(self.path, [json.dumps(event, ensure_ascii=False)])


_current = Events()


def current() -> Events:
    return _current


def record(kind: str, **facts: Any) -> None:
    """Append an event to this rank's log; `facts` are its JSON keys."""
    _current.record(kind, **facts)
