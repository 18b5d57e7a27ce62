"""The solvers of planning on mixed hardware: right answers first, then what time buys.

- Random problems of at most 6 devices and 4 tasks: the integer program against going through everything with code that
  shares nothing with the planner but the cost of one layout; the hybrid search and its bound against both.
- Random problems of 7 and 8 devices: the hybrid search against the program.
- 64 devices of three types, PPO of 6 tasks: the best answer after so many processor seconds, of the hybrid search, of
  greedy search (the most promising grouping, improved by the first better adjacent split) and of random placements;
  of the hybrid search by other seeds; and the program's proof.
- 1,024 such devices: the seconds of the hybrid, and of the best plan that ranks can run (`plan mixed --runnable`).

Times are those of the processor, one core: what else runs on the machine does not count.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.qwen3 import folder  # noqa: E402 - needs the path above
from benchmarks.ratio import Spread, conclude, options, parsed  # noqa: E402
from benchmarks.small_problems import brute_force, random_problem  # noqa: E402
from distflow.config.load import Spec, load  # noqa: E402
from planners.heterogeneous.exact import Proof, prove  # noqa: E402
from planners.heterogeneous.layouts import CostedProblem  # noqa: E402
from planners.heterogeneous.problem import ASYNC, SYNC, Placement, Problem  # noqa: E402
from planners.heterogeneous.runnable import run_freedom, search_runnable  # noqa: E402
from planners.heterogeneous.search import (  # noqa: E402
    Progress,
    adjacent_splits,
    groupings,
    proportional,
    random_split,
    search,
)
from planners.heterogeneous.workload import problem_of  # noqa: E402

SECONDS = 60
MEAN, WORST = 0.01, 0.05
EQUAL = 1e-6
CURVE = (0.1, 0.2, 0.5, 1, 2, 4, 8, 16)  # processor seconds
PROOF = 60  # processor seconds of the program on 64 devices
SEEDS = (1, 2, 3)


def searched(problem: Problem, seed: int = 0) -> Progress:
    *_, last = search(problem, seed)
    return last


def proven(problem: Problem, warm: Placement | None) -> Proof:
    *_, last = prove(problem, warm)
    return last


def small_ones(count: int) -> tuple[list[float], bool]:
    """Print how the solvers do on small problems; the gaps of the hybrid, and whether all goals are met."""
    gaps, wrong, untrue = [], 0, 0
    for seed in range(count):
        problem = random_problem(seed)
        truth, found = brute_force(problem), searched(problem, seed)
        answer = proven(problem, found.placement)
        if truth == math.inf:
            wrong += found.placement is not None or answer.placement is not None
            continue
        gaps.append(found.placement.seconds / truth - 1 if found.placement else math.inf)
        wrong += answer.placement is None or abs(answer.placement.seconds / truth - 1) > EQUAL or answer.gap > EQUAL
        untrue += found.bound > truth * (1 + EQUAL)
    print(f"{count} problems of at most 6 devices and 4 tasks, {len(gaps)} of them feasible: the program differs from "
          f"going through everything in {wrong}; the bound of the search is above the optimum in {untrue}; the search "
          f"is {statistics.mean(gaps):.3%} above the optimum on the mean, {max(gaps):.3%} at worst", flush=True)
    return gaps, not wrong and not untrue and statistics.mean(gaps) <= MEAN and max(gaps) <= WORST


def larger_ones(count: int) -> bool:
    """Print how far the search is from the program on 7 and 8 devices; whether it is near enough."""
    gaps, seed = [], 0
    while len(gaps) < count:
        seed += 1
        problem = random_problem(seed, devices=8)
        found = searched(problem, seed) if sum(problem.hardware.all) >= 7 else None
        if found and found.placement:
            gaps.append(found.placement.seconds / proven(problem, found.placement).placement.seconds - 1)
    print(f"{count} problems of 7 and 8 devices: the search is {statistics.mean(gaps):.3%} above the program on the "
          f"mean, {max(gaps):.3%} at worst", flush=True)
    return max(gaps) <= WORST


def ppo(cluster: str, models: Path, times: int = 1, mode: str = SYNC) -> Spec:
    """PPO with a reward model, Qwen3-8B, 256 × `times` prompts × 8 samples of up to 1,024 + 2,048 tokens."""
    spec = load("ppo", None, [
        f"mode={mode}",
        f"data.batch={256 * times}", "data.max_prompt_tokens=1024", "roles.actor.generation.max_new_tokens=2048",
        f"roles.actor.model={folder('8B', models)}", "roles.actor.recompute=true", "roles.reward.head=value",
        f"roles.reward.model={folder('8B', models, scores=True)}", "nodes.reward.type=MODEL_INFERENCE",
        "nodes.reward.function=model_score"], cluster)
    machines = {name: kind.model_copy(update={"count": times * kind.count})
                for name, kind in spec.cluster.machines.items()}
    spec.cluster = spec.cluster.model_copy(update={"machines": machines})
    return spec


def hybrid(problem: Problem, seed: int = 0) -> Iterator[float]:
    for found in search(problem, seed, budget=sys.maxsize):
        yield found.placement.seconds if found.placement else math.inf


def greedy(problem: Problem) -> Iterator[float]:
    """Stops where no adjacent split is better."""
    costed, hardware = CostedProblem(problem), problem.hardware
    split_of = {grouping: proportional(hardware, costed.shares(grouping)) for grouping in groupings(problem)}
    grouping, split = min(split_of.items(), key=lambda pair: costed.estimate(*pair))
    best, improved = _seconds(costed, grouping, split), True
    while improved:
        improved = False
        for near in adjacent_splits(hardware, split):
            found = _seconds(costed, grouping, near)
            if found < best:
                best, split, improved = found, near, True
            yield best
            if improved:
                break


def at_random(problem: Problem) -> Iterator[float]:
    costed, random, all_groupings, best = CostedProblem(problem), np.random.default_rng(0), groupings(problem), math.inf
    while True:
        grouping = all_groupings[int(random.integers(len(all_groupings)))]
        best = min(best, _seconds(costed, grouping, random_split(problem.hardware, len(grouping), random)))
        yield best


def _seconds(costed: CostedProblem, grouping: tuple, split: tuple) -> float:
    found = costed.placement(grouping, split)
    return found.seconds if found else math.inf


def others(name: str, problem: Problem, until: float) -> bool:
    """Print what searches by other seeds have after so many processor seconds, and what the program proves of it, or
    where that is after `PROOF` seconds; whether the best is the best of the layouts considered."""
    found = []
    for seed in SEEDS:
        begin = time.process_time()
        found.append(next(best for best in hybrid(problem, seed) if time.process_time() - begin >= until))
    print(f"64 devices ({name}), {problem.mode}, hybrid by seeds {SEEDS[0]} to {SEEDS[-1]}, {until:g} s: "
          f"{', '.join(f'{best:.2f}' for best in found)}", flush=True)
    *_, last = search(problem)
    assert last.placement
    begin = time.process_time()
    *_, proof = prove(problem, last.placement, lambda: time.process_time() - begin > PROOF)
    assert proof.placement
    print(f"64 devices ({name}), {problem.mode}, program: the best of the layouts considered has {proof.bound:.2f} or "
          f"more, the search's {last.placement.seconds:.2f}, the program's {proof.placement.seconds:.2f}; "
          f"{proof.open} groupings open after {time.process_time() - begin:.1f} s; no plan at all is below "
          f"{last.bound:.2f}", flush=True)
    return min(found) <= proof.bound * (1 + EQUAL)


def thousand(name: str, mode: str, models: Path) -> bool:
    """Print what a search for 1,024 devices and one for plans that ranks can run find; whether both are quick."""
    times, best = [], []
    spec = ppo(name, models, times=16, mode=mode)
    problem = problem_of(spec)
    limited = replace(problem, freedom=run_freedom(spec, problem))
    for searching in (lambda: search(problem),
                      lambda: search_runnable(spec, CostedProblem(problem), CostedProblem(limited))):
        begin = time.process_time()
        *_, last = searching()
        times.append(time.process_time() - begin)
        best.append(last.placement.seconds if last.placement else math.inf)
    print(f"1,024 devices ({name}), {mode}: {best[0]:.2f} s an iteration, planned in {times[0]:.1f} s; of plans that "
          f"ranks can run {best[1]:.2f} s, in {times[1]:.1f} s", flush=True)
    return max(times) <= SECONDS


def curve(name: str, problem: Problem, until: float) -> bool:
    """Print the best answer after so many processor seconds; whether the hybrid's improves after its first."""
    first, last = math.inf, math.inf
    for side in (hybrid, greedy, at_random):
        begin, best, marks = time.process_time(), math.inf, [mark for mark in CURVE if mark <= until]
        reached = []
        for best in side(problem):
            while marks and time.process_time() - begin >= marks[0]:
                reached.append(f"{marks.pop(0):g} s: {best:.2f}")
            if side is hybrid and first == math.inf:
                first = best
            if not marks:
                break
        last = best if side is hybrid else last
        ended = f"; ended after {time.process_time() - begin:.1f} s at {best:.2f}" if marks else ""
        print(f"64 devices ({name}), {problem.mode}, {side.__name__}: {', '.join(reached)}{ended}", flush=True)
    return last < first


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__ or "", repeats=None)
    given = parsed(parser, arguments)
    gaps, holds = small_ones(20 if given.quick else 300)
    holds = larger_ones(2 if given.quick else 20) and holds
    with tempfile.TemporaryDirectory() as models:
        for mode in (ASYNC,) if given.quick else (SYNC, ASYNC):
            problem = problem_of(ppo("multi_zone", Path(models), mode=mode))
            until = 2 if given.quick else CURVE[-1]
            falls, proven_best = curve("multi_zone", problem, until), others("multi_zone", problem, until)
            holds = (falls or proven_best) and holds
        for name, mode in product(("multi_region",) if given.quick else ("multi_region", "single_zone"), (SYNC, ASYNC)):
            holds = thousand(name, mode, Path(models)) and holds
    shares = [max(0.0, round(100 * gap, 6)) for gap in gaps]
    conclude("the hybrid search above the optimum, mean of random problems of at most 6 devices",
             Spread(statistics.mean(shares), min(shares), max(shares)), 100 * MEAN, unit="%", holds=holds,
             at_least=False)


if __name__ == "__main__":
    main()
