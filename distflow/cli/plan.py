"""`distflow plan`: what every rank will do, and plans for mixed hardware.

    show      the chain of each rank, transfers, added dependencies and memory; without a command, this one
    mixed     place a DAG on unlike devices by the cost model, which runs may calibrate (--from)
    explain   a placement that `mixed` has written: what bounds it, what would help, what ranks would run
    replan    whether another placement would be worth the restart of a run
"""

from __future__ import annotations

import argparse
import shlex
import sys

from distflow.cli import mixed_plan
from distflow.cli.common import Verb, add_dag_arguments
from distflow.cli.plan_text import describe, describe_dock
from distflow.options import load_and_plan

_OLD = {"--solver", "--runnable", "--from", "--out", "--explain", "--seed", "--seconds", "--within",
        "--threshold"}
"""Options of `distflow plan` that `plan mixed` has now, or with --plan and --replan another command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        child = commands.add_parser(name, help=command.help, description=command.help)
        command.add_arguments(child)
        child.set_defaults(main=command.main)


def with_command(words: list[str]) -> list[str]:
    """Return the words after `plan` with their command: `show` where none is named, and that of an old spelling."""
    if words and (words[0] in COMMANDS or words[0] in ("-h", "--help")):
        return words
    flags = {word.partition("=")[0] for word in words}
    if "--replan" in flags:
        dag = ["--dag"] if not words[0].startswith("-") else []
        found = ["replan", *dag, *(word for word in words if word not in ("--replan", "--from"))]
    elif "--plan" in flags:
        found = ["explain", *(word for word in words if word != "--explain")]
    elif flags & _OLD:
        found = ["mixed", *words]
    else:
        return ["show", *words]
    print(f"note: this is now  distflow plan {shlex.join(found)}", file=sys.stderr)
    return found


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    add_dag_arguments(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, with all details")
    form.add_argument("--dock", type=_positive, metavar="SHARDS",
                      help="also what a step would move through a transfer dock of so many storage shards")


def show(options: argparse.Namespace) -> int:
    spec, plan = load_and_plan(options, elsewhere=True)
    lines = [plan.to_json()] if options.json else [*describe(plan, spec), *describe_dock(plan, spec, options.dock)]
    print("\n".join(lines))
    return 0


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("a dock has at least one storage shard")
    return int(text)


COMMANDS = {
    "show": Verb("print the chain of each rank, transfers, added dependencies and memory", _add_show_arguments, show),
    "mixed": Verb("place a DAG on mixed hardware (a --cluster with `machines`) by the cost model",
                  mixed_plan.add_mixed_arguments, mixed_plan.mixed),
    "explain": Verb("say what bounds a placement, what would help, and what ranks would run by it",
                    mixed_plan.add_explain_arguments, mixed_plan.explain),
    "replan": Verb("say how long an iteration of a run takes as it is placed, and propose a placement if a better one "
                   "is found", mixed_plan.add_replan_arguments, mixed_plan.replan),
}
VERBS = {"plan": Verb("print what each rank will do; place a DAG on mixed hardware", add_arguments, show)}
