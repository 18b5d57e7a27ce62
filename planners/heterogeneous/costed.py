"""What a grouping with its pools takes: layouts and objective together, at real costs and at the ideal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from planners.heterogeneous.cost import Costs
from planners.heterogeneous.layouts import Layouts
from planners.heterogeneous.objective import Objective
from planners.heterogeneous.problem import SYNC, Grouping, Placement, Pool, Problem, shared


class Costed:
    """A problem with its cost model; what was costed once is remembered."""

    def __init__(self, problem: Problem):
        self.problem, self.costs = problem, Costs(problem)
        self.layouts = Layouts(self.costs)
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
