"""`distflow scale`: more or fewer rollouts for a run that is going on."""

from __future__ import annotations

import argparse
from pathlib import Path

from distflow.errors import InvalidInput
from distflow.recovery import autoscaler
from distflow.telemetry.run_folder import read_plan

HELP = "let a running job sample with fewer of its rollouts, or with more again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder, as runs/grpo-1")
    parser.add_argument("wanted", metavar="rollout=N", help="how many rollouts are to work")


def main(options: argparse.Namespace) -> int:
    folder = Path(options.run)
    group, _, number = options.wanted.partition("=")
    if group != "rollout" or not number.isdecimal():
        raise InvalidInput(f"`{options.wanted}` does not say how many rollouts are wanted. Write  rollout=2")
    seats, hybrid = _seats(folder)
    least = 0 if hybrid else 1
    if not least <= int(number) <= seats:
        raise InvalidInput(f"this run has seats for {seats} rollouts, so give {least} to {seats}. torchrun's "
                           "--nproc-per-node and groups.rollout of the run file say how many seats there are")
    before = autoscaler.read(folder, seats)
    autoscaler.write(folder, int(number))
    print(f"{before} → {int(number)} of {seats} rollouts; `distflow faults {folder}` shows when they change")
    return 0


def _seats(folder: Path) -> tuple[int, bool]:
    """Rollouts that the run has seats for, and whether ranks that train sample too.

    Raises:
        InvalidInput: it has none, or is no run.
    """
    plan = read_plan(folder)
    found = [group["replicas"] for group in plan["groups"] if group["name"] == "rollout"]
    if not found:
        raise InvalidInput(f"{folder} has no rollouts of its own: in mode sync all ranks sample and train. Start it "
                           "with  --set mode=async")
    return found[0], plan["mode"] == "semi_sync"
