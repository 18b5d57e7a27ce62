"""The best placement that `planners.apply_plan_file` can turn into a run.

Ranks run one chain together, or train on the first of them and sample on the others; the shares of a work follow each
other, and works that compute with one engine split it alike. What is left is little enough to go through: how models
are split, how many ranks train, and who has how many rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from distflow.config.load import Spec
from distflow.plan import Layout as Split
from planners.heterogeneous.layouts import CostedProblem, blocks_of, in_rows, strategies
from planners.heterogeneous.problem import GENERATE, SYNC, Grouping, Placement, Pool, Problem, TaskLayout, shared
from planners.splits import check_split

_CUTS = tuple((tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8))


def runnable(spec: Spec, costed: CostedProblem) -> Placement | None:
    """The fastest one; None if none fits into memory, or if the mode has groups and the devices are too few."""
    found = (_placement(spec, costed, grouping, pools) for grouping, pools in _groups(costed.problem))
    return min((placement for placement in found if placement), key=lambda placement: placement.seconds, default=None)


def ranks_of(problem: Problem, placement: Placement) -> list[list[int]]:
    """The ranks of each group of a runnable placement: the first ones train, the others sample."""
    training = [any(problem.works[work].kind != GENERATE for work in group) for group in placement.grouping]
    order = sorted(range(len(training)), key=lambda group: not training[group])
    starts = dict(zip(order, accumulate((sum(placement.pools[group]) for group in order), initial=0)))
    return [[*range(starts[group], starts[group] + sum(pool))] for group, pool in enumerate(placement.pools)]


def _groups(problem: Problem) -> Iterator[tuple[Grouping, tuple[Pool, ...]]]:
    works, hardware = range(len(problem.works)), problem.hardware
    if problem.mode == SYNC:
        yield (tuple(works),), (hardware.all,)
        return
    sampling = tuple(work for work in works if problem.works[work].kind == GENERATE)
    training = tuple(work for work in works if work not in sampling)
    starts = accumulate(hardware.all, initial=0)
    counts = sorted({start + count for start, site in zip(starts, hardware.sites) for count in site.counts})
    for count in counts[1:-1]:
        first = _first(hardware.all, count)
        rest = tuple(every - taken for every, taken in zip(hardware.all, first))
        halves = sorted([(training, first), (sampling, rest)])
        yield tuple(group for group, _ in halves), tuple(pool for _, pool in halves)


def _first(devices: Pool, count: int) -> Pool:
    """The first `count` devices."""
    before = accumulate(devices, initial=0)
    return tuple(min(max(count - start, 0), has) for start, has in zip(before, devices))


def _placement(spec: Spec, costed: CostedProblem, grouping: Grouping, pools: tuple[Pool, ...]) -> Placement | None:
    problem, layouts = costed.problem, {}
    for group, pool in zip(grouping, pools):
        turns = shared(problem, group)
        for tenant in dict.fromkeys(problem.works[work].tenant for work in group):
            best = _engine(spec, costed, [work for work in group if problem.works[work].tenant == tenant], pool, turns)
            if best is None:
                return None
            layouts |= best
    found = tuple(layouts[work] for work in range(len(problem.works)))
    durations = [layout.takes(shared(problem, group)) for layout, group in zip(found, (
        next(group for group in grouping if work in group) for work in range(len(found))))]
    return Placement(grouping, pools, found, costed.objective.seconds(grouping, pools, durations))


def _engine(spec: Spec, costed: CostedProblem, works: Sequence[int], pool: Pool,
            turns: bool) -> dict[int, TaskLayout] | None:
    """The layouts of works that compute with one engine, with it split in the best way."""
    least, best = math.inf, None
    for tp, pp in _CUTS:
        layouts = {work: _layout(spec, costed, work, pool, tp, pp) for work in works}
        if None not in layouts.values():
            seconds = sum(layout.takes(turns) for layout in layouts.values())
            least, best = min((least, best), (seconds, layouts), key=lambda pair: pair[0])
    return best


def _layout(spec: Spec, costed: CostedProblem, number: int, pool: Pool, tp: int, pp: int) -> TaskLayout | None:
    problem, work = costed.problem, costed.problem.works[number]
    split = Split(1, tp=tp, pp=pp).split
    apart = problem.mode != SYNC and work.kind == GENERATE
    roles = {each.role for each in problem.works if each.kind == GENERATE}
    hybrid = sum(problem.hardware.all) - sum(pool) if spec.run.mode == "semi_sync" else 0
    unfit = apart and (pp > 1 or hybrid % tp or (tp > 1 and len(roles) > 1))
    blocks = blocks_of(pool, tp, problem.hardware)
    if unfit or sum(pool) % (tp * pp) or sum(blocks) * tp < sum(pool) \
            or check_split(spec, work.name, (work.role, work.kind == GENERATE), split):
        return None
    arrangement = in_rows(blocks, pp, tuple(range(len(blocks))), by_stage=False)
    strategy = next(strategies(work, sum(blocks) // pp, tp, pp))
    layout = costed.costs.layout(number, strategy, arrangement)
    return layout if layout and len(set(layout.layers)) == 1 else None
