"""The cost model as runs have shown it: each work's seconds over its roofline, what a pass through a layer takes
however little it computes, the pace of each type of device, and the lengths of rows.

The seconds of a share are taken to be  pace × (times × roofline + launch × passes) + network.  Roofline, passes and
network are the cost model's own for the rows and lengths of the run, so what is fitted is linear: least squares of the
relative error (Björck 1996, §4.4), neither term below zero, over the medians of each run. The second term is what
kernels and messages take to start, the overhead of LogP (Culler et al. 1993, §3). Shares of nearly one size cannot tell
it from the first; then it is left at zero, and predictions for other sizes are worth less.

The pace of a device shows where ranks do not wait for each other, which is where they sample. Ranks that train or infer
go in step, layer by layer, and all take as long as the slowest; there the paces seen in sampling count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from planners.heterogeneous.costed import Costed
from planners.heterogeneous.problem import GENERATE, Measured, Problem
from planners.heterogeneous.ran import Ran, Share, lengthened

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
class Seen:
    """What was measured of a share, and the cost model's terms for it: seconds that the device took by itself, its
    roofline, and its passes. `kind`: the type of its device."""

    own: float
    roofline: float
    passes: float
    kind: str

    def at(self, pace: float) -> Seen:
        """On a device that takes so many times longer."""
        return replace(self, roofline=self.roofline * pace, passes=self.passes * pace)


def calibrated(problem: Problem, runs: Sequence[Ran]) -> Problem:
    """The problem with what runs of its DAG, on its hardware, have shown; lengths are those of the last one."""
    paces = _paces(runs)
    works = []
    for number, (work, before, shares) in enumerate(zip(problem.works, runs[-1].problem.works, runs[-1].shares)):
        times, launch = _fit([one for run in runs for one in _seen(replace(run, problem=_paced(run.problem, paces)),
                                                                   number)])
        works.append(lengthened(replace(work, measured=Measured(times, launch)), before, shares))
    return _paced(replace(problem, works=tuple(works)), paces)


def again(run: Ran, problem: Problem) -> Problem:
    """A calibrated problem at the rows and lengths of a run, to be held against what was measured."""
    works = tuple(replace(before, measured=before.measured._replace(times=work.measured.times,
                                                                    launch=work.measured.launch))
                  for work, before in zip(problem.works, run.problem.works))
    return replace(problem, works=works)


def _paced(problem: Problem, paces: Mapping[str, float]) -> Problem:
    sites = tuple(replace(site, pace=paces[site.kind]) for site in problem.hardware.sites)
    return replace(problem, hardware=replace(problem.hardware, sites=sites))


def _paces(runs: Sequence[Ran]) -> dict[str, float]:
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


def _seen(run: Ran, number: int) -> list[Seen]:
    """A work's measurements in a run: each share's, or where shares wait for each other that of all of them."""
    shares = run.shares[number]
    alone = run.problem.works[number].kind == GENERATE
    return [one for part in ([(share,) for share in shares] if alone else [shares])
            if (one := _terms(run, number, part))]


def _terms(run: Ran, number: int, shares: tuple[Share, ...]) -> Seen | None:
    """None if there were no rows or no seconds, or the cost model finds no room for the work."""
    found = []
    for times, launch in ((1.0, 0.0), (2.0, 0.0), (1.0, _MOMENT)):
        works = list(run.problem.works)
        works[number] = replace(works[number], measured=works[number].measured._replace(times=times, launch=launch))
        layout = run.layout(Costed(replace(run.problem, works=tuple(works))), number, shares)
        if layout is None:
            return None
        found.append(layout.seconds)
    once, twice, launched = found
    seconds, network = max(share.taken.seconds for share in shares), 2 * once - twice
    if not once or not seconds:
        return None
    return Seen(max(seconds - network, _LEAST * seconds), twice - once, (launched - once) / _MOMENT,
                run.problem.hardware.sites[shares[0].stages[0]].kind)


def _fit(seen: Sequence[Seen]) -> tuple[float, float]:
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
