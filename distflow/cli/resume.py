"""`distflow resume`: go on with a run from its newest whole checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from distflow.cli.common import rank_count
from distflow.cli.gpus import gpu_count
from distflow.cli.launcher import torchrun
from distflow.config.load import Spec
from distflow.errors import InvalidInput
from distflow.launch import load_spec, obeying
from distflow.telemetry.run_folder import read_plan
from distflow.telemetry.run_lock import in_use, refusal
from planners import plan

HELP = "go on with an interrupted run from its newest checkpoint, on any number of ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("resume", metavar="RUN", help="the run's folder, as runs/grpo-1")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
                        help="override one value, as steps=200 to go on for longer")
    parser.add_argument("--cluster", metavar="FILE", help="where it goes on, if not where it was")
    parser.add_argument("--plan", metavar="FILE",
                        help="place it anew by a plan for mixed hardware, as  distflow plan --replan --out  writes it")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes, one per GPU; default: as many as it had")


def main(options: argparse.Namespace) -> int:
    spec = load_spec(options)
    if held := in_use(Path(options.resume)):
        raise refusal(Path(options.resume), held)
    ranks = _rank_count(options, spec)
    plan(obeying(spec, options, ranks), ranks)
    more = [part for override in options.overrides for part in ("--set", override)]
    more += ["--cluster", options.cluster] if options.cluster else []
    more += ["--plan", options.plan] if options.plan else []
    return torchrun(ranks, ["--resume", options.resume, *more], shutdown_timeout=spec.run.robust.shutdown_timeout)


def _rank_count(options: argparse.Namespace, spec: Spec) -> int:
    """Return the number of ranks that the run had last, unless the options name another.

    Raises:
        InvalidInput: this machine has GPUs, but fewer; or the run's plan.json is damaged.
    """
    told = options.ranks is not None or options.cluster or any(each.startswith("ranks=") for each in options.overrides)
    if told:
        return rank_count(options, spec)
    ranks = read_plan(Path(options.resume))["ranks"]
    gpus = gpu_count()
    if 0 < gpus < ranks:
        raise InvalidInput(f"{options.resume} had {ranks} ranks, and this machine has {gpus} GPUs. Go on with fewer:  "
                           f"--ranks {gpus}   or start torchrun with  distflow/launch.py --resume {options.resume}  on "
                           "all its machines.")
    return ranks
