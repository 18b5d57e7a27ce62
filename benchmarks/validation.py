"""Validation in mode async: by a rollout while training goes on, against by the trainer, which stands still meanwhile.

`grpo.yaml` on the embedded task, 3 ranks on the CPU, one thread each: one trains and two sample, and every fifth step
is validated. The reward of the validation waits like a judge elsewhere, which costs no processor: 0.2 s an answer. Both
sides run the same steps turn by turn, and a third without validation. Compared are the seconds between the metrics of
one step and those of the next, all that happens between them included, where the first of the two is validated. The
first steps are left out. The mean of all steps is printed too, and the whole run, with the wait for the last result.
Run by hand:  python -m benchmarks.validation
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.modes import ROOT, run_once
from benchmarks.ratio import add_size, conclude, interleaved, options, parsed, ratios
from distflow.telemetry.run_reader import RunReader

RANKS, EVERY, WARM, GOAL = 3, 5, 2, 2.0
JUDGE = """
import time
from distflow import reward

@reward
def judged(completion, answer):
    time.sleep(0.2)
    return float(answer in completion)
"""
SIDES = {"rollout": ("validation.group=rollout",), "trainer": ("validation.group=trainer",),
         "none": ("validation=null",)}


@dataclass(frozen=True)
class Seconds:
    """Mean seconds from one step to the next: where the first of the two is validated, where it is not, and of all."""

    after: float
    others: float
    all: float


def seconds_of_steps(scratch: Path, steps: int, side: str, repeat: int) -> Seconds:
    settings = SIDES[side] if side == "none" else (
        f"validation.every={EVERY}", "validation.reward=judged", f"validation.data.heldout={scratch}/heldout.jsonl",
        *SIDES[side])
    began = time.perf_counter()
    folder = run_once(scratch, f"{side}-{repeat}", scratch / "grpo.yaml", "embedded.yaml", RANKS, (
        f"steps={steps}", "mode=async", "groups.rollout=2", "staleness=2", "checkpoint.every=0", f"seed={repeat}",
        *settings))
    whole = time.perf_counter() - began
    lines = [line for line in RunReader(folder).rows("metrics") if "wall_seconds" in line]
    between = {line["step"]: line["wall_seconds"] - before["wall_seconds"] for before, line in zip(lines, lines[1:])}
    timed = {step: seconds for step, seconds in between.items() if step > WARM}
    after = [seconds for step, seconds in timed.items() if step % EVERY == 1]
    others = [seconds for step, seconds in timed.items() if step % EVERY != 1]
    found = Seconds(*map(statistics.mean, (after, others, timed.values())))
    print(f"repeat {repeat}, validation by {side}: {found.all:.2f} s a step; {found.after:.2f} s after a validated "
          f"one, {found.others:.2f} s after others; the whole run {whole:.1f} s", flush=True)
    return found


def main() -> None:
    parser = options(__doc__)
    add_size(parser, "steps", 32, 12, "steps of a run")
    given = parsed(parser)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "judge.py").write_text(JUDGE)
        (scratch / "grpo.yaml").write_text((ROOT / "dags/grpo.yaml").read_text() + "imports: [judge]\n")
        held = (ROOT / "dags/data/arithmetic/heldout.jsonl").read_text().splitlines()[:60]
        (scratch / "heldout.jsonl").write_text("\n".join(held) + "\n")
        pairs = interleaved({side: partial(seconds_of_steps, scratch, given.steps, side) for side in SIDES},
                            given.repeats)
    for over, under in (("trainer", "rollout"), ("rollout", "none")):
        spread = ratios(pairs, over, under, lambda seconds: seconds.all)
        print(f"all steps: with validation by {over} a step takes {spread} times that with validation by {under}")
    conclude("the step after a validation takes less in async where a rollout validates than where the trainer does",
             ratios(pairs, "trainer", "rollout", lambda seconds: seconds.after), GOAL)


if __name__ == "__main__":
    main()
