"""The timeline of a run: how much longer a step takes because each rank writes what it does.

Both sides run the same steps of `grpo.yaml` on the embedded model, one with `timeline: true`, one with `false`, turn by
turn; that is the hardest case, since a step of such a small model takes a fraction of a second and has as many
activities and rows as one of a large model. Compared is the median step. What the calls themselves take is printed too.
Run by hand:  python -m benchmarks.timeline_overhead
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.modes import run_once, steps_of
from benchmarks.ratio import Spread, add_size, conclude, interleaved, options, parsed
from distflow.telemetry.timeline import Timeline

GOAL = 1.01
RANKS, WARM = 2, 3


def median_step(scratch: Path, steps: int, timeline: bool, repeat: int) -> float:
    name = "with" if timeline else "without"
    folder = run_once(scratch, f"{name}-{repeat}", Path("grpo.yaml"), "embedded.yaml", RANKS, (
        f"steps={steps}", "validation.every=1000", f"timeline={str(timeline).lower()}"))
    seconds = statistics.median(step["seconds"] for step in steps_of(folder)[WARM:])
    print(f"repeat {repeat}, {name} a timeline: a step takes {seconds:.3f} s", flush=True)
    return seconds


def cost_of_a_span(folder: Path, count: int = 10_000) -> float:
    """Return the seconds for one span, with its part of the line that is written."""
    mine = Timeline()
    mine.begin(role="trainer", attempt=0)
    mine.open(folder / "timeline" / "rank0.jsonl", 0)
    began = time.perf_counter()
    for number in range(count):
        mine.add("rows", f"row {number}", 0, 1, tokens=20)
    mine.write()
    taken = (time.perf_counter() - began) / count
    mine.close()
    return taken


def main() -> None:
    parser = options(__doc__)
    add_size(parser, "steps", 40, 8, "steps of a run")
    given = parsed(parser)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        print(f"a span costs {1e6 * cost_of_a_span(scratch):.1f} us, its line included")
        sides = {name: partial(median_step, scratch, given.steps, name == "with") for name in ("with", "without")}
        pairs = interleaved(sides, given.repeats)
    spread = Spread.of([pair["with"] / pair["without"] for pair in pairs])
    print(f"a step with a timeline takes {spread} of one without")
    conclude("a timeline makes a step at most 1% longer", spread, GOAL, at_least=False)


if __name__ == "__main__":
    main()
