"""What several verbs share: naming a DAG, loading it, and the number of ranks."""

from __future__ import annotations

import argparse
from dataclasses import replace

from distflow import launch
from distflow.cli.gpus import gpu_count
from distflow.config.load import Spec
from distflow.errors import InvalidInput
from distflow.plan import Plan
from distflow.telemetry.run_folder import choose


def add_dag_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dag_file", nargs="?", metavar="DAG", help="a path, or the name of a shipped DAG, as grpo")
    launch.add_arguments(parser)
    add_ranks(parser)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N",
                        help="processes, one per GPU; default: `ranks` of the run file, else all GPUs of the machine, "
                        "else 1")


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
    """The spec and the plan, once the data and the name of the run are looked at too; with notes about the data."""
    spec, plan = load_and_plan(options)
    notes = launch.check_data(spec)
    choose(spec.run.output, plan.name, options.name)
    return spec, replace(plan, notes=(*plan.notes, *notes))


def rank_count(options: argparse.Namespace, spec: Spec) -> int:
    """Return how many ranks the options, the cluster or the run file ask for; else one for each GPU of this machine."""
    asked = [count for count in (options.ranks, spec.cluster.size, spec.run.ranks) if count is not None]
    return asked[0] if asked else max(gpu_count(), 1)
