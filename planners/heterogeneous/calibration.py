"""Fits the cost model to measured runs: each task's seconds over its roofline, the constant cost of a pass through a
layer, the slowdown of each type of device, and the lengths of rows.

The seconds of a share are taken to be  slowdown × (times × roofline + launch × passes) + network.  Roofline, passes and
network are the cost model's own for the rows and lengths of the run, so the fit is linear: least squares of the
relative error (Björck 1996, §4.4), neither term below zero, over the medians of each run. The second term is what
kernels and messages take to start, the overhead of LogP (Culler et al. 1993, §3). Shares of nearly one size cannot tell
it from the first; then it is left at zero, and predictions for other sizes are worth less.

The slowdown of a device shows where ranks do not wait for each other, which is in sampling. Ranks that train or infer
go in step, layer by layer, and all take as long as the slowest; there the slowdowns seen in sampling count. What one of
them has waited within a task for another that began it later counts for neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from distflow.errors import Diagnostic, InvalidInput
from distflow.measurements import NodeTiming
from distflow.plan import Layout as Ranks
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.problem import (
    GENERATE,
    DeviceSubset,
    Grouping,
    Measured,
    ModelTask,
    Placement,
    Problem,
    Replicas,
    Strategy,
    TaskLayout,
)


class MeasuredReplica(NamedTuple):
    """Data-parallel share of a task: the device groups of its stages, and its measurements in an iteration."""

    stages: tuple[int, ...]
    timing: NodeTiming


@dataclass(frozen=True)
class MeasuredRun:
    """Measured run. `seconds` are of an iteration; strategies, shares and durations (see `_durations`) are by task."""

    name: str
    problem: Problem
    strategies: tuple[Strategy, ...]
    shares: tuple[tuple[MeasuredReplica, ...], ...]
    grouping: Grouping
    subsets: tuple[DeviceSubset, ...]
    durations: tuple[float, ...]
    seconds: float

    def layout(self, costed: CostedProblem, number: int,
               shares: tuple[MeasuredReplica, ...] | None = None) -> TaskLayout | None:
        """Return a task's layout in this run (or of `shares`) by a cost model; None if it does not fit there."""
        of = self.shares[number] if shares is None else shares
        scale = costed.problem.tasks[number].rows / self.problem.tasks[number].rows
        return costed.costs.layout(number, self.strategies[number], tuple(Replicas(share.stages, 1) for share in of),
                                   tuple(round(share.timing.rows * scale) for share in of))

    def placement(self, costed: CostedProblem) -> Placement:
        """Return this run's placement, costed by a cost model. Raises InvalidInput if by the model it does not fit."""
        found = costed.placed(self.grouping, self.subsets,
                              (self.layout(costed, number) for number in range(len(self.shares))))
        if found is None:
            raise InvalidInput(Diagnostic(f"{self.name} has run, but by the cost model it does not fit the machines",
                                          None, "Does `memory_gib` of the cluster file say too little?"))
        return found

    def rest(self, costed: CostedProblem) -> float:
        """Return the seconds of an iteration beside its tasks: rewards, what the host computes, and the step's end."""
        sites = [frozenset(stage for share in shares for stage in share.stages) for shares in self.shares]
        return max(0.0, self.seconds - costed.objective.seconds(self.grouping, self.durations, sites))


def measured_run(problem: Problem, layouts: Mapping[str, Ranks], timings: Mapping[tuple[str, int], NodeTiming],
                 seconds: float, name: str = "a run") -> MeasuredRun:
    """Return the measured run in mode sync; `timings` are medians over the steps, by task and rank."""
    device_group_of = [device_group for device_group, own in enumerate(problem.hardware.ranks) for _ in own]
    shares = tuple(_shares(task, layouts[task.name], timings, device_group_of) for task in problem.tasks)
    problem = replace(problem, tasks=tuple(map(with_run_lengths, problem.tasks, problem.tasks, shares)))
    ranks = [range(layouts[task.name].first, layouts[task.name].last + 1) for task in problem.tasks]
    grouping = _grouping(ranks)
    subsets = tuple(problem.hardware.subset({rank for task in group for rank in ranks[task]}) for group in grouping)
    strategies = tuple(_strategy(task, layouts[task.name]) for task in problem.tasks)
    taken = [{rank: timings[task.name, rank].seconds for rank in mine} for task, mine in zip(problem.tasks, ranks)]
    return MeasuredRun(name, problem, strategies, shares, grouping, subsets, _durations(grouping, taken), seconds)


def _durations(grouping: Grouping, taken: Sequence[Mapping[int, float]]) -> tuple[float, ...]:
    """Return by how many seconds each task delays the ranks of its group, from what their own part has taken each. A
    rank that is done earlier with one task waits within the next for those that are not, where that has them go in
    step; what it waited is no work. A task takes as long as its fastest share at least."""
    durations = [0.0] * len(taken)
    for group in grouping:
        ends = dict.fromkeys((rank for task in group for rank in taken[task]), 0.0)
        for task in group:
            before = max(ends.values())
            for rank, seconds in taken[task].items():
                ends[rank] += seconds
            durations[task] = max(max(ends.values()) - before, min(taken[task].values()))
    return tuple(durations)


def with_run_lengths(task: ModelTask, before: ModelTask, shares: tuple[MeasuredReplica, ...]) -> ModelTask:
    """Return a task with a run's lengths, of responses relative to the longest allowed; unknown without tokens."""
    rows = sum(share.timing.rows for share in shares)
    if not rows:
        return task
    prompt, read, response = (sum(getattr(share.timing, name) for share in shares) / rows
                              for name in ("prompt", "read", "response"))
    longest, scale = max(share.timing.longest for share in shares), task.response / before.response
    known = {"prompt": min(prompt, task.prompt), "read": min(read, task.prompt)} if prompt else {}
    if response:
        known |= {"response": min(response * scale, task.response),
                  "longest": max(1.0, min(longest * scale, task.response))}
    return replace(task, measured=task.measured._replace(**known))


def _shares(task: ModelTask, layout: Ranks, timings: Mapping[tuple[str, int], NodeTiming],
            device_group_of: list[int]) -> tuple[MeasuredReplica, ...]:
    found = []
    for share in range(layout.dp):
        first, each = layout.first + share * layout.width, layout.tp * layout.cp
        ranks = range(first, first + layout.width)
        seen = [timings[task.name, rank] for rank in ranks]
        found.append(MeasuredReplica(tuple(device_group_of[rank] for rank in ranks[::each]),
                                     replace(seen[0], seconds=max(one.seconds for one in seen))))
    return _whole(task, found)


def _whole(task: ModelTask, shares: list[MeasuredReplica]) -> tuple[MeasuredReplica, ...]:
    """Scale the rows of shares to those of the batch, for which a plan is made: filters drop rows and draw others."""
    rows = sum(share.timing.rows for share in shares)
    factor = task.rows / rows if rows else 1.0
    return tuple(share._replace(timing=replace(share.timing, **{
        name: round(factor * getattr(share.timing, name)) for name in ("rows", "prompt", "read", "response")}))
                 for share in shares)


def _grouping(ranks: list[range]) -> Grouping:
    import networkx as nx

    graph = nx.Graph((("task", task), rank) for task, mine in enumerate(ranks) for rank in mine)
    return tuple(sorted(tuple(sorted(node[1] for node in group if isinstance(node, tuple)))
                        for group in nx.connected_components(graph)))


def _strategy(task: ModelTask, layout: Ranks) -> Strategy:
    """Return the strategy, with micro-batches as engines cut them: by tokens at the measured lengths."""
    tokens = task.read if task.kind == GENERATE else task.whole
    micro = min(max(1, int(task.micro_tokens // max(tokens, 1.0))), task.rows)
    return Strategy(layout.dp, layout.tp, layout.pp, layout.ep, micro)


def unmeasured(problem: Problem) -> Problem:
    return replace(problem, tasks=tuple(replace(task, measured=Measured()) for task in problem.tasks))


_APART = 1.5  # shares are of different sizes if, among them, the roofline of a pass differs by this factor
_LEAST = 0.1
"""Least share of a task's seconds that counts as the device's own, whatever the cost model says of the network."""
_ROWS = 0.01  # rows are never free: their least `times`, as a share of those of a fit without launches
_ROUNDS = 8
_MOMENT = 1e-7  # seconds of a pass with which passes are counted
_MANY = 1e4  # `times` at which any task computes for longer than it gathers weights


@dataclass(frozen=True)
class Observed:
    """Measurement of a share, and the cost model's terms for it: seconds without network, roofline, passes."""

    own: float
    roofline: float
    passes: float
    kind: str

    def at(self, slowdown: float) -> Observed:
        return replace(self, roofline=self.roofline * slowdown, passes=self.passes * slowdown)


def calibrated(problem: Problem, runs: Sequence[MeasuredRun]) -> Problem:
    """Return the problem calibrated by runs of its DAG on its hardware; lengths are those of the last one."""
    slowdowns = _slowdowns(runs)
    tasks = []
    for number, (task, before, shares) in enumerate(zip(problem.tasks, runs[-1].problem.tasks, runs[-1].shares)):
        slowed = (replace(run, problem=_slowed(run.problem, slowdowns)) for run in runs)
        times, launch = _fit([one for run in slowed for one in _seen(run, number)])
        tasks.append(with_run_lengths(replace(task, measured=Measured(times, launch)), before, shares))
    return _slowed(replace(problem, tasks=tuple(tasks)), slowdowns)


def at_run_sizes(run: MeasuredRun, problem: Problem) -> Problem:
    """Return a calibrated problem at the rows and lengths of a run, to be compared with its measurements."""
    tasks = tuple(replace(before, measured=before.measured._replace(times=task.measured.times,
                                                                    launch=task.measured.launch))
                  for task, before in zip(problem.tasks, run.problem.tasks))
    return replace(problem, tasks=tasks)


def _slowed(problem: Problem, slowdowns: Mapping[str, float]) -> Problem:
    device_groups = tuple(replace(device_group, slowdown=slowdowns[device_group.kind])
                          for device_group in problem.hardware.device_groups)
    return replace(problem, hardware=replace(problem.hardware, device_groups=device_groups))


def _slowdowns(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Return the slowdown of each type of device; 1 of the first and of types that have sampled nothing."""
    problem = runs[0].problem
    kinds = list(dict.fromkeys(device_group.kind for device_group in problem.hardware.device_groups))
    sampling = [number for number, task in enumerate(problem.tasks) if task.kind == GENERATE]
    seen = [[one for run in runs for one in _seen(run, number)] for number in sampling]
    slowdowns = dict.fromkeys(kinds, 1.0)
    for _ in range(_ROUNDS if len(kinds) > 1 else 0):
        ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
        for task in seen:
            times, launch = _fit([one.at(slowdowns[one.kind]) for one in task])
            for one in task:
                ratios[one.kind].append(one.own / (times * one.roofline + launch * one.passes))
        found = {kind: median(each) if each else 1.0 for kind, each in ratios.items()}
        slowdowns = {kind: found[kind] / found[kinds[0]] if ratios[kind] else 1.0 for kind in kinds}
    return slowdowns


def _seen(run: MeasuredRun, number: int) -> list[Observed]:
    """Return a task's measurements in a run: each share's, or where shares wait for each other that of all."""
    shares = run.shares[number]
    alone = run.problem.tasks[number].kind == GENERATE
    parts = [((share,), share.timing.seconds) for share in shares] if alone else [(shares, run.durations[number])]
    return [one for part, seconds in parts if (one := _terms(run, number, part, seconds))]


def _terms(run: MeasuredRun, number: int, shares: tuple[MeasuredReplica, ...], seconds: float) -> Observed | None:
    """Return the terms of shares that have taken so many seconds; None if these are none or of no rows, the cost model
    finds no room for the task, or gathering weights hides what it computes. Seconds are linear in both coefficients
    where devices gather first and then compute; those that do both at once save a part of it, which is seen where
    computation takes much longer."""
    once, twice, launched, many = (_predicted(run, number, shares, *each, overlaps=False)
                                   for each in ((1.0, 0.0), (2.0, 0.0), (1.0, _MOMENT), (_MANY, 0.0)))
    roofline = twice - once
    if not seconds or not roofline > 0:
        return None
    saved = many - _predicted(run, number, shares, _MANY, 0.0)
    own = max(seconds - (once - roofline - saved), _LEAST * seconds)
    still, started = (_predicted(run, number, shares, own / roofline, launch) for launch in (0.0, _MOMENT))
    if started <= still:  # computation that gathering hides
        return None
    return Observed(own, roofline, (launched - once) / _MOMENT,
                    run.problem.hardware.device_groups[shares[0].stages[0]].kind)


def _predicted(run: MeasuredRun, number: int, shares: tuple[MeasuredReplica, ...], times: float, launch: float,
               overlaps: bool = True) -> float:
    """Return a task's seconds with these coefficients; NaN if it does not fit. `overlaps`: whether devices that can
    gather weights while they compute do so."""
    tasks, hardware = list(run.problem.tasks), run.problem.hardware
    tasks[number] = replace(tasks[number], measured=tasks[number].measured._replace(times=times, launch=launch))
    groups = tuple(replace(group, overlaps=group.overlaps and overlaps) for group in hardware.device_groups)
    layout = run.layout(CostedProblem(replace(run.problem, tasks=tuple(tasks),
                                              hardware=replace(hardware, device_groups=groups))), number, shares)
    return layout.seconds if layout else math.nan


def _fit(seen: Sequence[Observed]) -> tuple[float, float]:
    """Return `times` and `launch` by least squares of the relative error; 1 and 0 if nothing was measured."""
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
