"""`distflow plan`: what every rank will do; with --place or --fit, what to write into the run file instead.

    (no option)   the chain of each rank, transfers, added dependencies and memory
    --place       layouts and groups for unlike devices, by the cost model (`distflow.cli.mixed_plan`)
    --fit         settings that fit the memory of one kind of device (`distflow.cli.fit`)
    --from RUN    as a run has shown: its seconds calibrate --place, its memory --fit
"""

from __future__ import annotations

import argparse

from distflow.cli import fit, mixed_plan
from distflow.cli.common import Verb, add_dag_arguments
from distflow.cli.plan_text import describe, describe_dock
from distflow.errors import InvalidInput
from distflow.options import load_and_plan

_OF_PLACE = ("out", "explain", "solver", "seed", "seconds", "within")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dag_arguments(parser, of_run=False)
    parser.add_argument("--json", action="store_true", help="as JSON, with all details")
    parser.add_argument("--dock", type=_positive, metavar="SHARDS",
                        help="also what a step would move through a transfer dock of so many storage shards")
    parser.add_argument("--place", action="store_true",
                        help="find layouts and groups for the unlike devices of a --cluster with `machines`")
    parser.add_argument("--fit", action="store_true",
                        help="find the fastest settings that fit the memory of a --cluster with one kind of device")
    parser.add_argument("--from", metavar="RUN", nargs="+", dest="runs", default=[],
                        help="calibrate by what these runs have measured, finished or going on: folders, as "
                        "runs/grpo-1; without DAG, the last one's is planned. Runs of two batch sizes show what does "
                        "not shrink with the rows. With --fit: count memory as the last of them has taken it")
    parser.add_argument("--margin", type=float, metavar="SHARE",
                        help="with --fit: of a device's memory, what is to stay free (default: 0.1)")
    mixed_plan.add_arguments(parser.add_argument_group("with --place or --from"))


def main(options: argparse.Namespace) -> int:
    places = not options.fit and (options.place or bool(options.runs))
    alone = {"margin": options.fit, **dict.fromkeys(_OF_PLACE, places)}
    for name in (name for name, used in alone.items() if not used and getattr(options, name) not in (None, False)):
        raise InvalidInput(f"--{name} changes nothing here. It goes with {'--fit' if name == 'margin' else '--place'}.")
    if options.fit:
        return fit.main(options)
    return mixed_plan.main(options) if places else _show(options)


def _show(options: argparse.Namespace) -> int:
    spec, plan = load_and_plan(options, elsewhere=True)
    lines = [plan.to_json()] if options.json else [*describe(plan, spec), *describe_dock(plan, spec, options.dock)]
    print("\n".join(lines))
    return 0


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("a dock has at least one storage shard")
    return int(text)


VERBS = {"plan": Verb("print what each rank will do; find layouts for unlike devices, or settings that fit",
                      add_arguments, main)}
