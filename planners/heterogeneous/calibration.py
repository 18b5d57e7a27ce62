"""The cost model as runs have shown it: each work's seconds over its roofline, what a pass through a layer takes
however little it computes, the pace of each type of device, and the lengths of rows.

The seconds of a share are taken to be  pace × (times × roofline + launch × passes) + network.  Roofline, passes and
network are the cost model's own for the rows and lengths of the run, so what is fitted is linear: least squares of the
relative error (Björck 1996, §4.4), neither term below zero, over the medians of each run. The second term is what
kernels and messages take to start, the overhead of LogP (Culler et al. 1993, §3). Shares of nearly one size cannot tell
it from the first; then it is left at zero, and predictions for other sizes are worth less.

The pace of a device shows where ranks do not wait for each other, which is where they sample. Ranks that train or infer
go in step, layer by layer, and all take as long as the slowest; there the paces seen in sampling count.

A run as the joint problem sees it: which devices each work had, in which shares, and what was measured of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from distflow.plan import Layout as Ranks
from distflow.plan_file import NodeTiming
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.problem import (
    GENERATE,
    Grouping,
    Hardware,
    Measured,
    ModelTask,
    Placement,
    Pool,
    Problem,
    Replicas,
    Strategy,
    TaskLayout,
    shared,
)


class MeasuredReplica(NamedTuple):
    """A data-parallel share of a work: the sites of its stages, and what it took in an iteration."""

    stages: tuple[int, ...]
    taken: NodeTiming


@dataclass(frozen=True)
class MeasuredRun:
    """A run. `problem` is what it was, with the lengths that its rows had; the rest is by work. `seconds` are those of
    an iteration."""

    problem: Problem
    strategies: tuple[Strategy, ...]
    shares: tuple[tuple[MeasuredReplica, ...], ...]
    grouping: Grouping
    pools: tuple[Pool, ...]
    seconds: float

    @property
    def durations(self) -> list[float]:
        """Of each work, as measured: until the last share is done."""
        return [max(share.taken.seconds for share in shares) for shares in self.shares]

    def layout(self, costed: CostedProblem, number: int,
               shares: tuple[MeasuredReplica, ...] | None = None) -> TaskLayout | None:
        """A work as this run has placed it, by a cost model; of the shares `shares` only, if they are given. As many
        rows as the model's problem has are divided as they were. None if it does not fit, though it ran."""
        of = self.shares[number] if shares is None else shares
        scale = costed.problem.works[number].rows / self.problem.works[number].rows
        return costed.costs.layout(number, self.strategies[number], tuple(Replicas(share.stages, 1) for share in of),
                                   tuple(round(share.taken.rows * scale) for share in of))

    def placement(self, costed: CostedProblem) -> Placement | None:
        """The placement that it has, by a cost model."""
        layouts = [self.layout(costed, number) for number in range(len(self.shares))]
        if None in layouts:
            return None
        home = {work: shared(self.problem, group) for group in self.grouping for work in group}
        durations = [layout.takes(home[work]) for work, layout in enumerate(layouts)]
        return Placement(self.grouping, self.pools, tuple(layouts),
                         costed.objective.seconds(self.grouping, self.pools, durations))

    def rest(self, costed: CostedProblem) -> float:
        """Seconds of an iteration that no work takes: rewards, what the host computes, and the step's end."""
        return max(0.0, self.seconds - costed.objective.seconds(self.grouping, self.pools, self.durations))


def ran(problem: Problem, layouts: Mapping[str, Ranks], taken: Mapping[tuple[str, int], NodeTiming],
        seconds: float) -> MeasuredRun:
    """A run in mode sync.

    Args:
        problem: what it was, on this hardware.
        layouts: which ranks had each work, by name.
        taken: of each work and rank, medians over the steps.
        seconds: of a step, too.
    """
    homes = [site for site, devices in enumerate(problem.hardware.all) for _ in range(devices)]
    shares = tuple(_shares(work, layouts[work.name], taken, homes) for work in problem.works)
    problem = replace(problem, works=tuple(map(lengthened, problem.works, problem.works, shares)))
    ranks = [range(layouts[work.name].first, layouts[work.name].last + 1) for work in problem.works]
    grouping = _grouping(ranks)
    pools = tuple(_pool(problem.hardware, homes, {rank for work in group for rank in ranks[work]})
                  for group in grouping)
    strategies = tuple(_strategy(work, layouts[work.name]) for work in problem.works)
    return MeasuredRun(problem, strategies, shares, grouping, pools, seconds)


def lengthened(work: ModelTask, before: ModelTask, shares: tuple[MeasuredReplica, ...]) -> ModelTask:
    """A work with the lengths of a run in which it was `before`. Prompts are as long as they were; of responses it is
    taken over how long they were beside the longest allowed. Of what showed no tokens nothing is known."""
    rows = sum(share.taken.rows for share in shares)
    if not rows:
        return work
    prompt, read, response = (sum(getattr(share.taken, name) for share in shares) / rows
                              for name in ("prompt", "read", "response"))
    longest, scale = max(share.taken.longest for share in shares), work.response / before.response
    known = {"prompt": min(prompt, work.prompt), "read": min(read, work.prompt)} if prompt else {}
    if response:
        known |= {"response": min(response * scale, work.response),
                  "longest": max(1.0, min(longest * scale, work.response))}
    return replace(work, measured=work.measured._replace(**known))


def _shares(work: ModelTask, layout: Ranks, taken: Mapping[tuple[str, int], NodeTiming],
            homes: list[int]) -> tuple[MeasuredReplica, ...]:
    found = []
    for share in range(layout.dp):
        first, each = layout.first + share * layout.width, layout.tp * layout.cp
        ranks = range(first, first + layout.width)
        seen = [taken[work.name, rank] for rank in ranks]
        found.append(MeasuredReplica(tuple(homes[rank] for rank in ranks[::each]),
                                     replace(seen[0], seconds=max(one.seconds for one in seen))))
    return _whole(work, found)


def _whole(work: ModelTask, shares: list[MeasuredReplica]) -> tuple[MeasuredReplica, ...]:
    """The same seconds for as many rows as the batch has: filters drop some and draw others in their place, and a plan
    is for a batch."""
    rows = sum(share.taken.rows for share in shares)
    factor = work.rows / rows if rows else 1.0
    return tuple(share._replace(taken=replace(share.taken, **{
        name: round(factor * getattr(share.taken, name)) for name in ("rows", "prompt", "read", "response")}))
                 for share in shares)


def _grouping(ranks: list[range]) -> Grouping:
    """Works that have a rank in common take turns."""
    groups: list[tuple[set[int], list[int]]] = []
    for work, mine in enumerate(ranks):
        together = [group for group in groups if group[0] & set(mine)]
        groups = [group for group in groups if group not in together]
        groups.append((set(mine).union(*(group[0] for group in together)),
                       sorted([work, *(other for group in together for other in group[1])])))
    return tuple(sorted(tuple(works) for _, works in groups))


def _pool(hardware: Hardware, homes: list[int], ranks: set[int]) -> Pool:
    return tuple(sum(homes[rank] == site for rank in ranks) for site in range(len(hardware.sites)))


def _strategy(work: ModelTask, layout: Ranks) -> Strategy:
    """Micro-batches as engines cut them: by tokens, as long as the rows really are."""
    tokens = work.read if work.kind == GENERATE else work.whole
    micro = min(max(1, int(work.micro_tokens // max(tokens, 1.0))), work.rows)
    return Strategy(layout.dp, layout.tp, layout.pp, layout.ep, micro)


def unmeasured(problem: Problem) -> Problem:
    """The problem as it is without runs."""
    return replace(problem, works=tuple(replace(work, measured=Measured()) for work in problem.works))


_APART = 1.5
"""Shares are of different sizes if, among them, the roofline of a pass differs by this factor."""
_LEAST = 0.1
"""What a device has at least of a work's seconds, whatever the cost model says of the network."""
_ROWS = 0.01
"""Rows are never free: what they have at least of `times`, beside a fit in which starts take nothing."""
_ROUNDS = 8
_MOMENT = 1e-4
"""Seconds of a pass, to see how many passes there are."""


@dataclass(frozen=True)
class Observed:
    """What was measured of a share, and the cost model's terms for it: seconds that the device took by itself, its
    roofline, and its passes. `kind`: the type of its device."""

    own: float
    roofline: float
    passes: float
    kind: str

    def at(self, pace: float) -> Observed:
        """On a device that takes so many times longer."""
        return replace(self, roofline=self.roofline * pace, passes=self.passes * pace)


def calibrated(problem: Problem, runs: Sequence[MeasuredRun]) -> Problem:
    """The problem with what runs of its DAG, on its hardware, have shown; lengths are those of the last one."""
    paces = _paces(runs)
    works = []
    for number, (work, before, shares) in enumerate(zip(problem.works, runs[-1].problem.works, runs[-1].shares)):
        times, launch = _fit([one for run in runs for one in _seen(replace(run, problem=_paced(run.problem, paces)),
                                                                   number)])
        works.append(lengthened(replace(work, measured=Measured(times, launch)), before, shares))
    return _paced(replace(problem, works=tuple(works)), paces)


def again(run: MeasuredRun, problem: Problem) -> Problem:
    """A calibrated problem at the rows and lengths of a run, to be held against what was measured."""
    works = tuple(replace(before, measured=before.measured._replace(times=work.measured.times,
                                                                    launch=work.measured.launch))
                  for work, before in zip(problem.works, run.problem.works))
    return replace(problem, works=works)


def _paced(problem: Problem, paces: Mapping[str, float]) -> Problem:
    sites = tuple(replace(site, pace=paces[site.kind]) for site in problem.hardware.sites)
    return replace(problem, hardware=replace(problem.hardware, sites=sites))


def _paces(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Of each type of device; that of the first one is 1. Types that have sampled nothing have that of the first."""
    problem = runs[0].problem
    kinds = list(dict.fromkeys(site.kind for site in problem.hardware.sites))
    sampling = [number for number, work in enumerate(problem.works) if work.kind == GENERATE]
    seen = [[one for run in runs for one in _seen(run, number)] for number in sampling]
    paces = dict.fromkeys(kinds, 1.0)
    for _ in range(_ROUNDS if len(kinds) > 1 else 0):
        ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
        for work in seen:
            times, launch = _fit([one.at(paces[one.kind]) for one in work])
            for one in work:
                ratios[one.kind].append(one.own / (times * one.roofline + launch * one.passes))
        found = {kind: median(each) if each else 1.0 for kind, each in ratios.items()}
        paces = {kind: found[kind] / found[kinds[0]] if ratios[kind] else 1.0 for kind in kinds}
    return paces


def _seen(run: MeasuredRun, number: int) -> list[Observed]:
    """A work's measurements in a run: each share's, or where shares wait for each other that of all of them."""
    shares = run.shares[number]
    alone = run.problem.works[number].kind == GENERATE
    return [one for part in ([(share,) for share in shares] if alone else [shares])
            if (one := _terms(run, number, part))]


def _terms(run: MeasuredRun, number: int, shares: tuple[MeasuredReplica, ...]) -> Observed | None:
    """None if there were no rows or no seconds, or the cost model finds no room for the work."""
    found = []
    for times, launch in ((1.0, 0.0), (2.0, 0.0), (1.0, _MOMENT)):
        works = list(run.problem.works)
        works[number] = replace(works[number], measured=works[number].measured._replace(times=times, launch=launch))
        layout = run.layout(CostedProblem(replace(run.problem, works=tuple(works))), number, shares)
        if layout is None:
            return None
        found.append(layout.seconds)
    once, twice, launched = found
    seconds, network = max(share.taken.seconds for share in shares), 2 * once - twice
    if not once or not seconds:
        return None
    return Observed(max(seconds - network, _LEAST * seconds), twice - once, (launched - once) / _MOMENT,
                    run.problem.hardware.sites[shares[0].stages[0]].kind)


def _fit(seen: Sequence[Observed]) -> tuple[float, float]:
    """`times` and `launch` with the least squares of the relative error; 1 and 0 if nothing was measured."""
    if not seen:
        return 1.0, 0.0
    terms = np.array([[one.roofline / one.own, one.passes / one.own] for one in seen])
    first, second = terms.T
    found = [(float(first.sum() / (first @ first)), 0.0)]
    least = _ROWS * found[0][0]
    sizes = [one.roofline / one.passes for one in seen]
    if max(sizes) > _APART * min(sizes):
        both = np.linalg.lstsq(terms, np.ones(len(seen)), rcond=None)[0]
        left = 1 - least * first
        found += [(least, float(left @ second / (second @ second))), (float(both[0]), float(both[1]))]
    return min((pair for pair in found if pair[0] >= least and pair[1] >= 0),
               key=lambda pair: float(((terms @ np.array(pair) - 1) ** 2).sum()))
