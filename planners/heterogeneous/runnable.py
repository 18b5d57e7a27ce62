"""Finds the best placement that `planners.apply_plan_file` can turn into a run.

Ranks run one chain together, or train on the first of them and sample on the others; the shares of a task follow each
other, and tasks that compute with one engine split it alike. The rest is enumerated: how models are split, how many
ranks train, and the rows of each share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from distflow.config.load import Spec
from distflow.plan import Layout as Split
from planners.heterogeneous.layouts import CostedProblem, blocks_of, in_rows, strategies
from planners.heterogeneous.problem import (
    GENERATE,
    SYNC,
    DeviceSubset,
    Grouping,
    Placement,
    Problem,
    TaskLayout,
    shared,
)
from planners.splits import check_split

_CUTS = tuple((tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8))


def runnable(spec: Spec, costed: CostedProblem) -> Placement | None:
    """Return the fastest one; None if none fits memory, or if the mode has groups and the devices are too few."""
    found = (_placement(spec, costed, grouping, subsets) for grouping, subsets in _groups(costed.problem))
    return min((placement for placement in found if placement), key=lambda placement: placement.seconds, default=None)


def ranks_of(problem: Problem, placement: Placement) -> list[list[int]]:
    """Return the ranks of each group of a runnable placement: the first ones train, the others sample."""
    training = [any(problem.tasks[task].kind != GENERATE for task in group) for group in placement.grouping]
    order = sorted(range(len(training)), key=lambda group: not training[group])
    starts = dict(zip(order, accumulate((sum(placement.subsets[group]) for group in order), initial=0)))
    return [[*range(starts[group], starts[group] + sum(subset))] for group, subset in enumerate(placement.subsets)]


def _groups(problem: Problem) -> Iterator[tuple[Grouping, tuple[DeviceSubset, ...]]]:
    tasks, hardware = range(len(problem.tasks)), problem.hardware
    if problem.mode == SYNC:
        yield (tuple(tasks),), (hardware.all,)
        return
    sampling = tuple(task for task in tasks if problem.tasks[task].kind == GENERATE)
    training = tuple(task for task in tasks if task not in sampling)
    starts = accumulate(hardware.all, initial=0)
    counts = sorted({start + count
                     for start, device_group in zip(starts, hardware.device_groups) for count in device_group.counts})
    for count in counts[1:-1]:
        first = _first(hardware.all, count)
        rest = tuple(every - taken for every, taken in zip(hardware.all, first))
        halves = sorted([(training, first), (sampling, rest)])
        yield tuple(group for group, _ in halves), tuple(subset for _, subset in halves)


def _first(devices: DeviceSubset, count: int) -> DeviceSubset:
    before = accumulate(devices, initial=0)
    return tuple(min(max(count - start, 0), has) for start, has in zip(before, devices))


def _placement(spec: Spec, costed: CostedProblem, grouping: Grouping,
               subsets: tuple[DeviceSubset, ...]) -> Placement | None:
    problem, layouts = costed.problem, {}
    for group, subset in zip(grouping, subsets):
        turns = shared(problem, group)
        for memory_item in dict.fromkeys(problem.tasks[task].memory_item for task in group):
            best = _engine(spec, costed, [task for task in group if problem.tasks[task].memory_item == memory_item],
                           subset, turns)
            if best is None:
                return None
            layouts |= best
    return costed.placed(grouping, subsets, (layouts[task] for task in range(len(problem.tasks))))


def _engine(spec: Spec, costed: CostedProblem, tasks: Sequence[int], subset: DeviceSubset,
            turns: bool) -> dict[int, TaskLayout] | None:
    """Return the layouts of tasks that compute with one engine, with the engine split in the best way."""
    least, best = math.inf, None
    for tp, pp in _CUTS:
        found = {task: _layout(spec, costed, task, subset, (tp, pp), turns) for task in tasks}
        layouts = {task: layout for task, layout in found.items() if layout}
        if len(layouts) == len(found):
            seconds = sum(layout.takes(turns) for layout in layouts.values())
            least, best = min((least, best), (seconds, layouts), key=lambda pair: pair[0])
    return best


def _layout(spec: Spec, costed: CostedProblem, number: int, subset: DeviceSubset, cut: tuple[int, int],
            turns: bool) -> TaskLayout | None:
    tp, pp = cut
    problem, task = costed.problem, costed.problem.tasks[number]
    split = Split(1, tp=tp, pp=pp).split
    apart = problem.mode != SYNC and task.kind == GENERATE
    roles = {each.role for each in problem.tasks if each.kind == GENERATE}
    colocated = sum(problem.hardware.all) - sum(subset) if spec.run.mode == "semi_sync" else 0
    unfit = apart and (pp > 1 or colocated % tp or (tp > 1 and len(roles) > 1))
    blocks = blocks_of(subset, tp, problem.hardware)
    if unfit or sum(subset) % (tp * pp) or sum(blocks) * tp < sum(subset) \
            or check_split(spec, task.name, (task.role, task.kind == GENERATE), split):
        return None
    found = (costed.costs.layout(number, strategy, in_rows(blocks, strategy, tuple(range(len(blocks))), by_stage=False))
             for strategy in strategies(task, sum(blocks) // pp, tp, pp) if strategy.ep == 1)
    return min((layout for layout in found if layout and len(set(layout.layers)) == 1),
               key=lambda layout: layout.takes(turns), default=None)
