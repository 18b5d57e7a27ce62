"""The solvers of planning on mixed hardware against each other: right answers first, then processor seconds.

- 200 random problems of up to 6 devices and 3 tasks: the integer program against going through every grouping, set of
  devices and layout; the hybrid search against both.
- 64 devices of three types in one zone and in three, PPO of 6 tasks: the hybrid's answer and seconds against those of
  the proof, which starts from that answer.
- 1,024 such devices: the seconds of the hybrid.

Times are those of the processor, one core: what else runs on the machine does not count.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.qwen3 import folder  # noqa: E402 - needs the path above
from benchmarks.ratio import Spread, conclude, options, parsed  # noqa: E402
from benchmarks.small_problems import brute_force, small  # noqa: E402
from distflow.config.load import load  # noqa: E402
from planners.heterogeneous.exact import Proof, prove  # noqa: E402
from planners.heterogeneous.problem import ASYNC, SYNC, Placement, Problem  # noqa: E402
from planners.heterogeneous.search import Progress, search  # noqa: E402
from planners.heterogeneous.workload import problem_of  # noqa: E402

FASTER, NEAR, SECONDS = 50, 0.03, 60
MEAN, WORST = 0.01, 0.05
T = TypeVar("T")


def timed(act: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and processor seconds."""
    begin = time.process_time()
    return act(), time.process_time() - begin


def searched(problem: Problem, seed: int = 0) -> Progress:
    *_, last = search(problem, seed)
    return last


def proven(problem: Problem, warm: Placement | None) -> Proof:
    *_, last = prove(problem, warm)
    return last


def small_ones(count: int) -> bool:
    """Print how the solvers do on small problems; whether both goals are met."""
    gaps, wrong, impossible = [], 0, 0
    for seed in range(count):
        problem = small(seed)
        truth, found = brute_force(problem), searched(problem, seed).placement
        answer = proven(problem, found)
        if truth == float("inf"):
            impossible += 1
            wrong += found is not None or answer.placement is not None
            continue
        gaps.append(found.seconds / truth - 1)
        wrong += abs(answer.placement.seconds / truth - 1) > 1e-6 or answer.gap > 1e-6
    print(f"{count} problems of up to 6 devices and 3 tasks ({impossible} without any answer): the program differs "
          f"from going through everything in {wrong}; the hybrid is {statistics.mean(gaps):.3%} above it on the mean, "
          f"{max(gaps):.3%} at worst", flush=True)
    return not wrong and statistics.mean(gaps) <= MEAN and max(gaps) <= WORST


def ppo(cluster: str, models: Path, times: int = 1) -> Problem:
    """PPO with a reward model, Qwen3-8B, 256 × `times` prompts × 8 samples of up to 1,024 + 2,048 tokens."""
    spec = load("ppo", None, [
        f"data.batch={256 * times}", "data.max_prompt_tokens=1024", "roles.actor.generation.max_new_tokens=2048",
        f"roles.actor.model={folder('8B', models)}", "roles.actor.recompute=true", "roles.reward.head=value",
        f"roles.reward.model={folder('8B', models, scores=True)}", "nodes.reward.type=MODEL_INFERENCE",
        "nodes.reward.function=model_score"], cluster)
    machines = {name: kind.model_copy(update={"count": times * kind.count})
                for name, kind in spec.cluster.machines.items()}
    spec.cluster = spec.cluster.model_copy(update={"machines": machines})
    return problem_of(spec)


def sixty_four(cluster: str, problem: Problem) -> tuple[float, bool]:
    """How many times faster the hybrid is than the proof, and whether it is near enough to it."""
    found, quick = timed(lambda: searched(problem))
    answer, slow = timed(lambda: proven(problem, found.placement))
    above = found.placement.seconds / answer.bound - 1
    print(f"64 devices ({cluster}), {len(problem.tasks)} tasks, {problem.mode}: hybrid {found.placement.seconds:.2f} s "
          f"in {quick:.2f} s; proof {answer.placement.seconds:.2f} s, bound {answer.bound:.2f} s, in {slow:.1f} s "
          f"({answer.programs} programs); hybrid {above:.2%} above the bound, {slow / quick:.0f}x faster", flush=True)
    return slow / quick, above <= NEAR


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, repeats=1)
    given = parsed(parser, arguments)
    holds = small_ones(12 if given.quick else 200)
    with tempfile.TemporaryDirectory() as models:
        places = [("a100_l40s_l4", SYNC)] if given.quick else product(("a100_l40s_l4", "multi_zone"), (SYNC, ASYNC))
        found = [sixty_four(cluster, replace(ppo(cluster, Path(models)), mode=mode)) for cluster, mode in places]
        for name in ("multi_region", "single_zone"):
            large, seconds = timed(lambda name=name: searched(ppo(name, Path(models), times=16)))
            print(f"1,024 devices ({name}): {large.placement.seconds:.2f} s an iteration, planned in {seconds:.1f} s")
            holds = holds and seconds <= SECONDS
    holds = holds and all(near for _, near in found)
    conclude("the hybrid search against the exact proof, 64 devices, PPO: processor seconds",
             Spread.of([times for times, _ in found]), FASTER, holds=holds)


if __name__ == "__main__":
    main()
