"""What several verbs share: their form, naming and loading a DAG, and the number of ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from distflow import launch

_UNLIMITED = 10_000
"""Columns of an output that is no terminal: its lines are not folded."""


@dataclass(frozen=True)
class Verb:
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table: fitted into a terminal, else one for each row. `right`: columns flush right."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    grid = Table(box=None, show_header=bool(head), padding=(0, 2, 0, 0), pad_edge=False)
    for index, name in enumerate(head or [""] * len(rows[0] if rows else ())):
        grid.add_column(name, justify="right" if index in right else "left")
    for row in rows:
        grid.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else _UNLIMITED, markup=False, highlight=False, emoji=False,
                      color_system=None)
    with console.capture() as printed:
        console.print(Padding(grid, (0, 0, 0, 2)))
    return [line.rstrip() for line in printed.get().splitlines()] if rows else []


def noted(notes: Iterable[str]) -> Iterator[str]:
    for note in notes:
        yield f"\nnote: {note}"


def add_dag_arguments(parser: argparse.ArgumentParser, of_run: bool = True) -> None:
    """Add the DAG, its files and the number of ranks; for a run also its name and a plan to obey."""
    parser.add_argument("dag_file", nargs="?", metavar="DAG", help="a path, or the name of a shipped DAG, as grpo")
    (launch.add_run_arguments if of_run else launch.add_spec_arguments)(parser)
    add_ranks(parser)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N",
                        help="processes, one per GPU; default: `ranks` of the run file, else all GPUs of the machine, "
                        "else 1")
