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
    Strategy,
    TaskLayout,
    shared,
)
from planners.splits import check_split

_CUTS = tuple((tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8))


def runnable(spec: Spec, costed: CostedProblem) -> Placement | None:
    """Return the fastest one; None if none fits memory, or if the mode has groups and the devices are too few."""
    found = (_placement(spec, costed, grouping, subsets) for grouping, subsets in run_groups(costed.problem))
    return min((placement for placement in found if placement), key=lambda placement: placement.seconds, default=None)


def ranks_of(problem: Problem, placement: Placement) -> list[list[int]]:
    """Return the ranks of each group of a runnable placement: the first ones train, the others sample."""
    training = [any(problem.tasks[task].kind != GENERATE for task in group) for group in placement.grouping]
    order = sorted(range(len(training)), key=lambda group: not training[group])
    starts = dict(zip(order, accumulate((sum(placement.subsets[group]) for group in order), initial=0)))
    return [[*range(starts[group], starts[group] + sum(subset))] for group, subset in enumerate(placement.subsets)]


def run_groups(problem: Problem) -> Iterator[tuple[Grouping, tuple[DeviceSubset, ...]]]:
    """Yield all ways to divide ranks into groups that runs have, and the devices of each group."""
    tasks, hardware = range(len(problem.tasks)), problem.hardware
    if problem.mode == SYNC:
        yield (tuple(tasks),), (hardware.all,)
        return
    sampling = tuple(task for task in tasks if problem.tasks[task].kind == GENERATE)
    training = tuple(task for task in tasks if task not in sampling)
    counts = sorted({ranks.start + count for ranks, device_group in zip(hardware.ranks, hardware.device_groups)
                     for count in device_group.counts})
    for count in counts[1:-1]:
        first = hardware.subset(range(count))
        rest = tuple(every - taken for every, taken in zip(hardware.all, first))
        halves = sorted([(training, first), (sampling, rest)])
        yield tuple(group for group, _ in halves), tuple(subset for _, subset in halves)


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
    """Return the layouts of tasks that compute with one engine, with the engine split in the best way and
    micro-batches of the best size, which is one setting of its role."""
    least, best = math.inf, None
    for tp, pp in _CUTS:
        if not all(can_split(spec, costed.problem, task, subset, tp, pp) for task in tasks):
            continue
        blocks = blocks_of(subset, tp, costed.problem.hardware)
        most = sum(blocks) // pp
        sizes = {strategy.micro: None for task in tasks
                 for strategy in strategies(costed.problem.tasks[task], most, tp, pp)}
        rollout = costed.problem.tasks[tasks[0]].kind == GENERATE  # reads prompts in as large parts as fit
        for micro in list(sizes)[: 1 if rollout else None]:
            layouts = {task: layout for task in tasks if (layout := run_layout(costed, task, blocks, (tp, pp), micro))}
            seconds = sum(layout.takes(turns) for layout in layouts.values())
            if len(layouts) == len(tasks) and seconds < least:
                least, best = seconds, layouts
    return best


def can_split(spec: Spec, problem: Problem, number: int, subset: DeviceSubset, tp: int, pp: int) -> bool:
    """Return whether a task's engine and model, and the ranks of a subset, allow so many slices and stages."""
    task = problem.tasks[number]
    apart = problem.mode != SYNC and task.kind == GENERATE
    roles = {each.role for each in problem.tasks if each.kind == GENERATE}
    colocated = sum(problem.hardware.all) - sum(subset) if spec.run.mode == "semi_sync" else 0
    unfit = apart and (pp > 1 or colocated % tp or (tp > 1 and len(roles) > 1))
    whole = sum(subset) % (tp * pp) == 0 and sum(blocks_of(subset, tp, problem.hardware)) * tp == sum(subset)
    return not unfit and whole and not check_split(spec, task.name, (task.role, task.kind == GENERATE),
                                                   Split(1, tp=tp, pp=pp).split)


def run_layout(costed: CostedProblem, number: int, blocks: DeviceSubset, cut: tuple[int, int],
            micro: int) -> TaskLayout | None:
    """Return a task's layout on all blocks of its group, in the order of ranks; None if it does not fit."""
    tp, pp = cut
    strategy = Strategy(sum(blocks) // pp, tp, pp, 1, min(micro, costed.problem.tasks[number].rows))
    arrangement = in_rows(blocks, strategy, tuple(range(len(blocks))), by_stage=False)
    layout = costed.costs.layout(number, strategy, arrangement)
    return layout if layout and len(set(layout.layers)) == 1 else None
