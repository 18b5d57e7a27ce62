"""Validation in mode async: by a rollout while training goes on, against by the trainer, which stands still meanwhile.

`grpo.yaml` on the embedded task, 3 ranks on the CPU, one thread each: one trains and two sample, and every fifth step
is validated. The reward of the validation waits like a judge elsewhere, which costs no processor: 0.2 s an answer. Both
sides run the same steps turn by turn, and a third without validation. Compared are the seconds between the metrics of
one step and those of the next, all that happens between them included, over all steps but the first ones; it is also
printed for those that follow a validated step and for the others. A whole run has the wait for the last validation.
Run by hand:  python -m benchmarks.validation
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.modes import ROOT, run_once
from benchmarks.ratio import Spread, add_size, conclude, interleaved, options, parsed
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


def seconds_of_steps(scratch: Path, steps: int, side: str, repeat: int) -> float:
    """Return the mean seconds from one step to the next, of all that are validated or follow these."""
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
    mean = statistics.mean(timed.values())
    print(f"repeat {repeat}, validation by {side}: {mean:.2f} s a step; {statistics.mean(after):.2f} s after a "
          f"validated one, {statistics.mean(others):.2f} s after others; the whole run {whole:.1f} s", flush=True)
    return mean


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
    print(f"validation by a rollout: a step takes {Spread.of([pair['rollout'] / pair['none'] for pair in pairs])} of "
          "one without any")
    spread = Spread.of([pair["trainer"] / pair["rollout"] for pair in pairs])
    conclude("a step of async takes less where a rollout validates than where the trainer does", spread, GOAL)


if __name__ == "__main__":
    main()
