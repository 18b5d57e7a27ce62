"""A placement by the names of nodes and machines, as it is printed and turned into a run."""

from __future__ import annotations

from dataclasses import dataclass

from planners.heterogeneous.problem import DeviceSubset, Placement, Problem, TaskLayout


@dataclass(frozen=True)
class PlacedGroup:
    """Tasks that take turns on the same devices, counted by kind of machine, numbered in the cluster file's order."""

    tasks: list[str]
    devices: dict[str, int]
    ranks: list[int]


@dataclass(frozen=True)
class PlacedShares:
    """`count` data-parallel shares of `rows` rows each, and the machines of their stages."""

    count: int
    rows: int
    stages: list[str]


@dataclass(frozen=True)
class PlacedTask:
    """Layout of a task."""

    dp: int
    tp: int
    pp: int
    ep: int
    micro_rows: int
    layers: list[int]
    shares: list[PlacedShares]


@dataclass(frozen=True)
class PlacedPlan:
    """Placement of all tasks, with the predicted `seconds` of an iteration and their lower `bound` over all plans, and
    over those of the layouts that the exact solver considered; `rest_seconds`, of runs beside tasks, are added."""

    seconds: float
    groups: list[PlacedGroup]
    tasks: dict[str, PlacedTask]
    solver: str = "hybrid"
    bound: float = 0.0
    bound_considered: float | None = None
    rest_seconds: float = 0.0

    @property
    def ranks(self) -> list[int]:
        """Numbers of the devices of the cluster file that have a rank, by rank."""
        return sorted(rank for group in self.groups for rank in group.ranks)


def written(problem: Problem, placement: Placement) -> PlacedPlan:
    groups = []
    for group, subset, own in zip(placement.grouping, placement.subsets, ranks_of(problem, placement.subsets)):
        devices: dict[str, int] = {}
        for device_group, count in zip(problem.hardware.device_groups, subset):
            if count:
                devices[device_group.name] = devices.get(device_group.name, 0) + count
        groups.append(PlacedGroup([problem.tasks[task].name for task in group], devices, own))
    placed = {task.name: _task(problem, layout) for task, layout in zip(problem.tasks, placement.layouts)}
    return PlacedPlan(placement.seconds, groups, placed)


def _task(problem: Problem, layout: TaskLayout) -> PlacedTask:
    device_groups, strategy = problem.hardware.device_groups, layout.strategy
    shares = [PlacedShares(kind.count, rows, [device_groups[device_group].name for device_group in kind.stages])
              for kind, rows in zip(layout.arrangement, layout.rows)]
    return PlacedTask(strategy.dp, strategy.tp, strategy.pp, strategy.ep, strategy.micro, list(layout.layers), shares)


def ranks_of(problem: Problem, subsets: tuple[DeviceSubset, ...]) -> list[list[int]]:
    """Return the ranks of each subset; of alike machines the largest subsets take theirs first, to stay whole."""
    found: list[list[int]] = [[] for _ in subsets]
    for device_group, ranks in enumerate(problem.hardware.ranks):
        free = ranks.start
        for index in sorted(range(len(subsets)), key=lambda index: -subsets[index][device_group]):
            found[index] += range(free, free + subsets[index][device_group])
            free += subsets[index][device_group]
    return found
