"""Files that several processes append lines to."""

from __future__ import annotations

import os
from pathlib import Path


def add(path: Path, line: str) -> None:
    """Append a line at once, so that those of several processes do not mix.

    Raises:
        OSError: it cannot be written.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode(errors="backslashreplace") + b"\n")
    finally:
        os.close(file)
