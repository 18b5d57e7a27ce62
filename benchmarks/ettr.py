"""Effective training time (RobustRL §7.2) with a fault of the trainer in every tenth step: the role restarts alone,
against a restart of the whole task, against no fault; in each mode, on the same machine, in the same run.

The task, its tools with their long tail and the ranks are those of modes.py. A fault is a SIGKILL of one of the
trainer's ranks at a moment in the step that the seed draws; each side has the same faults. In mode sync all ranks are
the trainer's.

`role` is distflow's own way: supervisors start the trainer's ranks again from the copy in their memory; rollouts go on.
`task` is what ByteRobust does by the paper's account, and here torchrun by itself: all processes end and start again,
from the checkpoint of the step before on disk. What that costs elsewhere beside it, such as scheduling containers, it
does not cost here.

Effective is what `distflow faults` says. The time of a run is that from its first worker ready to its end.
Run by hand:  python -m benchmarks.ettr
"""

from __future__ import annotations

import random
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from pathlib import Path

from benchmarks.modes import RANKS, Contest, contest_options
from benchmarks.ratio import Spread, add_size, conclude, interleaved, parsed, ratios
from benchmarks.runs import run_once, steps_of
from distflow.telemetry.ettr import FailureCosts, account, read

MODES = ("sync", "semi_sync", "async")
RESTARTS = 100
GOALS = {"ettr": 0.95, "time": 1.2}


@dataclass(frozen=True)
class Outcome:
    """What a run has cost. `updates`: steps in metrics.jsonl; `trainers` of `ranks` ranks train."""

    account: FailureCosts
    updates: list[int]
    trainers: int

    @property
    def in_recovery(self) -> float:
        """The effective share of all ranks while the trainer was not ready; nan where no restart of it was seen: none
        failed, or the whole task started again."""
        gaps = [(each.began, each.began + each.detect + each.start + each.connect + each.load)
                for each in self.account.recoveries if each.start == each.start]
        length = sum(end - start for start, end in gaps)
        return sum(self.account.ettr_between(*gap) * (gap[1] - gap[0]) for gap in gaps) / length if length else nan


class Trial(Contest):
    """Runs with and without faults."""

    def measure(self, mode: str, side: str, seed: int) -> Outcome:
        given = self.given
        apart = () if mode == "sync" else ("groups.rollout=1", "staleness=1")
        drawn = random.Random(seed).sample(range(2, given.updates + 1), max(1, round(given.updates * given.share)))
        killed = ", ".join(f"{{kind: kill, step: {step}}}" for step in sorted(drawn))
        faults = () if side == "none" else (f"faults=[{killed}]",)
        task = side == "task"
        name = f"{mode}-{side}-{seed}"
        folder = run_once(self.scratch, name, self.dag, "embedded.yaml", RANKS, (
            f"mode={mode}", *apart, *faults, f"robust.restarts={0 if task else RESTARTS}",
            f"checkpoint={{every: {int(task)}, keep: 2}}", *self.settings(seed, given.updates)),
                          RESTARTS if task else 0)
        outcome = Outcome(account(read(folder)), [step["step"] for step in steps_of(folder)],
                          RANKS if mode == "sync" else RANKS - 1)
        found = outcome.account
        restarts = "" if side != "role" else (
            f", while the trainer restarted {outcome.in_recovery:.2f}; restarts took "
            f"{[round(each.start + each.connect + each.load, 2) for each in found.recoveries]} s")
        print(f"seed {seed}, {mode}, {side}: {len(found.recoveries)} faults, {found.total:.1f} s, effective "
              f"{found.ettr:.3f}{restarts}", flush=True)
        return outcome


def judge(mode: str, found: Sequence[dict[str, Outcome]], updates: int, share: float) -> None:
    """Print what came out for a mode; two last lines. `share`: of the steps, in which faults were ordered."""
    whole = all(each.updates == list(range(1, updates + 1)) for pair in found for each in pair.values())
    print(f"{mode}: every run has made each of its {updates} updates once: {'yes' if whole else 'NO'}")
    for side in ("role", "task"):
        print(f"{mode}, {side}: effective {Spread.of([pair[side].account.ettr for pair in found])}")
    windows = [value for pair in found if not isnan(value := pair["role"].in_recovery)]
    if windows:
        print(f"{mode}, role: effective while the trainer restarted {Spread.of(windows)} (rollouts are "
              f"{1 - found[0]['role'].trainers / RANKS:.2f} of the ranks)")
    conclude(f"time of task restart over role restart, {mode}, a trainer fault in {share:.0%} of the steps",
             ratios(found, "task", "role", lambda each: each.account.total), GOALS["time"], holds=whole)
    conclude(f"effective training time with role restart over that without faults, {mode}, a trainer fault in "
             f"{share:.0%} of the steps", ratios(found, "role", "none", lambda each: each.account.ettr), GOALS["ettr"],
             holds=whole)


def flags(arguments: list[str] | None) -> Namespace:
    parser = contest_options(__doc__, (30, 6), 0.3, repeats=3)
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all; with --quick async")
    add_size(parser, "share", 0.1, 0.4, "of the steps, in which a fault happens")
    given = parsed(parser, arguments)
    given.mode = given.mode or (["async"] if given.quick else list(MODES))
    return given


def main(arguments: list[str] | None = None) -> None:
    given = flags(arguments)
    with tempfile.TemporaryDirectory(prefix="ettr-") as scratch:
        trial = Trial(given, Path(scratch))
        sides = {f"{mode} {side}": partial(trial.measure, mode, side)
                 for mode in given.mode for side in ("none", "role", "task")}
        courses = interleaved(sides, given.repeats)
    for mode in given.mode:
        judge(mode, [{side: pair[f"{mode} {side}"] for side in ("none", "role", "task")} for pair in courses],
              given.updates, given.share)


if __name__ == "__main__":
    main()
