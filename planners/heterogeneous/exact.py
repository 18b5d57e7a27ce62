"""The exact solver: one integer program for each grouping that a bound does not exclude, all under the best answer yet.

Symmetric devices are folded: a pool counts the devices of a site, and does not name them. The hybrid's answer is the
first cutoff, so most programs end as infeasible at their root. What is exact: groupings, pools, and layouts of few
blocks (see `arrangements`); layouts of many blocks are those that the leaf finds, as for the hybrid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from planners.heterogeneous.costed import Costed
from planners.heterogeneous.family import Family
from planners.heterogeneous.groupings import groupings
from planners.heterogeneous.problem import Grouping, Placement, Pool, Problem
from planners.heterogeneous.program import Program


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
          seconds_each: float | None = None, costed: Costed | None = None) -> Iterator[Proof]:
    """Better and better bounds, and placements, until both are the same.

    Args:
        warm: an answer to start from, as the hybrid's.
        stop: asked after each program.
        seconds_each: what HiGHS may take for one program.

    Raises:
        InvalidInput: the cluster has too many pools.
    """
    run = _Proof(costed or Costed(problem), warm)
    for _ in run.steps(seconds_each):
        yield run.state()
        if stop():
            return


class _Proof:
    def __init__(self, costed: Costed, warm: Placement | None):
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
