"""What several verbs share: naming a DAG, loading it, and starting torchrun."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from distflow import launch
from distflow.launch import ROOT
from distflow.schema.errors import InvalidInput
from distflow.schema.plan import Plan
from distflow.schema.spec import Spec


def add_dag_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dag_file", nargs="?", metavar="DAG", help="a path, or the name of a shipped DAG, as grpo")
    launch.add_arguments(parser)
    add_ranks(parser)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N",
                        help="processes, one per GPU; default: `ranks` of the run file, or 1")


def load_and_plan(options: argparse.Namespace, obey: bool = True) -> tuple[Spec, Plan]:
    """The spec and the plan that the options ask for; every mistake is raised at once.

    `obey`: a plan for mixed hardware, if they name one.
    """
    from planners import plan

    if options.dag and options.dag_file:
        raise InvalidInput(f"which DAG, `{options.dag_file}` or `{options.dag}`? Name one.")
    options.dag = options.dag or options.dag_file
    options.resume = getattr(options, "resume", None)
    spec = launch.load_spec(options)
    ranks = rank_count(options, spec)
    spec = launch.obeying(spec, options, ranks) if obey else spec
    return spec, plan(spec, ranks)


def check(options: argparse.Namespace) -> tuple[Spec, Plan]:
    """The spec and the plan, once the data and the name of the run are looked at too."""
    spec, plan = load_and_plan(options)
    launch.prepare(spec, plan.name, options, rank=0)
    return spec, plan


def rank_count(options: argparse.Namespace, spec: Spec) -> int:
    return next(count for count in (options.ranks, spec.cluster.size, spec.run.ranks, 1) if count is not None)


def torchrun(ranks: int, arguments: list[str], quiet: bool = False) -> int:
    """Print the torchrun line and run it, with a store that only this machine reaches. Returns torchrun's exit code.

    `quiet` leaves out all but errors.
    """
    path = ROOT / "distflow" / "launch.py"
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    line = ["--nproc-per-node", str(ranks), str(shown), *arguments]
    if not quiet:
        print(shlex.join(["torchrun", "--standalone", *line]), flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    program = [sys.executable, "-P", str(ROOT / "workers" / "loopback.py")]
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run([*program, *line], env=environment, stdout=output, check=False).returncode
