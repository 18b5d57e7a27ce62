"""Finds the best layout of a task on a device subset, and costs whole placements: the leaf that all solvers share.

The slices of a stage are in one machine and make a *block*. A subset offers so many blocks of each device group, and an
arrangement gives each (share, stage) one of them. Few blocks are arranged in every way that makes a difference, so that
the leaf is exact; many, by device group: share after share, or stage after stage, in several orders of the groups.

Strategies are cut by successive halving (Jamieson and Talwalkar 2016): all of them are costed in one arrangement, and
only the better part in the others. Then the order of the groups is improved by swapping two as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, permutations, product

from planners.heterogeneous.cost import CostModel, Objective
from planners.heterogeneous.problem import (
    GENERATE,
    INFER,
    Arrangement,
    DeviceGroups,
    DeviceSubset,
    Grouping,
    Hardware,
    ModelTask,
    Placement,
    Problem,
    Replicas,
    Strategy,
    TaskLayout,
    device_groups_of,
    groups_of,
    turns_of,
)

FEW = 6  # blocks that are arranged in every way
_ORDERED = 3  # device groups whose every order is tried


def blocks_of(subset: DeviceSubset, tp: int, hardware: Hardware) -> DeviceSubset:
    """Return how many blocks of `tp` devices of one machine the subset has in each device group."""
    return tuple(count // group.each * (group.each // tp) + count % group.each // tp
                 for count, group in zip(subset, hardware.device_groups))


def every(blocks: DeviceSubset, pp: int) -> Iterator[Arrangement]:
    """Yield all arrangements of all blocks, up to the order of the shares."""
    device_groups = [group for group, count in enumerate(blocks) for _ in range(count)]
    dp, kinds = sum(blocks) // pp, sorted(set(permutations(device_groups, pp)))
    for chosen in _multisets(kinds, dp, list(blocks)):
        yield tuple(Replicas(kind, chosen.count(kind)) for kind in dict.fromkeys(chosen))


def _multisets(kinds: list[tuple[int, ...]], count: int, left: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not count:
        yield ()
        return
    for index, kind in enumerate(kinds):
        needed = [kind.count(group) for group in range(len(left))]
        if all(have >= need for have, need in zip(left, needed)):
            rest = [have - need for have, need in zip(left, needed)]
            yield from ((kind, *more) for more in _multisets(kinds[index:], count - 1, rest))


def few(blocks: DeviceSubset) -> bool:
    return sum(blocks) <= FEW


def in_rows(blocks: DeviceSubset, strategy: Strategy, order: tuple[int, ...], by_stage: bool) -> Arrangement:
    """Return blocks in the order of the device groups, dealt by share or by stage; the rest idle."""
    dp, pp = strategy.dp, strategy.pp
    runs = [(group, blocks[group]) for group in order if blocks[group]]
    if not by_stage and len(runs) == 1 or pp == 1:
        return _alike(runs, pp, dp)
    starts, total = [], 0
    for _, count in runs:
        starts.append(total)
        total += count
    changes = sorted({0} | {at for start in starts[1:] for at in _changes(start, dp, pp, by_stage) if 0 < at < dp})
    found: dict[tuple[int, ...], int] = {}
    for first, after in zip(changes, [*changes[1:], dp]):
        places = [stage * dp + first if by_stage else first * pp + stage for stage in range(pp)]
        stages = tuple(runs[max(index for index, start in enumerate(starts) if start <= place)][0] for place in places)
        found[stages] = found.get(stages, 0) + after - first
    return tuple(Replicas(stages, count) for stages, count in found.items())


def _changes(start: int, dp: int, pp: int, by_stage: bool) -> tuple[int, ...]:
    """Return the shares from which on another kind begins, since a device group's blocks begin at `start`."""
    return (start % dp,) if by_stage else (start // pp, -(-start // pp))


def _alike(runs: list[tuple[int, int]], pp: int, dp: int) -> Arrangement:
    found = []
    for group, count in runs:
        found.append(Replicas((group,) * pp, min(dp, count // pp)))
        dp -= found[-1].count
    return tuple(kind for kind in found if kind.count)


def orders(blocks: DeviceSubset, hardware: Hardware) -> list[tuple[int, ...]]:
    """Return orders of the device groups that have blocks: all if few, else by zone, speed and memory, both ways."""
    used = [group for group, count in enumerate(blocks) if count]
    if len(used) <= _ORDERED:
        return list(permutations(used))
    groups = hardware.device_groups
    keys = (lambda group: (groups[group].zone, groups[group].peak),
            lambda group: groups[group].peak,
            lambda group: groups[group].memory)
    found = [tuple(sorted(used, key=key)) for key in keys]
    return list(dict.fromkeys(found + [order[::-1] for order in found]))


def swaps(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for one in range(len(order)):
        for other in range(one + 1, len(order)):
            changed = list(order)
            changed[one], changed[other] = changed[other], changed[one]
            yield tuple(changed)


def used_by(layout: TaskLayout, hardware: Hardware) -> DeviceSubset:
    """Return the blocks of each device group that a layout uses."""
    return tuple(sum(kind.count * kind.stages.count(group) for kind in layout.arrangement)
                 for group in range(len(hardware.device_groups)))


def with_idle_shares(costs: CostModel, number: int, layout: TaskLayout, held: DeviceSubset) -> TaskLayout | None:
    """Return the layout of task `number` with the seconds that it takes if what it leaves of `held`, the blocks that
    have its model, has shares of 0 rows, as ranks have; None if these have too little memory for their part of the
    state."""
    strategy = layout.strategy
    left = tuple(max(0, blocks - taken) for blocks, taken in zip(held, used_by(layout, costs.problem.hardware)))
    idle = strategy._replace(dp=sum(left) // strategy.pp)
    more = in_rows(left, idle, tuple(range(len(left))), False) if idle.dp else ()
    found = costs.layout(number, strategy._replace(dp=strategy.dp + idle.dp), (*layout.arrangement, *more),
                         (*layout.rows, *(0 for _ in more)), layout.layers)
    return found and layout._replace(seconds=found.seconds, swap=found.swap)


_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)  # into how many stages many blocks are arranged
_BETTER = 4  # part of the strategies that are arranged in several ways: one in so many
_PARTS, _SUBSETS = 3, 5
"""Combinations of device groups that are tried, and the number of groups up to which all are candidates."""
_LESS = 1 - 1e-9  # layouts that differ by rounding only are equal: larger micro-batches come first
_SMALL = 8  # devices of a subset of which any may stay idle
Draft = tuple[TaskLayout | None, Strategy, DeviceSubset]
"""A layout in the first arrangement (None: it does not fit), its strategy, and the subset's blocks."""
Pair = tuple[TaskLayout, TaskLayout]  # the best alone, and the best taking turns
Cut = tuple[int, int, int]  # tp, pp and ep
Choices = dict[tuple[DeviceGroups, Cut | None], Pair]
"""By the device groups that a layout uses, since transfers depend on them, and where tasks of an engine must be split
alike by how: the fastest layout need not be the best."""


class LayoutSearch:
    """Best layouts of a problem's tasks; cached."""

    def __init__(self, costs: CostModel):
        self.costs, self.problem = costs, costs.problem
        self._cuts_of = self.problem.freedom.cuts
        plain = [(replace(task, name="", role=""), self._cuts_of and self._cuts_of[number],
                  number in self.problem.freedom.idle_shares) for number, task in enumerate(self.problem.tasks)]
        self._like = [plain.index(task) for task in plain]
        self.parts = cache(self._parts_of)
        self._drafted: dict[tuple[int, DeviceSubset], list[Draft]] = {}
        self._exactly: dict[tuple[int, DeviceSubset], Choices] = {}
        self._best: dict[tuple[int, DeviceSubset], Choices] = {}

    def best(self, task: int, subset: DeviceSubset) -> Choices:
        """Return the fastest layouts of a task on a subset or a part of it; none if none fits."""
        key = (self._like[task], subset)
        if key not in self._best:
            parts = [self.exactly(key[0], part) for part in self.parts(*key)]
            self._best[key] = self._among(*key, parts)
        return self._best[key]

    def _among(self, task: int, subset: DeviceSubset, parts: Iterable[Choices]) -> Choices:
        """Return the fastest layouts of parts of a subset, whose other devices have idle shares if the problem says so.
        """
        layouts = dict.fromkeys(layout for choices in parts for pair in choices.values() for layout in pair)
        hardware = self.problem.hardware
        return self._fastest(with_idle_shares(self.costs, task, layout, blocks_of(subset, layout.strategy.tp, hardware))
                             if task in self.problem.freedom.idle_shares else layout for layout in layouts)

    def estimate(self, task: int, subset: DeviceSubset) -> tuple[float, DeviceGroups]:
        """Return a cheap estimate and where it is: the ideal and the slowest links of the groups that suit it best."""
        task = self._like[task]
        best = self.parts(task, subset)[0]
        return self.costs.estimate(task, best), device_groups_of(best)

    def _parts_of(self, task: int, subset: DeviceSubset) -> list[DeviceSubset]:
        """Return parts of a subset, most promising first: any of a small one, whole device groups of a large one."""
        groups = self.problem.hardware.device_groups
        used = sorted((group for group, count in enumerate(subset) if count), key=lambda group: groups[group].peak)
        if not used or not self.problem.freedom.assignment:
            return [subset]
        if sum(subset) <= _SMALL:
            counts = [[count for count in group.counts if count <= limit] for group, limit in zip(groups, subset)]
            return sorted((part for part in product(*counts) if any(part)), key=partial(self.costs.estimate, task))
        chosen = [used[gone:] for gone in range(len(used))] if len(used) > _SUBSETS else \
            [some for size in range(len(used), 0, -1) for some in combinations(used, size)]
        parts = [tuple(count if group in some else 0 for group, count in enumerate(subset)) for some in chosen]
        return sorted(parts, key=partial(self.costs.estimate, task))[:_PARTS]

    def rough(self, task: int, subset: DeviceSubset) -> Choices:
        """Return the fastest layouts on the most promising part of the subset, in the order of the cluster file: a
        first look, at a fraction of the cost. On a cluster of few devices, the best ones."""
        if sum(self.problem.hardware.all) <= FEW:
            return self.best(task, subset)
        task = self._like[task]
        return self._fastest(layout for layout, _, _ in self._drafts(task, self.parts(task, subset)[0]))

    def exactly(self, task: int, subset: DeviceSubset) -> Choices:
        """Return the fastest layouts on the whole subset. Equal tasks share them."""
        key = (self._like[task], subset)
        if key not in self._exactly:
            self._exactly[key] = self._fastest(self._search(*key))
        return self._exactly[key]

    def _fastest(self, layouts: Iterable[TaskLayout | None]) -> Choices:
        """Return the fastest layouts; the first of equals."""
        found: Choices = {}
        for layout in layouts:
            if layout is not None:
                key = layout.sites, cut_of(layout) if self._cuts_of else None
                alone, turns = found.get(key, (layout, layout))
                found[key] = (layout if layout.seconds < _LESS * alone.seconds else alone,
                              layout if layout.takes(True) < _LESS * turns.takes(True) else turns)
        return found

    def _drafts(self, task: int, subset: DeviceSubset) -> list[Draft]:
        if (task, subset) not in self._drafted:
            found: list[Draft] = []
            for tp, pp in self._cuts(task, subset) if any(subset) else ():
                found += self._cut(task, blocks_of(subset, tp, self.problem.hardware), tp, pp)
            self._drafted[task, subset] = found
        return self._drafted[task, subset]

    def _cut(self, task: int, blocks: DeviceSubset, tp: int, pp: int) -> Iterator[Draft]:
        """Yield drafts of micro-batches of every size; of many blocks, from the largest on as long as it helps."""
        least: dict[int, float] = {}
        done: set[int] = set()
        for strategy in strategies(self.problem.tasks[task], sum(blocks) // pp, tp, pp):
            if strategy.ep in done:
                continue
            layout = self.costs.layout(task, strategy, in_rows(blocks, strategy, tuple(range(len(blocks))), pp > 1))
            yield layout, strategy, blocks
            if layout and layout.seconds >= least.get(strategy.ep, math.inf) and not few(blocks):
                done.add(strategy.ep)
            least[strategy.ep] = min(layout.seconds if layout else math.inf, least.get(strategy.ep, math.inf))

    def _search(self, task: int, subset: DeviceSubset) -> Iterator[TaskLayout]:
        drafts = self._drafts(task, subset)
        yield from (layout for layout, _, _ in drafts if layout)
        if not self.problem.freedom.assignment:
            return
        rest: dict[tuple[int, int, int], tuple[float, int]] = {}  # seconds of the best micro-batches
        for number, (layout, strategy, blocks) in enumerate(drafts):
            if not few(blocks):
                mine, cut = layout.takes(True) if layout else math.inf, (strategy.tp, strategy.pp, strategy.ep)
                rest[cut] = min(rest.get(cut, (mine, number)), (mine, number), key=lambda pair: pair[0])
            elif sum(blocks) == strategy.dp * strategy.pp:
                yield from self._costed(task, strategy, every(blocks, strategy.pp))
        for _, number in sorted(rest.values())[: -(-len(rest) // _BETTER)]:
            yield from self._arranged(task, *drafts[number][1:])

    def _cuts(self, task: int, subset: DeviceSubset) -> Iterator[tuple[int, int]]:
        groups = self.problem.hardware.device_groups
        for tp in slices_of(self.problem.tasks[task], [groups[group].each for group,
                                                       count in enumerate(subset) if count]):
            blocks = sum(blocks_of(subset, tp, self.problem.hardware))
            for pp in range(1, min(blocks, self.problem.tasks[task].layers) + 1):
                if (blocks <= FEW or pp in _STAGES) and (self._cuts_of is None or (tp, pp) in self._cuts_of[task]):
                    yield tp, pp

    def _costed(self, task: int, strategy: Strategy, arrangements: Iterable[Arrangement]) -> Iterator[TaskLayout]:
        for arrangement in arrangements:
            layout = self.costs.layout(task, strategy, arrangement)
            if layout is not None:
                yield layout

    def _arranged(self, task: int, strategy: Strategy, blocks: DeviceSubset) -> Iterator[TaskLayout]:
        best: tuple[float, tuple[int, ...], bool] | None = None
        ahead = orders(blocks, self.problem.hardware)
        seen = set(ahead)
        while ahead:
            improved = False
            for order, by_stage in product(ahead, (False, True)[: strategy.pp]):
                for layout in self._costed(task, strategy, (in_rows(blocks, strategy, order, by_stage),)):
                    yield layout
                    if best is None or layout.seconds < best[0]:
                        best, improved = (layout.seconds, order, by_stage), True
            ahead = [order for order in swaps(best[1]) if order not in seen] if best and improved else []
            seen.update(ahead)


def slices_of(task: ModelTask, machines: list[int]) -> list[int]:
    """Return sizes of tensor parallelism: powers of two that these machines and the attention heads allow."""
    found, tp = [], 1
    while tp <= min(machines) and task.heads % tp == 0:
        found.append(tp)
        tp *= 2
    return found


def strategies(task: ModelTask, most: int, tp: int, pp: int) -> Iterator[Strategy]:
    """Yield the sizes of micro-batches and of expert parallelism for tp, pp and `most` shares, of which none is idle.
    """
    dp = min(most, task.rows)
    if dp < 1 or (pp > 1 and not task.stages):
        return
    tokens = task.read if task.kind == GENERATE else task.whole
    fitting, even = max(1, int(task.micro_tokens // tokens)), -(-task.rows // dp)
    largest = min(fitting, task.rows)  # a share may have more rows than an even one
    powers = [2**power for power in range(largest.bit_length() - 1, -1, -1)]
    micros = dict.fromkeys([largest, min(fitting, even), *powers])
    for micro in micros:
        for ep in (1, *(size for size in (2, 4, 8, 16, 32, 64) if task.experts and task.kind != GENERATE
                        and task.experts % size == 0 and dp * tp % size == 0)):
            yield Strategy(dp, tp, pp, ep, micro)


def cut_of(layout: TaskLayout) -> Cut:
    return layout.strategy.tp, layout.strategy.pp, layout.strategy.ep


def _split_of(layout: TaskLayout, with_sites: bool) -> tuple[Cut, tuple[int, ...]]:
    return cut_of(layout), tuple(sorted(layout.sites)) if with_sites else ()


def _starts(options: list[list[TaskLayout]]) -> Iterator[list[TaskLayout]]:
    """Yield the fastest layouts, and the fastest ones inside each set of device groups."""
    yield [layouts[0] for layouts in options]
    for sites in {layout.sites: None for layouts in options for layout in layouts}:
        inside = [next((layout for layout in layouts if layout.sites <= sites), None) for layouts in options]
        found = [layout for layout in inside if layout is not None]
        if len(found) == len(options):
            yield found


_COMBINATIONS = 256  # of the layouts of all tasks that are compared


class CostedProblem:
    """Seconds of placements of a problem; cached."""

    def __init__(self, problem: Problem):
        self.problem, self.costs = problem, CostModel(problem)
        self.layouts = LayoutSearch(self.costs)
        self.objective = Objective(problem, self.costs.network)
        self.ideal_of, self.estimate_of = cache(self._ideal_of), cache(self._estimate_of)
        self._looks = 0

    @property
    def evaluations(self) -> int:
        """Layouts and placements that were costed."""
        return self.costs.evaluations + self._looks

    def placed(self, grouping: Grouping, subsets: Sequence[DeviceSubset],
               layouts: Iterable[TaskLayout | None]) -> Placement | None:
        """Return the placement with these layouts of the tasks; None at the first task that has none."""
        found: list[TaskLayout] = []
        for layout in layouts:
            if layout is None:
                return None
            found.append(layout)
        return Placement(grouping, tuple(subsets), tuple(found),
                         self._seconds(grouping, turns_of(self.problem, grouping), found))

    def placement(self, grouping: Grouping, subsets: Sequence[DeviceSubset]) -> Placement | None:
        return self._with(self.layouts.best, grouping, subsets)

    def rough(self, grouping: Grouping, subsets: Sequence[DeviceSubset]) -> float:
        found = self._with(self.layouts.rough, grouping, subsets)
        return found.seconds if found else math.inf

    def _with(self, choices: Callable[[int, DeviceSubset], Choices], grouping: Grouping,
              subsets: Sequence[DeviceSubset]) -> Placement | None:
        self._looks += 1
        turns, options = turns_of(self.problem, grouping), []
        for task, group in enumerate(groups_of(grouping)):
            found = choices(task, subsets[group])
            if not found:
                return None
            options.append(sorted((pair[turns[task]] for pair in found.values()),
                                  key=lambda layout: (layout.takes(turns[task]), sorted(layout.sites))))
        if self.problem.freedom.cuts is not None:
            options = self._alike(grouping, turns, options)
        return self.placed(grouping, subsets, self._together(grouping, turns, options)) if all(options) else None

    def _alike(self, grouping: Grouping, turns: list[bool], options: list[list[TaskLayout]]) -> list[list[TaskLayout]]:
        """Return the options of each task that split an engine as the others of its group do, in the quickest way; on
        the same devices, if the engine is on no others and any options are."""
        tasks, found = self.problem.tasks, list(options)
        for group in grouping:
            whole = self.problem.freedom.whole_beside and {tasks[task].kind for task in group} == {GENERATE, INFER}
            for memory_item in dict.fromkeys(tasks[task].memory_item for task in group):
                own = [task for task in group if tasks[task].memory_item == memory_item]
                left_out = self.problem.freedom.idle_shares.isdisjoint(own)
                for with_sites in (True, False) if left_out and len(own) > 1 else (False,):
                    best = self._common(own, turns, options, whole, with_sites)
                    for task in own:
                        found[task] = [layout for layout in options[task] if _split_of(layout, with_sites) == best]
                    if best is not None:
                        break
        return found

    def _common(self, own: Sequence[int], turns: list[bool], options: list[list[TaskLayout]], whole: bool,
                with_sites: bool) -> tuple[Cut, tuple[int, ...]] | None:
        """Return the split of an engine, and (`with_sites`) its device groups, that is quickest for all `own` tasks."""
        fastest = [{_split_of(layout, with_sites): layout.takes(turns[task]) for layout in reversed(options[task])}
                   for task in own]
        shared = sorted(set(fastest[0]).intersection(*fastest))
        common = [split for split in shared if not whole or split[0] == (1, 1, 1)]
        total = {split: sum(each[split] for each in fastest) for split in common}
        return min(total, key=total.__getitem__, default=None)

    def _together(self, grouping: Grouping, turns: list[bool], options: list[list[TaskLayout]]) -> list[TaskLayout]:
        """Return the layouts that are best together: of few combinations the best one; of many, the fastest layouts of
        all, or of those on the same device groups, improved one task after the other."""
        value, best = min(((self._seconds(grouping, turns, start), start) for start in _starts(options)),
                          key=lambda pair: pair[0])
        fastest = [layouts[0].takes(shared) for layouts, shared in zip(options, turns)]
        options = [[layout for layout in layouts if self.objective.seconds(
            grouping, [*fastest[:task], layout.takes(turns[task]), *fastest[task + 1:]]) < value]
            for task, layouts in enumerate(options)]  # the others take longer even if nothing is sent
        if math.prod(map(len, options)) <= _COMBINATIONS:
            return min([best, *map(list, product(*options))], key=partial(self._seconds, grouping, turns))
        improved = True
        while improved:
            improved = False
            for task, layouts in enumerate(options):
                for layout in layouts:
                    changed = [*best[:task], layout, *best[task + 1:]]
                    found = self._seconds(grouping, turns, changed)
                    if found < value:
                        value, best, improved = found, changed, True
        return best

    def _seconds(self, grouping: Grouping, turns: list[bool], layouts: Sequence[TaskLayout]) -> float:
        return self.objective.seconds(grouping, [layout.takes(shared) for layout, shared in zip(layouts, turns)],
                                      [layout.sites for layout in layouts])

    def ideal(self, grouping: Grouping, subsets: Sequence[DeviceSubset]) -> float:
        """Return a lower bound for any layouts on these subsets: nothing is sent."""
        turns = turns_of(self.problem, grouping)
        return self.objective.seconds(grouping, [self.ideal_of(task, subsets[group], turns[task])
                                                 for task, group in enumerate(groups_of(grouping))])

    def estimate(self, grouping: Grouping, subsets: Sequence[DeviceSubset]) -> float:
        """Return the ideal plus what is sent between the device groups that suit the tasks best."""
        turns = turns_of(self.problem, grouping)
        found = [self.estimate_of(task, subsets[group], turns[task]) for task, group in enumerate(groups_of(grouping))]
        durations, sites = zip(*found)
        return math.inf if math.inf in durations else self.objective.seconds(grouping, durations, sites)

    def _ideal_of(self, task: int, subset: DeviceSubset, turns: bool) -> float:
        return self.costs.ideal(task, subset) + (self.costs.ideal_swap(task, subset) if turns else 0.0)

    def _estimate_of(self, task: int, subset: DeviceSubset, turns: bool) -> tuple[float, DeviceGroups]:
        seconds, sites = self.layouts.estimate(task, subset)
        return seconds + (self.costs.ideal_swap(task, subset) if turns else 0.0), sites

    def shares(self, grouping: Grouping) -> list[float]:
        everything = self.problem.hardware.all
        times = [sum(self.ideal_of(task, everything, False) for task in group) for group in grouping]
        total = sum(times)
        return [time / total if 0 < total < math.inf else 1 / len(times) for time in times]

    def bound(self) -> float:
        """Return a lower bound for any placement: all arithmetic at the peak of all devices, and in mode sync the
        longest path with all devices for each task and nothing sent."""
        everything, tasks = self.problem.hardware.all, range(len(self.problem.tasks))
        busy = sum(self.costs.tasks[task].arithmetic(list(zip(self.problem.hardware.device_groups, everything)))
                   for task in tasks)
        apart = tuple((task,) for task in tasks)
        return max(busy, self.ideal(apart, [everything] * len(tasks)))
