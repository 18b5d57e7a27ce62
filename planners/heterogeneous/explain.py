"""What bounds each work, what would help most, and what the placement looks like.

A resource bounds a layout as far as the layout would be faster with twice as much of it: the same layout is costed
again, balanced anew, on hardware that is twice as good in one respect.

Why a work fits nowhere: its tenant, what a device would need at least, and how much is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from distflow.errors import Diagnostic
from planners.heterogeneous.cost import CostModel, Objective
from planners.heterogeneous.layouts import CostedProblem, blocks_of, slices_of, strategies
from planners.heterogeneous.plan_file import ranks_of
from planners.heterogeneous.problem import (
    SYNC,
    TRAIN,
    DeviceGroup,
    Hardware,
    NetworkLink,
    Placement,
    Problem,
    Strategy,
    shared,
)

_GIB = 2**30


def impossible(costed: CostedProblem) -> list[Diagnostic]:
    """A mistake for each tenant that no layout on the whole cluster has room for."""
    everything, found = costed.problem.hardware.all, {}
    for number, work in enumerate(costed.problem.works):
        if work.tenant not in found and costed.layouts.best(number, everything, False) is None:
            found[work.tenant] = _shortfall(costed, number)
    return list(found.values())


def _shortfall(costed: CostedProblem, number: int) -> Diagnostic:
    """For the device and the strategy that come nearest to having room."""
    work, sites = costed.problem.works[number], costed.problem.hardware.sites
    missing, needed, site, strategy = min(_needs(costed, number), key=lambda need: need[0])
    state = "weights, gradients and optimizer" if work.kind == TRAIN else "weights"
    what = (f"`{work.tenant}` ({work.name}) fits no device: cut as far as can be (dp {strategy.dp}, tp {strategy.tp}, "
            f"pp {strategy.pp}), {state} and activations need {needed / _GIB:.2f} GiB, and of a {sites[site].kind} "
            f"{(needed - missing) / _GIB:.2f} GiB may be filled: {missing / _GIB:.2f} GiB too little")
    return Diagnostic(what, None,
                      "Take more or larger devices, a smaller model, shorter rows, or set  recompute: true  "
                      "and a lower  micro_batch_tokens  for its role.")


def _needs(costed: CostedProblem, number: int) -> Iterator[tuple[float, float, int, Strategy]]:
    """Missing bytes, needed bytes, and where: of the fullest stage, for each strategy and site."""
    work, cost, hardware = costed.problem.works[number], costed.costs.works[number], costed.problem.hardware
    for tp in slices_of(work, [max(site.each for site in hardware.sites)]):
        blocks = sum(blocks_of(hardware.all, tp, hardware))
        for pp in range(1, min(blocks, work.layers) + 1):
            for strategy in strategies(work, blocks // pp, tp, pp):
                layers = -(-work.layers // pp)
                for index, site in enumerate(hardware.sites):
                    needed = cost.fills(strategy, 0, layers)
                    yield needed - cost.room(site), needed, index, strategy


_WIDTH = 60
"""Characters of a chart."""
_MARKS = "123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Bound:
    """Seconds that a work would save with twice as much of each resource, most first, and what that is."""

    work: str
    seconds: float
    saved: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        what, most = self.saved[0]
        if most < 0.01 * self.seconds:
            return "nothing that could be doubled; its rows and layers do not divide any better"
        return f"{what} (twice as much: {most / self.seconds:.0%} faster)"


def doubled(problem: Problem) -> dict[str, Problem]:
    """The problem with twice as much of each resource, by name."""
    hardware, found = problem.hardware, {}
    for name, change in (("compute", lambda site: replace(site, peak=2 * site.peak)),
                         ("memory bandwidth", lambda site: replace(site, bandwidth=2 * site.bandwidth)),
                         ("memory", lambda site: replace(site, memory=2 * site.memory)),
                         ("host link", lambda site: replace(site, host=2 * site.host)),
                         ("links inside machines", lambda site: replace(site, inside=_faster(site.inside)))):
        found[name] = Hardware(tuple(map(change, hardware.sites)), hardware.between)
    for name, near in (("links inside a zone", lambda one, other: one.zone == other.zone),
                       ("links between zones", lambda one, other: one.zone != other.zone)):
        between = tuple(tuple(_faster(way) if near(one, other) else way for way, other in zip(row, hardware.sites))
                        for row, one in zip(hardware.between, hardware.sites))
        found[name] = Hardware(hardware.sites, between)
    sooner = tuple(replace(work, measured=work.measured._replace(launch=work.measured.launch / 2))
                   for work in problem.works)
    return {**{name: replace(problem, hardware=changed) for name, changed in found.items()},
            "speed of starting kernels": replace(problem, works=sooner)}


def _faster(way: NetworkLink) -> NetworkLink:
    return NetworkLink(way.latency / 2, way.bandwidth * 2)


def bounds(problem: Problem, placement: Placement) -> list[Bound]:
    """For each work, what bounds it."""
    before, after = _durations(problem, placement), {name: _durations(changed, placement)
                                                     for name, changed in doubled(problem).items()}
    found = []
    for number, work in enumerate(problem.works):
        saved = sorted(((name, before[number] - durations[number]) for name, durations in after.items()),
                       key=lambda pair: -pair[1])
        found.append(Bound(work.name, before[number], tuple(saved)))
    return found


def helps(problem: Problem, placement: Placement) -> list[tuple[str, float]]:
    """How many times faster an iteration would be with twice as much of each resource, most first."""
    found = [(name, placement.seconds / _seconds(changed, placement)) for name, changed in doubled(problem).items()]
    return sorted(found, key=lambda pair: -pair[1])


def _durations(problem: Problem, placement: Placement) -> list[float]:
    costs, turns = CostModel(problem), _turns(problem, placement)
    layouts = (costs.layout(number, layout.strategy, layout.arrangement)
               for number, layout in enumerate(placement.layouts))
    return [layout.takes(turns[number]) for number, layout in enumerate(layouts)]


def _seconds(problem: Problem, placement: Placement) -> float:
    objective = Objective(problem, CostModel(problem).network)
    return objective.seconds(placement.grouping, placement.pools, _durations(problem, placement))


def _turns(problem: Problem, placement: Placement) -> dict[int, bool]:
    return {work: shared(problem, group) for group in placement.grouping for work in group}


def gantt(costed: CostedProblem, placement: Placement) -> Iterator[str]:
    """A line for each work: in mode sync when it runs in an iteration, in mode async its part of the group's period."""
    problem, turns = costed.problem, _turns(costed.problem, placement)
    durations = [layout.takes(turns[number]) for number, layout in enumerate(placement.layouts)]
    starts = costed.objective.starts(placement.grouping, placement.pools, durations)
    if problem.mode != SYNC:
        starts = [sum(durations[other] for other in group if other < work) for work in range(len(durations))
                  for group in placement.grouping if work in group]
    scale, width = _WIDTH / placement.seconds, max(len(work.name) for work in problem.works)
    for index, group in enumerate(placement.grouping, 1):
        for work in group:
            bar = " " * min(_WIDTH - 1, int(starts[work] * scale)) + "█" * max(1, round(durations[work] * scale))
            name, chart = problem.works[work].name, f"{bar[:_WIDTH]:{_WIDTH}}"
            yield f"  group {index}  {name:{width}}  |{chart}| {durations[work]:.2f} s"


def owners(problem: Problem, placement: Placement) -> list[int | None]:
    """The group of each rank; None of one that idles."""
    found: list[int | None] = [None] * sum(problem.hardware.all)
    for group, ranks in enumerate(ranks_of(problem, placement.pools)):
        for rank in ranks:
            found[rank] = group
    return found


def picture(problem: Problem, placement: Placement) -> Iterator[str]:
    """A line for each kind of machine: a character for each device, the number of its group or a point if it idles."""
    sites, ranks = problem.hardware.sites, iter(owners(problem, placement))
    width = max(len(_label(site)) for site in sites)
    for site in sites:
        machines = ["".join("." if group is None else _MARKS[group] for group in islice(ranks, site.each))
                    for _ in range(site.machines)]
        yield f"  {_label(site):{width}}  {' '.join(machines)}"


def _label(site: DeviceGroup) -> str:
    return f"{site.name} ({site.kind}, {site.zone})"


def svg(problem: Problem, placement: Placement) -> str:
    """The picture as SVG: a square for each device, in the colour of its group."""
    sites, ranks, left, lines = problem.hardware.sites, iter(owners(problem, placement)), 220, []
    for row, site in enumerate(sites):
        lines.append(f'<text x="4" y="{row * 22 + 32}">{_label(site)}</text>')
        for number, group in enumerate(islice(ranks, site.devices)):
            x = left + number * 14 + number // site.each * 6
            lines.append(f'<rect x="{x}" y="{row * 22 + 22}" width="12" height="12" fill="{_colour(group, 60)}"/>')
    for group, works in enumerate(placement.grouping):
        names = ", ".join(problem.works[work].name for work in works)
        lines.append(f'<text x="4" y="{len(sites) * 22 + 48 + 18 * group}" fill="{_colour(group, 35)}">'
                     f"{_MARKS[group]}: {names}</text>")
    width = left + max(site.devices * 14 + site.machines * 6 for site in sites)
    height = len(sites) * 22 + 60 + 18 * len(placement.grouping)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
            'font-size="12">\n' + "\n".join(lines) + "\n</svg>\n")


def _colour(group: int | None, light: int) -> str:
    return "#ddd" if group is None else f"hsl({group * 67 % 360},65%,{light}%)"
