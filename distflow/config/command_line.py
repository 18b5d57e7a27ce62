"""Reads `--machines`, and names options in hints."""

from __future__ import annotations

import shlex

from distflow.errors import InvalidInput

_OPTIONS = {"DAG": "--dag", "run file": "--run-file", "cluster": "--cluster"}  # of `distflow` and `launch.py` alike


def given_as(kind: str, name: str, wrong: str, dag: str = "grpo") -> str:
    """Return the options that give a file of a kind as such, where it was given as of a `wrong` one; in place of the
    DAG, `dag`."""
    return f"{f'--dag {shlex.quote(dag)} ' * (wrong == 'DAG')}{_OPTIONS[kind]} {shlex.quote(name)}"


def span_of(machines: str) -> tuple[int, int]:
    """Return how many machines are enough, and how many there may be, as `--machines` says: `4`, or `3:4`. Raises
    InvalidInput."""
    least, _, most = machines.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal() and 0 < int(least) <= int(most or least)):
        raise InvalidInput(f"--machines {machines}: say how many there are, as  --machines 4  , or how many are enough "
                           "and how many there may be, as  --machines 3:4")
    return int(least), int(most or least)
