"""What several verbs share: their form, naming and loading a DAG, and the number of ranks."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distflow import launch
from distflow.config.load import Spec
from distflow.config.yaml_source import check as parsed
from distflow.config.yaml_source import read
from distflow.errors import InvalidInput, shown
from distflow.plan import Plan
from distflow.plan_file import PlacedPlan
from distflow.telemetry.run_folder import choose, unwritable

_DRIVER_SECONDS = 20.0
"""Time limit of `nvidia-smi`: a driver that is being loaded has answered by then."""


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


def load_and_plan(options: argparse.Namespace, obey: bool = True, elsewhere: bool = False) -> tuple[Spec, Plan]:
    """Return the spec and the plan that the options ask for; raise every mistake at once. `obey`: follow `--plan`.
    `elsewhere`: the run is of other machines, and what this one lacks for it is a note of the plan."""
    from planners import plan

    if options.dag and options.dag_file:
        raise InvalidInput(f"which DAG, `{options.dag_file}` or `{options.dag}`? Name one.")
    options.dag = options.dag or options.dag_file
    options.resume = getattr(options, "resume", None)
    spec = launch.load_spec(options)
    ranks = rank_count(options, spec)
    spec = launch.apply_plan_option(spec, options, ranks) if obey else spec
    lacks = without_lacks(spec) if elsewhere else []
    if elsewhere and (why := unwritable(Path(spec.run.output))):
        lacks.append(f"the run folder cannot be written, {why}: a run on this machine would need  --set output=FOLDER")
    found = plan(spec, ranks)
    return spec, replace(found, notes=(*found.notes, *lacks))


def without_lacks(spec: Spec) -> list[str]:
    """Take out of the spec's mistakes what this machine alone lacks, as of a run of others; return it as notes."""
    lacks = [mistake for mistake in spec.mistakes if mistake.of_machine]
    spec.mistakes[:] = [mistake for mistake in spec.mistakes if not mistake.of_machine]
    return [f"{mistake.what}: a run on this machine would be refused" for mistake in lacks]


def check(options: argparse.Namespace) -> tuple[Spec, Plan]:
    """Return the spec and the plan, with notes about the data; check the data and the name of the run too."""
    from distflow.data.checks import check_data

    spec, plan = load_and_plan(options)
    notes = check_data(spec, getattr(options, "prove", False))
    choose(spec.run.output, plan.name, options.name)
    return spec, replace(plan, notes=(*plan.notes, *notes))


def rank_count(options: argparse.Namespace, spec: Spec) -> int:
    """Return how many ranks the options, the plan file, the cluster or the run file ask for; else one for each GPU of
    this machine."""
    asked = [count for count in (options.ranks, _planned(options), spec.cluster.size, spec.run.ranks)
             if count is not None]
    return asked[0] if asked else max(gpu_count(), 1)


def _planned(options: argparse.Namespace) -> int | None:
    """Return how many devices the plan file uses; None without a plan, or if it cannot be read as one."""
    if not getattr(options, "plan", None):
        return None
    found, _ = parsed(PlacedPlan, read(Path(options.plan), shown(options.plan)))
    return len(found.ranks) if found else None


def gpu_count(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Return the number of NVIDIA GPUs that processes started here may use, as torch would, without its import of
    seconds: CUDA_VISIBLE_DEVICES counts up to an entry that names no GPU."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        named = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        unusable = [index for index, each in enumerate(named) if not re.match(r"\s*(\d+|GPU-|MIG-)", each)]
        return min([len(named), *unusable])
    program = shutil.which("nvidia-smi")
    if program:
        try:  # unlike the driver's folder, it shows only what a container may use
            listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_DRIVER_SECONDS,
                                    check=False)
        except subprocess.TimeoutExpired:
            return 0
        return len(re.findall("^GPU ", listed.stdout, re.MULTILINE))
    return len(list(driver.iterdir())) if driver.is_dir() else 0
