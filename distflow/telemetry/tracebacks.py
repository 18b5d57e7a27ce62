"""Shows what went wrong where users look: tracebacks without foreign frames, and the cause in torchrun's summary.

Tracebacks are shortened as text, since they come from other processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path

from distflow.errors import is_users, shown
from distflow.telemetry.files import write_atomically
from distflow.telemetry.screen import printable

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n(?P<code>(?:    .*\n)*)',
                    re.MULTILINE)
_HEAD = "Traceback (most recent call last):\n"


def users_part(trace: str) -> tuple[str, int]:
    """Return a traceback without the frames of distflow and of libraries, and how many these are. The last frame of
    each part stays, since the error was raised there; so do all where none is the user's."""
    parts = trace.split(_HEAD)
    shortened = [_shortened(part) for part in parts]
    if not any(users for _, _, users in shortened):
        return trace, 0
    return _HEAD.join(text for text, _, _ in shortened), sum(left_out for _, left_out, _ in shortened)


def users_line(trace: str) -> str:
    """Return the last place in users' code, as "FILE, line N, in FUNCTION: CODE"; "" if there is none."""
    found = [frame for frame in _FRAME.finditer(trace) if is_users(frame["file"])]
    if not found:
        return ""
    code = found[-1]["code"].splitlines()
    return f"{shown(found[-1]['file'])}, line {found[-1]['line']}, in {found[-1]['function']}" + \
        (f":  {code[0].strip()}" if code else "")


def report_to_torchrun(text: str) -> None:
    """Leave the cause of a failure for torchrun, which prints the first one below its own traceback. Without that, all
    it says last is `exitcode: 1`."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = printable(text)
        facts = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            write_atomically(Path(file), json.dumps({"message": facts}))


def _shortened(part: str) -> tuple[str, int, bool]:
    frames = [*_FRAME.finditer(part)]
    users = any(is_users(frame["file"]) for frame in frames)
    if not users:
        return part, 0, False
    dropped = [frame for frame in frames[:-1] if not is_users(frame["file"])]
    for frame in reversed(dropped):
        part = part[: frame.start()] + part[frame.end() :]
    return part, len(dropped), True
