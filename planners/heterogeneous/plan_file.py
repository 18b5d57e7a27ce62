"""Writes placements as plan files and reads them back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from distflow.config.spec import Spec
from distflow.plan_file import Digests, PlacedPlan, PlacedTask, digest
from planners.heterogeneous.problem import DeviceSubset, Placement, Problem, Replicas, Strategy, TaskLayout


def digests_of(spec: Spec, problem: Problem) -> Digests:
    own = ("measured", "micro_tokens", "at_once",  # what runs and plans find out
           "stages", "states")  # follows from the engine
    tasks = [{name: value for name, value in asdict(task).items() if name not in own} for task in problem.tasks]
    cluster = spec.cluster.model_dump(mode="json")
    return Digests(dag=digest(spec.dag.model_dump(mode="json")), cluster=digest(_said(cluster)),
                   work=digest([tasks, problem.mode]))


def _said(value: Any) -> Any:
    """Return a cluster's mapping without `efficiency` where it is unset, so that plans made before that key existed are
    still for the same cluster."""
    if isinstance(value, list):
        return [_said(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _said(each) for key, each in value.items() if (key, each) != ("efficiency", None)}


def written(problem: Problem, placement: Placement, made_for: Digests, solver: str, bound: float) -> PlacedPlan:
    """Return the placement as a plan file."""
    device_groups = problem.hardware.device_groups
    groups = []
    for group, subset, own in zip(placement.grouping, placement.subsets, ranks_of(problem, placement.subsets)):
        devices: dict[str, int] = {}
        for device_group, count in zip(device_groups, subset):
            if count:
                devices[device_group.name] = devices.get(device_group.name, 0) + count
        groups.append({"tasks": [problem.tasks[task].name for task in group], "devices": devices, "ranks": own})
    placed = {task.name: _task(problem, layout) for task, layout in zip(problem.tasks, placement.layouts)}
    return PlacedPlan.model_validate({"made_for": made_for.model_dump(), "solver": solver, "groups": groups,
                                      "tasks": placed, "seconds": placement.seconds, "bound": bound})


def _task(problem: Problem, layout: TaskLayout) -> dict[str, Any]:
    device_groups, strategy = problem.hardware.device_groups, layout.strategy
    shares = [{"count": kind.count, "rows": rows,
               "stages": [device_groups[device_group].name for device_group in kind.stages]}
              for kind, rows in zip(layout.arrangement, layout.rows)]
    return {"dp": strategy.dp, "tp": strategy.tp, "pp": strategy.pp, "ep": strategy.ep, "micro_rows": strategy.micro,
            "layers": list(layout.layers), "shares": shares, "seconds": layout.seconds,
            "swap_seconds": layout.swap}


def ranks_of(problem: Problem, subsets: tuple[DeviceSubset, ...]) -> list[list[int]]:
    """Return the ranks of each subset; of alike machines the largest subsets take theirs first, to stay whole."""
    found: list[list[int]] = [[] for _ in subsets]
    for device_group, ranks in enumerate(problem.hardware.ranks):
        free = ranks.start
        for index in sorted(range(len(subsets)), key=lambda index: -subsets[index][device_group]):
            found[index] += range(free, free + subsets[index][device_group])
            free += subsets[index][device_group]
    return found


def placement_of(problem: Problem, plan: PlacedPlan) -> Placement:
    index = {task.name: number for number, task in enumerate(problem.tasks)}
    grouping = tuple(tuple(index[name] for name in group.tasks) for group in plan.groups)
    subsets = tuple(problem.hardware.subset(group.ranks) for group in plan.groups)
    layouts = tuple(_layout(problem, plan.tasks[task.name]) for task in problem.tasks)
    return Placement(grouping, subsets, layouts, plan.seconds)


def _layout(problem: Problem, placed: PlacedTask) -> TaskLayout:
    names = [device_group.name for device_group in problem.hardware.device_groups]
    arrangement = tuple(Replicas(tuple(names.index(stage) for stage in shares.stages), shares.count)
                        for shares in placed.shares)
    return TaskLayout(Strategy(placed.dp, placed.tp, placed.pp, placed.ep, placed.micro_rows), arrangement,
                      tuple(shares.rows for shares in placed.shares), tuple(placed.layers), placed.seconds,
                      placed.swap_seconds)
