"""`distflow validate`: is everything right with a DAG, its run and its data?"""

from __future__ import annotations

import argparse

from distflow.cli.common import add_dag_arguments, check

HELP = "check a DAG, a run and its data, and report every mistake"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dag_arguments(parser)


def main(options: argparse.Namespace) -> int:
    spec, plan = check(options)
    print(f"{spec.dag_source.file} with {spec.run_source.file} on {plan.ranks} ranks: no mistakes")
    for note in plan.notes:
        print(f"note: {note}")
    return 0
