"""Commands: writes them for hints, in the form of the program that the user has called, and reads `--machines`."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from distflow.errors import InvalidInput


@dataclass(frozen=True)
class CommandForm:
    """How a program takes its files: what stands before a DAG, and before a run file."""

    program: str
    dag: tuple[str, ...]
    run: str

    def command(self, dag: str, run: str | None = None, cluster: str | None = None) -> str:
        words = [*self.dag, dag, *((self.run, run) if run else ()), *(("--cluster", cluster) if cluster else ())]
        return f"{self.program} {shlex.join(words)}"


_TORCHRUN = CommandForm("torchrun --nproc-per-node 2 distflow/launch.py", ("--dag",), "--run-file")
_called = [_TORCHRUN]


@contextlib.contextmanager
def called_as(verb: str) -> Iterator[None]:
    """Write commands as of `distflow VERB` meanwhile."""
    _called.append(CommandForm(f"distflow {verb}", (), "--run"))
    try:
        yield
    finally:
        _called.pop()


def command(dag: str, run: str | None = None, cluster: str | None = None) -> str:
    """Return the command for these files."""
    return _called[-1].command(dag, run, cluster)


def span_of(machines: str) -> tuple[int, int]:
    """Return how many machines are enough, and how many there may be, as `--machines` says: `4`, or `3:4`. Raises
    InvalidInput."""
    least, _, most = machines.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal() and 0 < int(least) <= int(most or least)):
        raise InvalidInput(f"--machines {machines}: say how many there are, as  --machines 4  , or how many are enough "
                           "and how many there may be, as  --machines 3:4")
    return int(least), int(most or least)
