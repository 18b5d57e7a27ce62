"""Explains a placement: what bounds each task, what would help most, why a task fits nowhere, and charts.

A resource bounds a layout as far as the layout would be faster with twice as much of it: the same layout is costed
again, rebalanced, on hardware that is twice as good in one respect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from distflow.errors import Diagnostic
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
_WIDTH = 60  # characters of a chart
_MARKS = "123456789abcdefghijklmnopqrstuvwxyz"


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


def timeline(costed: CostedProblem, placement: Placement) -> list[tuple[float, float]]:
    """Return when each task starts and the seconds that it takes: in mode async in its part of the group's period."""
    problem = costed.problem
    durations = [layout.takes(turns) for layout, turns in zip(placement.layouts, turns_of(problem, placement.grouping))]
    starts = costed.objective.starts(placement.grouping, durations, [layout.sites for layout in placement.layouts])
    if problem.mode != SYNC:
        starts = [sum(durations[other] for other in group if other < task) for task in range(len(durations))
                  for group in placement.grouping if task in group]
    return list(zip(starts, durations))


def gantt(costed: CostedProblem, placement: Placement) -> Iterator[str]:
    """Yield a line for each task with its bar in time."""
    problem, times = costed.problem, timeline(costed, placement)
    scale, width = _WIDTH / placement.seconds, max(len(task.name) for task in problem.tasks)
    for index, group in enumerate(placement.grouping, 1):
        for task in group:
            start, seconds = times[task]
            bar = " " * min(_WIDTH - 1, int(start * scale)) + "█" * max(1, round(seconds * scale))
            name, chart = problem.tasks[task].name, f"{bar[:_WIDTH]:{_WIDTH}}"
            yield f"  group {index}  {name:{width}}  |{chart}| {duration(seconds)}"


def owners(problem: Problem, placement: Placement) -> list[int | None]:
    found: list[int | None] = [None] * sum(problem.hardware.all)
    for group, ranks in enumerate(ranks_of(problem, placement.subsets)):
        for rank in ranks:
            found[rank] = group
    return found


def picture(problem: Problem, placement: Placement) -> Iterator[str]:
    """Yield a line for each kind of machine: a character for each device, its group's number or a point if it idles."""
    device_groups, ranks = problem.hardware.device_groups, iter(owners(problem, placement))
    width = max(len(_label(device_group)) for device_group in device_groups)
    for device_group in device_groups:
        machines = ["".join("." if group is None else _MARKS[group] for group in islice(ranks, device_group.each))
                    for _ in range(device_group.machines)]
        yield f"  {_label(device_group):{width}}  {' '.join(machines)}"


def _label(device_group: DeviceGroup) -> str:
    return f"{device_group.name} ({device_group.kind}, {device_group.zone})"


_LEFT, _AXIS, _LANE = 220, 720, 9  # pixels: of the names, of an iteration, and of a lane


def svg(costed: CostedProblem, placement: Placement) -> str:
    """Return an iteration as SVG: a lane for each device, with the tasks that it computes in time, and a lane for each
    transfer, of rows and of weights."""
    problem, times, top = costed.problem, timeline(costed, placement), 22
    lines, tops = [], []
    for device_group in problem.hardware.device_groups:
        lines.append(f'<text x="4" y="{top + 9}">{_label(device_group)}</text>')
        tops += range(top, top + _LANE * device_group.devices, _LANE)
        top += _LANE * device_group.devices + 8
    lines += [f'<rect x="{_LEFT}" y="{y}" width="{_AXIS}" height="{_LANE - 2}" fill="#eee"/>' for y in tops]
    sent = list(_transfers(costed, placement, times))
    scale = _AXIS / max(placement.seconds, *map(sum, times), *(start + seconds for _, start, seconds in sent))
    for task, (devices, (start, seconds)) in enumerate(zip(_devices(problem, placement), times)):
        name = f"{problem.tasks[task].name}, {duration(seconds)}"
        lines += [_bar(start * scale, tops[device], seconds * scale, _colour(task, 60), name) for device in devices]
    for name, start, seconds in sent:
        lines += [f'<text x="4" y="{top + 8}" fill="#555">{name}</text>',
                  _bar(start * scale, top, seconds * scale, "#555", f"{name}, {duration(seconds)}")]
        top += 14
    for tick in range(5):
        x, at = _LEFT + _AXIS * tick // 4, duration(_AXIS / scale * tick / 4)
        lines += [f'<path d="M{x} 16V{top}" stroke="#999" stroke-width="0.5"/>',
                  f'<text x="{x - 12}" y="12">{at}</text>']
    for task, item in enumerate(problem.tasks):
        lines.append(f'<text x="{_LEFT + task * 110}" y="{top + 18}" fill="{_colour(task, 35)}">{item.name}</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _AXIS + 40}" height="{top + 30}" '
            'font-family="sans-serif" font-size="11">\n' + "\n".join(lines) + "\n</svg>\n")


def _bar(start: float, top: int, width: float, colour: str, title: str) -> str:
    return (f'<rect x="{_LEFT + start:.1f}" y="{top}" width="{max(width, 1.0):.1f}" height="{_LANE - 2}" '
            f'fill="{colour}"><title>{title}</title></rect>')


def _devices(problem: Problem, placement: Placement) -> Iterator[list[int]]:
    """Yield the devices of each task: of its group's, in each device group as many as its layout uses."""
    own, group_of = ranks_of(problem, placement.subsets), groups_of(placement.grouping)
    for task, layout in enumerate(placement.layouts):
        left = [layout.strategy.tp * sum(kind.count * kind.stages.count(group) for kind in layout.arrangement)
                for group in range(len(problem.hardware.device_groups))]
        found = []
        for rank in own[group_of[task]]:
            group = next(number for number, ranks in enumerate(problem.hardware.ranks) if rank in ranks)
            if left[group]:
                left[group] -= 1
                found.append(rank)
        yield found


def _transfers(costed: CostedProblem, placement: Placement,
               times: list[tuple[float, float]]) -> Iterator[tuple[str, float, float]]:
    """Yield what is sent, when, and its seconds: rows and weights as soon as they are there."""
    problem, group_of = costed.problem, groups_of(placement.grouping)
    sites = [layout.sites for layout in placement.layouts]
    sent = [(edge, "rows", costed.objective.moved(edge, sites)) for edge in problem.edges]
    sent += [(edge, "weights", costed.objective.synced(edge, sites, group_of[edge.source] == group_of[edge.target]))
             for edge in problem.syncs]
    for edge, what, seconds in sent:
        if seconds:
            names = f"{problem.tasks[edge.source].name} → {problem.tasks[edge.target].name}"
            yield f"{what}, {names}", sum(times[edge.source]), seconds


def _colour(task: int, light: int) -> str:
    return f"hsl({task * 67 % 360},65%,{light}%)"
