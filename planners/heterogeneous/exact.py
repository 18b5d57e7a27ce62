"""Exact solver: one integer program for each grouping that a bound does not exclude, all under the best answer so far.

Symmetric devices are folded: a subset counts the devices of a device group, and does not name them. The hybrid's answer
is the first cutoff, so most programs end as infeasible at their root. What is exact: groupings, subsets, and layouts of
few blocks (see `layouts`); layouts of many blocks are those that the leaf finds, as for the hybrid.

The program chooses the subset of each group. Minimise T, as a share of the cutoff, with z[g,p] = 1 if group g has
subset p:

    Σ_p z[g,p] = 1                                         for each group
    Σ_g Σ_p devices of i in p · z[g,p] ≤ devices of i      for each device group i
    start[t] ≥ start[u] + Σ_p seconds[u,p] z[g(u),p] + moving from g(u) to g(t)       sync: t reads u, or follows it in
    T ≥ start[t] + Σ_p seconds[t,p] z[g(t),p] (+ weights to those that use them)      the chain of its group
    T ≥ Σ_{t in g} Σ_p seconds[t,p] z[g,p] + moving to g                              async: for each group

The seconds of moving depend on the device groups of both subsets. They are linear in w[a,b,A,B] = 1 if group a is on
device groups A and group b on B, whose sums over A and over B must be those of z (the usual form of a product of
choices; Adams and Johnson 1994).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from distflow.config.extras import pip_line
from distflow.errors import Diagnostic, InvalidInput
from planners.heterogeneous.layouts import CostedProblem, fastest
from planners.heterogeneous.problem import (
    SYNC,
    DeviceGroups,
    DeviceSubset,
    Edge,
    Grouping,
    Placement,
    Problem,
    TaskLayout,
    device_groups_of,
    groups_of,
    turns_of,
)
from planners.heterogeneous.search import groupings

MAX_SUBSETS = 20_000  # limit of the list of subsets


class DurationGrid:
    """Durations of tasks on all subsets, an axis for each device group; infinite where a task does not fit. Devices may
    stay idle: a running minimum along each axis. Raises InvalidInput for too many subsets."""

    def __init__(self, costed: CostedProblem, cutoff: float = math.inf):
        self.costed, self.cutoff = costed, cutoff
        self.counts = [device_group.counts for device_group in costed.problem.hardware.device_groups]
        self.shape = tuple(map(len, self.counts))
        if math.prod(self.shape) > MAX_SUBSETS:
            raise InvalidInput(Diagnostic(f"this cluster has {math.prod(self.shape):,} subsets, too many for the exact "
                                          f"program, which lists up to {MAX_SUBSETS:,}", None,
                                          "Use  --solver hybrid  , or describe fewer kinds of machines."))

    def subset(self, position: tuple[int, ...]) -> DeviceSubset:
        return tuple(counts[index] for counts, index in zip(self.counts, position))

    @cached_property
    def durations(self) -> np.ndarray:
        """Seconds by (task, 0 alone or 1 taking turns, position…). What cannot undercut the cutoff is not costed."""
        tasks = range(len(self.costed.problem.tasks))
        found = np.full((len(tasks), 2, *self.shape), math.inf)
        for task, position in product(tasks, product(*map(range, self.shape))):
            subset = self.subset(position)
            if any(subset) and self.costed.ideal_of(task, subset) <= self.cutoff:
                for turns, layout in enumerate(self.costed.layouts.exactly(task, subset)):
                    found[task, turns][position] = layout.takes(bool(turns)) if layout else math.inf
        for axis in range(len(self.shape)):
            found = np.minimum.accumulate(found, axis=axis + 2)
        return found

    def layout(self, task: int, subset: DeviceSubset, turns: bool) -> TaskLayout | None:
        parts = product(*([count for count in counts if count <= limit] for counts, limit in zip(self.counts, subset)))
        layouts = (layout for part in parts if any(part) and self.costed.ideal_of(task, part) <= self.cutoff
                   for layout in self.costed.layouts.exactly(task, part))
        return fastest(layouts)[turns]


_BETTER = 1e-7  # by how much, as a share, an answer must undercut the cutoff
Term = dict[int, float]  # coefficients by variable


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
    """Integer program of a grouping. `cutoff`: seconds that an answer must undercut."""

    def __init__(self, grid: DurationGrid, grouping: Grouping, cutoff: float):
        self.grid, self.grouping, self.cutoff = grid, grouping, cutoff
        self.costed, self.problem = grid.costed, grid.costed.problem
        self.group_of, self.turns = groups_of(grouping), turns_of(self.problem, grouping)
        self.columns = [self._columns(index) for index in range(len(grouping))]
        self.hopeless = not all(self.columns)

    def relaxed(self) -> float:
        """Return a lower bound: every group has all devices, and nothing is moved."""
        return self._unmoved(self._whole())

    def _whole(self) -> list[float]:
        last = [-1] * len(self.grid.shape)
        return [float(self.grid.durations[(task, int(self.turns[task]), *last)])
                for task in range(len(self.group_of))]

    def _unmoved(self, durations: list[float]) -> float:
        if math.inf in durations:
            return math.inf
        if self.problem.mode != SYNC:
            return max(sum(durations[task] for task in group) for group in self.grouping)
        ends, free = [0.0] * len(durations), [0.0] * len(self.grouping)
        for task, duration in enumerate(durations):
            read = [ends[edge.source] for edge in self.problem.edges if edge.target == task]
            ends[task] = free[self.group_of[task]] = max([free[self.group_of[task]], *read]) + duration
        return max(ends)

    def _columns(self, index: int) -> list[tuple[DeviceSubset, dict[int, float]]]:
        """Return the subsets that may undercut the cutoff, with their tasks' seconds, without useless larger ones."""
        group, turns, table = self.grouping[index], int(self.turns[self.grouping[index][0]]), self.grid.durations
        times = table[list(group), turns]
        whole, found = self._whole(), []
        for position in np.argwhere(np.isfinite(times).all(axis=0)).tolist():
            mine = times[(slice(None), *position)]
            smaller = ([*position[:axis], at - 1, *position[axis + 1:]] for axis, at in enumerate(position) if at > 1)
            if any((times[(slice(None), *less)] <= mine).all() for less in smaller):
                continue
            seconds = dict(zip(group, mine.tolist()))
            if self._unmoved([seconds.get(task, whole[task]) for task in range(len(whole))]) < self.cutoff:
                found.append((self.grid.subset(tuple(position)), seconds))
        return found

    def solve(self) -> tuple[tuple[DeviceSubset, ...] | None, float]:
        """Return the subsets of an answer below the cutoff, if any, and a bound. Raises InvalidInput: no scipy."""
        Bounds, LinearConstraint, milp, coo_array = _scipy()
        rows, integral = self._constraints()
        entries = [(row, column, value) for row, terms in enumerate(rows.terms) for column, value in terms.items()]
        row, column, value = zip(*entries)
        matrix = coo_array((value, (row, column)), shape=(len(rows.terms), len(integral))).tocsr()
        upper = np.where(np.array(integral) == 1, 1.0, np.inf)
        upper[0] = 1 - _BETTER
        cost = np.zeros(len(integral))
        cost[0] = 1.0
        result = milp(cost, integrality=integral, bounds=Bounds(0, upper),
                      constraints=LinearConstraint(matrix, rows.low, rows.high), options={"mip_rel_gap": 0.0})
        bound = self.cutoff * (1.0 if result.status == 2 else result.mip_dual_bound or 0.0)
        return (None if result.x is None else self._chosen(result.x)), bound

    def _chosen(self, values: np.ndarray) -> tuple[DeviceSubset, ...]:
        return tuple(max(zip(values[first:], columns), key=lambda pair: pair[0])[1][0]
                     for first, columns in zip(self._first, self.columns))

    def _constraints(self) -> tuple[_Rows, list[int]]:
        """Return the constraints and which variables are integral: T, starts, z by group, w by pair of groups."""
        tasks, rows, integral = len(self.group_of), _Rows(), [0] * (1 + len(self.group_of))
        self._first = []
        for columns in self.columns:
            self._first.append(len(integral))
            rows.add({len(integral) + number: 1.0 for number in range(len(columns))}, 1.0, 1.0)
            integral += [1] * len(columns)
        for device_group, devices in enumerate(self.problem.hardware.all):
            rows.add({first + number: float(subset[device_group]) for first, columns in zip(self._first, self.columns)
                      for number, (subset, _) in enumerate(columns) if subset[device_group]} | {0: 0.0},
                     high=float(devices))
        self._pairs: dict[tuple[int, int], dict[tuple[DeviceGroups, DeviceGroups], int]] = {}
        if self.problem.mode == SYNC:
            self._chains(rows, integral, tasks)
        else:
            self._periods(rows, integral)
        return rows, integral

    def _chains(self, rows: _Rows, integral: list[int], tasks: int) -> None:
        for task in range(tasks):
            takes = self._takes(task)
            rows.add(_sum({0: 1.0, 1 + task: -1.0}, _minus(takes)), low=0.0)
            after = [other for other in self.grouping[self.group_of[task]] if other > task][:1]
            for other in after:
                rows.add(_sum({1 + other: 1.0, 1 + task: -1.0}, _minus(takes)), low=0.0)
        for edge in self.problem.edges:
            seconds_moved = self._moved_seconds(rows, integral, edge, False)
            rows.add(_sum({1 + edge.target: 1.0, 1 + edge.source: -1.0}, _minus(self._takes(edge.source)),
                          _minus(seconds_moved)),
                     low=0.0)
        for edge in self.problem.syncs:
            seconds_moved = self._moved_seconds(rows, integral, edge, True)
            rows.add(_sum({0: 1.0, 1 + edge.source: -1.0}, _minus(self._takes(edge.source)), _minus(seconds_moved)),
                     low=0.0)

    def _periods(self, rows: _Rows, integral: list[int]) -> None:
        arriving: dict[int, list[Term]] = defaultdict(list)
        for edges, sync in ((self.problem.edges, False), (self.problem.syncs, True)):
            for edge in edges:
                arriving[self.group_of[edge.target]].append(self._moved_seconds(rows, integral, edge, sync))
        for index, group in enumerate(self.grouping):
            rows.add(_sum({0: 1.0}, *(_minus(self._takes(task)) for task in group), *map(_minus, arriving[index])),
                     low=0.0)

    def _takes(self, task: int) -> Term:
        index = self.group_of[task]
        return {self._first[index] + number: seconds[task] / self.cutoff
                for number, (_, seconds) in enumerate(self.columns[index])}

    def _moved_seconds(self, rows: _Rows, integral: list[int], edge: Edge, sync: bool) -> Term:
        one, other = self.group_of[edge.source], self.group_of[edge.target]
        if one == other:
            found = {self._first[one] + number: self._cost(edge, sync, device_groups_of(subset),
                                                           device_groups_of(subset), True)
                     for number, (subset, _) in enumerate(self.columns[one])}
        else:
            pair = self._pair(rows, integral, one, other)
            found = {variable: self._cost(edge, sync, sources, targets, False)
                     for (sources, targets), variable in pair.items()}
        return {variable: cost / self.cutoff for variable, cost in found.items() if cost}

    def _cost(self, edge: Edge, sync: bool, sources: DeviceGroups, targets: DeviceGroups, together: bool) -> float:
        objective = self.costed.objective
        if sync:
            return objective.synced(edge, sources, targets, together)
        return objective.moved(sources, targets, edge.nbytes)

    def _pair(self, rows: _Rows, integral: list[int], one: int, other: int) -> dict[tuple[DeviceGroups, DeviceGroups],
                                                                                    int]:
        if (one, other) not in self._pairs:
            at = [self._by_device_groups(index) for index in (one, other)]
            pair = {}
            for sources in at[0]:
                for targets in at[1]:
                    pair[sources, targets] = len(integral)
                    integral.append(0)
            for side, by_groups in enumerate(at):
                for device_groups, chosen in by_groups.items():
                    rows.add(_sum({variable: 1.0 for key, variable in pair.items() if key[side] == device_groups},
                                  _minus(chosen)), 0.0, 0.0)
            self._pairs[one, other] = pair
        return self._pairs[one, other]

    def _by_device_groups(self, index: int) -> dict[DeviceGroups, Term]:
        found: dict[DeviceGroups, Term] = defaultdict(dict)
        for number, (subset, _) in enumerate(self.columns[index]):
            found[device_groups_of(subset)][self._first[index] + number] = 1.0
        return found


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
    """Yield ever better bounds and placements, until both are the same; `stop` is asked after each program. `warm` is
    an answer to start from. Raises InvalidInput for too many subsets."""
    run = _Proof(costed or CostedProblem(problem), warm)
    for _ in run.steps():
        yield run.state()
        if stop():
            return


class _Proof:
    def __init__(self, costed: CostedProblem, warm: Placement | None):
        self.costed, self.best = costed, warm
        self.grid = DurationGrid(costed, warm.seconds if warm else math.inf)
        self.left: list[float] = []
        self.undecided, self.programs = math.inf, 0

    def state(self) -> Proof:
        best = self.best.seconds if self.best else math.inf
        return Proof(self.best, min([best, self.undecided, *self.left[:1]]), len(self.left), self.programs)

    def steps(self) -> Iterator[None]:
        ahead = sorted((Program(self.grid, grouping, math.inf if not self.best else self.best.seconds).relaxed(),
                        grouping) for grouping in groupings(self.costed.problem))
        self.left = [bound for bound, _ in ahead]
        for bound, grouping in ahead:
            if self.best is None or bound < self.best.seconds:
                self._decide(grouping)
            self.left.pop(0)
            yield

    def _decide(self, grouping: Grouping) -> None:
        program = Program(self.grid, grouping, self.best.seconds if self.best else self._first(grouping))
        if program.hopeless or math.isinf(program.cutoff):
            return
        self.programs += 1
        subsets, bound = program.solve()
        found = self._placement(grouping, subsets) if subsets else None
        if found and (self.best is None or found.seconds < self.best.seconds):
            self.best = found
        if bound < program.cutoff and not (found and found.seconds <= bound * (1 + 1e-6)):
            self.undecided = min(self.undecided, bound)

    def _first(self, grouping: Grouping) -> float:
        table = self.grid.durations
        longest = [float(times[times < math.inf].max(initial=0.0)) for times in table.reshape(len(table), -1)]
        moved = sum(self.costed.objective.moved(frozenset(range(len(self.grid.shape))),
                                                frozenset(range(len(self.grid.shape))), edge.nbytes)
                    for edge in (*self.costed.problem.edges, *self.costed.problem.syncs))
        return sum(longest) + moved

    def _placement(self, grouping: Grouping, subsets: tuple[DeviceSubset, ...]) -> Placement | None:
        turns = turns_of(self.costed.problem, grouping)
        return self.costed.placed(grouping, subsets, (self.grid.layout(task, subsets[group], turns[task])
                                                      for task, group in enumerate(groups_of(grouping))))
