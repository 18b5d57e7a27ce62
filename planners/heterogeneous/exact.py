"""Exact solver: one integer program for each grouping that a bound does not exclude, all under the best answer so far.

Symmetric devices are folded: a subset counts the devices of a device group, and does not name them. The hybrid's answer
is the first cutoff, so most programs end as infeasible at their root. What is exact: groupings, subsets, and which of
the layouts that `layouts` finds each task has. Of few blocks these are all; of many, a better one may be left out, and
so a proof says what is best of the layouts considered.

An option of a task is a layout with the subset that it takes. Minimise T, as a share of the cutoff, with x[t,o] = 1 if
task t has option o, and n[g,i] devices of device group i for group g:

    Σ_o x[t,o] = 1                                               for each task
    Σ_o devices of i in o · x[t,o] ≤ n[g(t),i]                   for each task and device group
    Σ_g n[g,i] ≤ devices of i                                    for each device group
    start[t] ≥ start[u] + Σ_o seconds[o] x[u,o] + moved[u,t]     sync: t reads u, or follows it in its group's chain
    T ≥ start[t] + Σ_o seconds[o] x[t,o] (+ weights to those that use them)
    T ≥ Σ_{t in g} (Σ_o seconds[o] x[t,o] + moved to t)          async: for each group

The seconds of moving depend on the device groups that both layouts use. They are linear in w[t,u,A,B] = 1 if t is on
device groups A and u on B, whose sums over A and over B must be those of x (the usual form of a product of choices;
Adams and Johnson 1994). Device groups that make no difference to a transfer share their w.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from distflow.config.extras import pip_line
from distflow.errors import Diagnostic, InvalidInput
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.problem import (
    DeviceGroups,
    DeviceSubset,
    Edge,
    Grouping,
    Placement,
    Problem,
    TaskLayout,
    groups_of,
    turns_of,
)
from planners.heterogeneous.search import groupings

MAX_SUBSETS = 20_000  # limit of the list of subsets


class Option(NamedTuple):
    """Layout of a task, the subset that it takes, and its seconds there."""

    subset: DeviceSubset
    seconds: float
    layout: TaskLayout


class Options:
    """Options of the tasks of a problem. Raises InvalidInput for too many subsets."""

    def __init__(self, costed: CostedProblem, cutoff: float = math.inf):
        self.costed, self.cutoff = costed, cutoff
        self._counts = [device_group.counts for device_group in costed.problem.hardware.device_groups]
        subsets = math.prod(map(len, self._counts))
        if subsets > MAX_SUBSETS:
            raise InvalidInput(Diagnostic(f"this cluster has {subsets:,} subsets, too many for the exact "
                                          f"program, which lists up to {MAX_SUBSETS:,}", None,
                                          "Use  --solver hybrid  , or describe fewer kinds of machines."))

    @cached_property
    def all(self) -> list[tuple[list[Option], list[Option]]]:
        """Options of each task, alone and taking turns; without those that are slower than one with no more devices and
        the same device groups. What cannot undercut the cutoff is not costed."""
        return [(self._of(task, False), self._of(task, True)) for task in range(len(self.costed.problem.tasks))]

    def _of(self, task: int, turns: bool) -> list[Option]:
        found: list[Option] = []
        least: dict[tuple[int, ...], dict[DeviceGroups, float]] = {}  # seconds with so many devices or fewer
        for position in product(*(range(len(counts)) for counts in self._counts)):
            subset = tuple(counts[at] for counts, at in zip(self._counts, position))
            choices = self.costed.layouts.exactly(task, subset) \
                if any(subset) and self.costed.ideal_of(task, subset, turns) <= self.cutoff else {}
            before: dict[DeviceGroups, float] = {}
            for axis, at in enumerate(position):
                less = least[(*position[:axis], at - 1, *position[axis + 1:])] if at else {}
                before |= {sites: min(seconds, before.get(sites, math.inf)) for sites, seconds in less.items()}
            least[position] = before
            for (sites, _), pair in choices.items():
                seconds = pair[turns].takes(turns)
                if seconds < before.get(sites, math.inf):
                    before[sites] = seconds
                    found.append(Option(subset, seconds, pair[turns]))
        return found


_BETTER = 1e-7  # by how much, as a share, an answer must undercut the cutoff
Term = dict[int, float]  # coefficients by variable


@dataclass
class _Rows:
    """Constraints: low ≤ terms ≤ high; and of each variable whether it is integral."""

    integral: list[int]
    terms: list[Term] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: Term, low: float = -math.inf, high: float = math.inf) -> None:
        self.terms.append(terms)
        self.low.append(low)
        self.high.append(high)

    def variables(self, count: int, integral: int) -> range:
        first = len(self.integral)
        self.integral += [integral] * count
        return range(first, first + count)


class Program:
    """Integer program of a grouping. `cutoff`: seconds that an answer must undercut."""

    def __init__(self, options: Options, grouping: Grouping, cutoff: float):
        self.grouping, self.cutoff, self.costed = grouping, cutoff, options.costed
        self.problem, self.group_of = self.costed.problem, groups_of(grouping)
        turns = turns_of(self.problem, grouping)
        self.options = [pair[shared] for pair, shared in zip(options.all, turns)]
        self.fastest = [min((option.seconds for option in mine), default=math.inf) for mine in self.options]

    def relaxed(self) -> float:
        """Return a lower bound: every group has all devices, and nothing is moved."""
        return self.costed.objective.seconds(self.grouping, self.fastest)

    def _promising(self, task: int) -> list[Option]:
        """Return the options with which an answer may undercut the cutoff."""
        before, after = self.fastest[:task], self.fastest[task + 1:]
        return [option for option in self.options[task]
                if self.costed.objective.seconds(self.grouping, [*before, option.seconds, *after]) < self.cutoff]

    def solve(self) -> tuple[list[Option] | None, float]:
        """Return the options of an answer that undercuts the cutoff (None: there is none), and a bound. Raises
        InvalidInput without scipy."""
        Bounds, LinearConstraint, milp, coo_array = _scipy()
        self.options = [self._promising(task) for task in range(len(self.group_of))]
        if not all(self.options):
            return None, self.cutoff
        rows = self._constraints()
        entries = [(row, column, value) for row, terms in enumerate(rows.terms) for column, value in terms.items()]
        row, column, value = zip(*entries)
        matrix = coo_array((value, (row, column)), shape=(len(rows.terms), len(rows.integral))).tocsr()
        upper = np.where(np.array(rows.integral) == 1, 1.0, np.inf)
        upper[0] = 1 - _BETTER
        cost = np.zeros(len(rows.integral))
        cost[0] = 1.0
        result = milp(cost, integrality=rows.integral, bounds=Bounds(0, upper),
                      constraints=LinearConstraint(matrix, rows.low, rows.high), options={"mip_rel_gap": 0.0})
        bound = self.cutoff * (1.0 if result.status == 2 else result.mip_dual_bound or 0.0)
        return (None if result.x is None else self._chosen(result.x)), bound

    def _chosen(self, values: np.ndarray) -> list[Option]:
        return [max(zip(values[mine.start:mine.stop], options), key=lambda pair: pair[0])[1]
                for mine, options in zip(self._mine, self.options)]

    def _constraints(self) -> _Rows:
        """Return the constraints over T, starts, x by task, n by group, and w by transfer."""
        tasks = len(self.group_of)
        rows = _Rows([0] * (1 + tasks))
        self._mine = [rows.variables(len(options), 1) for options in self.options]
        for mine in self._mine:
            rows.add(dict.fromkeys(mine, 1.0), 1.0, 1.0)
        for device_group, devices in enumerate(self.problem.hardware.all):
            taken = rows.variables(len(self.grouping), 0)
            rows.add(dict.fromkeys(taken, 1.0), high=float(devices))
            for task, mine in enumerate(self._mine):
                counts = {variable: float(option.subset[device_group]) for variable, option
                          in zip(mine, self.options[task]) if option.subset[device_group]}
                rows.add(_sum({taken[self.group_of[task]]: 1.0}, _minus(counts)), low=0.0)
        (self._periods if self.problem.has_samplers else self._chains)(rows)
        return rows

    def _chains(self, rows: _Rows) -> None:
        for task, group in enumerate(self.group_of):
            rows.add(_sum({0: 1.0, 1 + task: -1.0}, _minus(self._takes(task))), low=0.0)
            for other in [other for other in self.grouping[group] if other > task][:1]:
                rows.add(_sum({1 + other: 1.0, 1 + task: -1.0}, _minus(self._takes(task))), low=0.0)
        for edges, sync in ((self.problem.edges, False), (self.problem.syncs, True)):
            for edge in edges:
                later = {0: 1.0} if sync else {1 + edge.target: 1.0}
                rows.add(_sum(later, {1 + edge.source: -1.0}, _minus(self._takes(edge.source)),
                              _minus(self._moved(rows, edge, sync))), low=0.0)

    def _periods(self, rows: _Rows) -> None:
        arriving: dict[int, list[Term]] = defaultdict(list)
        for edges, sync in ((self.problem.edges, False), (self.problem.syncs, True)):
            for edge in edges:
                arriving[self.group_of[edge.target]].append(self._moved(rows, edge, sync))
        for index, group in enumerate(self.grouping):
            rows.add(_sum({0: 1.0}, *(_minus(self._takes(task)) for task in group), *map(_minus, arriving[index])),
                     low=0.0)

    def _takes(self, task: int) -> Term:
        return {variable: option.seconds / self.cutoff
                for variable, option in zip(self._mine[task], self.options[task])}

    def _moved(self, rows: _Rows, edge: Edge, sync: bool) -> Term:
        """Return the share of the cutoff that a transfer takes, as a sum of new variables w."""
        ends = [self._by_sites(task) for task in (edge.source, edge.target)]
        costs = np.array([[self._seconds(edge, sync, sources, targets) for targets in ends[1]] for sources in ends[0]])
        costs, first = _merged(costs, list(ends[0].values()))
        turned, second = _merged(costs.T, list(ends[1].values()))
        costs = turned.T
        pair = np.array(rows.variables(costs.size, 0)).reshape(costs.shape)
        for axis, terms in enumerate((first, second)):
            for index, chosen in enumerate(terms):
                rows.add(_sum(dict.fromkeys(pair.take(index, axis).tolist(), 1.0), _minus(chosen)), 0.0, 0.0)
        return {int(variable): float(cost) / self.cutoff for variable, cost in zip(pair.flat, costs.flat) if cost}

    def _seconds(self, edge: Edge, sync: bool, sources: DeviceGroups, targets: DeviceGroups) -> float:
        sites, objective = {edge.source: sources, edge.target: targets}, self.costed.objective
        if sync:
            return objective.synced(edge, sites, self.group_of[edge.source] == self.group_of[edge.target])
        return objective.moved(edge, sites)

    def _by_sites(self, task: int) -> dict[DeviceGroups, Term]:
        found: dict[DeviceGroups, Term] = defaultdict(dict)
        for variable, option in zip(self._mine[task], self.options[task]):
            found[option.layout.sites][variable] = 1.0
        return found


def _merged(costs: np.ndarray, terms: Sequence[Term]) -> tuple[np.ndarray, list[Term]]:
    """Return the different rows of a matrix of costs, and the sum of the terms of each."""
    rows, which = np.unique(costs, axis=0, return_inverse=True)
    return rows, [_sum(*(term for term, index in zip(terms, which.ravel()) if index == row))
                  for row in range(len(rows))]


def _scipy() -> tuple[Any, ...]:
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
    """Best placement so far, the proven bound, and the number of open groupings."""

    placement: Placement | None
    bound: float
    open: int
    programs: int

    @property
    def gap(self) -> float:
        """How far the placement may be from the optimum, as a share of its time; 0: it is optimal."""
        return max(0.0, 1 - self.bound / self.placement.seconds) if self.placement else 1.0


def prove(problem: Problem, warm: Placement | None = None, stop: Callable[[], bool] = lambda: False,
          costed: CostedProblem | None = None) -> Iterator[Proof]:
    """Yield ever better bounds and placements, until both are the same: the best of the layouts considered. `stop` is
    asked after each program. `warm` is an answer to start from. Raises InvalidInput for too many subsets."""
    run = _Proof(costed or CostedProblem(problem), warm)
    for _ in run.steps():
        yield run.state()
        if stop():
            return


class _Proof:
    def __init__(self, costed: CostedProblem, warm: Placement | None):
        self.costed, self.best = costed, warm
        self.options = Options(costed, warm.seconds if warm else math.inf)
        self.left: list[float] = []
        self.undecided, self.programs = math.inf, 0

    def state(self) -> Proof:
        best = self.best.seconds if self.best else math.inf
        return Proof(self.best, min([best, self.undecided, *self.left[:1]]), len(self.left), self.programs)

    def steps(self) -> Iterator[None]:
        """Decide one grouping after the other, the most promising first."""
        ahead = sorted((Program(self.options, grouping, math.inf).relaxed(),
                        grouping) for grouping in groupings(self.costed.problem))
        self.left = [bound for bound, _ in ahead]
        for bound, grouping in ahead:
            if bound < (self.best.seconds if self.best else math.inf):
                self._decide(grouping)
            self.left.pop(0)
            yield

    def _decide(self, grouping: Grouping) -> None:
        program = Program(self.options, grouping, self.best.seconds if self.best else self._first())
        self.programs += 1
        chosen, bound = program.solve()
        found = self._placement(grouping, chosen) if chosen else None
        if found and (self.best is None or found.seconds < self.best.seconds):
            self.best = found
        if bound < program.cutoff and not (found and found.seconds <= bound * (1 + 1e-6)):
            self.undecided = min(self.undecided, bound)

    def _first(self) -> float:
        """Return a cutoff that every placement undercuts, for the program's scale; used without an answer."""
        everywhere = [{option.layout.sites for options in pair for option in options} for pair in self.options.all]
        objective, problem = self.costed.objective, self.costed.problem
        moved = [max(seconds(edge, {edge.source: sources, edge.target: targets})
                     for sources in everywhere[edge.source] for targets in everywhere[edge.target])
                 for edges, seconds in ((problem.edges, objective.moved),
                                        (problem.syncs, lambda edge, sites: objective.synced(edge, sites, False)))
                 for edge in edges]
        return 1.01 * (sum(max(option.seconds for options in pair for option in options)
                           for pair in self.options.all) + sum(moved))

    def _placement(self, grouping: Grouping, chosen: Sequence[Option]) -> Placement | None:
        subsets = [tuple(map(max, *(chosen[task].subset for task in group), [0] * len(chosen[0].subset)))
                   for group in grouping]
        return self.costed.placed(grouping, subsets, (option.layout for option in chosen))
