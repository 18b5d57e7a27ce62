"""Both solvers against each other and against going through everything, on random small problems."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_problems import brute_force, random_problem

from benchmarks.shapes import SHAPES
from distflow.config.extras import pip_line
from distflow.config.load import load
from distflow.errors import InvalidInput
from planners.heterogeneous.exact import Options, Proof, prove
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.planned_run import ranks_of
from planners.heterogeneous.problem import Freedom, Placement, Problem
from planners.heterogeneous.search import Progress, allowed, groupings, sampled_groupings, search
from planners.heterogeneous.workload import problem_of

SEEDS = (0, 4, 9, 11, 14, 16, 21, 26)


def searched(problem: Problem, **options) -> Progress:
    *_, last = search(problem, **options)
    return last


def proven(problem: Problem, warm: Placement | None) -> Proof:
    *_, last = prove(problem, warm)
    return last


@pytest.mark.parametrize("seed", SEEDS)
def test_small_problems_are_solved_to_the_end(seed):
    problem = random_problem(seed)
    truth, found = brute_force(problem), searched(problem, seed=seed)
    answer = proven(problem, found.placement)
    assert answer.placement.seconds == pytest.approx(truth, rel=1e-6)
    assert answer.gap <= 1e-6
    assert answer.open == 0
    assert truth * (1 - 1e-9) <= found.placement.seconds <= truth * 1.05
    assert found.bound <= truth * (1 + 1e-9)


@pytest.mark.parametrize("seed", [0, 11])
def test_the_proof_needs_no_answer_to_start_from(seed):
    problem = random_problem(seed)
    assert proven(problem, None).placement.seconds == pytest.approx(brute_force(problem), rel=1e-6)


def test_one_device_needs_no_answer_to_start_from():
    """Its only placement takes as long as all tasks after each other."""
    problem = random_problem(0, devices=1)
    assert proven(problem, None).placement.seconds == pytest.approx(brute_force(problem))


def test_a_poor_answer_is_replaced():
    problem = random_problem(0)
    best = searched(problem).placement
    assert proven(problem, replace(best, seconds=best.seconds * 2)).placement.seconds == pytest.approx(best.seconds)


CASES = Path(__file__).parent / "cases"


def test_the_bound_is_below_what_exists(tmp_path):
    """A box of slow inner links is no reason to wait for it: nothing has to be sent there."""
    spec = load("grpo", None, [f"roles.actor.model={SHAPES['Qwen3-4B'].folder(tmp_path)}", "data.batch=8",
                               "data.max_prompt_tokens=512", "roles.actor.generation.max_new_tokens=256"],
                str(CASES / "slow_inside.yaml"))
    found = searched(problem_of(spec))
    assert found.bound < found.placement.seconds < 4.4


def test_the_budget_is_spent_and_no_grouping_is_dropped():
    """Beside the most promising one, all in one and all apart come first; what looks bad comes to a turn too."""
    problem = _many_devices()
    steps = list(search(problem, budget=3000))
    assert steps[-1].evaluations >= 3000
    costed, tasks = CostedProblem(problem), range(len(problem.tasks))
    assert steps[2].placement.seconds <= costed.placement((tuple(tasks),), [problem.hardware.all]).seconds


def _many_devices() -> Problem:
    problem = random_problem(11)
    groups = tuple(replace(group, machines=1, each=12) for group in problem.hardware.device_groups)
    return replace(problem, hardware=replace(problem.hardware, device_groups=groups))


class OnlyApart:
    """Accepts placements whose tasks are all in groups of their own; each of them is carried out in one form that takes
    as long, and an earlier one that nothing accepts."""

    def __init__(self, tasks: int):
        self.tasks = tasks

    def forms(self, placement: Placement) -> list[Placement]:
        return [replace(placement, subsets=(), seconds=placement.seconds / 2), placement]

    def accepts(self, form: Placement) -> bool:
        return bool(form.subsets) and len(form.grouping) == self.tasks


@pytest.mark.parametrize("many", [False, True])
def test_a_search_keeps_only_forms_that_are_accepted(many):
    """The tasks of this problem are best together; of few devices all placements are gone through."""
    problem = _many_devices() if many else random_problem(11)
    tasks = len(problem.tasks)
    together = searched(problem, budget=1500).placement
    assert len(together.grouping) < tasks
    found = searched(problem, budget=1500, required=OnlyApart(tasks)).placement
    assert len(found.grouping) == len(found.subsets) == tasks
    assert together.seconds < found.seconds
    if not many:
        apart = replace(problem, freedom=Freedom(groupings=(tuple((task,) for task in range(tasks)),)))
        assert found.seconds == pytest.approx(searched(apart).placement.seconds)


@pytest.mark.parametrize("has_samplers", [False, True])
def test_the_same_seed_gives_the_same_answer(mixed_spec, has_samplers):
    problem = replace(problem_of(mixed_spec("ppo", "h200_a100")), has_samplers=has_samplers)
    first, second = (list(search(problem, seed=7, budget=3000)) for _ in range(2))
    assert first == second
    assert len(first) >= 3


def test_the_search_is_any_time(mixed_spec):
    problem = problem_of(mixed_spec("ppo", "multi_region"))
    steps = list(search(problem, budget=8000))
    seconds = [step.placement.seconds for step in steps if step.placement]
    assert seconds == sorted(seconds, reverse=True)
    asked = iter([False, False, True])
    assert len(list(search(problem, stop=lambda: next(asked)))) == 3
    assert searched(problem, quality=0.99).evaluations < steps[-1].evaluations


def test_the_budget_is_kept(mixed_spec):
    problem = problem_of(mixed_spec("grpo", "multi_zone"))
    for budget in (1, 1500):
        steps = list(search(problem, budget=budget))
        assert all(step.evaluations < budget for step in steps[:-1])


def test_a_thousand_devices_take_no_more_layouts_than_sixty_four(mixed_spec):
    spec = mixed_spec("ppo", "multi_region", "data.batch=512")
    machines = {name: kind.model_copy(update={"count": 16 * kind.count})
                for name, kind in spec.cluster.machines.items()}
    spec.cluster = spec.cluster.model_copy(update={"machines": machines})
    problem = problem_of(spec)
    assert sum(problem.hardware.all) == 1024
    found = searched(problem, budget=6000)
    assert found.placement
    assert found.evaluations < 12_000
    devices = [rank for ranks in ranks_of(problem, found.placement.subsets) for rank in ranks]
    assert len(set(devices)) == len(devices) <= 1024


def test_what_trains_one_role_stays_together():
    problem = random_problem(11)
    twice = replace(problem, tasks=(*problem.tasks, problem.tasks[2]))
    assert all(any({2, 3} <= set(group) for group in grouping) for grouping in groupings(twice))
    assert len(groupings(problem)) == 5


def test_less_freedom_is_never_better(mixed_spec):
    problem = problem_of(mixed_spec("grpo", "multi_region"))
    free = searched(problem, budget=8000).placement.seconds
    for freedom in (Freedom(groupings=(((0, 1, 2),),)), Freedom(assignment=False),
                    Freedom(cuts=(frozenset({(1, 1)}),) * 3), Freedom(balance=False)):
        assert searched(replace(problem, freedom=freedom), budget=8000).placement.seconds >= free * 0.98, freedom


def test_many_works_are_grouped_by_drawing():
    problem = random_problem(11)
    many = replace(problem, tasks=problem.tasks * 3)
    drawn = sampled_groupings(many, np.random.default_rng(0), 50)
    assert drawn == sampled_groupings(many, np.random.default_rng(0), 50)
    assert len(drawn) > 10
    assert all(allowed(many, grouping) for grouping in drawn)
    assert ((0, 1, 2, 3, 4, 5, 6, 7, 8),) in drawn
    assert all(sorted(task for group in grouping for task in group) == list(range(9)) for grouping in drawn)
    assert searched(replace(many, edges=(), syncs=()), budget=2000).placement
    with pytest.raises(InvalidInput, match="9 nodes run models, too many for the exact program"):
        groupings(many)


def test_too_many_pools_for_the_program(mixed_spec):
    spec = mixed_spec("grpo", "multi_region")
    kinds = {f"{name}{copy}": kind for name, kind in spec.cluster.machines.items() for copy in range(2)}
    spec.cluster = spec.cluster.model_copy(update={"machines": kinds})
    with pytest.raises(InvalidInput, match=r"subsets, too many for the exact program") as caught:
        Options(CostedProblem(problem_of(spec)))
    assert "--solver hybrid" in str(caught.value)


def test_without_scipy_the_program_says_what_to_install(monkeypatch):
    problem = random_problem(3, devices=3)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(InvalidInput, match=re.escape(pip_line("exact"))):
        proven(problem, None)
