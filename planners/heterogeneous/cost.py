"""The cost model: from a work, a strategy and an arrangement to the layout's shares, stages and seconds.

A pipeline's first micro-batch passes all stages, each further one comes as the slowest stage lets it (Huang et al.
2019, §2; the bubble is the first one's way). The last one has the rows that are left. A stage has the same layers in
all shares, since their gradients are added up. The cache limits how many rows of a share generate at once; the others
follow as places become free (Kwon et al. 2023), so `rows` take rows / places times as long as those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from planners.heterogeneous.balance import layers_of_stages, rows_of_shares
from planners.heterogeneous.network import Network
from planners.heterogeneous.problem import (
    GENERATE,
    TRAIN,
    Arrangement,
    Layout,
    Pool,
    Problem,
    Replicas,
    Sites,
    Strategy,
    sites_of,
)
from planners.heterogeneous.roofline import Roofline, Rows

_PARCELS = 512
"""Rows are dealt to unlike shares in parcels; a share has at most so many."""


class Passing(NamedTuple):
    """Seconds of a micro-batch through all stages, and through the slowest one."""

    fill: float
    step: float


class Costs:
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
               rows: tuple[int, ...] | None = None) -> Layout | None:
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
        return Layout(strategy, arrangement, rows, layers, seconds, swap)

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

    def _passing(self, number: int, strategy: Strategy, kind: Replicas, layers: tuple[int, ...]) -> Passing:
        """A micro-batch through the stages, and for training back."""
        work = self.problem.works[number]
        stages = [count * self._layer(number, site, strategy) for site, count in zip(kind.stages, layers)]
        hops = self._hops(kind, strategy, strategy.micro * work.computed * work.hidden * work.width)
        both = 2 if work.kind == TRAIN else 1
        return Passing(sum(stages) + both * sum(hops), max(*stages, *(both * hop for hop in hops)))

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
        prefill = _pipeline(Passing(sum(full), max(full)), Passing(sum(least), max(least)), strategy.micro, 1, 1, rows)
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


def _pipeline(full: Passing, least: Passing, micro: int, parts: int, times: int, rows: Rows) -> Rows:
    """Seconds of `rows`, in `parts` mini-batches of micro-batches of `micro` rows, all of it so many `times`. `least`
    is a micro-batch of one row; one that is not full lies between."""
    each = np.asarray(rows) / parts
    batches = np.ceil(each / micro)
    filled = np.maximum(each - (batches - 1) * micro - 1, 0.0) / max(1, micro - 1)
    first, last = (short + (long - short) * filled for short, long in zip(least, full))
    several = full.fill + (batches - 2) * full.step + last
    return np.where(each > 0, times * parts * np.where(batches > 1, several, first), 0.0)
