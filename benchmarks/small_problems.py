"""Small random problems, and their solution by going through everything: devices one by one, nothing folded."""

from __future__ import annotations

import math
from functools import cache
from itertools import permutations, product

import numpy as np

from planners.heterogeneous.cost import CostModel
from planners.heterogeneous.layouts import slices_of, strategies
from planners.heterogeneous.problem import (
    ASYNC,
    GENERATE,
    INFER,
    SYNC,
    TRAIN,
    DeviceGroup,
    Edge,
    Hardware,
    ModelTask,
    NetworkLink,
    Problem,
    Replicas,
)

KINDS = {"h200": (989e12, 131, 4.8e12), "a100": (312e12, 74, 2.0e12), "l40s": (362e12, 44, 0.86e12),
         "l4": (121e12, 22, 0.3e12)}
LINKS = {"zone": NetworkLink(2e-5, 12.5e9), "region": NetworkLink(6e-4, 2e9), "world": NetworkLink(0.06, 0.3e9)}


def small(seed: int, devices: int = 6) -> Problem:
    """A problem of up to so many devices and three model tasks; the same for the same seed."""
    random = np.random.default_rng(seed)
    machines = _machines(random, int(random.integers(2, devices + 1)))
    device_groups = tuple(_device_group(random, index, count) for index, count in enumerate(machines))
    far = [[LINKS["zone" if one.zone == other.zone else str(random.choice(["region", "world"]))]
            for other in device_groups] for one in device_groups]
    numbers = range(len(device_groups))
    between = tuple(tuple(far[min(i, j)][max(i, j)] for j in numbers) for i in numbers)
    tasks = tuple(_task(random, kind, role) for kind, role in
                  ((GENERATE, "actor"), (INFER, str(random.choice(["actor", "reference"]))), (TRAIN, "actor")))
    edges = tuple(Edge(one, other, float(random.integers(0, 2) * random.integers(1, 2**31)))
                  for one, other in ((0, 1), (1, 2), (0, 2)) if (one, other) == (0, 1) or random.random() < 0.7)
    syncs = tuple(Edge(2, index, 2.0 * tasks[2].parameters) for index in (0, 1) if tasks[index].role == "actor")
    return Problem(Hardware(device_groups, between), tasks, edges, syncs, SYNC if random.random() < 0.5 else ASYNC)


def _machines(random: np.random.Generator, devices: int) -> list[int]:
    found: list[int] = []
    while sum(found) < devices:
        found.append(int(random.integers(1, min(4, devices - sum(found)) + 1)))
    return found


def _device_group(random: np.random.Generator, index: int, count: int) -> DeviceGroup:
    kind = str(random.choice(sorted(KINDS)))
    peak, memory, bandwidth = KINDS[kind]
    return DeviceGroup(f"m{index}", kind, str(random.choice(["a", "b"])), 1, count, peak, memory * 2**30, bandwidth,
                       25e9,
                       NetworkLink(3e-6, float(random.choice([32e9, 300e9]))))


def _task(random: np.random.Generator, kind: str, role: str) -> ModelTask:
    layers, hidden = int(random.integers(4, 13)), int(random.choice([1024, 2048, 4096]))
    parameters = 12 * layers * hidden**2
    return ModelTask(f"{role} {kind}", role, kind, parameters, layers, hidden, 4 * hidden // 4,
                     int(random.integers(4, 65)),
                     int(random.integers(16, 1025)), int(random.integers(16, 2049)), outputs=32000, heads=8,
                     micro_tokens=4096, epochs=int(random.integers(1, 3)), recompute=bool(random.integers(0, 2)))


def brute_force(problem: Problem) -> float:
    """The seconds of the best placement: every grouping, every set of devices for each group, every layout."""
    costs = CostModel(problem)
    devices = [device_group for device_group, count in enumerate(problem.hardware.all) for _ in range(count)]
    best = cache(lambda task, subset, turns: _best(costs, task, subset, turns))
    found = math.inf
    for group_of in ([0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 1, 2]):
        for owners in product(range(-1, max(group_of) + 1), repeat=len(devices)):
            subsets = [tuple(device_group for device_group, owner in zip(devices, owners) if owner == group)
                       for group in range(max(group_of) + 1)]
            if all(subsets):
                items = [{problem.tasks[task].memory_item for task in range(3) if group_of[task] == group}
                         for group in range(len(subsets))]
                durations = [best(task, subsets[group], len(items[group]) > 1) for task, group in enumerate(group_of)]
                if math.inf not in durations:
                    found = min(found, _iteration(problem, costs, group_of, subsets, durations))
    return found


def _best(costs: CostModel, task: int, devices: tuple[int, ...], turns: bool) -> float:
    """The fastest layout on any part of these devices."""
    parts = {tuple(device_group for device_group, used in zip(devices, chosen) if used)
             for chosen in product((0, 1), repeat=len(devices))}
    return min((_exactly(costs, task, part, turns) for part in parts if part), default=math.inf)


def _exactly(costs: CostModel, task: int, devices: tuple[int, ...], turns: bool) -> float:
    item, found = costs.problem.tasks[task], math.inf
    machines = [costs.problem.hardware.device_groups[device_group].each for device_group in devices]
    for tp in slices_of(item, machines):
        for pp in range(1, min(item.layers, len(devices)) + 1):
            if len(devices) % (tp * pp):
                continue
            dp = len(devices) // tp // pp
            for strategy, arrangement in product(strategies(item, dp, tp, pp), _arrangements(devices, dp, tp, pp)):
                layout = costs.layout(task, strategy, arrangement)
                found = min(found, layout.takes(turns) if layout else math.inf)
    return found


def _arrangements(devices: tuple[int, ...], dp: int, tp: int, pp: int) -> set[tuple[Replicas, ...]]:
    """Every order of the devices, dealt to share after share, stage after stage, slice after slice."""
    found = set()
    for order in set(permutations(devices)):
        blocks = [order[first: first + tp] for first in range(0, len(order), tp)]
        if all(len(set(block)) == 1 for block in blocks):
            shares = sorted(tuple(block[0] for block in blocks[share * pp: share * pp + pp]) for share in range(dp))
            found.add(tuple(Replicas(share, shares.count(share)) for share in dict.fromkeys(shares)))
    return found


def _iteration(problem: Problem, costs: CostModel, group_of: list[int], subsets: list[tuple[int, ...]],
               durations: list[float]) -> float:
    """The objective, written down a second time."""
    def transfer(edge: Edge) -> float:
        ends = [frozenset(subsets[group_of[task]]) for task in (edge.source, edge.target)]
        return costs.network.reach(*ends).seconds(edge.nbytes) if edge.nbytes else 0.0

    def follow(edge: Edge) -> float:
        one, other = (problem.tasks[task].memory_item for task in (edge.source, edge.target))
        return 0.0 if one == other and group_of[edge.source] == group_of[edge.target] else transfer(edge)

    if problem.mode == ASYNC:
        return max(sum(durations[task] for task in range(3) if group_of[task] == group)
                   + sum(transfer(edge) for edge in problem.edges if group_of[edge.target] == group)
                   + sum(follow(edge) for edge in problem.syncs if group_of[edge.target] == group)
                   for group in range(len(subsets)))
    ends: list[float] = []
    for task in range(3):
        before = [ends[other] for other in range(task) if group_of[other] == group_of[task]]
        came = [ends[edge.source] + transfer(edge) for edge in problem.edges if edge.target == task]
        ends.append(max([0.0, *before, *came]) + durations[task])
    return max([*ends, *(ends[edge.source] + follow(edge) for edge in problem.syncs)])
