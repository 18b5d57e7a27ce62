"""The best layout of one work on one pool: the leaf of the search, shared by all solvers.

Strategies are cut by successive halving (Jamieson and Talwalkar 2016): all of them are costed in one arrangement, and
only the better part in the others. Then the order of the sites is improved by swapping two as long as that helps. Few
blocks are gone through completely, so there the leaf is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product

from planners.heterogeneous.arrangements import FEW, blocks_of, every, few, in_rows, orders, swaps
from planners.heterogeneous.cost import Costs
from planners.heterogeneous.problem import GENERATE, Arrangement, Layout, Pool, Strategy, Work

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
Draft = tuple[Layout | None, Strategy, Pool]
"""A layout in the first arrangement (None: it does not fit), its strategy, and the pool's blocks."""
Pair = tuple[Layout | None, Layout | None]
"""The best alone, and the best taking turns."""


class Layouts:
    """The best layouts of a problem's works, remembered."""

    def __init__(self, costs: Costs):
        self.costs, self.problem = costs, costs.problem
        plain = [replace(work, name="", role="") for work in self.problem.works]
        self._like = [plain.index(work) for work in plain]
        self.parts = cache(self._parts_of)
        self._drafted: dict[tuple[int, Pool], list[Draft]] = {}
        self._exactly: dict[tuple[int, Pool], Pair] = {}
        self._best: dict[tuple[int, Pool], Pair] = {}

    def best(self, work: int, pool: Pool, shared: bool) -> Layout | None:
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

    def rough(self, work: int, pool: Pool, shared: bool) -> Layout | None:
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

    def _search(self, work: int, pool: Pool) -> Iterator[Layout]:
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

    def _costed(self, work: int, strategy: Strategy, arrangements: Iterable[Arrangement]) -> Iterator[Layout]:
        for arrangement in arrangements:
            layout = self.costs.layout(work, strategy, arrangement)
            if layout is not None:
                yield layout

    def _arranged(self, work: int, strategy: Strategy, blocks: Pool) -> Iterator[Layout]:
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


def slices_of(work: Work, machines: list[int]) -> list[int]:
    """Sizes of tensor parallelism: powers of two that all these machines have devices for and the heads allow."""
    found, tp = [], 1
    while tp <= min(machines) and work.heads % tp == 0:
        found.append(tp)
        tp *= 2
    return found


def strategies(work: Work, dp: int, tp: int, pp: int) -> Iterator[Strategy]:
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


def fastest(layouts: Iterable[Layout | None]) -> Pair:
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
