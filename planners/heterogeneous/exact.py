"""The exact solver: one integer program for each grouping that a bound does not exclude, all under the best answer yet.

Symmetric devices are folded: a pool counts the devices of a site, and does not name them. The hybrid's answer is the
first cutoff, so most programs end as infeasible at their root. What is exact: groupings, pools, and layouts of few
blocks (see `arrangements`); layouts of many blocks are those that the leaf finds, as for the hybrid.

All pools of a cluster that a placement may use, and what each work takes on each of them.

The integer program of one grouping: which pool each group gets.

Minimise T, in parts of the cutoff, with z[g,p] = 1 if group g has pool p:

    Σ_p z[g,p] = 1                                         for each group
    Σ_g Σ_p devices of site i in p · z[g,p] ≤ those of i   for each site
    start[t] ≥ start[u] + Σ_p seconds[u,p] z[g(u),p] + the way from g(u) to g(t)      sync: t reads u, or follows it in
    T ≥ start[t] + Σ_p seconds[t,p] z[g(t),p] (+ weights to those that use them)      the chain of its group
    T ≥ Σ_{t in g} Σ_p seconds[t,p] z[g,p] + what comes to g                          async: for each group

A way depends on the sites of both pools. It is linear in w[a,b,A,B] = 1 if group a is at sites A and group b at B,
whose sums over A and over B must be those of z (the usual form of a product of choices; Adams and Johnson 1994).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from distflow.config.extras import pip_line
from distflow.errors import Diagnostic, InvalidInput
from planners.heterogeneous.layouts import CostedProblem, fastest
from planners.heterogeneous.problem import (
    SYNC,
    Edge,
    Grouping,
    Placement,
    Pool,
    Problem,
    Sites,
    TaskLayout,
    shared,
    sites_of,
)
from planners.heterogeneous.search import groupings

POOLS = 20_000
"""More than so many are not listed."""


class Family:
    """The pools in a grid, one axis a site; durations are arrays over it, infinite where a work does not fit.

    A pool serves a work at least as well as any part of it, since devices may stay idle; so the grid is filled by a
    running minimum along each axis.

    Raises:
        InvalidInput: there are too many pools to list.
    """

    def __init__(self, costed: CostedProblem, cutoff: float = math.inf):
        self.costed, self.cutoff = costed, cutoff
        self.counts = [site.counts for site in costed.problem.hardware.sites]
        self.shape = tuple(map(len, self.counts))
        if math.prod(self.shape) > POOLS:
            raise InvalidInput(Diagnostic(f"this cluster has {math.prod(self.shape):,} pools, too many for the exact "
                                          f"program, which lists up to {POOLS:,}", None,
                                          "Use  --solver hybrid  , or describe fewer kinds of machines."))

    def pool(self, place: tuple[int, ...]) -> Pool:
        """The pool at a place of the grid."""
        return tuple(counts[index] for counts, index in zip(self.counts, place))

    @cached_property
    def durations(self) -> np.ndarray:
        """Seconds by (work, 0 alone or 1 taking turns, place…). What cannot undercut the cutoff is not costed."""
        works = range(len(self.costed.problem.works))
        found = np.full((len(works), 2, *self.shape), math.inf)
        for work, place in product(works, product(*map(range, self.shape))):
            pool = self.pool(place)
            if any(pool) and self.costed.ideal_of(work, pool) <= self.cutoff:
                for turns, layout in enumerate(self.costed.layouts.exactly(work, pool)):
                    found[work, turns][place] = layout.takes(bool(turns)) if layout else math.inf
        for axis in range(len(self.shape)):
            found = np.minimum.accumulate(found, axis=axis + 2)
        return found

    def layout(self, work: int, pool: Pool, turns: bool) -> TaskLayout:
        """The layout behind a duration."""
        parts = product(*([count for count in counts if count <= limit] for counts, limit in zip(self.counts, pool)))
        layouts = (layout for part in parts if any(part) and self.costed.ideal_of(work, part) <= self.cutoff
                   for layout in self.costed.layouts.exactly(work, part))
        return fastest(layouts)[turns]


_BETTER = 1e-7
"""By how much, as a share, an answer must undercut the cutoff."""
Term = dict[int, float]
"""Coefficients by variable."""


@dataclass
class _Rows:
    """Constraints: low ≤ terms ≤ high."""

    terms: list[Term] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: Term, low: float = -math.inf, high: float = math.inf) -> None:
        self.terms.append(terms)
        self.low.append(low)
        self.high.append(high)


class Program:
    """The program of a grouping. `cutoff`: seconds that an answer must undercut."""

    def __init__(self, family: Family, grouping: Grouping, cutoff: float):
        self.family, self.grouping, self.cutoff = family, grouping, cutoff
        self.costed, self.problem = family.costed, family.costed.problem
        self.home = {work: index for index, group in enumerate(grouping) for work in group}
        self.turns = [shared(self.problem, group) for group in grouping]
        self.columns = [self._columns(index) for index in range(len(grouping))]
        self.hopeless = not all(self.columns)

    def relaxed(self) -> float:
        """A bound: every group has all devices, and nothing is moved."""
        return self._unmoved(self._whole())

    def _whole(self) -> list[float]:
        """What each work takes with all devices."""
        last = [-1] * len(self.family.shape)
        return [float(self.family.durations[(work, int(self.turns[self.home[work]]), *last)])
                for work in range(len(self.home))]

    def _unmoved(self, durations: list[float]) -> float:
        if math.inf in durations:
            return math.inf
        if self.problem.mode != SYNC:
            return max(sum(durations[work] for work in group) for group in self.grouping)
        ends, free = [0.0] * len(durations), [0.0] * len(self.grouping)
        for work, duration in enumerate(durations):
            read = [ends[edge.source] for edge in self.problem.edges if edge.target == work]
            ends[work] = free[self.home[work]] = max([free[self.home[work]], *read]) + duration
        return max(ends)

    def _columns(self, index: int) -> list[tuple[Pool, dict[int, float]]]:
        """The pools that a group may have, with its works' seconds there: those that may undercut the cutoff, without
        those that are larger than others at the same sites for no gain."""
        group, turns, table = self.grouping[index], int(self.turns[index]), self.family.durations
        times = table[list(group), turns]
        whole, found = self._whole(), []
        for place in np.argwhere(np.isfinite(times).all(axis=0)).tolist():
            mine = times[(slice(None), *place)]
            smaller = ([*place[:axis], at - 1, *place[axis + 1:]] for axis, at in enumerate(place) if at > 1)
            if any((times[(slice(None), *less)] <= mine).all() for less in smaller):
                continue
            seconds = dict(zip(group, mine.tolist()))
            if self._unmoved([seconds.get(work, whole[work]) for work in range(len(whole))]) < self.cutoff:
                found.append((self.family.pool(tuple(place)), seconds))
        return found

    def solve(self, seconds: float | None = None) -> tuple[tuple[Pool, ...] | None, float]:
        """The pools of an answer that undercuts the cutoff (None: there is none, or none was found), and a bound.

        Args:
            seconds: what HiGHS may take.

        Raises:
            InvalidInput: scipy is not installed.
        """
        Bounds, LinearConstraint, milp, coo_array = _scipy()
        rows, integral = self._constraints()
        entries = [(row, column, value) for row, terms in enumerate(rows.terms) for column, value in terms.items()]
        row, column, value = zip(*entries)
        matrix = coo_array((value, (row, column)), shape=(len(rows.terms), len(integral))).tocsr()
        upper = np.where(np.array(integral) == 1, 1.0, np.inf)
        upper[0] = 1 - _BETTER
        cost = np.zeros(len(integral))
        cost[0] = 1.0
        options = {"mip_rel_gap": 0.0, **({"time_limit": seconds} if seconds else {})}
        result = milp(cost, integrality=integral, bounds=Bounds(0, upper),
                      constraints=LinearConstraint(matrix, rows.low, rows.high), options=options)
        bound = self.cutoff * (1.0 if result.status == 2 else result.mip_dual_bound or 0.0)
        return (None if result.x is None else self._chosen(result.x)), bound

    def _chosen(self, values: np.ndarray) -> tuple[Pool, ...]:
        return tuple(max(zip(values[first:], columns), key=lambda pair: pair[0])[1][0]
                     for first, columns in zip(self._first, self.columns))

    def _constraints(self) -> tuple[_Rows, list[int]]:
        """Variables: T, starts, z by group, w by pair of groups."""
        works, rows, integral = len(self.home), _Rows(), [0] * (1 + len(self.home))
        self._first = []
        for columns in self.columns:
            self._first.append(len(integral))
            rows.add({len(integral) + number: 1.0 for number in range(len(columns))}, 1.0, 1.0)
            integral += [1] * len(columns)
        for site, devices in enumerate(self.problem.hardware.all):
            rows.add({first + number: float(pool[site]) for first, columns in zip(self._first, self.columns)
                      for number, (pool, _) in enumerate(columns) if pool[site]} | {0: 0.0}, high=float(devices))
        self._pairs: dict[tuple[int, int], dict[tuple[Sites, Sites], int]] = {}
        if self.problem.mode == SYNC:
            self._chains(rows, integral, works)
        else:
            self._periods(rows, integral)
        return rows, integral

    def _chains(self, rows: _Rows, integral: list[int], works: int) -> None:
        for work in range(works):
            takes = self._takes(work)
            rows.add(_sum({0: 1.0, 1 + work: -1.0}, _minus(takes)), low=0.0)
            after = [other for other in self.grouping[self.home[work]] if other > work][:1]
            for other in after:
                rows.add(_sum({1 + other: 1.0, 1 + work: -1.0}, _minus(takes)), low=0.0)
        for edge in self.problem.edges:
            way = self._way(rows, integral, edge, False)
            rows.add(_sum({1 + edge.target: 1.0, 1 + edge.source: -1.0}, _minus(self._takes(edge.source)), _minus(way)),
                     low=0.0)
        for edge in self.problem.syncs:
            way = self._way(rows, integral, edge, True)
            rows.add(_sum({0: 1.0, 1 + edge.source: -1.0}, _minus(self._takes(edge.source)), _minus(way)), low=0.0)

    def _periods(self, rows: _Rows, integral: list[int]) -> None:
        ways: dict[int, list[Term]] = defaultdict(list)
        for edges, sync in ((self.problem.edges, False), (self.problem.syncs, True)):
            for edge in edges:
                ways[self.home[edge.target]].append(self._way(rows, integral, edge, sync))
        for index, group in enumerate(self.grouping):
            rows.add(_sum({0: 1.0}, *(_minus(self._takes(work)) for work in group), *map(_minus, ways[index])), low=0.0)

    def _takes(self, work: int) -> Term:
        index = self.home[work]
        return {self._first[index] + number: seconds[work] / self.cutoff
                for number, (_, seconds) in enumerate(self.columns[index])}

    def _way(self, rows: _Rows, integral: list[int], edge: Edge, sync: bool) -> Term:
        one, other = self.home[edge.source], self.home[edge.target]
        if one == other:
            found = {self._first[one] + number: self._cost(edge, sync, sites_of(pool), sites_of(pool), True)
                     for number, (pool, _) in enumerate(self.columns[one])}
        else:
            pair = self._pair(rows, integral, one, other)
            found = {variable: self._cost(edge, sync, sources, targets, False)
                     for (sources, targets), variable in pair.items()}
        return {variable: cost / self.cutoff for variable, cost in found.items() if cost}

    def _cost(self, edge: Edge, sync: bool, sources: Sites, targets: Sites, together: bool) -> float:
        objective = self.costed.objective
        if sync:
            return objective.synced(edge, sources, targets, together)
        return objective.moved(sources, targets, edge.nbytes)

    def _pair(self, rows: _Rows, integral: list[int], one: int, other: int) -> dict[tuple[Sites, Sites], int]:
        """The variables w of two groups, made when they are first asked for."""
        if (one, other) not in self._pairs:
            at = [self._by_sites(index) for index in (one, other)]
            pair = {}
            for sources in at[0]:
                for targets in at[1]:
                    pair[sources, targets] = len(integral)
                    integral.append(0)
            for side, places in enumerate(at):
                for sites, chosen in places.items():
                    rows.add(_sum({variable: 1.0 for key, variable in pair.items() if key[side] == sites},
                                  _minus(chosen)), 0.0, 0.0)
            self._pairs[one, other] = pair
        return self._pairs[one, other]

    def _by_sites(self, index: int) -> dict[Sites, Term]:
        found: dict[Sites, Term] = defaultdict(dict)
        for number, (pool, _) in enumerate(self.columns[index]):
            found[sites_of(pool)][self._first[index] + number] = 1.0
        return found


def _scipy() -> tuple[Any, ...]:
    """What of scipy is used; loaded late, since only this solver needs it."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ModuleNotFoundError:
        raise InvalidInput(Diagnostic("the exact solver needs scipy, which is not installed", None,
                                      f"{pip_line('exact')}  , or use  --solver hybrid")) from None
    return Bounds, LinearConstraint, milp, coo_array


def _minus(terms: Term) -> Term:
    return {variable: -value for variable, value in terms.items()}


def _sum(*many: Term) -> Term:
    total: Term = {}
    for terms in many:
        for variable, value in terms.items():
            total[variable] = total.get(variable, 0.0) + value
    return total


@dataclass(frozen=True)
class Proof:
    """The best placement so far, the bound that is proven, and how many groupings are still open."""

    placement: Placement | None
    bound: float
    open: int
    programs: int

    @property
    def gap(self) -> float:
        """How far the placement may be from the best one, as a share of its time; 0: it is the best one."""
        return max(0.0, 1 - self.bound / self.placement.seconds) if self.placement else 1.0


def prove(problem: Problem, warm: Placement | None = None, stop: Callable[[], bool] = lambda: False,
          seconds_each: float | None = None, costed: CostedProblem | None = None) -> Iterator[Proof]:
    """Better and better bounds, and placements, until both are the same.

    Args:
        warm: an answer to start from, as the hybrid's.
        stop: asked after each program.
        seconds_each: what HiGHS may take for one program.

    Raises:
        InvalidInput: the cluster has too many pools.
    """
    run = _Proof(costed or CostedProblem(problem), warm)
    for _ in run.steps(seconds_each):
        yield run.state()
        if stop():
            return


class _Proof:
    def __init__(self, costed: CostedProblem, warm: Placement | None):
        self.costed, self.best = costed, warm
        self.family = Family(costed, warm.seconds if warm else math.inf)
        self.left: list[float] = []
        self.undecided, self.programs = math.inf, 0

    def state(self) -> Proof:
        best = self.best.seconds if self.best else math.inf
        return Proof(self.best, min([best, self.undecided, *self.left[:1]]), len(self.left), self.programs)

    def steps(self, seconds_each: float | None) -> Iterator[None]:
        """One grouping after the other, the most promising first."""
        ahead = sorted((Program(self.family, grouping, math.inf if not self.best else self.best.seconds).relaxed(),
                        grouping) for grouping in groupings(self.costed.problem))
        self.left = [bound for bound, _ in ahead]
        for bound, grouping in ahead:
            if self.best is None or bound < self.best.seconds:
                self._decide(grouping, seconds_each)
            self.left.pop(0)
            yield

    def _decide(self, grouping: Grouping, seconds_each: float | None) -> None:
        program = Program(self.family, grouping, self.best.seconds if self.best else self._first(grouping))
        if program.hopeless or math.isinf(program.cutoff):
            return
        self.programs += 1
        pools, bound = program.solve(seconds_each)
        found = self._placement(grouping, pools) if pools else None
        if found and (self.best is None or found.seconds < self.best.seconds):
            self.best = found
        if bound < program.cutoff and not (found and found.seconds <= bound * (1 + 1e-6)):
            self.undecided = min(self.undecided, bound)

    def _first(self, grouping: Grouping) -> float:
        """Without an answer yet: a cutoff that no good placement of this grouping exceeds, for the program's scale."""
        table = self.family.durations
        longest = [float(times[times < math.inf].max(initial=0.0)) for times in table.reshape(len(table), -1)]
        moved = sum(self.costed.objective.moved(frozenset(range(len(self.family.shape))),
                                                frozenset(range(len(self.family.shape))), edge.nbytes)
                    for edge in (*self.costed.problem.edges, *self.costed.problem.syncs))
        return sum(longest) + moved

    def _placement(self, grouping: Grouping, pools: tuple[Pool, ...]) -> Placement:
        home = {work: index for index, group in enumerate(grouping) for work in group}
        turns = Program(self.family, grouping, math.inf).turns
        layouts = tuple(self.family.layout(work, pools[home[work]], turns[home[work]]) for work in range(len(home)))
        durations = [layout.takes(turns[home[work]]) for work, layout in enumerate(layouts)]
        answer = Placement(grouping, pools, layouts)
        return replace(answer, seconds=self.costed.objective.seconds(grouping, pools, durations))
