"""Finds the best placement that `planned_run` can turn into a run.

Ranks run one chain together, or train on the first of them and sample on the next, which may compute frozen roles
beside that in mode async; and where all machines have ranks may have one role on others. The shares of a task follow
each other, and tasks that compute with one engine split it alike. A search looks among the groups and splits that runs
have (`run_freedom`), at what ranks can run in the seconds that they take (`ByRanks`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from distflow.config.spec import Spec
from distflow.errors import Diagnostic, InvalidInput
from distflow.plan import Layout as Split
from planners.heterogeneous.cost import CostModel
from planners.heterogeneous.layouts import CostedProblem, blocks_of, used_by, with_idle_shares
from planners.heterogeneous.planned_run import are_groups_of_a_run, planned_run
from planners.heterogeneous.problem import (
    GENERATE,
    INFER,
    TRAIN,
    DeviceSubset,
    Freedom,
    Grouping,
    Placement,
    Problem,
    Strategy,
    TaskLayout,
    groups_of,
    turns_of,
)
from planners.heterogeneous.search import BUDGET, MOST, Progress, groupings, sampled_groupings, search
from planners.placement import can_leave_out, owner_of
from planners.planner import plan as make_plan
from planners.planner import roles_apart, roles_on_rollouts
from planners.splits import check_split

_SLICES, _STAGES = (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16)
_SAMPLED = 4000  # groupings of many tasks of which those that runs have are taken
_REFUSALS, _ALL_REFUSALS = 20, 2000
"""After so many plans of a grouping with as many devices in each group that the launcher refuses, and none that it
accepts, a search asks for no others of these; and for none at all after so many of all, and none that it accepts."""


def search_runnable(spec: Spec, costed: CostedProblem, limited: CostedProblem, seed: int = 0, budget: int = BUDGET,
                    stop: Callable[[], bool] = lambda: False, quality: float = 0.0) -> Iterator[Progress]:
    """Yield ever better plans that ranks can run, by a search of the problem `limited` to `run_freedom`; the rest is as
    of `search`. Raises InvalidInput with the reason most often given if the launcher refuses all plans that fit."""
    ranks, best = ByRanks(spec, costed), None

    def ended() -> bool:
        return stop() or ranks.hopeless

    for progress in search(limited.problem, seed, budget, ended, quality, limited, ranks):
        best = progress.placement
        yield progress
    if best is None:
        ranks.raise_refusals()


class ByRanks:
    """Requirement of a search that ranks can run what it finds, counted as they run it. `costed`: the problem without
    the limits of `run_freedom`."""

    def __init__(self, spec: Spec, costed: CostedProblem):
        self.spec, self.costed = spec, costed
        self._accepted: set[tuple[Grouping, tuple[int, ...]]] = set()
        self._refused, self._why = Counter[tuple[Grouping, tuple[int, ...]]](), dict[str, list[Diagnostic]]()

    def forms(self, placement: Placement) -> list[Placement]:
        """Return a placement without the machines that none of its tasks uses, and with them, as `as_ranks_run` says;
        the fastest first."""
        both = dict.fromkeys((without_idle(self.costed.problem, placement), placement))
        made = dict.fromkeys(as_ranks_run(self.spec, self.costed, each) for each in both)
        return sorted((each for each in made if each is not None), key=lambda each: each.seconds)

    def accepts(self, form: Placement) -> bool:
        """Return whether the launcher accepts a form; False, unasked, of a grouping that it has always refused with as
        many devices in each group."""
        sized = form.grouping, tuple(map(sum, form.subsets))
        if self.hopeless or (self._refused[sized] >= _REFUSALS and sized not in self._accepted):
            return False
        why = refusal(self.spec, self.costed.problem, form)
        if why is None:
            self._accepted.add(sized)
            return True
        self._refused[sized] += 1
        self._why.setdefault(re.sub(r"\d+", "N", why.what), []).append(why)
        return False

    def fastest(self, found: Iterable[Placement]) -> Placement | None:
        """Return the fastest form of some placements that ranks can run; None if there is none."""
        forms = [form for placement in dict.fromkeys(found) for form in self.forms(placement)]
        return next(filter(self.accepts, sorted(forms, key=lambda form: form.seconds)), None)

    @property
    def hopeless(self) -> bool:
        """Whether so many plans were refused, and none accepted, that no other is asked for."""
        return not self._accepted and self._refused.total() >= _ALL_REFUSALS

    def raise_refusals(self) -> None:
        """Raise InvalidInput with an example of the reason most often given, if plans were refused."""
        if not self._why:
            return
        most = max(self._why.values(), key=len)
        why, total = most[0], self._refused.total()
        said = f"the launcher refuses the {total} plans that were tried, {len(most)} of them because {why.what}"
        raise InvalidInput(replace(why, what=said))


def as_ranks_run(spec: Spec, costed: CostedProblem, placement: Placement) -> Placement | None:
    """Return the placement with the seconds that ranks take for it: devices that have an engine and that a task of it
    does not use have shares of 0 rows, frozen models beside rollouts are on the first device of each, and ranks that
    sample and train are in step with others. None if their memory has no room for that."""
    held = [_engine_devices(spec, costed.problem, placement, task) for task in range(len(placement.layouts))]
    layouts = [with_idle_shares(costed.costs, task, layout, blocks)
               for task, (layout, blocks) in enumerate(zip(placement.layouts, held))]
    for group in placement.grouping:
        if {costed.problem.tasks[task].kind for task in group} == {GENERATE, INFER} and costed.problem.has_samplers:
            for task, layout in _behind_rollouts(costed.problem, group, placement.layouts):
                layouts[task] = layout
    made = placement if tuple(layouts) == placement.layouts else \
        costed.placed(placement.grouping, placement.subsets, layouts)
    if made is None or not costed.problem.has_samplers or not costed.objective.are_in_step(made.grouping):
        return made
    taken = [layout.takes(turns) for layout, turns in zip(made.layouts, turns_of(costed.problem, made.grouping))]
    sites = [layout.sites for layout in made.layouts]
    return replace(made, seconds=costed.objective.in_step(made.grouping, taken, sites))


def _behind_rollouts(problem: Problem, group: Sequence[int],
                     layouts: Sequence[TaskLayout]) -> Iterator[tuple[int, TaskLayout | None]]:
    """Yield the layouts of a group whose rollouts have frozen models, whole, on the first device of each: this computes
    what the rollout samples, and what its models take of its memory is no room for the rollout's cache."""
    sampling = next(task for task in group if problem.tasks[task].kind == GENERATE)
    frozen, rollout = [task for task in group if problem.tasks[task].kind == INFER], layouts[sampling]
    whole = CostModel(replace(problem, tasks=tuple(replace(task, engine="megatron") if number in frozen else task
                                                   for number, task in enumerate(problem.tasks))))
    taken = 0.0
    for task in frozen:
        own, strategy = whole.tasks[task].task, Strategy(rollout.strategy.dp, micro=layouts[task].strategy.micro)
        rows = tuple(-(-count * own.rows // problem.tasks[sampling].rows) for count in rollout.rows)
        found = whole.layout(task, strategy, rollout.arrangement, rows)
        yield task, found and layouts[task]._replace(seconds=found.seconds, swap=0.0)
        taken += whole.tasks[task].fills(strategy, 0, own.layers) / problem.filled
    devices = tuple(replace(each, memory=max(each.memory - taken, 0.0)) for each in problem.hardware.device_groups)
    less = CostModel(replace(problem, hardware=replace(problem.hardware, device_groups=devices)))
    found = less.layout(sampling, rollout.strategy, rollout.arrangement, rollout.rows, rollout.layers)
    yield sampling, found and rollout._replace(seconds=found.seconds)


def _engine_devices(spec: Spec, problem: Problem, placement: Placement, task: int) -> DeviceSubset:
    """Return the blocks of each device group that have the engine of a task: those that any task of it uses, or all of
    its group's, if the engine needs that or these are not the ranks that train first."""
    tasks, hardware, groups = problem.tasks, problem.hardware, groups_of(placement.grouping)
    mine = [each for each in range(len(tasks)) if groups[each] == groups[task]]
    own = [each for each in mine if tasks[each].kind != GENERATE
           and owner_of(spec, tasks[each].role) == owner_of(spec, tasks[task].role)]
    alone = not any(tasks[each].kind == TRAIN for each in range(len(tasks)) if each not in mine)
    first = {GENERATE, TRAIN} <= {tasks[each].kind for each in mine} or (
        alone and all(tasks[each].kind == TRAIN for each in own))  # nodes that infer may go to whichever rank is free
    if task not in own or not first or not leaves_out(spec, problem, task):
        return blocks_of(placement.subsets[groups[task]], placement.layouts[task].strategy.tp, hardware)
    return tuple(map(max, zip(*(used_by(placement.layouts[each], hardware) for each in own))))


def leaves_out(spec: Spec, problem: Problem, task: int) -> bool:
    """Return whether the engine that trains or infers in a task need not be on ranks without rows, if models are not
    split into stages."""
    kind, role = problem.tasks[task].kind, problem.tasks[task].role
    return kind != GENERATE and can_leave_out(spec, role, False, Split(1))


def without_idle(problem: Problem, placement: Placement) -> Placement:
    """Return the placement with no more machines in each group than its tasks use."""
    subsets = []
    for group, subset in zip(placement.grouping, placement.subsets):
        used = [max(_devices_in(placement.layouts[task], index) for task in group) for index in range(len(subset))]
        subsets.append(tuple(min(count, -(-most // device_group.each) * device_group.each)
                             for count, most, device_group in zip(subset, used, problem.hardware.device_groups)))
    return replace(placement, subsets=tuple(subsets))


def _devices_in(layout: TaskLayout, device_group: int) -> int:
    return layout.strategy.tp * sum(kind.count * kind.stages.count(device_group) for kind in layout.arrangement)


def run_freedom(spec: Spec, problem: Problem) -> Freedom:
    """Return the decisions that a search may take for plans that ranks can run: groups that runs have, and splits that
    engines have. What is left to check is where devices stand."""
    numbers = range(len(problem.tasks))
    grouped = sampled_groupings(problem, np.random.default_rng(0), _SAMPLED) if len(numbers) > MOST else \
        groupings(problem)
    apart, beside = {*roles_apart(spec)}, {*roles_on_rollouts(spec)}

    def has_roles(group: tuple[int, ...], others: bool) -> bool:
        roles, kinds = ({getattr(problem.tasks[task], of) for task in group} for of in ("role", "kind"))
        frozen = {problem.tasks[task].role for task in group if problem.tasks[task].kind != GENERATE}
        if not others or (GENERATE in kinds and TRAIN in kinds):
            return True
        return frozen <= beside if GENERATE in kinds else TRAIN in kinds or roles <= apart

    fitting = tuple(grouping for grouping in grouped if are_groups_of_a_run(problem, grouping, spec.run)
                    and all(has_roles(group, len(grouping) > 1) for group in grouping))
    return replace(problem.freedom, groupings=fitting, whole_beside=problem.has_samplers, in_step=True,
                   idle_shares=frozenset(task for task in numbers if not leaves_out(spec, problem, task)), cuts=tuple(
        frozenset(cut for cut in product(_SLICES, _STAGES) if has_cut(spec, problem, number, *cut))
        for number in numbers))


def refusal(spec: Spec, problem: Problem, placement: Placement) -> Diagnostic | None:
    """Return why ranks cannot run a placement; None if they can."""
    if (own := planned_run(spec, problem, placement)) is None:
        return Diagnostic("the ranks of a machine, of a share or of a group would not follow each other")
    try:
        make_plan(own, own.run.ranks or 0)
    except InvalidInput as error:
        return error.mistakes[0]
    return None


def has_cut(spec: Spec, problem: Problem, number: int, tp: int, pp: int) -> bool:
    """Return whether a task's engine and model allow so many slices and stages."""
    task = problem.tasks[number]
    apart = problem.has_samplers and task.kind == GENERATE
    roles = {each.role for each in problem.tasks if each.kind == GENERATE}
    layers = [task.layers // pp + (stage < task.layers % pp) for stage in range(pp)]
    return not (apart and (pp > 1 or (tp > 1 and len(roles) > 1))) and pp <= task.layers and not check_split(
        spec, task.name, (task.role, task.kind == GENERATE), Split(1, tp=tp, pp=pp).split, layers)
