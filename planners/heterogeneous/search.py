"""The hybrid search: fast, seeded, and any-time.

Levels, after HetRL (arXiv 2512.12476, §4): groupings; how their pools divide the devices; strategies and arrangements
of each work (`layouts`). Successive halving (Jamieson and Talwalkar 2016) is nested: groupings compete at what no
layout can undercut and what their slowest links add, which costs next to nothing, then the better ones at a first look
at their layouts, with more splits for half as many in each round; the best of a round are looked at closely. Within a
grouping a genetic search divides the devices, and in the end local search improves what it found.

Budgets are counted in layouts costed, so that the same seed gives the same answer on any machine.

Ways to colocate works. What trains one role stays together, since it has one optimizer.

How the devices of each site are divided among groups: the genetic search's individuals and its operators.

A split is the pools of a grouping. Crossover keeps what is near each other together: a child has all the sites of a
zone from the same parent (after the graph partitioning of Soper et al. 2004, which HetRL §4 takes up).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product, zip_longest

import numpy as np

from distflow.errors import Diagnostic, InvalidInput
from planners.heterogeneous.layouts import FEW, CostedProblem
from planners.heterogeneous.problem import TRAIN, DeviceGroup, Grouping, Hardware, Placement, Pool, Problem

MOST = 8
"""Of more works, not all groupings are listed: there are 4,140 of eight, 21,147 of nine."""
_LISTED = 6


def groupings(problem: Problem) -> list[Grouping]:
    """All that are allowed.

    Raises:
        InvalidInput: there are too many works.
    """
    if problem.freedom.groupings is not None:
        return list(problem.freedom.groupings)
    count = len(problem.works)
    if count > MOST:
        raise InvalidInput(Diagnostic(f"{count} nodes run models, too many for the exact program, which goes through "
                                      f"all ways to colocate up to {MOST}", None, "Use  --solver hybrid"))
    found: list[Grouping] = [()]
    for work in range(count):
        found = [longer for grouping in found for longer in _with(grouping, work)]
    return [grouping for grouping in found if allowed(problem, grouping)]


def some(problem: Problem, random: np.random.Generator, count: int) -> list[Grouping]:
    """All of few works; of many, everything together, everything apart, and others, drawn."""
    works = range(len(problem.works))
    if problem.freedom.groupings is not None or len(works) <= _LISTED:
        return groupings(problem)
    found = {(tuple(works),), _joined(problem, [[work] for work in works])}
    for _ in range(count):
        drawn: Grouping = ()
        for work in works:
            choices = _with(drawn, work)
            drawn = choices[int(random.integers(len(choices)))]
        found.add(_joined(problem, [list(group) for group in drawn]))
    return sorted(found)


def allowed(problem: Problem, grouping: Grouping) -> bool:
    """Whether what trains a role is together, and the problem leaves this choice."""
    only, homes = problem.freedom.groupings, {}
    if only is not None:
        return grouping in only
    return all(homes.setdefault(problem.works[work].role, index) == index for index, group in enumerate(grouping)
               for work in group if problem.works[work].kind == TRAIN)


def _with(grouping: Grouping, work: int) -> list[Grouping]:
    """The grouping with one more work: in each of its groups, or in one of its own."""
    joined = [(*grouping[:index], (*group, work), *grouping[index + 1:]) for index, group in enumerate(grouping)]
    return [*joined, (*grouping, (work,))]


def _joined(problem: Problem, groups: list[list[int]]) -> Grouping:
    """With all that trains a role moved to where the first of it is."""
    homes: dict[str, int] = {}
    for index, group in enumerate(groups):
        for work in list(group):
            role = problem.works[work].role
            if problem.works[work].kind == TRAIN and homes.setdefault(role, index) != index:
                group.remove(work)
                groups[homes[role]].append(work)
    return tuple(sorted(tuple(sorted(group)) for group in groups if group))


Split = tuple[Pool, ...]


def proportional(hardware: Hardware, shares: Sequence[float]) -> Split:
    """Every site divided in proportion to the groups' shares, rounded to counts that it allows."""
    return _pools(rounded(site, shares) for site in hardware.sites)


def whole_sites(hardware: Hardware, groups: int, random: np.random.Generator, most: int) -> list[Split]:
    """Each site for one group, or for none: every such split if they are few, else some, drawn, without idle sites."""
    sites = hardware.sites
    if (groups + 1) ** len(sites) <= most:
        owners = list(product(range(groups + 1), repeat=len(sites)))
    else:
        owners = random.integers(0, groups, (most, len(sites))).tolist()
    return [_pools([site.devices * (group == owner) for group in range(groups)] for site, owner in zip(sites, drawn))
            for drawn in owners if set(range(groups)) <= set(drawn)]


def is_whole(hardware: Hardware, split: Split) -> bool:
    """Whether no site is divided."""
    return all(sum(count > 0 for count in column) <= 1 for column in zip(*split))


def rounded(site: DeviceGroup, shares: Sequence[float]) -> list[int]:
    """A site's devices divided by shares; what rounding leaves goes to whoever lacks most."""
    total = sum(shares)
    wanted = [site.devices * share / total for share in shares]
    counts = [_most(site, want) for want in wanted]
    while True:
        free = site.devices - sum(counts)
        for group in sorted(range(len(counts)), key=lambda group: counts[group] - wanted[group]):
            grown = _next(site, counts[group])
            if grown is not None and grown - counts[group] <= free:
                counts[group] = grown
                break
        else:
            return counts


def crossed(hardware: Hardware, one: Split, other: Split, random: np.random.Generator) -> Split:
    """A child: the sites of each zone from one of two parents."""
    zones = sorted({site.zone for site in hardware.sites})
    from_one = dict(zip(zones, random.integers(0, 2, len(zones)).astype(bool).tolist()))
    columns = [[pool[index] for pool in (one if from_one[site.zone] else other)]
               for index, site in enumerate(hardware.sites)]
    return _pools(columns)


def mutated(hardware: Hardware, split: Split, random: np.random.Generator) -> Split:
    """One site divided anew, at random."""
    index = int(random.integers(len(hardware.sites)))
    columns = [list(column) for column in zip(*split)]
    columns[index] = rounded(hardware.sites[index], random.dirichlet(np.ones(len(split))) + 1e-9)
    return _pools(columns)


def scattered(hardware: Hardware, groups: int, random: np.random.Generator) -> Split:
    """Every site divided at random."""
    return _pools(rounded(site, random.dirichlet(np.ones(groups)) + 1e-9) for site in hardware.sites)


def neighbours(hardware: Hardware, split: Split) -> Iterator[Split]:
    """Splits in which one group gives devices of a site to another, as few as can be or all; takes idle ones, or leaves
    its own idle; in which all groups leave a site; or in which two change what they have of two sites."""
    columns = [list(column) for column in zip(*split)]
    for index, site in enumerate(hardware.sites):
        for changed in _given(site, columns[index]):
            yield _pools([*columns[:index], changed, *columns[index + 1:]])
    for one, other in combinations(range(len(columns)), 2):
        for giver, taker in permutations(range(len(split)), 2):
            if columns[one][giver] and columns[other][taker]:
                changed = [list(column) for column in columns]
                _pass(hardware.sites[one], changed[one], giver, taker)
                _pass(hardware.sites[other], changed[other], taker, giver)
                yield _pools(changed)


def _given(site: DeviceGroup, column: list[int]) -> Iterator[list[int]]:
    for giver, taker in permutations(range(len(column)), 2):
        for less in sorted({_most(site, column[giver] - 1), 0}) if column[giver] else ():
            changed = list(column)
            _pass(site, changed, giver, taker, less)
            yield changed
    for giver in range(len(column)):
        if column[giver]:
            yield [*column[:giver], 0, *column[giver + 1:]]
    yield [0] * len(column)
    for taker in range(len(column)):
        grown = _most(site, column[taker] + site.devices - sum(column))
        if grown > column[taker]:
            yield [*column[:taker], grown, *column[taker + 1:]]


def _pass(site: DeviceGroup, column: list[int], giver: int, taker: int, less: int = 0) -> None:
    """Leave the giver `less` devices; the taker gets what is then free."""
    column[giver] = less
    column[taker] = _most(site, column[taker] + site.devices - sum(column))


def _pools(columns) -> Split:
    return tuple(zip(*(tuple(column) for column in columns)))


def _most(site: DeviceGroup, limit: float) -> int:
    """The largest number that a pool may take within a limit."""
    return site.counts[max(0, bisect_right(site.counts, limit) - 1)]


def _next(site: DeviceGroup, count: int) -> int | None:
    position = bisect_right(site.counts, count)
    return site.counts[position] if position < len(site.counts) else None


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
           quality: float = 0.0, costed: CostedProblem | None = None) -> Iterator[Progress]:
    """Better and better placements.

    Args:
        budget: layouts that may be costed; default: `BUDGET`, or `THOROUGH` for few devices.
        stop: asked between steps; planners have no clock, callers have.
        quality: the gap at which the search is content.
    """
    costed = costed or CostedProblem(problem)
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
    def __init__(self, costed: CostedProblem, random: np.random.Generator):
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
