"""Explains a placement: bounds of tasks, what would help, why a task fits nowhere, weights that are sent, memory.

A resource bounds a layout as far as the layout would be faster with twice as much of it: the same layout is costed
again, rebalanced, on hardware that is twice as good in one respect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from distflow.errors import Diagnostic
from planners.heterogeneous.layouts import CostedProblem, blocks_of, slices_of, strategies
from planners.heterogeneous.problem import (
    TRAIN,
    Hardware,
    NetworkLink,
    Placement,
    Problem,
    Strategy,
    groups_of,
    turns_of,
)

_GIB = 2**30


def impossible(costed: CostedProblem) -> list[Diagnostic]:
    everything, found = costed.problem.hardware.all, {}
    for number, task in enumerate(costed.problem.tasks):
        if task.memory_item not in found and not costed.layouts.best(number, everything):
            found[task.memory_item] = _shortfall(costed, number)
    return list(found.values())


def _shortfall(costed: CostedProblem, number: int) -> Diagnostic:
    task = costed.problem.tasks[number]
    missing, needed, device, strategy = min(_needs(costed, number), key=lambda need: need[0])
    state = "weights, gradients and optimizer" if task.kind == TRAIN else "weights"
    what = (f"`{task.memory_item}` ({task.name}) fits no device: cut as far as can be (dp {strategy.dp}, "
            f"tp {strategy.tp}, pp {strategy.pp}), {state} and activations need {needed / _GIB:.2f} GiB, and of a "
            f"{device} {(needed - missing) / _GIB:.2f} GiB may be filled: {missing / _GIB:.2f} GiB too little")
    return Diagnostic(what, None,
                      "Take more or larger devices, a smaller model, shorter rows, or set  recompute: true  "
                      "and a lower  micro_batch_tokens  for its role.")


def _needs(costed: CostedProblem, number: int) -> Iterator[tuple[float, float, str, Strategy]]:
    """Yield missing and needed bytes and the type of device, of the fullest stage, by strategy and device group."""
    task, cost, hardware = costed.problem.tasks[number], costed.costs.tasks[number], costed.problem.hardware
    for tp in slices_of(task, [max(device_group.each for device_group in hardware.device_groups)]):
        blocks = sum(blocks_of(hardware.all, tp, hardware))
        for pp in range(1, min(blocks, task.layers) + 1):
            for strategy in strategies(task, blocks // pp, tp, pp):
                layers = -(-task.layers // pp)
                for device_group in hardware.device_groups:
                    needed = cost.fills(strategy, 0, layers)
                    yield needed - cost.room(device_group), needed, device_group.kind, strategy


def duration(seconds: float) -> str:
    """Return seconds as text: of less than 10 ms, milli- or microseconds."""
    if seconds >= 0.01 or seconds == 0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


_STARTS = "speed of starting kernels"
@dataclass(frozen=True)
class Bound:
    """Seconds that a task would save with twice as much of each resource, most first."""

    task: str
    seconds: float
    saved: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        what, most = self.saved[0]
        if most < 0.01 * self.seconds:
            return "nothing that could be doubled; its rows and layers do not divide any better"
        return f"{what} (twice as much: {most / self.seconds:.0%} faster)"


def doubled(problem: Problem) -> dict[str, Problem]:
    hardware, found = problem.hardware, {}
    for name, change in (("compute", lambda device_group: replace(device_group, peak=2 * device_group.peak)),
                         ("memory bandwidth",
                          lambda device_group: replace(device_group, bandwidth=2 * device_group.bandwidth)),
                         ("memory", lambda device_group: replace(device_group, memory=2 * device_group.memory)),
                         ("host link", lambda device_group: replace(device_group, host=2 * device_group.host)),
                         ("links inside machines",
                          lambda device_group: replace(device_group, inside=_faster(device_group.inside))),
                         (_STARTS, lambda device_group: replace(device_group, launch=device_group.launch / 2))):
        found[name] = Hardware(tuple(map(change, hardware.device_groups)), hardware.between)
    for name, near in (("links inside a zone", lambda one, other: one.zone == other.zone),
                       ("links between zones", lambda one, other: one.zone != other.zone)):
        between = tuple(tuple(_faster(link) if near(one, other) else link
                              for link, other in zip(row, hardware.device_groups))
                        for row, one in zip(hardware.between, hardware.device_groups))
        found[name] = Hardware(hardware.device_groups, between)
    sooner = tuple(replace(task, measured=task.measured._replace(launch=(task.measured.launch or 0.0) / 2))
                   if task.measured.launch else task for task in problem.tasks)
    return {name: replace(problem, hardware=changed, tasks=sooner if name == _STARTS else problem.tasks)
            for name, changed in found.items()}


def _faster(link: NetworkLink) -> NetworkLink:
    return NetworkLink(link.latency / 2, link.bandwidth * 2)


def bounds(problem: Problem, placement: Placement) -> list[Bound]:
    before, after = _durations(problem, placement), {name: _durations(changed, placement)
                                                     for name, changed in doubled(problem).items()}
    found = []
    for number, task in enumerate(problem.tasks):
        saved = sorted(((name, before[number] - durations[number]) for name, durations in after.items()),
                       key=lambda pair: -pair[1])
        found.append(Bound(task.name, before[number], tuple(saved)))
    return found


def helps(problem: Problem, placement: Placement) -> list[tuple[str, float]]:
    """Return how many times faster an iteration would be with twice as much of each resource, most first."""
    before = _again(problem, placement).seconds  # costed in the same way: a plan's own may count idle shares too
    found = [(name, before / _again(changed, placement).seconds)
             for name, changed in doubled(problem).items()]
    return sorted(found, key=lambda pair: -pair[1])


def _durations(problem: Problem, placement: Placement) -> list[float]:
    again = _again(problem, placement)
    return [layout.takes(turns) for layout, turns in zip(again.layouts, turns_of(problem, placement.grouping))]


def _again(problem: Problem, placement: Placement) -> Placement:
    costed = CostedProblem(problem)
    found = costed.placed(placement.grouping, placement.subsets, (
        costed.costs.layout(number, layout.strategy, layout.arrangement)
        for number, layout in enumerate(placement.layouts)))
    assert found is not None, "what had room has room with more"
    return found


@dataclass(frozen=True)
class WeightSync:
    """Trained weights that a task gets in an iteration."""

    source: str
    target: str
    nbytes: float
    seconds: float


def weight_syncs(costed: CostedProblem, placement: Placement) -> list[WeightSync]:
    """Return what is sent; of tasks that share an engine with the training one nothing is."""
    tasks, group_of = costed.problem.tasks, groups_of(placement.grouping)
    sites = [layout.sites for layout in placement.layouts]
    found = []
    for edge in costed.problem.syncs:
        seconds = costed.objective.synced(edge, sites, group_of[edge.source] == group_of[edge.target])
        if seconds:
            found.append(WeightSync(tasks[edge.source].name, tasks[edge.target].name, edge.nbytes, seconds))
    return found


def memory_of(costed: CostedProblem, placement: Placement) -> Iterator[tuple[str, str, float, float]]:
    """Yield each task, a type of machine, the bytes of its fullest device there while the task computes, and how many
    may be filled. A task that samples counts with the cache of one row; what is left is cache."""
    groups = costed.problem.hardware.device_groups
    for number, layout in enumerate(placement.layouts):
        cost, fullest = costed.costs.tasks[number], {}
        for kind in layout.arrangement:
            for stage, (group, layers) in enumerate(zip(kind.stages, layout.layers)):
                fills = cost.fills(layout.strategy, stage, layers)
                fullest[group] = max(fullest.get(group, 0.0), fills)
        for group, fills in sorted(fullest.items()):
            yield costed.problem.tasks[number].name, groups[group].name, fills, cost.room(groups[group])
