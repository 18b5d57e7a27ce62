"""Finds the best placement that `planned_run` can turn into a run.

Ranks run one chain together, or train on the first of them and sample on the next, which may compute frozen roles
beside that in mode async; and where all machines have ranks may have one role on others. The shares of a task follow
each other, and tasks that compute with one engine split it alike. The rest is enumerated: which machines have ranks,
how models are split, which ranks train, the rows of each share and the layers of each stage. Beside that, a search
looks among the groups and splits that runs have (`run_freedom`), at what ranks can run in the seconds that they take
(`ByRanks`), from the best plan that was enumerated.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, product

import numpy as np

from distflow.config.spec import Spec
from distflow.errors import Diagnostic, InvalidInput
from distflow.plan import Layout as Split
from planners.heterogeneous.cost import CostModel
from planners.heterogeneous.layouts import CostedProblem, blocks_of, in_rows, strategies, used_by, with_idle_shares
from planners.heterogeneous.placed_plan import PlacedPlan, written
from planners.heterogeneous.planned_run import are_groups_of_a_run, planned_run
from planners.heterogeneous.problem import (
    GENERATE,
    INFER,
    TRAIN,
    DeviceSubset,
    Freedom,
    Grouping,
    Hardware,
    Placement,
    Problem,
    Strategy,
    TaskLayout,
    groups_of,
    shared,
    turns_of,
)
from planners.heterogeneous.search import BUDGET, MOST, Progress, groupings, sampled_groupings, search
from planners.placement import can_leave_out, owner_of
from planners.planner import plan as make_plan
from planners.planner import roles_apart, roles_on_rollouts
from planners.splits import check_split

_SLICES, _STAGES = (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16)
_CUTS = tuple((tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8))
_SAMPLED = 4000  # groupings of many tasks of which those that runs have are taken
_PLACES = 4  # kinds of devices in zones of which any part may be left out
_REFUSALS, _ALL_REFUSALS = 20, 2000
"""After so many plans of a grouping with as many devices in each group that the launcher refuses, and none that it
accepts, a search asks for no others of these; and for none at all after so many of all, and none that it accepts."""


def runnable(spec: Spec, costed: CostedProblem, found: Iterable[Placement] = ()) -> Placement | None:
    """Return the fastest plan that ranks can run; None if none fits memory, or if the mode has groups and the devices
    are too few. `found`, by a search, are considered too: without the machines that none of their tasks uses, or with
    them if ranks cannot run the rest; both take what `as_ranks_run` says. Raises InvalidInput with the reason most
    often given if the launcher refuses all that fit."""
    ranks = ByRanks(spec, costed)
    best = _enumerated(ranks, ranks.fastest(found))
    if best is None:
        ranks.raise_refusals()
    return best


def search_runnable(spec: Spec, costed: CostedProblem, limited: CostedProblem, seed: int = 0, budget: int = BUDGET,
                    stop: Callable[[], bool] = lambda: False, quality: float = 0.0) -> Iterator[Progress]:
    """Yield ever better plans that ranks can run: the one that `runnable` returns, then those of a search of the
    problem `limited` to `run_freedom`; the rest is as of `search`. `stop` ends what is enumerated too, after at least
    one plan. Raises InvalidInput as `runnable`."""
    ranks = ByRanks(spec, costed)
    begin = best = _enumerated(ranks, None, stop)

    def ended() -> bool:
        return stop() or ranks.hopeless

    for progress in search(limited.problem, seed, budget, ended, quality, limited, ranks, begin):
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
        sized = _sized(form)
        if self.hopeless or (self._refused[sized] >= _REFUSALS and sized not in self._accepted):
            return False
        return self.asked(form)

    def asked(self, form: Placement) -> bool:
        """Return whether the launcher accepts a form, however many like it were refused."""
        problem, sized = self.costed.problem, _sized(form)
        why = refusal(self.spec, written(problem, form))
        if why is None:
            self._accepted.add(sized)
            return True
        self._refused[sized] += 1
        self._why.setdefault(re.sub(r"\d+", "N", why.what), []).append(why)
        return False

    def fastest(self, found: Iterable[Placement]) -> Placement | None:
        """Return the fastest form of some placements that ranks can run; None if there is none. If all forms of a
        placement are refused, its groups are tried with each engine split in one way for all of its tasks."""
        engines, able = EngineLayouts(self.spec, self.costed), list[Placement]()
        for each in dict.fromkeys(found):
            forms = self.forms(each)
            best = next(filter(self.accepts, forms), None)
            alike = engines.placement(each.grouping, each.subsets) if forms and best is None else None
            able += [form for form in (best, *(self.forms(alike) if alike else ())) if form]
        return next(filter(self.accepts, sorted(able, key=lambda form: form.seconds)), None)

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


def _sized(form: Placement) -> tuple[Grouping, tuple[int, ...]]:
    return form.grouping, tuple(map(sum, form.subsets))


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
        frozenset(cut for cut in product(_SLICES, _STAGES) if _has_cut(spec, problem, number, *cut))
        for number in numbers))


def refusal(spec: Spec, plan: PlacedPlan) -> Diagnostic | None:
    """Return why ranks cannot run a plan; None if they can."""
    try:
        make_plan(planned_run(spec, plan), len(plan.ranks))
    except InvalidInput as error:
        return error.mistakes[0]
    return None


def _enumerated(ranks: ByRanks, best: Placement | None,
                stop: Callable[[], bool] = lambda: False) -> Placement | None:
    """Return the fastest enumerated plan that ranks can run, or `best` if none is faster. Groups are tried by the least
    seconds that they may take, until those left cannot be faster than what is found, or until `stop`."""
    spec, costed = ranks.spec, ranks.costed
    groups = enumerate(run_groups(costed.problem, roles_apart(spec), roles_on_rollouts(spec)))
    layouts = EngineLayouts(spec, costed)
    for least, _, each in sorted((costed.ideal(*each), number, each) for number, each in groups):
        if best and least > best.seconds:
            break
        planned = layouts.placement(*each)
        placement = planned and as_ranks_run(spec, costed, planned)
        if placement and (best is None or placement.seconds < best.seconds) and ranks.asked(placement):
            best = placement
        if stop():
            break
    return best


def run_groups(problem: Problem, roles: Sequence[str] = (),
               on_rollouts: Sequence[str] = ()) -> Iterator[tuple[Grouping, tuple[DeviceSubset, ...]]]:
    """Yield ways to divide ranks into groups that runs have, and the devices of each group, with all machines or
    without some kinds or zones of them: any number of the first ones trains, or some kinds or zones do; and with all
    machines, in mode sync too, one of `roles` may have what these leave. The roles `on_rollouts` may be with those that
    sample."""
    for beside in chain.from_iterable(combinations(on_rollouts, count) for count in range(len(on_rollouts) + 1)):
        yield from _run_groups(problem, [role for role in roles if role not in beside], beside)


def _run_groups(problem: Problem, roles: Sequence[str],
                beside: Collection[str]) -> Iterator[tuple[Grouping, tuple[DeviceSubset, ...]]]:
    tasks = range(len(problem.tasks))
    sampling = tuple(task for task in tasks
                     if problem.tasks[task].kind == GENERATE or problem.tasks[task].role in beside)
    training = tuple(task for task in tasks if task not in sampling)
    for used in _parts(problem.hardware):
        if not problem.has_samplers:
            yield (tuple(tasks),), (used,)
            continue
        for first in _divisions(problem.hardware, used) if sampling and training else ():
            yield _sorted([(training, first), (sampling, _less(used, first))])
    everything = problem.hardware.all
    for role, second in ((role, second) for role in roles for second in _divisions(problem.hardware, everything)):
        own, last = tuple(task for task in training if problem.tasks[task].role == role), _less(everything, second)
        rest = tuple(task for task in training if task not in own)
        if not problem.has_samplers:
            yield _sorted([((*sampling, *rest), second), (own, last)])
            continue
        for first in _divisions(problem.hardware, second):
            yield _sorted([(rest, first), (sampling, _less(second, first)), (own, last)])


def _sorted(groups: list[tuple[tuple[int, ...], DeviceSubset]]) -> tuple[Grouping, tuple[DeviceSubset, ...]]:
    groups = sorted(groups)
    return tuple(tasks for tasks, _ in groups), tuple(subset for _, subset in groups)


def _less(subset: DeviceSubset, other: DeviceSubset) -> DeviceSubset:
    return tuple(count - taken for count, taken in zip(subset, other))


def _parts(hardware: Hardware) -> Iterator[DeviceSubset]:
    """Yield all devices, and all of some kinds in some zones: of few such places any, of many without the slowest."""
    groups = hardware.device_groups
    places = sorted({(group.peak, group.kind, group.zone) for group in groups}, reverse=True)
    sizes = range(len(places), 0, -1)
    for chosen in (some for size in sizes for some in combinations(places, size)) if len(places) <= _PLACES else \
            (places[:size] for size in sizes):
        yield tuple(group.devices * ((group.peak, group.kind, group.zone) in chosen) for group in groups)


def _divisions(hardware: Hardware, used: DeviceSubset) -> Iterable[DeviceSubset]:
    """Return ways to take some of the devices in use: the first ones, or all of some kinds and zones that no earlier
    division has cut."""
    parts = (tuple(min(count, limit) for count, limit in zip(part, used)) for part in _parts(hardware))
    whole = (part for part in parts if part != used and any(part)
             and all(count in (0, group.devices) for count, group in zip(part, hardware.device_groups)))
    return dict.fromkeys((*_beginnings(hardware, used), *whole))


def _beginnings(hardware: Hardware, used: DeviceSubset) -> Iterator[DeviceSubset]:
    """Yield the subsets of the first ranks of the devices in use, as many as device groups may be divided into."""
    for last, device_group in enumerate(hardware.device_groups):
        for count in device_group.counts[1:] if used[last] else ():
            found = (*used[:last], count, *(0 for _ in used[last + 1:]))
            if found != used:
                yield found


class EngineLayouts:
    """Best layouts of the tasks that compute with one engine, all split alike; cached."""

    def __init__(self, spec: Spec, costed: CostedProblem):
        self.spec, self.costed = spec, costed
        self._best = cache(self._best_of)

    def placement(self, grouping: Grouping, subsets: tuple[DeviceSubset, ...]) -> Placement | None:
        """Return the best placement of these groups on these subsets; None if a task does not fit."""
        problem, layouts = self.costed.problem, {}
        for group, subset in zip(grouping, subsets):
            turns = shared(problem, group)
            whole = turns and problem.has_samplers and any(problem.tasks[task].kind == GENERATE for task in group)
            colocated = sum(map(sum, subsets)) - sum(subset) if self.spec.run.trainer_samples else 0
            for memory_item in dict.fromkeys(problem.tasks[task].memory_item for task in group):
                own = tuple(task for task in group if problem.tasks[task].memory_item == memory_item)
                best = self._best(own, subset, colocated, turns, whole)
                if best is None:
                    return None
                layouts |= best
        return self.costed.placed(grouping, subsets, (layouts[task] for task in range(len(problem.tasks))))

    def _best_of(self, tasks: tuple[int, ...], subset: DeviceSubset, colocated: int, turns: bool,
                 whole: bool) -> dict[int, TaskLayout] | None:
        """Return the layouts with the engine split in the best way, or `whole`, and micro-batches of the best size,
        which is one setting of its role."""
        least, best, problem = math.inf, None, self.costed.problem
        for tp, pp in _CUTS[:1] if whole else _CUTS:
            if not all(can_split(self.spec, problem, task, subset, colocated, tp, pp) for task in tasks):
                continue
            blocks = blocks_of(subset, tp, problem.hardware)
            sizes = {strategy.micro: None for task in tasks
                     for strategy in strategies(problem.tasks[task], sum(blocks) // pp, tp, pp)}
            rollout = problem.tasks[tasks[0]].kind == GENERATE  # reads prompts in as large parts as fit
            for micro, by_stage in product(list(sizes)[: 1 if rollout else None], (False, True)[: pp]):
                layouts = _alike(self.costed, tasks, blocks, (tp, pp), micro, by_stage)
                seconds = sum(layout.takes(turns) for layout in layouts.values())
                if len(layouts) == len(tasks) and seconds < least:
                    least, best = seconds, layouts
        return best


def _alike(costed: CostedProblem, tasks: Sequence[int], blocks: DeviceSubset, cut: tuple[int, int], micro: int,
           by_stage: bool) -> dict[int, TaskLayout]:
    """Return the layouts of the tasks that fit, all with the layers in each stage that are best for the one that
    trains."""
    found: dict[int, TaskLayout] = {}
    for task in sorted(tasks, key=lambda task: costed.problem.tasks[task].kind != TRAIN):
        layers = next((layout.layers for layout in found.values()), None)
        if layout := run_layout(costed, task, blocks, cut, micro, by_stage, layers):
            found[task] = layout
    return found


def can_split(spec: Spec, problem: Problem, number: int, subset: DeviceSubset, colocated: int, tp: int,
              pp: int) -> bool:
    """Return whether a task's engine and model, and the ranks of a subset, allow so many slices and stages; in mode
    semi_sync so do the `colocated` ranks, which sample too."""
    apart = problem.has_samplers and problem.tasks[number].kind == GENERATE
    whole = sum(subset) % (tp * pp) == 0 and sum(blocks_of(subset, tp, problem.hardware)) * tp == sum(subset)
    return whole and not (apart and colocated % tp) and _has_cut(spec, problem, number, tp, pp)


def _has_cut(spec: Spec, problem: Problem, number: int, tp: int, pp: int) -> bool:
    """Return whether a task's engine and model allow so many slices and stages."""
    task = problem.tasks[number]
    apart = problem.has_samplers and task.kind == GENERATE
    roles = {each.role for each in problem.tasks if each.kind == GENERATE}
    layers = [task.layers // pp + (stage < task.layers % pp) for stage in range(pp)]
    return not (apart and (pp > 1 or (tp > 1 and len(roles) > 1))) and pp <= task.layers and not check_split(
        spec, task.name, (task.role, task.kind == GENERATE), Split(1, tp=tp, pp=pp).split, layers)


def run_layout(costed: CostedProblem, number: int, blocks: DeviceSubset, cut: tuple[int, int],
               micro: int, by_stage: bool = False, layers: tuple[int, ...] | None = None) -> TaskLayout | None:
    """Return a task's layout on all blocks of its group, in the order of ranks, dealt by share or by stage, with
    `layers` in each stage or the best; None if it does not fit."""
    tp, pp = cut
    strategy = Strategy(sum(blocks) // pp, tp, pp, 1, min(micro, costed.problem.tasks[number].rows))
    arrangement = in_rows(blocks, strategy, tuple(range(len(blocks))), by_stage)
    return costed.costs.layout(number, strategy, arrangement, layers=layers)
