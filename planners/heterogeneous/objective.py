"""The time of one iteration of the graph, from the groups, their pools and how long each work takes.

Sync: the chain of each group runs in the plan's order; a work starts once its group is free and what it reads has
come; the iteration ends when the last work is done and the trained weights are where the next one needs them. Async:
the groups work on different iterations at the same time, so the slowest group's period counts: its works, and what it
waits for from others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from planners.heterogeneous.network import Network
from planners.heterogeneous.problem import SYNC, Edge, Grouping, Pool, Problem, Sites, sites_of

Durations = Sequence[float]


class Objective:
    """The objective of a problem."""

    def __init__(self, problem: Problem, network: Network):
        self.problem = problem
        self._moved = cache(lambda sources, targets, nbytes: network.reach(sources, targets).seconds(nbytes))
        self._arriving = [[edge for edge in problem.edges if edge.target == work] for work in range(len(problem.works))]

    def moved(self, sources: Sites, targets: Sites, nbytes: float) -> float:
        """Seconds until what lies at one pool is at another."""
        return self._moved(sources, targets, nbytes) if nbytes else 0.0

    def synced(self, edge: Edge, sources: Sites, targets: Sites, together: bool) -> float:
        """Seconds to bring trained weights to a work; none where one engine trains and uses them."""
        works = self.problem.works
        if together and works[edge.source].tenant == works[edge.target].tenant:
            return 0.0
        return self.moved(sources, targets, edge.nbytes)

    def seconds(self, grouping: Grouping, pools: Sequence[Pool], durations: Durations) -> float:
        """Seconds of an iteration."""
        return max(self.ends(grouping, pools, durations), default=0.0)

    def ends(self, grouping: Grouping, pools: Sequence[Pool], durations: Durations) -> list[float]:
        """Sync: when each work is done and its weights are where they are used. Async: each group's period."""
        home = {work: index for index, group in enumerate(grouping) for work in group}
        sites = [sites_of(pool) for pool in pools]
        if self.problem.mode != SYNC:
            return self._periods(home, sites, durations)
        starts = self.starts(grouping, pools, durations)
        ends = [start + duration for start, duration in zip(starts, durations)]
        return ends + [ends[edge.source] + self.synced(edge, sites[home[edge.source]], sites[home[edge.target]],
                                                       home[edge.source] == home[edge.target])
                       for edge in self.problem.syncs]

    def starts(self, grouping: Grouping, pools: Sequence[Pool], durations: Durations) -> list[float]:
        """When each work starts, in mode sync."""
        home = {work: index for index, group in enumerate(grouping) for work in group}
        sites, free = [sites_of(pool) for pool in pools], [0.0] * len(grouping)
        starts: list[float] = []
        for work, duration in enumerate(durations):
            mine = home[work]
            start = free[mine]
            for edge in self._arriving[work]:
                start = max(start, starts[edge.source] + durations[edge.source]
                            + self.moved(sites[home[edge.source]], sites[mine], edge.nbytes))
            starts.append(start)
            free[mine] = start + duration
        return starts

    def _periods(self, home: dict[int, int], sites: list[Sites], durations: Durations) -> list[float]:
        periods = [0.0] * len(sites)
        for work, duration in enumerate(durations):
            periods[home[work]] += duration
        for edges, cost in ((self.problem.edges, self._read), (self.problem.syncs, self.synced)):
            for edge in edges:
                one, other = home[edge.source], home[edge.target]
                periods[other] += cost(edge, sites[one], sites[other], one == other)
        return periods

    def _read(self, edge: Edge, sources: Sites, targets: Sites, together: bool) -> float:
        return self.moved(sources, targets, edge.nbytes)
