"""The hybrid search: fast, seeded, and any-time.

Levels, after HetRL (arXiv 2512.12476, §4): groupings; how their pools divide the devices; strategies and arrangements
of each work (`layouts`). Successive halving (Jamieson and Talwalkar 2016) is nested: groupings compete at what no
layout can undercut and what their slowest links add, which costs next to nothing, then the better ones at a first look
at their layouts, with more splits for half as many in each round; the best of a round are looked at closely. Within a
grouping a genetic search divides the devices, and in the end local search improves what it found.

Budgets are counted in layouts costed, so that the same seed gives the same answer on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product, zip_longest

import numpy as np

from planners.heterogeneous.arrangements import FEW
from planners.heterogeneous.costed import Costed
from planners.heterogeneous.groupings import allowed, some
from planners.heterogeneous.problem import Grouping, Placement, Problem
from planners.heterogeneous.splits import (
    Split,
    crossed,
    is_whole,
    mutated,
    neighbours,
    proportional,
    scattered,
    whole_sites,
)

BUDGET, THOROUGH = 4_000, 50_000
"""Layouts that may be costed: usually, and on clusters of few devices, where the leaf goes through all of them."""
_PARENTS, _CHILDREN = 4, 8
"""Splits of a grouping that have children, and how many children it gets at estimates."""
_DRAWN = 400
"""Groupings that are drawn where there are too many to list."""
_ARMS = 8
"""Groupings that are left when layouts begin to be costed."""
_SPLITS, _DRAFTS = 32, 4096
"""Splits by whole sites that a grouping begins with, at least, and those of all groupings together."""
_ELITE, _WHOLE = 2, 2
"""Splits of a grouping that are costed first: the best ones, and the best ones that divide no site."""
_HOPE = 1.15
"""How many times as long a neighbour may take at a first look to get a second one."""
_RESTARTS = 64
"""Local searches from anywhere, if the budget lasts."""
_MAPPINGS = 1000
"""Ways to give works to pools, at most so many of which are gone through."""


@dataclass(frozen=True)
class Progress:
    """The best placement so far (None: none fits yet), a bound below which none can come, and layouts costed."""

    placement: Placement | None
    bound: float
    evaluations: int

    @property
    def gap(self) -> float:
        """How far the placement may be from the best one, as a share of its time."""
        return 1 - self.bound / self.placement.seconds if self.placement else 1.0


def search(problem: Problem, seed: int = 0, budget: int | None = None, stop: Callable[[], bool] = lambda: False,
           quality: float = 0.0, costed: Costed | None = None) -> Iterator[Progress]:
    """Better and better placements.

    Args:
        budget: layouts that may be costed; default: `BUDGET`, or `THOROUGH` for few devices.
        stop: asked between steps; planners have no clock, callers have.
        quality: the gap at which the search is content.
    """
    costed = costed or Costed(problem)
    if budget is None:
        budget = THOROUGH if sum(problem.hardware.all) <= FEW else BUDGET
    run = _Search(costed, np.random.default_rng(seed))
    bound = costed.bound()
    begin = costed.evaluations
    for best in run.steps():
        yield Progress(best, bound, costed.evaluations - begin)
        enough = best is not None and 1 - bound / best.seconds <= quality
        if enough or costed.evaluations - begin >= budget or stop():
            return


class _Search:
    def __init__(self, costed: Costed, random: np.random.Generator):
        self.costed, self.random, self.hardware = costed, random, costed.problem.hardware
        self.best: tuple[float, Grouping, Split] | None = None
        self.free = costed.problem.freedom.assignment
        self.groupings = some(costed.problem, random, _DRAWN)

    def steps(self) -> Iterator[Placement | None]:
        """The best placement after each piece of work."""
        arms = sorted(((value, grouping, splits) for grouping in self.groupings
                       for value, splits in [self._drafted(grouping)] if value < float("inf")), key=lambda arm: arm[0])
        left, rounds, ended = arms[:_ARMS], 1, []
        if arms:
            self._value(arms[0][1], arms[0][2][0])
            yield self._answer()
        while left:
            ranked = []
            for _, grouping, splits in left:
                found: dict[Split, float] = {}
                for _ in self._improved(grouping, splits, rounds, found):
                    yield self._answer()
                best = sorted(found, key=lambda split: (found[split], split))[: _ELITE + _WHOLE]
                ranked.append((found[best[0]], grouping, best))
            ranked.sort(key=lambda arm: arm[0])
            for _, grouping, splits in ranked[: -(-len(ranked) // 4)]:
                self._value(grouping, splits[0])
                yield self._answer()
            yield self._regrouped()
            left, rounds = ranked[: len(ranked) // 2], rounds * 2
            ended = ranked[len(left):] + ended
        if self.best:
            yield from self._polished(self.best[1], self.best[2])
        for _, grouping, splits in ended:
            yield from self._polished(grouping, splits[0])
        for _ in range(_RESTARTS if self.free and ended else 0):
            grouping = ended[int(self.random.integers(len(ended)))][1]
            yield from self._polished(grouping, scattered(self.hardware, len(grouping), self.random))

    def _drafted(self, grouping: Grouping) -> tuple[float, list[Split]]:
        """The genetic search at estimates: the value of the best split, and the best few."""
        shares, most = self.costed.shares(grouping), max(_SPLITS, _DRAFTS // len(self.groupings))
        found = {split: self.costed.estimate(grouping, split) for split in
                 [proportional(self.hardware, shares),
                  *(whole_sites(self.hardware, len(grouping), self.random, most) if self.free else ())]}
        for _ in range(_CHILDREN if self.free and len(grouping) > 1 else 0):
            child = self._child(sorted(found, key=found.__getitem__)[:_PARENTS])
            found.setdefault(child, self.costed.estimate(grouping, child))
        best = sorted(found, key=found.__getitem__)
        whole = [split for split in best if is_whole(self.hardware, split)]
        ahead = [split for pair in zip_longest(best[:_ELITE], whole[:_WHOLE]) for split in pair if split]
        return found[best[0]], list(dict.fromkeys(ahead))

    def _child(self, parents: list[Split]) -> Split:
        one, other = self.random.integers(0, len(parents), 2)
        child = crossed(self.hardware, parents[one], parents[other], self.random)
        return mutated(self.hardware, child, self.random) if child in parents else child

    def _improved(self, grouping: Grouping, splits: list[Split], rounds: int, found: dict[Split, float]) -> \
            Iterator[None]:
        """The genetic search at a first look; what splits take goes to `found`."""
        for split in splits[: 2 * rounds]:
            found[split] = self.costed.rough(grouping, split)
            yield
        for _ in range(rounds - 1 if self.free and len(grouping) > 1 else 0):
            child = self._child(sorted(found, key=found.__getitem__)[:_PARENTS])
            nearby = min(neighbours(self.hardware, child), key=lambda split: self.costed.estimate(grouping, split),
                         default=child)
            for split in (child, nearby):
                if split not in found:
                    found[split] = self.costed.rough(grouping, split)
                    yield

    def _regrouped(self) -> Placement | None:
        """The works anew on the pools of the best answer: their layouts there are mostly known."""
        if self.best is None:
            return None
        _, grouping, split = self.best
        works, pools = sum(map(len, grouping)), len(split)
        if pools > 1 and pools**works <= _MAPPINGS:
            for homes in product(range(pools), repeat=works):
                order = list(dict.fromkeys(homes))
                changed = tuple(tuple(work for work in range(works) if homes[work] == pool) for pool in order)
                if len(order) == pools and allowed(self.costed.problem, changed):
                    self._value(changed, tuple(split[pool] for pool in order))
        return self._answer()

    def _value(self, grouping: Grouping, split: Split) -> float:
        value = self.costed.seconds(grouping, split)
        if value < (self.best[0] if self.best else float("inf")):
            self.best = (value, grouping, split)
        return value

    def _polished(self, grouping: Grouping, split: Split) -> Iterator[Placement | None]:
        """Local search: to the first better neighbour, the most promising first, until none is better."""
        value, seen = self._value(grouping, split), {split}
        improved = self.free
        while improved:
            improved = False
            ahead = {near: self.costed.estimate(grouping, near) for near in neighbours(self.hardware, split)}
            for near in sorted(set(ahead) - seen, key=lambda near: (ahead[near], near)):
                if self.costed.ideal(grouping, near) >= value:
                    continue
                seen.add(near)
                if self.costed.rough(grouping, near) >= value * _HOPE:
                    yield self._answer()
                    continue
                found = self._value(grouping, near)
                yield self._answer()
                if found < value:
                    value, split, improved = found, near, True
                    break
            if self.best == (value, grouping, split):
                yield self._regrouped()

    def _answer(self) -> Placement | None:
        return self.costed.placement(*self.best[1:]) if self.best else None
