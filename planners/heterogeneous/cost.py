"""The time of one iteration of the graph, from the groups, their pools and how long each work takes.

Sync: the chain of each group runs in the plan's order; a work starts once its group is free and what it reads has
come; the iteration ends when the last work is done and the trained weights are where the next one needs them. Async:
the groups work on different iterations at the same time, so the slowest group's period counts: its works, and what it
waits for from others.

Load balance: as much for each as lets the slowest finish first.

The cost model: from a work, a strategy and an arrangement to the layout's shares, stages and seconds.

A pipeline's first micro-batch passes all stages, each further one comes as the slowest stage lets it (Huang et al.
2019, §2; the bubble is the first one's way). The last one has the rows that are left. A stage has the same layers in
all shares, since their gradients are added up. The cache limits how many rows of a share generate at once; the others
follow as places become free (Kwon et al. 2023), so `rows` take rows / places times as long as those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from planners.heterogeneous.hardware import Network, Roofline, Rows
from planners.heterogeneous.problem import (
    GENERATE,
    SYNC,
    TRAIN,
    Arrangement,
    Edge,
    Grouping,
    Pool,
    Problem,
    Replicas,
    Sites,
    Strategy,
    TaskLayout,
    sites_of,
)


def layers_of_stages(layers: int, seconds: Sequence[float], most: Sequence[float], even: bool = False) -> \
        tuple[int, ...] | None:
    """How many of `layers` each stage has, so that the slowest is as fast as can be; None if they do not fit.

    Args:
        seconds: what a layer takes in each stage.
        most: how many layers fit each stage.
        even: give all stages as many (the last ones may have one less).
    """
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
    """How many parcels of rows a share of each kind has, so that the slowest is as fast as can be.

    Args:
        total: parcels, over all shares.
        counts: how many shares there are of each kind.
        times: of each kind, seconds for 0, 1, … parcels, never falling; up to total / count at least.
    """
    parts = np.concatenate([table[1:] for table in times])
    weights = np.repeat(counts, [len(table) - 1 for table in times])
    order = np.argsort(parts, kind="stable")
    limit = parts[order[int(weights[order].cumsum().searchsorted(total))]]  # by then all parcels are done
    rows = [int(table.searchsorted(limit, "right")) - 1 for table in times]
    for kind in sorted(range(len(rows)), key=lambda kind: -times[kind][rows[kind]]):
        surplus = sum(count * each for count, each in zip(counts, rows)) - total
        rows[kind] -= min(rows[kind], surplus // counts[kind])
    return tuple(rows)


_PARCELS = 512
"""Rows are dealt to unlike shares in parcels; a share has at most so many."""


class PipelinePass(NamedTuple):
    """Seconds of a micro-batch through all stages, and through the slowest one."""

    fill: float
    step: float


class CostModel:
    """The cost model of a problem. `evaluations` counts the layouts costed: the currency of search budgets."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.network = Network(problem.hardware, problem.coefficients.network)
        self.works = [Roofline(work, problem.coefficients, self.network) for work in problem.works]
        self.evaluations = 0
        self._sites = problem.hardware.sites
        self._layer = cache(self._layer_seconds)
        self._fits = cache(self._layers_that_fit)

    def layout(self, number: int, strategy: Strategy, arrangement: Arrangement,
               rows: tuple[int, ...] | None = None) -> TaskLayout | None:
        """The layout of work `number`, balanced, or with these rows of a share of each entry of the arrangement; None
        if a device has too little memory for it."""
        self.evaluations += 1
        cost, even = self.works[number], not self.problem.freedom.balance
        stages = [frozenset(kind.stages[stage] for kind in arrangement) for stage in range(strategy.pp)]
        slowest = [max(self._layer(number, site, strategy) for site in sites) for sites in stages]
        most = [min(self._fits(number, site, strategy, stage) for site in sites) for stage, sites in enumerate(stages)]
        layers = layers_of_stages(cost.work.layers, slowest, most, even)
        if layers is None:
            return None
        clocks = [self._clock(number, strategy, kind, layers) for kind in arrangement]
        rows = self._rows(cost.work.rows, arrangement, clocks, even) if rows is None else rows
        seconds = max(float(clock(share)) for clock, share in zip(clocks, rows))
        if cost.work.kind == TRAIN:
            seconds += self._updates(number, strategy, stages, layers)
        swap = max(cost.swap(self._sites[site], strategy, count) for sites, count in zip(stages, layers)
                   for site in sites)
        return TaskLayout(strategy, arrangement, rows, layers, seconds, swap)

    def ideal(self, number: int, pool: Pool) -> float:
        """Seconds that no layout of a work on this pool can undercut."""
        return self.works[number].ideal(list(zip(self._sites, pool)))

    def estimate(self, number: int, pool: Pool) -> float:
        """The ideal, and what training must send over the slowest links of the pool."""
        return self.ideal(number, pool) + self._crossing(number, sites_of(pool))

    def _crossing(self, number: int, sites: Sites) -> float:
        """Roughly what training on several sites sends over the slowest way between them: for each update the gradients
        of one of eight stages, or the activations of all rows if the sites have different stages."""
        work = self.problem.works[number]
        if work.kind != TRAIN or len(sites) < 2:
            return 0.0
        nbytes = work.epochs * min(work.mini_batches * work.parameters,
                                   2 * work.rows * work.tokens * work.hidden * work.width)
        return self.network.reach(frozenset({min(sites)}), sites).seconds(nbytes)

    def _layer_seconds(self, number: int, site: int, strategy: Strategy) -> float:
        """What a layer takes relative to others, to balance stages: for a micro-batch, or for a token of each row."""
        cost, work = self.works[number], self.problem.works[number]
        if work.kind == GENERATE:
            together = max(1.0, work.rows / strategy.dp / strategy.pp)
            return float(cost.decode(site, self._sites[site], strategy.tp, together))
        return cost.batch(site, self._sites[site], strategy, strategy.micro * work.computed, work.whole) \
            + self._experts(number, frozenset({site}), strategy)

    def _layers_that_fit(self, number: int, site: int, strategy: Strategy, stage: int) -> float:
        return self.works[number].fits(self._sites[site], strategy, stage)

    def _experts(self, number: int, sites: frozenset[int], strategy: Strategy) -> float:
        """Tokens to their experts and back, forward, and for training backward."""
        work = self.problem.works[number]
        nbytes = strategy.micro * work.computed * work.hidden * work.width * work.experts_per_token
        return (4 if work.kind == TRAIN else 2) * self.network.experts(sites, strategy, nbytes)

    def _rows(self, total: int, arrangement: Arrangement, clocks: list[Callable[[Rows], Rows]], even: bool) -> \
            tuple[int, ...]:
        shares = sum(kind.count for kind in arrangement)
        if even or len(arrangement) == 1:
            return (-(-total // shares),) * len(arrangement)
        counts = [kind.count for kind in arrangement]
        parcel = -(-total // min(counts) // _PARCELS)
        parcels = -(-total // parcel)
        tables = [clock(np.arange(-(-parcels // count) + 1) * parcel) for clock, count in zip(clocks, counts)]
        return tuple(each * parcel for each in rows_of_shares(parcels, counts, tables))

    def _clock(self, number: int, strategy: Strategy, kind: Replicas, layers: tuple[int, ...]) -> \
            Callable[[Rows], Rows]:
        """Seconds that a share takes for a number of rows."""
        work = self.problem.works[number]
        if work.kind == GENERATE:
            return partial(self._generates, number, strategy, kind, layers)
        full, least = (self._passing(number, strategy._replace(micro=micro), kind, layers)
                       for micro in (strategy.micro, 1))
        return partial(_pipeline, full, least, strategy.micro, work.mini_batches, work.epochs)

    def _passing(self, number: int, strategy: Strategy, kind: Replicas, layers: tuple[int, ...]) -> PipelinePass:
        """A micro-batch through the stages, and for training back."""
        work = self.problem.works[number]
        stages = [count * self._layer(number, site, strategy) for site, count in zip(kind.stages, layers)]
        hops = self._hops(kind, strategy, strategy.micro * work.computed * work.hidden * work.width)
        both = 2 if work.kind == TRAIN else 1
        return PipelinePass(sum(stages) + both * sum(hops), max(*stages, *(both * hop for hop in hops)))

    def _hops(self, kind: Replicas, strategy: Strategy, nbytes: float) -> list[float]:
        stages = kind.stages
        return [self.network.hop(source, target, stages.count(source), strategy, nbytes)
                for source, target in zip(stages, stages[1:])] or [0.0]

    def _generates(self, number: int, strategy: Strategy, kind: Replicas, layers: tuple[int, ...], rows: Rows) -> Rows:
        """Prefill in micro-batches, then a step for each token of the response, the stages taking turns with as many
        parts of the rows. Rows that have ended leave their place: on the mean so many are there as the mean
        response is shorter than the longest."""
        cost, work = self.works[number], self.problem.works[number]
        per_row = work.hidden * work.width
        stages = list(zip(kind.stages, layers))
        full, least = ([count * cost.batch(site, self._sites[site], strategy, micro * work.read, work.seen)
                        for site, count in stages] for micro in (strategy.micro, 1))
        prefill = _pipeline(PipelinePass(sum(full), max(full)), PipelinePass(sum(least), max(least)), strategy.micro,
                            1, 1, rows)
        together = np.minimum(rows, self._places(number, strategy, stages))
        part = together * (work.answer / work.longest) / strategy.pp
        steps = [count * cost.decode(site, self._sites[site], strategy.tp, part) for site, count in stages]
        whole, longest = sum(steps), steps[0]
        for (source, _), (target, _) in zip(stages, stages[1:]):
            whole = whole + self.network.hop(source, target, kind.stages.count(source), strategy, part * per_row)
        for step in steps[1:]:
            longest = np.maximum(longest, step)
        turns = np.maximum(1.0, rows / np.maximum(together, 1.0))
        decode = work.longest * turns * np.maximum(whole, strategy.pp * longest)
        return np.where(rows > 0, decode, 0.0) + prefill

    def _places(self, number: int, strategy: Strategy, stages: list[tuple[int, int]]) -> int:
        """Rows that a share's cache holds at their longest."""
        cost, found = self.works[number], np.inf
        for stage, (site, count) in enumerate(stages):
            free = cost.room(self._sites[site]) - cost.kept(strategy, stage)[1] - count * cost.state(strategy)
            found = min(found, free // (count * cost.cache(strategy.tp)))
        return int(found)

    def _updates(self, number: int, strategy: Strategy, stages: list[frozenset[int]], layers: tuple[int, ...]) -> float:
        """Adding up gradients of 4 bytes, and the optimizer; each stage for itself."""
        cost, work = self.works[number], self.problem.works[number]
        slowest = 0.0
        for sites, count in zip(stages, layers):
            nbytes = 4 * count * work.parameters / work.layers / strategy.tp
            slowest = max(slowest, self.network.gradients(sites, strategy, nbytes)
                          + max(cost.step(self._sites[site], strategy, count) for site in sites))
        return work.epochs * work.mini_batches * slowest


def _pipeline(full: PipelinePass, least: PipelinePass, micro: int, parts: int, times: int, rows: Rows) -> Rows:
    """Seconds of `rows`, in `parts` mini-batches of micro-batches of `micro` rows, all of it so many `times`. `least`
    is a micro-batch of one row; one that is not full lies between."""
    each = np.asarray(rows) / parts
    batches = np.ceil(each / micro)
    filled = np.maximum(each - (batches - 1) * micro - 1, 0.0) / max(1, micro - 1)
    first, last = (short + (long - short) * filled for short, long in zip(least, full))
    several = full.fill + (batches - 2) * full.step + last
    return np.where(each > 0, times * parts * np.where(batches > 1, several, first), 0.0)


Durations = Sequence[float]


class Objective:
    """The objective of a problem."""

    def __init__(self, problem: Problem, network: Network):
        self.problem = problem
        self._moved = cache(lambda sources, targets, nbytes: network.reach(sources, targets).seconds(nbytes))
        self._arriving = [[edge for edge in problem.edges if edge.target == work] for work in range(len(problem.works))]

    def moved(self, sources: Sites, targets: Sites, nbytes: float) -> float:
        """Seconds until what lies at one pool is at another."""
        return self._moved(sources, targets, nbytes) if nbytes else 0.0

    def synced(self, edge: Edge, sources: Sites, targets: Sites, together: bool) -> float:
        """Seconds to bring trained weights to a work; none where one engine trains and uses them."""
        works = self.problem.works
        if together and works[edge.source].tenant == works[edge.target].tenant:
            return 0.0
        return self.moved(sources, targets, edge.nbytes)

    def seconds(self, grouping: Grouping, pools: Sequence[Pool], durations: Durations) -> float:
        """Seconds of an iteration."""
        return max(self.ends(grouping, pools, durations), default=0.0)

    def ends(self, grouping: Grouping, pools: Sequence[Pool], durations: Durations) -> list[float]:
        """Sync: when each work is done and its weights are where they are used. Async: each group's period."""
        home = {work: index for index, group in enumerate(grouping) for work in group}
        sites = [sites_of(pool) for pool in pools]
        if self.problem.mode != SYNC:
            return self._periods(home, sites, durations)
        starts = self.starts(grouping, pools, durations)
        ends = [start + duration for start, duration in zip(starts, durations)]
        return ends + [ends[edge.source] + self.synced(edge, sites[home[edge.source]], sites[home[edge.target]],
                                                       home[edge.source] == home[edge.target])
                       for edge in self.problem.syncs]

    def starts(self, grouping: Grouping, pools: Sequence[Pool], durations: Durations) -> list[float]:
        """When each work starts, in mode sync."""
        home = {work: index for index, group in enumerate(grouping) for work in group}
        sites, free = [sites_of(pool) for pool in pools], [0.0] * len(grouping)
        starts: list[float] = []
        for work, duration in enumerate(durations):
            mine = home[work]
            start = free[mine]
            for edge in self._arriving[work]:
                start = max(start, starts[edge.source] + durations[edge.source]
                            + self.moved(sites[home[edge.source]], sites[mine], edge.nbytes))
            starts.append(start)
            free[mine] = start + duration
        return starts

    def _periods(self, home: dict[int, int], sites: list[Sites], durations: Durations) -> list[float]:
        periods = [0.0] * len(sites)
        for work, duration in enumerate(durations):
            periods[home[work]] += duration
        for edges, cost in ((self.problem.edges, self._read), (self.problem.syncs, self.synced)):
            for edge in edges:
                one, other = home[edge.source], home[edge.target]
                periods[other] += cost(edge, sites[one], sites[other], one == other)
        return periods

    def _read(self, edge: Edge, sources: Sites, targets: Sites, together: bool) -> float:
        return self.moved(sources, targets, edge.nbytes)
