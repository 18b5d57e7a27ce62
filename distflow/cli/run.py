"""`distflow run`: check everything, print the torchrun line, execute it."""

from __future__ import annotations

import argparse

from distflow.cli.common import add_dag_arguments, check
from distflow.cli.launcher import torchrun

HELP = "run a DAG on the GPUs (or cores) of this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dag_arguments(parser)


def main(options: argparse.Namespace) -> int:
    spec, plan = check(options)
    return torchrun(plan.ranks, _arguments(options), shutdown_timeout=spec.run.robust.shutdown_timeout)


def _arguments(options: argparse.Namespace) -> list[str]:
    given = [("--dag", options.dag), ("--run-file", options.run), ("--name", options.name),
             ("--cluster", options.cluster), ("--plan", options.plan)]
    arguments = [part for flag, value in given if value for part in (flag, value)]
    for override in options.overrides:
        arguments += ["--set", override]
    return arguments
