"""`distflow resume`: go on with a run from its newest whole checkpoint."""

from __future__ import annotations

import argparse

from distflow.cli.common import add_ranks, rank_count, torchrun
from distflow.launch import load_spec, obeying
from planners import plan

HELP = "go on with an interrupted run from its newest checkpoint, on any number of ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("resume", metavar="RUN", help="the run's folder, as runs/grpo-1")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
                        help="override one value, as steps=200 to go on for longer")
    parser.add_argument("--cluster", metavar="FILE", help="where it goes on, if not where it was")
    parser.add_argument("--plan", metavar="FILE",
                        help="place it anew by a plan for mixed hardware, as  distflow plan --replan --out  writes it")
    add_ranks(parser)


def main(options: argparse.Namespace) -> int:
    spec = load_spec(options)
    ranks = rank_count(options, spec)
    plan(obeying(spec, options, ranks), ranks)
    more = [part for override in options.overrides for part in ("--set", override)]
    more += ["--cluster", options.cluster] if options.cluster else []
    more += ["--plan", options.plan] if options.plan else []
    return torchrun(ranks, ["--resume", options.resume, *more])
