"""`distflow plan`: print what every rank will do, what moves between them, and what memory it takes."""

from __future__ import annotations

import argparse

from distflow.cli import mixed_plan
from distflow.cli.common import Verb, add_dag_arguments, load_and_plan
from distflow.cli.plan_text import describe, describe_dock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dag_arguments(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, with all details")
    form.add_argument("--dock", type=_positive, metavar="WAREHOUSES",
                      help="also what a step would move through a transfer dock of so many storage shards")
    mixed_plan.add_arguments(parser)


def main(options: argparse.Namespace) -> int:
    if mixed_plan.asked(options):
        return mixed_plan.main(options)
    spec, plan = load_and_plan(options)
    lines = [plan.to_json()] if options.json else [*describe(plan, spec), *describe_dock(plan, spec, options.dock)]
    print("\n".join(lines))
    return 0


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("a dock has at least one storage shard")
    return int(text)


VERBS = {"plan": Verb("print the chain of each rank, transfers, added dependencies and memory", add_arguments, main)}
