"""Cost model: balances a layout and predicts its seconds (`CostModel`), and those of an iteration (`Objective`).

Load balance gives each stage or share as much as lets the slowest finish first. A pipeline's first micro-batch passes
all stages, each further one follows as fast as the slowest stage (Huang et al. 2019, §2). The last one has the rows
that are left. A stage has the same layers in all shares, since their gradients are summed. The cache limits how many
rows of a share generate at once; the others follow as slots become free (Kwon et al. 2023), so `rows` take rows / slots
times as long.

An iteration in mode sync: the chain of each group runs in the plan's order; a task starts once its group is free and
its inputs have arrived; the iteration ends when the last task is done and the trained weights are where the next one
needs them. Async: the groups work on different iterations at the same time, so the slowest group's period counts: its
tasks, and what it waits for from others; but where ranks can run it only in step, see `in_step`. What is sent goes
between the device groups that the layouts use, not those that the groups may use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from planners.heterogeneous.hardware import Network, Roofline, Rows
from planners.heterogeneous.problem import (
    GENERATE,
    TRAIN,
    Arrangement,
    DeviceGroups,
    DeviceSubset,
    Edge,
    Grouping,
    Problem,
    Replicas,
    Strategy,
    TaskLayout,
    device_groups_of,
    groups_of,
)


def layers_of_stages(layers: int, seconds: Sequence[float], most: Sequence[float], even: bool = False) -> \
        tuple[int, ...] | None:
    """Return the layers of each stage that minimise the slowest one's seconds, or, if `even`, equally many (the last
    ones may have one less); None if they do not fit. `seconds` are of a layer in each stage, `most` is how many fit."""
    stages = len(seconds)
    if even:
        counts = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        return tuple(counts) if all(count <= limit for count, limit in zip(counts, most)) else None
    if stages > layers or min(most) < 1 or sum(min(limit, layers) for limit in most) < layers:
        return None
    rate = layers / sum(1 / each for each in seconds)
    counts = [max(1, min(int(rate / each), int(limit))) for each, limit in zip(seconds, most)]
    while sum(counts) > layers:
        counts[max((count * each, stage) for stage, (count, each) in enumerate(zip(counts, seconds))
                   if count > 1)[1]] -= 1
    while sum(counts) < layers:
        counts[min(((count + 1) * each, stage) for stage, (count, each, limit) in enumerate(zip(counts, seconds, most))
                   if count + 1 <= limit)[1]] += 1
    return tuple(counts)


def rows_of_shares(total: int, counts: Sequence[int], times: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Return the chunks of rows of a share of each kind that minimise the slowest one's seconds. `times` are by kind
    the seconds for 0, 1, … chunks, never falling, up to total / count at least."""
    parts = np.concatenate([table[1:] for table in times])
    weights = np.repeat(counts, [len(table) - 1 for table in times])
    order = np.argsort(parts, kind="stable")
    limit = parts[order[int(weights[order].cumsum().searchsorted(total))]]  # by then all chunks are done
    rows = [int(table.searchsorted(limit, "right")) - 1 for table in times]
    for kind in sorted(range(len(rows)), key=lambda kind: -times[kind][rows[kind]]):
        surplus = sum(count * each for count, each in zip(counts, rows)) - total
        rows[kind] -= max(0, min(rows[kind] - 1, surplus // counts[kind]))
    return tuple(rows)


_CONTENTION = 0.5  # seconds that a device computes longer for each second in which it gathers weights beside that
_CHUNKS = 512  # rows are dealt to unlike shares in chunks; a share has at most so many


class PipelinePass(NamedTuple):
    """Seconds of a micro-batch through all stages, and through the slowest one."""

    fill: float
    step: float


class CostModel:
    """Seconds of layouts on a problem's hardware. `evaluations` counts costed layouts: what search budgets limit."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.network = Network(problem.hardware)
        self.tasks = [Roofline(task, problem.filled, self.network) for task in problem.tasks]
        self.evaluations = 0
        self._device_groups = problem.hardware.device_groups
        self._layer = cache(self._layer_seconds)
        self._fits = cache(self._layers_that_fit)

    def layout(self, number: int, strategy: Strategy, arrangement: Arrangement,
               rows: tuple[int, ...] | None = None, layers: tuple[int, ...] | None = None) -> TaskLayout | None:
        """Return the layout of task `number`, balanced, or with `rows` of a share of each entry of the arrangement and
        `layers` of each stage; None if a device has too little memory for it, or is too slow for a single row."""
        self.evaluations += 1
        cost, even = self.tasks[number], not self.problem.freedom.balance
        stages = [frozenset(kind.stages[stage] for kind in arrangement) for stage in range(strategy.pp)]
        slowest = [max(self._layer(number, group, strategy) for group in groups) for groups in stages]
        most = [min(self._fits(number, group, strategy, stage) for group in groups)
                for stage, groups in enumerate(stages)]
        layers = layers or layers_of_stages(cost.task.layers, slowest, most, even)
        if layers is None or any(count > limit for count, limit in zip(layers, most)):
            return None
        clocks = [self._clock(number, strategy, kind, layers) for kind in arrangement]
        if rows is None:
            rows = self._rows(cost.task.rows, arrangement, clocks, even)
            if min(rows) < 1:
                return None
        seconds = max(float(clock(share)) for clock, share in zip(clocks, rows))
        if cost.shards(strategy):
            gathers = self._gathers(number, strategy, stages[0], max(rows))
            hides = all(self._device_groups[group].overlaps for group in stages[0])
            seconds = max(seconds + _CONTENTION * gathers, gathers) + gathers / cost.task.layers if hides \
                else seconds + gathers
        if cost.task.kind == TRAIN:
            seconds += self._updates(number, strategy, stages, layers)
        swap = max(cost.swap(self._device_groups[group], strategy, count) for groups, count in zip(stages, layers)
                   for group in groups)
        return TaskLayout(strategy, arrangement, rows, layers, seconds, swap)

    def ideal(self, number: int, subset: DeviceSubset) -> float:
        """Return a lower bound on the seconds of any layout of a task on this subset."""
        return self.tasks[number].ideal(list(zip(self._device_groups, subset)))

    def ideal_swap(self, number: int, subset: DeviceSubset) -> float:
        """Return a lower bound on the seconds of any layout's swaps with host memory."""
        return self.tasks[number].ideal_swap(list(zip(self._device_groups, subset)))

    def estimate(self, number: int, subset: DeviceSubset) -> float:
        """Return the ideal plus what training must send over the slowest links of the subset."""
        return self.ideal(number, subset) + self._crossing(number, device_groups_of(subset))

    def _crossing(self, number: int, groups: DeviceGroups) -> float:
        task = self.problem.tasks[number]
        if task.kind != TRAIN or len(groups) < 2:
            return 0.0
        nbytes = task.epochs * min(task.mini_batches * task.trained,
                                   2 * task.rows * task.tokens * task.hidden * task.width)
        return self.network.weights(frozenset({min(groups)}), groups).seconds(nbytes)

    def _layer_seconds(self, number: int, group: int, strategy: Strategy) -> float:
        cost, task = self.tasks[number], self.problem.tasks[number]
        if task.kind == GENERATE:
            together = max(1.0, task.rows / strategy.dp / strategy.pp)
            return float(cost.decode(group, self._device_groups[group], strategy.tp, together))
        return cost.batch(group, self._device_groups[group], strategy, strategy.micro * task.computed, task.whole) \
            + self._experts(number, frozenset({group}), strategy)

    def _layers_that_fit(self, number: int, group: int, strategy: Strategy, stage: int) -> float:
        return self.tasks[number].fits(self._device_groups[group], strategy, stage)

    def _experts(self, number: int, groups: frozenset[int], strategy: Strategy) -> float:
        task = self.problem.tasks[number]
        nbytes = strategy.micro * task.computed * task.hidden * task.width * task.experts_per_token
        return (4 if task.kind == TRAIN else 2) * self.network.experts(groups, strategy, nbytes)

    def _rows(self, total: int, arrangement: Arrangement, clocks: list[Callable[[Rows], Rows]], even: bool) -> \
            tuple[int, ...]:
        shares = sum(kind.count for kind in arrangement)
        if even or len(arrangement) == 1:
            return (-(-total // shares),) * len(arrangement)
        counts = [kind.count for kind in arrangement]
        chunk = -(-total // min(counts) // _CHUNKS)
        chunks = -(-total // chunk)
        tables = [clock(np.arange(-(-chunks // count) + 1) * chunk) for clock, count in zip(clocks, counts)]
        return tuple(each * chunk for each in rows_of_shares(chunks, counts, tables))

    def _clock(self, number: int, strategy: Strategy, kind: Replicas, layers: tuple[int, ...]) -> \
            Callable[[Rows], Rows]:
        task = self.problem.tasks[number]
        if task.kind == GENERATE:
            return partial(self._generates, number, strategy, kind, layers)
        full, least = (self._passing(number, strategy._replace(micro=micro), kind, layers)
                       for micro in (strategy.micro, 1))
        return partial(_pipeline, full, least, strategy.micro, task.mini_batches, task.epochs)

    def _passing(self, number: int, strategy: Strategy, kind: Replicas, layers: tuple[int, ...]) -> PipelinePass:
        task = self.problem.tasks[number]
        stages = [count * self._layer(number, group, strategy) for group, count in zip(kind.stages, layers)]
        hops = self._hops(kind, strategy, strategy.micro * task.computed * task.hidden * task.width)
        both = 2 if task.kind == TRAIN else 1
        return PipelinePass(sum(stages) + both * sum(hops), max(*stages, *(both * hop for hop in hops)))

    def _hops(self, kind: Replicas, strategy: Strategy, nbytes: float) -> list[float]:
        stages = kind.stages
        return [self.network.hop(source, target, stages.count(source), strategy, nbytes)
                for source, target in zip(stages, stages[1:])] or [0.0]

    def _generates(self, number: int, strategy: Strategy, kind: Replicas, layers: tuple[int, ...], rows: Rows) -> Rows:
        """Return the seconds of prefill, then of a step for each token, the stages taking turns with parts of the rows;
        the mean step has fewer rows than the first, by the mean response's length over the longest."""
        cost, task = self.tasks[number], self.problem.tasks[number]
        per_row = task.hidden * task.width
        stages = list(zip(kind.stages, layers))
        full, least = ([count * cost.batch(group, self._device_groups[group], strategy,
                                           micro * task.read, task.seen)
                        for group, count in stages] for micro in (strategy.micro, 1))
        prefill = _pipeline(PipelinePass(sum(full), max(full)), PipelinePass(sum(least), max(least)), strategy.micro,
                            1, 1, rows)
        together = np.minimum(rows, self._cache_slots(number, strategy, stages))
        part = together * (task.answer / task.longest) / strategy.pp
        steps = [count * cost.decode(group, self._device_groups[group], strategy.tp, part) for group, count in stages]
        whole, longest = sum(steps), steps[0]
        for (source, _), (target, _) in zip(stages, stages[1:]):
            whole = whole + self.network.hop(source, target, kind.stages.count(source), strategy, part * per_row)
        for step in steps[1:]:
            longest = np.maximum(longest, step)
        turns = np.maximum(1.0, rows / np.maximum(together, 1.0))
        decode = task.longest * turns * np.maximum(whole, strategy.pp * longest)
        return np.where(rows > 0, decode, 0.0) + prefill

    def _cache_slots(self, number: int, strategy: Strategy, stages: list[tuple[int, int]]) -> int:
        cost, found = self.tasks[number], self.problem.tasks[number].at_once or np.inf
        for stage, (group, count) in enumerate(stages):
            _, beside = cost.kept(strategy, stage)
            free = cost.room(self._device_groups[group]) - beside - count * cost.state(strategy)
            found = min(found, free // (count * cost.cache(strategy.tp)))
        return int(found)

    def _updates(self, number: int, strategy: Strategy, stages: list[frozenset[int]], layers: tuple[int, ...]) -> float:
        """Return the seconds of adding up the gradients (4 bytes each) and of the optimizer, each stage by itself. What
        divides its weights among the shares needs each sum in one place; else it goes to all."""
        cost, task = self.tasks[number], self.problem.tasks[number]
        slowest, halves = 0.0, 0 if cost.by_layer(strategy) else 1 if cost.shards(strategy) else 2
        for groups, count in zip(stages, layers):
            nbytes = 4 * count * task.trained / task.parameters  # of a parameter of each layer
            sums = sum(self.network.half_ring(groups, split, nbytes * each / split.tp)
                       for each, split in cost.splits(strategy) if each)
            slowest = max(slowest, halves * sums
                          + max(cost.step(self._device_groups[group], strategy, count) for group in groups))
        return task.epochs * task.mini_batches * slowest

    def _gathers(self, number: int, strategy: Strategy, groups: DeviceGroups, rows: int) -> float:
        """Return the seconds of gathering divided weights, layer by layer, in each pass of a micro-batch: forward, and
        for training backward (Zhao et al. 2023, §3.3), where a large model's gradients (4 bytes each) are scattered
        too. Devices that compute meanwhile, more slowly, wait for the first layer alone, if links are quick enough."""
        task = self.problem.tasks[number]
        passes = task.epochs * task.mini_batches * math.ceil(rows / task.mini_batches / strategy.micro)
        nbytes = task.divided / task.layers / strategy.tp * task.width
        seconds = (2 if task.kind == TRAIN else 1) * self.network.half_ring(groups, strategy, nbytes)
        if task.kind == TRAIN and self.tasks[number].by_layer(strategy):
            seconds += self.network.half_ring(groups, strategy, 4 * task.trained / task.layers / strategy.tp)
        return passes * task.layers * seconds


def _pipeline(full: PipelinePass, least: PipelinePass, micro: int, parts: int, times: int, rows: Rows) -> Rows:
    """Return the seconds of `rows`, in `parts` mini-batches of micro-batches of `micro` rows, repeated `times`. `least`
    is a micro-batch of one row; partly filled ones are interpolated."""
    each = np.asarray(rows) / parts
    batches = np.ceil(each / micro)
    filled = np.maximum(each - (batches - 1) * micro - 1, 0.0) / max(1, micro - 1)
    first, last = (short + (long - short) * filled for short, long in zip(least, full))
    several = full.fill + (batches - 2) * full.step + last
    return np.where(each > 0, times * parts * np.where(batches > 1, several, first), 0.0)


_ITERATIONS = 5  # until iterations follow each other as all later ones do
Durations = Sequence[float]
Sites = Sequence[DeviceGroups] | Mapping[int, DeviceGroups]  # device groups that each task's layout uses


class Objective:
    """Seconds of an iteration, from groups and the durations and sites of tasks; without sites nothing is sent."""

    def __init__(self, problem: Problem, network: Network):
        self.problem, self._network = problem, network
        self._arriving = [[edge for edge in problem.edges if edge.target == task] for task in range(len(problem.tasks))]

    def moved(self, edge: Edge, sites: Sites | None) -> float:
        """Return the seconds of bringing rows to a task."""
        if sites is None or not edge.nbytes:
            return 0.0
        return self._network.rows(sites[edge.source], sites[edge.target]).seconds(edge.nbytes)

    def synced(self, edge: Edge, sites: Sites | None, together: bool) -> float:
        """Return the seconds of bringing trained weights to a task; 0 where one engine trains and uses them."""
        if sites is None or not edge.nbytes:
            return 0.0
        tasks, sources, targets = self.problem.tasks, sites[edge.source], sites[edge.target]
        if together and sources == targets and tasks[edge.source].memory_item == tasks[edge.target].memory_item:
            return 0.0
        return self._network.weights(sources, targets).seconds(edge.nbytes)

    def seconds(self, grouping: Grouping, durations: Durations, sites: Sites | None = None) -> float:
        """Return in mode sync when tasks are done and weights where they are used; in async the longest period."""
        group_of = groups_of(grouping)
        if self.problem.has_samplers:
            return self.in_step(grouping, durations, sites) \
                if self.problem.freedom.in_step and self.are_in_step(grouping) else \
                max(self._periods(group_of, durations, sites), default=0.0)
        ends = [start + duration for start, duration in zip(self.starts(grouping, durations, sites), durations)]
        used = [ends[edge.source] + self.synced(edge, sites, group_of[edge.source] == group_of[edge.target])
                for edge in self.problem.syncs]
        return max([*ends, *used], default=0.0)

    def are_in_step(self, grouping: Grouping) -> bool:
        """Return whether ranks run these groups in mode sync, whichever they are planned for: if some sample and train,
        and others have roles of their own."""
        return len(grouping) > 1 and any({GENERATE, TRAIN} <= {self.problem.tasks[task].kind for task in group}
                                         for group in grouping)

    def in_step(self, grouping: Grouping, durations: Durations, sites: Sites | None) -> float:
        """Return the seconds from iteration to iteration if all groups work on the same one, and each begins the next
        as soon as it can."""
        group_of, tasks = groups_of(grouping), self.problem.tasks
        moved = [[(edge.source, self.moved(edge, sites)) for edge in arriving] for arriving in self._arriving]
        synced = [[(edge.source, self.synced(edge, sites, group_of[edge.source] == group_of[task]))
                   for edge in self.problem.syncs if edge.target == task] for task in range(len(tasks))]
        free, before, ends = [0.0] * len(grouping), [-math.inf] * len(tasks), [0.0] * len(tasks)
        for _ in range(_ITERATIONS):
            before, ends = ends if max(ends, default=0.0) else before, [0.0] * len(tasks)
            for task, duration in enumerate(durations):
                start = max([free[group_of[task]], *(ends[source] + seconds for source, seconds in moved[task]),
                             *(before[source] + seconds for source, seconds in synced[task])])
                free[group_of[task]] = ends[task] = start + duration
        return max(ends, default=0.0) - max(before, default=0.0)

    def starts(self, grouping: Grouping, durations: Durations, sites: Sites | None) -> list[float]:
        group_of, free = groups_of(grouping), [0.0] * len(grouping)
        starts: list[float] = []
        for task, duration in enumerate(durations):
            start = free[group_of[task]]
            for edge in self._arriving[task]:
                start = max(start, starts[edge.source] + durations[edge.source] + self.moved(edge, sites))
            starts.append(start)
            free[group_of[task]] = start + duration
        return starts

    def _periods(self, group_of: list[int], durations: Durations, sites: Sites | None) -> list[float]:
        periods = [0.0] * (max(group_of) + 1)
        for task, duration in enumerate(durations):
            periods[group_of[task]] += duration
        for edge in self.problem.edges:
            periods[group_of[edge.target]] += self.moved(edge, sites)
        for edge in self.problem.syncs:
            one, other = group_of[edge.source], group_of[edge.target]
            periods[other] += self.synced(edge, sites, one == other)
        return periods
