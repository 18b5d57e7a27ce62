"""What a grouping with its pools takes: layouts and objective together, at real costs and at the ideal.

Which site each tasklet of a work is at.

The slices of a stage are neighbours in one machine and make a *block*. A pool offers so many blocks of each site, and
an arrangement gives each (share, stage) one of them. Few blocks are arranged in every way that makes a difference;
many, in rows by site: share after share, or stage after stage, in several orders of the sites.

The best layout of one work on one pool: the leaf of the search, shared by all solvers.

Strategies are cut by successive halving (Jamieson and Talwalkar 2016): all of them are costed in one arrangement, and
only the better part in the others. Then the order of the sites is improved by swapping two as long as that helps. Few
blocks are gone through completely, so there the leaf is exact.
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
    SYNC,
    Arrangement,
    Grouping,
    Hardware,
    ModelTask,
    Placement,
    Pool,
    Problem,
    Replicas,
    Strategy,
    TaskLayout,
    shared,
)

FEW = 6
"""Blocks that are arranged in every way."""
_ORDERED = 3
"""Sites whose every order is tried."""


def blocks_of(pool: Pool, tp: int, hardware: Hardware) -> Pool:
    """How many blocks of `tp` devices of one machine the pool has at each site."""
    return tuple(count // site.each * (site.each // tp) + count % site.each // tp
                 for count, site in zip(pool, hardware.sites))


def every(blocks: Pool, pp: int) -> Iterator[Arrangement]:
    """All arrangements of all blocks, up to the order of the shares."""
    dp, kinds = sum(blocks) // pp, sorted(set(permutations(_sequence(blocks), pp)))
    for chosen in _multisets(kinds, dp, list(blocks)):
        yield tuple(Replicas(kind, chosen.count(kind)) for kind in dict.fromkeys(chosen))


def _multisets(kinds: list[tuple[int, ...]], count: int, left: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not count:
        yield ()
        return
    for index, kind in enumerate(kinds):
        needed = [kind.count(site) for site in range(len(left))]
        if all(have >= need for have, need in zip(left, needed)):
            rest = [have - need for have, need in zip(left, needed)]
            yield from ((kind, *more) for more in _multisets(kinds[index:], count - 1, rest))


def _sequence(blocks: Pool) -> list[int]:
    return [site for site, count in enumerate(blocks) for _ in range(count)]


def few(blocks: Pool) -> bool:
    return sum(blocks) <= FEW


def in_rows(blocks: Pool, pp: int, order: tuple[int, ...], by_stage: bool) -> Arrangement:
    """Blocks in the order of the sites, dealt to share after share or to stage after stage; what is left over, idle."""
    dp = sum(blocks) // pp
    runs = [(site, blocks[site]) for site in order if blocks[site]]
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
    """The shares from which on another kind begins, since a site's blocks begin at `start`."""
    return (start % dp,) if by_stage else (start // pp, -(-start // pp))


def _alike(runs: list[tuple[int, int]], pp: int, dp: int) -> Arrangement:
    found = []
    for site, count in runs:
        found.append(Replicas((site,) * pp, min(dp, count // pp)))
        dp -= found[-1].count
    return tuple(kind for kind in found if kind.count)


def orders(blocks: Pool, hardware: Hardware) -> list[tuple[int, ...]]:
    """Orders of the sites that have blocks: all of few sites; of more, by zone, by speed and by memory, both ways."""
    used = [site for site, count in enumerate(blocks) if count]
    if len(used) <= _ORDERED:
        return list(permutations(used))
    sites = hardware.sites
    keys = (lambda site: (sites[site].zone, sites[site].peak), lambda site: sites[site].peak,
            lambda site: sites[site].memory)
    found = [tuple(sorted(used, key=key)) for key in keys]
    return list(dict.fromkeys(found + [order[::-1] for order in found]))


def swaps(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Orders in which two sites have changed places."""
    for one in range(len(order)):
        for other in range(one + 1, len(order)):
            changed = list(order)
            changed[one], changed[other] = changed[other], changed[one]
            yield tuple(changed)


_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Into how many stages many blocks are arranged."""
_BETTER = 4
"""Part of the strategies that are arranged in several ways: one in so many."""
_PARTS, _SUBSETS = 3, 5
"""Choices of sites that are looked at, and sites of which every choice is one to begin with."""
_LESS = 1 - 1e-9
"""Layouts that differ by rounding only are equal: larger micro-batches come first."""
_SMALL = 8
"""Devices of a pool of which any may stay idle."""
Draft = tuple[TaskLayout | None, Strategy, Pool]
"""A layout in the first arrangement (None: it does not fit), its strategy, and the pool's blocks."""
Pair = tuple[TaskLayout | None, TaskLayout | None]
"""The best alone, and the best taking turns."""


class LayoutSearch:
    """The best layouts of a problem's works, remembered."""

    def __init__(self, costs: CostModel):
        self.costs, self.problem = costs, costs.problem
        plain = [replace(work, name="", role="") for work in self.problem.works]
        self._like = [plain.index(work) for work in plain]
        self.parts = cache(self._parts_of)
        self._drafted: dict[tuple[int, Pool], list[Draft]] = {}
        self._exactly: dict[tuple[int, Pool], Pair] = {}
        self._best: dict[tuple[int, Pool], Pair] = {}

    def best(self, work: int, pool: Pool, shared: bool) -> TaskLayout | None:
        """The fastest layout of a work on a pool or on a part of it, alone or taking turns; None if none fits."""
        work = self._like[work]
        if (work, pool) not in self._best:
            parts = [self.exactly(work, part) for part in self.parts(work, pool)]
            self._best[work, pool] = fastest(layout for pair in parts for layout in pair)
        return self._best[work, pool][shared]

    def estimate(self, work: int, pool: Pool) -> float:
        """Seconds at no cost: the ideal and the slowest links of the sites that a work would do best to use."""
        return min(map(partial(self.costs.estimate, self._like[work]), self.parts(self._like[work], pool)))

    def _parts_of(self, work: int, pool: Pool) -> list[Pool]:
        """The pool and what it may leave idle, most promising first: any of a small pool's devices, and of a large one
        whole sites, in a few ways."""
        sites = self.problem.hardware.sites
        used = sorted((site for site, count in enumerate(pool) if count), key=lambda site: sites[site].peak)
        if not used or not self.problem.freedom.assignment:
            return [pool]
        if sum(pool) <= _SMALL:
            counts = [[count for count in site.counts if count <= limit] for site, limit in zip(sites, pool)]
            return sorted((part for part in product(*counts) if any(part)), key=partial(self.costs.estimate, work))
        chosen = [used[gone:] for gone in range(len(used))] if len(used) > _SUBSETS else \
            [some for size in range(len(used), 0, -1) for some in combinations(used, size)]
        parts = [tuple(count if site in some else 0 for site, count in enumerate(pool)) for some in chosen]
        return sorted(parts, key=partial(self.costs.estimate, work))[:_PARTS]

    def rough(self, work: int, pool: Pool, shared: bool) -> TaskLayout | None:
        """The fastest layout on the most promising part of the pool, in the order of the cluster file: a first look, at
        a fraction of the cost. On a cluster of few devices, the best one."""
        if sum(self.problem.hardware.all) <= FEW:
            return self.best(work, pool, shared)
        work = self._like[work]
        return fastest(layout for layout, _, _ in self._drafts(work, self.parts(work, pool)[0]))[shared]

    def exactly(self, work: int, pool: Pool) -> Pair:
        """The fastest layouts that use the whole pool: alone, and taking turns. Works that ask the same share them."""
        key = (self._like[work], pool)
        if key not in self._exactly:
            self._exactly[key] = fastest(self._search(*key))
        return self._exactly[key]

    def _drafts(self, work: int, pool: Pool) -> list[Draft]:
        """Each strategy in one arrangement."""
        if (work, pool) not in self._drafted:
            found: list[Draft] = []
            for tp, pp in self._cuts(work, pool) if any(pool) else ():
                blocks = blocks_of(pool, tp, self.problem.hardware)
                first = in_rows(blocks, pp, tuple(range(len(blocks))), by_stage=pp > 1)
                found += [(self.costs.layout(work, strategy, first), strategy, blocks)
                          for strategy in strategies(self.problem.works[work], sum(blocks) // pp, tp, pp)]
            self._drafted[work, pool] = found
        return self._drafted[work, pool]

    def _search(self, work: int, pool: Pool) -> Iterator[TaskLayout]:
        drafts = self._drafts(work, pool)
        yield from (layout for layout, _, _ in drafts if layout)
        if not self.problem.freedom.assignment:
            return
        rest = []
        for number, (layout, strategy, blocks) in enumerate(drafts):
            if not few(blocks):
                rest.append((layout.takes(True) if layout else math.inf, number))
            elif sum(blocks) % strategy.pp == 0:
                yield from self._costed(work, strategy, every(blocks, strategy.pp))
        for _, number in sorted(rest)[: -(-len(rest) // _BETTER)]:
            yield from self._arranged(work, *drafts[number][1:])

    def _cuts(self, work: int, pool: Pool) -> Iterator[tuple[int, int]]:
        """The pairs of tp and pp that the pool allows."""
        sites, cut = self.problem.hardware.sites, self.problem.freedom.cut
        for tp in slices_of(self.problem.works[work], [sites[site].each for site, count in enumerate(pool) if count]):
            blocks = sum(blocks_of(pool, tp, self.problem.hardware))
            for pp in range(1, min(blocks, self.problem.works[work].layers) + 1):
                if (blocks <= FEW or pp in _STAGES) and cut in (None, (tp, pp)):
                    yield tp, pp

    def _costed(self, work: int, strategy: Strategy, arrangements: Iterable[Arrangement]) -> Iterator[TaskLayout]:
        for arrangement in arrangements:
            layout = self.costs.layout(work, strategy, arrangement)
            if layout is not None:
                yield layout

    def _arranged(self, work: int, strategy: Strategy, blocks: Pool) -> Iterator[TaskLayout]:
        """In several orders of the sites, the best of which is improved by swaps."""
        best: tuple[float, tuple[int, ...], bool] | None = None
        ahead = orders(blocks, self.problem.hardware)
        seen = set(ahead)
        while ahead:
            improved = False
            for order, by_stage in product(ahead, (False, True)[: strategy.pp]):
                for layout in self._costed(work, strategy, (in_rows(blocks, strategy.pp, order, by_stage),)):
                    yield layout
                    if best is None or layout.seconds < best[0]:
                        best, improved = (layout.seconds, order, by_stage), True
            ahead = [order for order in swaps(best[1]) if order not in seen] if best and improved else []
            seen.update(ahead)


def slices_of(work: ModelTask, machines: list[int]) -> list[int]:
    """Sizes of tensor parallelism: powers of two that all these machines have devices for and the heads allow."""
    found, tp = [], 1
    while tp <= min(machines) and work.heads % tp == 0:
        found.append(tp)
        tp *= 2
    return found


def strategies(work: ModelTask, dp: int, tp: int, pp: int) -> Iterator[Strategy]:
    """The sizes of micro-batches, and of expert parallelism, that go with dp, tp and pp."""
    if dp < 1:
        return
    tokens = work.read if work.kind == GENERATE else work.whole
    fitting, even = max(1, int(work.micro_tokens // tokens)), -(-work.rows // dp)
    sizes = (min(fitting, work.rows), min(fitting, even), 1)  # a share may have more rows than an even one
    micros = sizes[1:2] if work.kind == GENERATE else dict.fromkeys(sizes)
    for micro in micros:
        for ep in (size for size in (1, 2, 4, 8) if size == 1 or (work.experts % size == 0 and dp % size == 0
                                                                  and work.experts)):
            yield Strategy(dp, tp, pp, ep, micro)


def fastest(layouts: Iterable[TaskLayout | None]) -> Pair:
    """The best alone and the best taking turns; the first of equals."""
    alone = turns = None
    for layout in layouts:
        if layout is None:
            continue
        if alone is None or layout.seconds < _LESS * alone.seconds:
            alone = layout
        if turns is None or layout.takes(True) < _LESS * turns.takes(True):
            turns = layout
    return alone, turns


class CostedProblem:
    """A problem with its cost model; what was costed once is remembered."""

    def __init__(self, problem: Problem):
        self.problem, self.costs = problem, CostModel(problem)
        self.layouts = LayoutSearch(self.costs)
        self.objective = Objective(problem, self.costs.network)
        self.ideal_of, self.estimate_of = cache(self.costs.ideal), cache(self.layouts.estimate)

    @property
    def evaluations(self) -> int:
        return self.costs.evaluations

    def placement(self, grouping: Grouping, pools: Sequence[Pool]) -> Placement | None:
        """The placement with the best layouts for these pools; None if a work fits nowhere."""
        homes = {work: index for index, group in enumerate(grouping) for work in group}
        turns = [shared(self.problem, group) for group in grouping]
        found = []
        for work in range(len(self.problem.works)):
            layout = self.layouts.best(work, pools[homes[work]], turns[homes[work]])
            if layout is None:
                return None
            found.append(layout)
        durations = [layout.takes(turns[homes[work]]) for work, layout in enumerate(found)]
        return Placement(grouping, tuple(pools), tuple(found), self.objective.seconds(grouping, pools, durations))

    def seconds(self, grouping: Grouping, pools: Sequence[Pool]) -> float:
        """What the best layouts take on these pools; infinite if a work fits nowhere."""
        found = self.placement(grouping, pools)
        return found.seconds if found else math.inf

    def rough(self, grouping: Grouping, pools: Sequence[Pool]) -> float:
        """The same at a first look."""
        turns = [shared(self.problem, group) for group in grouping]
        homes = {work: index for index, group in enumerate(grouping) for work in group}
        durations = []
        for work in range(len(homes)):
            layout = self.layouts.rough(work, pools[homes[work]], turns[homes[work]])
            if layout is None:
                return math.inf
            durations.append(layout.takes(turns[homes[work]]))
        return self.objective.seconds(grouping, pools, durations)

    def ideal(self, grouping: Grouping, pools: Sequence[Pool]) -> float:
        """What no layouts on these pools can undercut."""
        return self._with(self.ideal_of, grouping, pools)

    def estimate(self, grouping: Grouping, pools: Sequence[Pool]) -> float:
        """The ideal, and what training must send over the slowest links of the sites that it uses."""
        return self._with(self.estimate_of, grouping, pools)

    def _with(self, seconds: Callable[[int, Pool], float], grouping: Grouping, pools: Sequence[Pool]) -> float:
        homes = {work: index for index, group in enumerate(grouping) for work in group}
        durations = [seconds(work, pools[homes[work]]) for work in range(len(homes))]
        return math.inf if math.inf in durations else self.objective.seconds(grouping, pools, durations)

    def shares(self, grouping: Grouping) -> list[float]:
        """What part of the cluster each group is worth: the works' ideal times on all of it."""
        everything = self.problem.hardware.all
        times = [sum(self.ideal_of(work, everything) for work in group) for group in grouping]
        total = sum(times)
        return [time / total if 0 < total < math.inf else 1 / len(times) for time in times]

    def bound(self) -> float:
        """Seconds below which no placement can come: all arithmetic at the peak of all devices, and in mode sync the
        longest path with all devices for each work."""
        everything, works = self.problem.hardware.all, range(len(self.problem.works))
        busy = sum(self.costs.works[work].arithmetic(list(zip(self.problem.hardware.sites, everything)))
                   for work in works)
        if self.problem.mode != SYNC:
            return busy
        apart, pools = tuple((work,) for work in works), [everything] * len(works)
        return max(busy, self.ideal(apart, pools))
