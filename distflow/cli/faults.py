"""`distflow faults`: what has failed in a run, what was done about it, and what it has cost."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from distflow.errors import InvalidInput
from distflow.telemetry.ettr import FailureCosts, Recovery, account, read

HELP = "list a run's failures, what was done about each, and the share of its time that was effective"
_SHOWN = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder, as runs/grpo-1")
    parser.add_argument("--window", type=float, default=300.0, metavar="SECONDS",
                        help="for the effective share in each window of the run (default: 300)")


def main(options: argparse.Namespace) -> int:
    if not (Path(options.run) / "events.jsonl").is_file():
        raise InvalidInput(f"{options.run} has no events.jsonl, so it is not the folder of a run")
    if not options.window > 0:
        raise InvalidInput(f"--window {options.window:g} is no time; give seconds, as --window 60")
    found = account(read(Path(options.run)))
    print("\n".join([*_table(found.recoveries), *_summary(found, options.window)]))
    return 0


def _table(recoveries: list[Recovery]) -> list[str]:
    if not recoveries:
        return ["nothing has failed"]
    head = f"{'at':>8} {'unit':12} {'rank':>4} {'step':>5} {'phase':11} {'detect':>7} {'start':>6} {'connect':>7} " \
           f"{'load':>6} {'first':>6}  what"
    return [head, *(_line(each) for each in recoveries)]


def _line(each: Recovery) -> str:
    times = " ".join(f"{_seconds(value):>{width}}" for value, width in (
        (each.detect, 7), (each.start, 6), (each.connect, 7), (each.load, 6), (each.first, 6)))
    what = " ".join(each.what.split())
    what = what if len(what) <= _SHOWN else f"{what[: _SHOWN - 1]}…"
    where = f"{each.began:8.1f} {each.unit:12} {each.rank:4} {each.step:5} {each.phase:11}"
    return f"{where} {times}  {what} → {each.verdict}"


def _seconds(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _summary(found: FailureCosts, window: float) -> list[str]:
    if math.isnan(found.ettr):
        return ["no worker has been ready"]
    lines = [f"effective training time: {found.ettr:.1%} of {found.total:.1f} s on {len(found.intervals)} ranks"]
    shares = found.sliding(window)
    if len(shares) > 1:
        lines.append(f"in windows of {window:g} s: " + " ".join(f"{share:.0%}" for share in shares))
    return lines
