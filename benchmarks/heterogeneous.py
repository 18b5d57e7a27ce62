"""A PREDICTION of the cost model, not a measurement: what planning mixed hardware as one problem is worth.

The grid is that of the HetRL paper (arXiv 2512.12476, fig. 3): PPO and GRPO, sync and async, three sizes of models, and
64 GPUs (24 A100, 24 L40S, 16 L4) in four scenarios: one zone, three zones, two regions, two continents. The same cost
model answers for all in each cell, and charges each what its layouts send, swaps and new weights included:

- ours: all four decisions, by the hybrid search; and the best plan that ranks can run.
- verl as it ships: blind to kinds of devices. All tasks take turns on all devices in equal shares, FSDP shards over all
  of them, rollouts are split by tp 2, and micro-batches are the largest that fit the smallest device.
- StreamRL as described (arXiv 2504.15930): generation has a pool of its own and the rest another, each of whole kinds
  of devices, in equal shares; which kinds go where and how models are split in a pool is chosen as profiling would.
- both optimised within their restrictions: verl with any split of each model; StreamRL with the devices of the pools
  searched as freely as by ours. A third of verl's kind may let devices idle.

None of the others' plans must be one that ranks can run; our plans that run must be, by the launcher's own check. The
searches of all sides, ours and those of the optimised ones, cost as many layouts and placements, by the same seeds and
for both engines. Ours begin with what those of the others have found, which their spaces contain: their plans that run
with the best of these that ranks can run, and it is said in how many cells they found nothing faster.

Beside the grid, by --accepted: which of the best plans of 8B ranks can run as they are.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path

from benchmarks.ratio import Spread, conclude, options, parsed
from benchmarks.shapes import SHAPES
from distflow.config.cluster import Link
from distflow.config.load import load
from distflow.config.spec import Spec
from planners.heterogeneous.layouts import CostedProblem, blocks_of, in_rows, strategies
from planners.heterogeneous.problem import GENERATE, Freedom, Grouping, Placement, Problem, TaskLayout
from planners.heterogeneous.runnable import (
    ByRanks,
    as_ranks_run,
    refusal,
    run_freedom,
    without_idle,
)
from planners.heterogeneous.search import BUDGET, search
from planners.heterogeneous.workload import problem_of

MEAN, BEST, NEVER_BELOW = 3.17, 9.17, 1.0
SEEDS = 0, 1  # of each side's searches
NEAR = 0.02  # how much longer a plan may take to count as good
ROUNDED = 1e-6
SCENARIOS = {"one zone": "a100_l40s_l4", "three zones": "multi_zone", "two regions": "multi_region",
             "two continents": "multi_region"}
OCEAN = Link(gb_s=0.125, latency_us=150_000.0)
"""Between continents: 1 Gbit/s and 150 ms, the low end of what public clouds show."""
SIZES, ALGORITHMS, MODES = ("4B", "8B", "14B"), ("ppo", "grpo"), ("sync", "async")
QUICK = BUDGET // 10  # layouts and placements that each search may cost with --quick; else as many as a plan usually


@dataclass(frozen=True)
class Cell:
    """One place of the grid."""

    scenario: str
    algorithm: str
    mode: str
    size: str

    def problem(self, models: Path, engine: str = "fsdp") -> Problem:
        return problem_of(self.spec(models, engine))

    def spec(self, models: Path, engine: str = "fsdp") -> Spec:
        """1,024 prompts × 5 samples of at most 1,024 + 1,024 tokens, trained on in 4 mini-batches: usual sizes. PPO has
        a reward model as large as the actor."""
        model = SHAPES[f"Qwen3-{self.size}"]
        settings = [f"mode={self.mode}", "data.batch=1024", "data.max_prompt_tokens=1024",
                    f"roles.actor.model={model.folder(models)}",
                    "roles.actor.generation.max_new_tokens=1024", "nodes.rollout.with.group_size=5",
                    "nodes.update.with.mini_batches=4"]
        if self.algorithm == "ppo":
            settings += ["nodes.critic.with.mini_batches=4",
                         "nodes.reward.type=MODEL_INFERENCE", "nodes.reward.function=model_score",
                         "roles.reward.head=value", f"roles.reward.model={model.folder(models, scores=True)}"]
        spec = load(self.algorithm, None, settings, SCENARIOS[self.scenario])
        engines = {"engine": engine, "rollout": "vllm"}  # need not be installed to be planned
        roles = spec.run.roles | {"actor": spec.run.roles["actor"].model_copy(update=engines)}
        spec.run = spec.run.model_copy(update={"roles": roles})
        if self.scenario == "two continents":
            links = {**spec.cluster.links, "world": OCEAN}
            spec.cluster = spec.cluster.model_copy(update={"links": links})
        return spec


def verl_as_shipped(problem: Problem) -> float:
    """What verl's defaults take; infinite if they do not fit."""
    costed = CostedProblem(replace(problem, freedom=Freedom(balance=False)))
    together, everything = (tuple(range(len(problem.tasks))),), problem.hardware.all

    def layout(number: int) -> TaskLayout | None:
        tp = 2 if problem.tasks[number].kind == GENERATE else 1
        blocks = blocks_of(everything, tp, problem.hardware)
        found = (costed.costs.layout(number, strategy, in_rows(blocks, strategy, tuple(range(len(blocks))), False))
                 for strategy in strategies(problem.tasks[number], sum(blocks), tp, 1))
        return next((each for each in found if each), None)  # the largest micro-batches come first

    placement = costed.placed(together, (everything,), map(layout, range(len(problem.tasks))))
    return placement.seconds if placement else float("inf")


def stream_rl_as_described(problem: Problem) -> float:
    """What two pools of whole kinds of devices take, in equal shares; infinite if none fits."""
    costed = CostedProblem(replace(problem, freedom=Freedom(balance=False)))
    groups, grouping = problem.hardware.device_groups, _two_pools(problem)
    kinds, best = sorted({group.kind for group in groups}), float("inf")
    for chosen in (some for size in range(1, len(kinds)) for some in combinations(kinds, size)):
        pools = [tuple(group.devices * ((group.kind in chosen) == generates) for group in groups)
                 for generates in (problem.tasks[tasks[0]].kind == GENERATE for tasks in grouping)]
        own = [next(pool for tasks, pool in zip(grouping, pools) if number in tasks)
               for number in range(len(problem.tasks))]
        choices = [costed.layouts.exactly(number, pool) for number, pool in enumerate(own)]
        layouts = [min((pair[1] for pair in choice.values()), key=lambda layout: layout.takes(True), default=None)
                   for choice in choices]
        placement = costed.placed(grouping, pools, layouts)
        best = min(best, placement.seconds if placement else best)
    return best


def verl(problem: Problem, idle: bool = False) -> Problem:
    """All tasks take turns, in equal shares, on all devices or (`idle`) on the best part of them."""
    together = (tuple(range(len(problem.tasks))),)
    return replace(problem, freedom=Freedom(groupings=(together,), assignment=idle, balance=False))


def stream_rl(problem: Problem) -> Problem:
    """Generation on one pool, all else on another, in equal shares."""
    return replace(problem, freedom=Freedom(groupings=(_two_pools(problem),), balance=False))


def _two_pools(problem: Problem) -> Grouping:
    numbers = range(len(problem.tasks))
    return tuple(tuple(number for number in numbers if (problem.tasks[number].kind == GENERATE) == generates)
                 for generates in (True, False))


def best_of(problem: Problem, budget: int, begin: Placement | None = None,
            required: ByRanks | None = None) -> Placement | None:
    """Return the best that searches by `SEEDS` find, or `begin`; None if none fits. Each costs so many layouts and
    placements, those that are costed as ranks run them among them."""
    for seed in SEEDS:
        costed, found = CostedProblem(problem), begin
        counted = [costed, *([required.costed] if required else ())]
        end = sum(each.evaluations for each in counted) + budget
        for step in search(problem, seed, budget, costed=costed, required=required, begin=begin):
            found = step.placement
            if sum(each.evaluations for each in counted) >= end or (required and required.hopeless):
                break
        begin = found
    return begin


def seconds(problem: Problem, budget: int) -> float:
    """Return what the best of some searches predicts for an iteration; infinite if none fits."""
    return seconds_of(best_of(problem, budget))


def seconds_of(placement: Placement | None) -> float:
    """Return the seconds of a placement; infinite if there is none."""
    return placement.seconds if placement else float("inf")


SHIPPED, OPTIMISED = ("verl", "StreamRL"), ("verl, best", "StreamRL, best", "verl, idling")
ENGINES = "fsdp", "megatron"  # FSDP recomputes activations and Megatron keeps them; all but verl as it ships may choose


def grid(cells: list[Cell], models: Path, budget: int) -> Iterator[tuple[Cell, dict[str, float]]]:
    """For each cell, the seconds of every side, and of the best plan of others that ranks can run (`known`)."""
    for cell in cells:
        found = [sides(cell.spec(models, engine), budget) for engine in ENGINES]
        best = {side: min(each[side] for each in found) for side in found[0]}
        yield cell, best | {"verl": found[0]["verl"]}


def sides(spec: Spec, budget: int) -> dict[str, float]:
    """Return the seconds of all sides with one engine. Plans that run are among all plans, so ours is no worse."""
    problem = problem_of(spec)
    spaces = dict(zip(OPTIMISED, (verl(problem), stream_rl(problem), verl(problem, idle=True))))
    others = {side: best_of(space, budget) for side, space in spaces.items()}
    known = ByRanks(spec, CostedProblem(problem)).fastest(filter(None, others.values()))
    run = that_run(spec, budget, known)
    least = min(filter(None, (run, *others.values())), key=seconds_of, default=None)
    return {"ours": seconds_of(best_of(problem, budget, least)), "that run": seconds_of(run),
            "known": seconds_of(known), "verl": verl_as_shipped(problem), "StreamRL": stream_rl_as_described(problem),
            **{side: seconds_of(placement) for side, placement in others.items()}}


def that_run(spec: Spec, budget: int, known: Placement | None = None) -> Placement | None:
    """Return the best plan that ranks can run; None if none fits or the launcher refuses all that do."""
    problem = problem_of(spec)
    limited = replace(problem, freedom=run_freedom(spec, problem))
    return best_of(limited, budget, known, ByRanks(spec, CostedProblem(problem)))


def finds_nothing_faster(took: dict[str, float]) -> bool:
    """Return whether the best plan that ranks can run is one that another side has found."""
    return took["known"] < float("inf") and took["that run"] >= took["known"] * (1 - ROUNDED)


def report(cells: list[Cell], models: Path, budget: int) -> dict[str, list[dict[str, float]]]:
    """Print the grid; returns how many times longer each baseline takes than ours, and than our best plan that ranks
    can run, by cell."""
    print("PREDICTION of the cost model, not a measurement: seconds of ours and of our best plan that ranks can run, "
          "and how many times longer than ours others take: as shipped and described, and optimised")
    print(f"  {'scenario':15} {'':5} {'mode':6} {'size':4} {'ours, s':>8} {'that run':>9}  "
          + "  ".join(f"{side:>14}" for side in (*SHIPPED, *OPTIMISED)))
    found: dict[str, list[dict[str, float]]] = {"ours": [], "that run": []}
    by_scenario: dict[str, list[dict[str, float]]] = {}
    nothing_faster = 0
    for cell, took in grid(cells, models, budget):
        nothing_faster += finds_nothing_faster(took)
        for own, rows in found.items():
            if took[own] < float("inf"):
                rows.append({side: took[side] / took[own] for side in (*SHIPPED, *OPTIMISED)})
        by_scenario.setdefault(cell.scenario, []).append(found["ours"][-1])
        print(f"  {cell.scenario:15} {cell.algorithm:5} {cell.mode:6} {cell.size:4} {took['ours']:8.1f} "
              f"{took['that run']:9.1f}  "
              + "  ".join(f"{times:13.2f}x" if times < float("inf") else "  does not fit"
                          for times in found["ours"][-1].values()), flush=True)
    for own, rows in found.items():
        name = "ours" if own == "ours" else f"plans that run ({len(rows)} of {len(cells)} cells)"
        for side in (*SHIPPED, *OPTIMISED):
            spread = _all(rows, (side,))
            fits = sum(row[side] < float("inf") for row in rows)
            print(f"  {name} against {side}: mean {spread.median:.2f}x, from {spread.low:.2f}x to {spread.high:.2f}x"
                  + (f" (it fits in {fits})" if fits < len(rows) else ""))
    print(f"  in {nothing_faster} of {len(cells)} cells the plan that runs is one that another side has found")
    print("  ours against verl as it ships: "
          + ", ".join(f"{name} {_all(rows, ('verl',)).median:.2f}x" for name, rows in by_scenario.items()))
    return found


def accepted(cells: list[Cell], models: Path, budget: int) -> None:
    """Print which of the best plans ranks can run, with the engine of the run (FSDP), and whether in the seconds that
    are predicted of them; else why not, and how much longer the best one that they can run takes."""
    longer, runs, exact = list[float](), 0, 0
    for cell in cells:
        spec = cell.spec(models)
        problem = problem_of(spec)
        *_, last = search(problem, 0, budget)
        assert last.placement
        costed, best = CostedProblem(problem), without_idle(problem, last.placement)
        ran = as_ranks_run(spec, costed, best)
        share = ran.seconds / best.seconds - 1 if ran else float("inf")
        no = refusal(spec, problem, best)
        why = no.what if no else "" if ran else "as ranks run it, it does not fit into memory"
        said = "is refused: " + why if why else "runs" if share < ROUNDED else f"runs, and takes {share:+.1%} then"
        runs, exact = runs + (not why), exact + (said == "runs")
        longer.append(0.0 if said == "runs" else seconds_of(that_run(spec, budget)) / last.placement.seconds - 1)
        print(f"  {cell.scenario:15} {cell.algorithm:5} {cell.mode:6} "
              f"{' | '.join('+'.join(problem.tasks[task].name for task in group) for group in best.grouping)}: {said}"
              + ("" if said == "runs" else f"; {longer[-1]:+.1%} for the best that runs"), flush=True)
    near = sum(each <= NEAR for each in longer)
    print(f"{runs} of {len(cells)} best plans of 8B can be run, {exact} in the seconds that are predicted of them; "
          f"{near} or ones that take at most {NEAR:.0%} longer: {statistics.mean(longer):.1%} longer on the mean, "
          f"{max(longer):.1%} at worst")


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__ or "", repeats=1)
    parser.add_argument("--budget", type=int, help="layouts and placements that each search may cost")
    parser.add_argument("--size", choices=SIZES, nargs="+", default=SIZES, help="only cells with models of these sizes")
    parser.add_argument("--accepted", action="store_true", help="only count the best plans that ranks can run")
    given = parsed(parser, arguments)
    budget = given.budget or (QUICK if given.quick else BUDGET)
    cells = [Cell(*place) for place in product(SCENARIOS, ALGORITHMS, MODES, given.size)]
    if given.quick:
        cells = [cell for cell in cells if cell.size == "8B" and cell.algorithm == "grpo" and cell.mode == "sync"]
    if (given.quick or given.accepted) and "8B" not in given.size:
        parser.error(f"--{'quick' if given.quick else 'accepted'} has models of 8B only; leave out  --size")
    with tempfile.TemporaryDirectory() as models:
        if given.accepted:
            accepted([cell for cell in cells if cell.size == "8B"], Path(models), budget)
            return
        found = report(cells, Path(models), budget)
    shipped = _all(found["that run"], SHIPPED)
    never = {name: _all(rows, (*SHIPPED, *OPTIMISED)).low for name, rows in found.items()}
    print(f"plans that run, over verl as it ships and StreamRL as described: {shipped.median:.2f}x on the mean "
          f"(goal {MEAN}x), best {shipped.high:.2f}x (HetRL's: {BEST}x); ours over the optimised ones "
          f"{_all(found['ours'], OPTIMISED[:2]).median:.2f}x; least against any: "
          + ", ".join(f"{name} {low:.2f}x" for name, low in never.items()) + f" (goal {NEVER_BELOW}x)")
    holds = len(found["that run"]) == len(cells) and min(never.values()) >= NEVER_BELOW
    conclude("PREDICTION: an iteration on mixed hardware by plans that run, against verl as it ships and StreamRL as "
             "described, mean of the grid", shipped, MEAN, holds=holds)


def _all(rows: list[dict[str, float]], sides: tuple[str, ...]) -> Spread:
    """The mean and the range of these sides, where they fit."""
    values = [row[side] for row in rows for side in sides if row[side] < float("inf")]
    return Spread(statistics.mean(values), min(values), max(values))


if __name__ == "__main__":
    main()
