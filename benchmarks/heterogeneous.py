"""A PREDICTION of the cost model, not a measurement: what planning mixed hardware as one problem is worth.

The grid is that of the HetRL paper (arXiv 2512.12476, fig. 3): PPO and GRPO, sync and async, three sizes of models, and
64 GPUs (24 A100, 24 L40S, 16 L4) in four scenarios: one zone, three zones, two regions, two continents. In each cell
three planners answer to the same cost model, each at its best within its own restrictions:

- ours: all four decisions, by the hybrid search.
- verl-like: homogeneous and colocated: all tasks take turns on all devices, in equal shares, a strategy for each task.
- StreamRL-like: generation has one pool and the rest another; which devices are in which is searched as freely as by
  ours, but rows and layers are divided equally.

Beside the grid: verl-like with leave to let devices idle, and each of our four decisions switched off in turn.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.qwen3 import folder  # noqa: E402 - needs the path above
from benchmarks.ratio import Spread, conclude, options, parsed  # noqa: E402
from distflow.config.cluster import Link  # noqa: E402
from distflow.config.load import load  # noqa: E402
from planners.heterogeneous.problem import GENERATE, Freedom, Problem  # noqa: E402
from planners.heterogeneous.search import BUDGET, search  # noqa: E402
from planners.heterogeneous.workload import problem_of  # noqa: E402

MEAN, BEST, NEVER_BELOW = 3.17, 9.17, 1.0
SCENARIOS = {"one zone": "a100_l40s_l4", "three zones": "multi_zone", "two regions": "multi_region",
             "two continents": "multi_region"}
OCEAN = Link(gb_s=0.125, latency_us=150_000.0)
"""Between continents: 1 Gbit/s and 150 ms, the low end of what public clouds show."""
SIZES, ALGORITHMS, MODES = ("4B", "8B", "14B"), ("ppo", "grpo"), ("sync", "async")
DECISIONS = ("grouping", "assignment", "strategy", "balance")
QUICK = BUDGET // 10  # layouts and placements that each search may cost with --quick; else as many as a plan usually
CUTS = tuple(product((1, 2, 4, 8), (1, 2, 4, 8)))


@dataclass(frozen=True)
class Cell:
    """One place of the grid."""

    scenario: str
    algorithm: str
    mode: str
    size: str

    def problem(self, models: Path) -> Problem:
        """1,024 prompts × 5 samples of at most 1,024 + 1,024 tokens, trained on in 4 mini-batches: usual sizes. PPO has
        a reward model as large as the actor."""
        settings = [f"mode={self.mode}", "data.batch=1024", "data.max_prompt_tokens=1024",
                    f"roles.actor.model={folder(self.size, models)}", "roles.actor.recompute=true",
                    "roles.actor.generation.max_new_tokens=1024", "nodes.rollout.with.group_size=5",
                    "nodes.update.with.mini_batches=4"]
        if self.algorithm == "ppo":
            settings += ["nodes.critic.with.mini_batches=4",
                         "nodes.reward.type=MODEL_INFERENCE", "nodes.reward.function=model_score",
                         "roles.reward.head=value", f"roles.reward.model={folder(self.size, models, scores=True)}"]
        spec = load(self.algorithm, None, settings, SCENARIOS[self.scenario])
        if self.scenario == "two continents":
            links = spec.cluster.links.model_copy(update={"world": OCEAN})
            spec.cluster = spec.cluster.model_copy(update={"links": links})
        return problem_of(spec)


def verl(problem: Problem, idle: bool = False) -> Problem:
    """All tasks take turns, in equal shares, on all devices or (`idle`) on the best part of them."""
    together = (tuple(range(len(problem.tasks))),)
    return replace(problem, freedom=Freedom(groupings=(together,), assignment=idle, balance=False))


def stream_rl(problem: Problem) -> Problem:
    """Generation on one pool, all else on another, in equal shares."""
    numbers = range(len(problem.tasks))
    sides = tuple(tuple(number for number in numbers if (problem.tasks[number].kind == GENERATE) == generates)
                  for generates in (True, False))
    return replace(problem, freedom=Freedom(groupings=(sides,), balance=False))


def seconds(problem: Problem, budget: int, seed: int = 0) -> float:
    """What the search predicts for an iteration."""
    *_, last = search(problem, seed, budget)
    return last.placement.seconds if last.placement else float("inf")


def without(problem: Problem, decision: str, budget: int) -> float:
    """Ours with one of the four decisions switched off."""
    together = (tuple(range(len(problem.tasks))),)
    if decision == "strategy":  # the best single cut for all tasks
        return min(seconds(replace(problem, freedom=Freedom(cut=cut)), budget // 4) for cut in CUTS)
    freedom = {"grouping": Freedom(groupings=(together,)), "assignment": Freedom(assignment=False),
               "balance": Freedom(balance=False)}[decision]
    return seconds(replace(problem, freedom=freedom), budget)


def grid(cells: list[Cell], models: Path, budget: int) -> Iterator[tuple[Cell, dict[str, float]]]:
    """For each cell, the seconds of ours and how many times faster ours is than the others."""
    for cell in cells:
        problem = cell.problem(models)
        ours = seconds(problem, budget)
        yield cell, {"seconds": ours, "verl": seconds(verl(problem), budget) / ours,
                     "stream": seconds(stream_rl(problem), budget) / ours,
                     "idle": seconds(verl(problem, idle=True), budget) / ours}


def report(cells: list[Cell], models: Path, budget: int) -> list[float]:
    """Print the grid; returns every ratio of it."""
    print("PREDICTION of the cost model, not a measurement: times that our iteration is faster")
    print(f"  {'scenario':15} {'':5} {'mode':6} {'size':4}  ours, s   verl-like  StreamRL-like  (with idling)")
    found: list[dict[str, float]] = []
    for cell, ratios in grid(cells, models, budget):
        found.append(ratios)
        print(f"  {cell.scenario:15} {cell.algorithm:5} {cell.mode:6} {cell.size:4} {ratios['seconds']:8.1f} "
              f"{ratios['verl']:10.2f}x {ratios['stream']:13.2f}x {ratios['idle']:13.2f}x", flush=True)
    for side, name in (("verl", "verl-like"), ("stream", "StreamRL-like"), ("idle", "verl-like with idling")):
        values = [ratios[side] for ratios in found]
        print(f"  against {name}: mean {statistics.mean(values):.2f}x, from {min(values):.2f}x to {max(values):.2f}x")
    return [ratios[side] for ratios in found for side in ("verl", "stream")]


def ablation(cells: list[Cell], models: Path, budget: int) -> None:
    """Print what each decision is worth."""
    print("times slower with one decision switched off (PREDICTION)")
    for cell in cells:
        problem = cell.problem(models)
        ours = seconds(problem, budget)
        worth = {name: without(problem, name, budget) / ours for name in DECISIONS}
        print(f"  {cell.scenario:15} {cell.algorithm:5} {cell.mode:6} {cell.size:4} "
              + "  ".join(f"{name} {times:.2f}x" for name, times in worth.items()), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, repeats=1)
    parser.add_argument("--budget", type=int, help="layouts and placements that each search may cost")
    given = parsed(parser, arguments)
    budget = given.budget or (QUICK if given.quick else BUDGET)
    cells = [Cell(*place) for place in product(SCENARIOS, ALGORITHMS, MODES, SIZES)]
    if given.quick:
        cells = [cell for cell in cells if cell.size == "8B" and cell.algorithm == "grpo" and cell.mode == "sync"]
    with tempfile.TemporaryDirectory() as models:
        ratios = report(cells, Path(models), budget)
        ablation([cell for cell in cells if cell.size == "8B"], Path(models), budget)
    found = Spread(statistics.mean(ratios), min(ratios), max(ratios))
    print(f"goals: mean at least {MEAN}x: {found.median:.2f}x; best above {BEST}x: {found.high:.2f}x; "
          f"never below {NEVER_BELOW}x: {found.low:.2f}x")
    conclude("PREDICTION: an iteration on mixed hardware against verl-like and StreamRL-like, mean of the grid", found,
             MEAN, holds=found.high > BEST and found.low >= NEVER_BELOW)


if __name__ == "__main__":
    main()
