"""Effective training time (RobustRL §7.2) with a fault of the trainer in every tenth step: the role restarts alone,
against a restart of the whole task, against no fault; in each mode, on the same machine, in the same run.

The task, its tools with their long tail and the ranks are those of modes.py. A fault is a SIGKILL of one of the
trainer's ranks at a moment in the step that the seed draws; each side has the same faults. In mode sync all ranks are
the trainer's.

`role` is distflow's own way: supervisors start the trainer's ranks again from the copy in their memory; rollouts go on.
`task` is what ByteRobust does by the paper's account, and here torchrun by itself: all processes end and start again,
from the checkpoint of the step before on disk. What that costs elsewhere beside it, such as scheduling containers, it
does not cost here.

Effective is what `distflow faults` says, of the whole run and of a dozen windows (Figure 12); tokens are those that are
sampled and trained (Figure 16). The time of a run is that from its first worker ready to its end.

With `--restarts` a rank of the trainer is killed in every other step of small runs of mode semi_sync instead: seconds
until all trainers are ready again, of either way, by the size of the model and by ranks (Figure 14), and of a snapshot
in memory and a checkpoint on disk (Figure 19).
Run by hand:  python -m benchmarks.ettr
"""

from __future__ import annotations

import random
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from pathlib import Path

from benchmarks.fault_matrix import SETTINGS, write_dag
from benchmarks.modes import RANKS, Contest, contest_options
from benchmarks.ratio import Spread, add_size, conclude, interleaved, least, parsed, ratios
from benchmarks.runs import run_once, steps_of
from distflow.telemetry.ettr import FailureCosts, account, read

MODES = ("sync", "semi_sync", "async")
RESTARTS = 100
GOALS = {"ettr": 0.95, "time": 1.2}
WINDOWS = 12
SHAPES = {"64 × 2": "hidden: 64, layers: 2, heads: 2, kv_heads: 1", "512 × 8": "hidden: 512, layers: 8, heads: 8, "
          "kv_heads: 4", "768 × 12": "hidden: 768, layers: 12, heads: 12, kv_heads: 4"}
"""Models, and on how many ranks each is restarted."""
CELLS = [*((shape, 2) for shape in SHAPES), ("64 × 2", 3), ("64 × 2", 5)]


@dataclass(frozen=True)
class Outcome:
    """What a run has cost. `updates`: steps in metrics.jsonl; `trainers` of `ranks` ranks train."""

    account: FailureCosts
    updates: list[int]
    trainers: int
    tokens: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.account.total

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
        steps = steps_of(folder)
        outcome = Outcome(account(read(folder)), [step["step"] for step in steps],
                          RANKS if mode == "sync" else RANKS - 1, sum(step["tokens"] for step in steps))
        found = outcome.account
        restarts = "" if side != "role" else (
            f", while the trainer restarted {outcome.in_recovery:.2f}; restarts took "
            f"{[round(each.start + each.connect + each.load, 2) for each in found.recoveries]} s")
        print(f"seed {seed}, {mode}, {side}: {len(found.recoveries)} faults, {found.total:.1f} s, effective "
              f"{found.ettr:.3f}{restarts}; {outcome.tokens_per_second:.0f} tokens/s; effective in windows of "
              f"{found.total / WINDOWS:.0f} s: "
              + " ".join(f"{share:.2f}" for share in found.sliding(found.total / WINDOWS)), flush=True)
        return outcome


def restart(given: Namespace, scratch: Path, shape: str, ranks: int, side: str, repeat: int) -> float:
    """Return the median seconds of restarts: until the last trainer is ready again."""
    kills, name = given.kills, f"{shape}-{ranks}-{side}-{repeat}".replace(" × ", "x")
    task, faults = side == "task", ", ".join(f"{{kind: kill, step: {3 + 2 * kill}}}" for kill in range(kills))
    settings = (*SETTINGS, f"steps={2 * kills + 3}", "mode=semi_sync", "groups.rollout=1", f"faults=[{faults}]",
                f"roles.actor.model={{architecture: qwen3, {SHAPES[shape]}}}",
                f"robust.restarts={0 if task else RESTARTS}")
    folder = run_once(scratch, name, write_dag(scratch, False), "embedded.yaml", ranks, settings,
                      RESTARTS if task else 0)
    events, steps = read(folder), steps_of(folder)
    spans = account(events).intervals
    found = [max(again[0] - before[1] for before, again in gaps) for gaps in zip(*(
        zip(spans[rank], spans[rank][1:]) for rank in range(ranks - 1)))]
    written = [event["seconds"] for event in events if event["event"] == "checkpoint_written"]
    print(f"{shape}, {ranks} ranks, {side}: a restart {Spread.of(found)} s; a snapshot of "
          f"{max(step.get('snapshot/bytes', 0) for step in steps) / 2**20:.0f} MiB "
          f"{statistics.median(step.get('snapshot/seconds', 0) for step in steps):.3g} s, a checkpoint "
          f"{Spread.of(written)} s", flush=True)
    return statistics.median(found)


def compare_restarts(given: Namespace, scratch: Path) -> None:
    found = {cell: interleaved({side: partial(restart, given, scratch, *cell, side) for side in ("role", "task")},
                               given.repeats) for cell in (CELLS[:1] if given.quick else CELLS)}
    for (shape, ranks), pairs in found.items():
        print(f"{shape}, {ranks} ranks: task restart over role restart {ratios(pairs, 'task', 'role', float)}")
    conclude("seconds of a task's restart over a role's, semi_sync, the least of all sizes",
             least(ratios(pairs, "task", "role", float) for pairs in found.values()), 1.5)


def judge(mode: str, found: Sequence[dict[str, Outcome]], updates: int, share: float) -> None:
    """Print what came out for a mode; two last lines. `share`: of the steps, in which faults were ordered."""
    whole = all(each.updates == list(range(1, updates + 1)) for pair in found for each in pair.values())
    print(f"{mode}: every run has made each of its {updates} updates once: {'yes' if whole else 'NO'}")
    for side in ("role", "task"):
        print(f"{mode}, {side}: effective {Spread.of([pair[side].account.ettr for pair in found])}, tokens per second "
              f"over those without faults {ratios(found, side, 'none', lambda each: each.tokens_per_second)}")
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
    parser.add_argument("--restarts", action="store_true", help="time single restarts by size instead")
    add_size(parser, "kills", 3, 1, "of each run with --restarts")
    given = parsed(parser, arguments)
    given.mode = given.mode or (["async"] if given.quick else list(MODES))
    return given


def main(arguments: list[str] | None = None) -> None:
    given = flags(arguments)
    with tempfile.TemporaryDirectory(prefix="ettr-") as scratch:
        if given.restarts:
            return compare_restarts(given, Path(scratch))
        trial = Trial(given, Path(scratch))
        sides = {f"{mode} {side}": partial(trial.measure, mode, side)
                 for mode in given.mode for side in ("none", "role", "task")}
        courses = interleaved(sides, given.repeats)
    for mode in given.mode:
        judge(mode, [{side: pair[f"{mode} {side}"] for side in ("none", "role", "task")} for pair in courses],
              given.updates, given.share)
    return None


if __name__ == "__main__":
    main()
