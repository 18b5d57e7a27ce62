"""From a placement to the plan file and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from distflow.config.load import Spec
from distflow.plan_file import Digests, PlacedPlan, PlacedTask, digest
from planners.heterogeneous.problem import Placement, Pool, Problem, Replicas, Strategy, TaskLayout


def digests_of(spec: Spec, problem: Problem) -> Digests:
    """What a plan of this problem is for."""
    works = [{name: value for name, value in asdict(work).items() if name != "measured"} for work in problem.works]
    return Digests(dag=digest(spec.dag.model_dump(mode="json")), cluster=digest(spec.cluster.model_dump(mode="json")),
                   work=digest([works, problem.mode]))


def written(problem: Problem, placement: Placement, made_for: Digests, solver: str, bound: float,
            ranks: list[list[int]] | None = None) -> PlacedPlan:
    """The placement as a file says it. `ranks`: of each group, if it matters which they are."""
    sites = problem.hardware.sites
    groups = []
    for group, pool, own in zip(placement.grouping, placement.pools, ranks or ranks_of(problem, placement.pools)):
        devices: dict[str, int] = {}
        for site, count in zip(sites, pool):
            if count:
                devices[site.name] = devices.get(site.name, 0) + count
        groups.append({"tasks": [problem.works[work].name for work in group], "devices": devices, "ranks": own})
    tasks = {work.name: _task(problem, layout) for work, layout in zip(problem.works, placement.layouts)}
    return PlacedPlan.model_validate({"made_for": made_for.model_dump(), "solver": solver, "groups": groups,
                                      "tasks": tasks, "seconds": placement.seconds, "bound": bound})


def _task(problem: Problem, layout: TaskLayout) -> dict[str, Any]:
    sites, strategy = problem.hardware.sites, layout.strategy
    shares = [{"count": kind.count, "rows": rows, "stages": [sites[site].name for site in kind.stages]}
              for kind, rows in zip(layout.arrangement, layout.rows)]
    return {"dp": strategy.dp, "tp": strategy.tp, "pp": strategy.pp, "ep": strategy.ep, "micro_rows": strategy.micro,
            "layers": list(layout.layers), "shares": shares, "seconds": layout.seconds,
            "swap_seconds": layout.swap}


def ranks_of(problem: Problem, pools: tuple[Pool, ...]) -> list[list[int]]:
    """The ranks of each pool. Of alike machines the largest pools take theirs first, so that parts of a machine fill
    what whole ones leave."""
    found: list[list[int]] = [[] for _ in pools]
    first = 0
    for site, devices in enumerate(problem.hardware.all):
        free = first
        for index in sorted(range(len(pools)), key=lambda index: -pools[index][site]):
            found[index] += range(free, free + pools[index][site])
            free += pools[index][site]
        first += devices
    return found


def placement_of(problem: Problem, plan: PlacedPlan) -> Placement:
    """What a file says, for a problem with the same digests."""
    index = {work.name: number for number, work in enumerate(problem.works)}
    grouping = tuple(tuple(index[name] for name in group.tasks) for group in plan.groups)
    starts, first = [], 0
    for devices in problem.hardware.all:
        starts.append(range(first, first + devices))
        first += devices
    pools = tuple(tuple(sum(rank in site for rank in group.ranks) for site in starts) for group in plan.groups)
    layouts = tuple(_layout(problem, plan.tasks[work.name]) for work in problem.works)
    return Placement(grouping, pools, layouts, plan.seconds)


def _layout(problem: Problem, task: PlacedTask) -> TaskLayout:
    names = [site.name for site in problem.hardware.sites]
    arrangement = tuple(Replicas(tuple(names.index(stage) for stage in shares.stages), shares.count)
                        for shares in task.shares)
    return TaskLayout(Strategy(task.dp, task.tp, task.pp, task.ep, task.micro_rows), arrangement,
                      tuple(shares.rows for shares in task.shares), tuple(task.layers), task.seconds, task.swap_seconds)
