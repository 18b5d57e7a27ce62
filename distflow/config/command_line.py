"""Reads `--machines`, and names options in hints."""

from __future__ import annotations

from distflow.errors import InvalidInput

OPTION_OF = {"DAG": "--dag", "run file": "--run-file", "cluster": "--cluster"}
"""Option by which each kind of file is given, by `distflow` and by `launch.py` alike."""


def span_of(machines: str) -> tuple[int, int]:
    """Return how many machines are enough, and how many there may be, as `--machines` says: `4`, or `3:4`. Raises
    InvalidInput."""
    least, _, most = machines.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal() and 0 < int(least) <= int(most or least)):
        raise InvalidInput(f"--machines {machines}: say how many there are, as  --machines 4  , or how many are enough "
                           "and how many there may be, as  --machines 3:4")
    return int(least), int(most or least)
