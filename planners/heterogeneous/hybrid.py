"""The hybrid search: fast, seeded, and any-time.

Levels, after HetRL (arXiv 2512.12476, §4): groupings; how their pools divide the devices; strategies and arrangements
of each work (`layouts`). Successive halving (Jamieson and Talwalkar 2016) is nested: groupings compete at what no layout
can undercut, which costs next to nothing, then the better ones at what their layouts really take, with twice the budget
for half as many in each round. Within a grouping a genetic search divides the devices, and the last ones are improved
by local search. Budgets are counted in layouts costed, so that the same seed gives the same answer on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from planners.heterogeneous.costed import Costed
from planners.heterogeneous.objective import groupings
from planners.heterogeneous.problem import Grouping, Placement, Problem
from planners.heterogeneous.splits import Split, crossed, mutated, neighbours, proportional, whole_sites

BUDGET = 20_000
_FIRST, _CHILDREN = 4, 12
"""Splits of a grouping to begin with, and children that it gets, at the ideal."""
_ARMS = 16
"""Groupings that are left when layouts begin to be costed."""
_ELITE = 3
"""Splits of a grouping that are costed first."""


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


def search(problem: Problem, seed: int = 0, budget: int = BUDGET, stop: Callable[[], bool] = lambda: False,
           quality: float = 0.0, costed: Costed | None = None) -> Iterator[Progress]:
    """Better and better placements.

    Args:
        budget: layouts that may be costed.
        stop: asked between steps; planners have no clock, callers have.
        quality: the gap at which the search is content.
    """
    costed = costed or Costed(problem)
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

    def steps(self) -> Iterator[Placement | None]:
        """The best placement after each piece of work."""
        arms = sorted(((value, grouping, splits) for grouping in groupings(self.costed.problem)
                       for value, splits in [self._ideal(grouping)] if value < float("inf")), key=lambda arm: arm[0])
        arms, rounds = arms[:_ARMS], 1
        while arms:
            ranked = []
            for _, grouping, splits in arms:
                found = self._improved(grouping, splits, rounds)
                ranked.append((found[0][0], grouping, [split for _, split in found]))
                yield self._answer()
            ranked.sort(key=lambda arm: arm[0])
            if len(ranked) == 1:
                break
            arms, rounds = ranked[: len(ranked) // 2], rounds * 2
        yield from self._polished()

    def _ideal(self, grouping: Grouping) -> tuple[float, list[Split]]:
        """The genetic search at the ideal: the value of the best split, and the best few."""
        shares = self.costed.shares(grouping)
        found = {split: self.costed.ideal(grouping, split) for split in
                 [proportional(self.hardware, shares),
                  *(whole_sites(self.hardware, shares, self.random) for _ in range(_FIRST * (len(grouping) > 1)))]}
        for _ in range(_CHILDREN if len(grouping) > 1 else 0):
            child = self._child(sorted(found, key=found.__getitem__)[:_FIRST])
            found.setdefault(child, self.costed.ideal(grouping, child))
        best = sorted(found, key=found.__getitem__)[:_ELITE]
        return found[best[0]], best

    def _child(self, parents: list[Split]) -> Split:
        one, other = self.random.integers(0, len(parents), 2)
        child = crossed(self.hardware, parents[one], parents[other], self.random)
        return mutated(self.hardware, child, self.random) if child in parents else child

    def _improved(self, grouping: Grouping, splits: list[Split], rounds: int) -> list[tuple[float, Split]]:
        """The genetic search at real costs: the best splits, best first."""
        found = {split: self._value(grouping, split) for split in splits}
        for _ in range(rounds if len(grouping) > 1 else 0):
            child = self._child(sorted(found, key=found.__getitem__)[:_FIRST])
            nearby = min(neighbours(self.hardware, child), key=lambda split: self.costed.ideal(grouping, split),
                         default=child)
            for split in (child, nearby):
                if split not in found:
                    found[split] = self._value(grouping, split)
        return sorted((value, split) for split, value in found.items())[:_ELITE]

    def _value(self, grouping: Grouping, split: Split) -> float:
        value = self.costed.seconds(grouping, split)
        if value < (self.best[0] if self.best else float("inf")):
            self.best = (value, grouping, split)
        return value

    def _polished(self) -> Iterator[Placement | None]:
        """Local search from the best: neighbours whose ideal is good enough, until none is better."""
        seen: set[Split] = set()
        improved = True
        while self.best and improved:
            improved = False
            value, grouping, split = self.best
            ahead = {near: self.costed.ideal(grouping, near) for near in neighbours(self.hardware, split)}
            for near in sorted(set(ahead) - seen, key=lambda near: (ahead[near], near)):
                if ahead[near] >= self.best[0]:
                    break
                seen.add(near)
                if self._value(grouping, near) < value:
                    improved = True
                    break
                yield self._answer()
            yield self._answer()

    def _answer(self) -> Placement | None:
        return self.costed.placement(*self.best[1:]) if self.best else None
