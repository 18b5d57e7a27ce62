"""Small random problems, and their solution by going through everything.

The brute force shares nothing with the planner but the cost of one layout: it has its own layouts, groupings, links and
objective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from planners.heterogeneous.cost import CostModel
from planners.heterogeneous.problem import (
    GENERATE,
    INFER,
    TRAIN,
    DeviceGroup,
    Edge,
    Hardware,
    ModelTask,
    NetworkLink,
    Problem,
    Replicas,
    Strategy,
)

KINDS = {"b200": (2250e12, 180, 8.0e12), "h200": (989e12, 131, 4.8e12), "h100": (989e12, 76, 3.35e12),
         "a100": (312e12, 74, 2.0e12), "l40s": (362e12, 44, 0.86e12), "l4": (121e12, 22, 0.3e12),
         "v100": (125e12, 30, 0.9e12)}
"""Peak, GiB and bytes a second; `v100` stands for what is old."""
CHAIN = ((GENERATE, "actor"), (INFER, "reference"), (TRAIN, "actor"))
GRAPHS = {  # tasks, and who reads whom
    "chain": (CHAIN, ((0, 1), (1, 2), (0, 2))),
    "own": (((GENERATE, "actor"), (INFER, "actor"), (TRAIN, "actor")), ((0, 1), (0, 2))),
    "pair": (((GENERATE, "actor"), (TRAIN, "actor")), ((0, 1),)),
    "diamond": (((GENERATE, "actor"), (INFER, "reference"), (INFER, "reward"), (TRAIN, "actor")),
                ((0, 1), (0, 2), (1, 3), (2, 3))),
    "two trained": (((GENERATE, "actor"), (INFER, "critic"), (TRAIN, "critic"), (TRAIN, "actor")),
                    ((0, 1), (1, 2), (1, 3), (0, 3))),
}
MOST = {2: 6, 3: 6, 4: 5}  # devices by tasks, so that everything can be gone through


def random_problem(seed: int, devices: int | None = None) -> Problem:
    """Return a problem of up to so many devices and four model tasks; the same for the same seed. Among them are odd
    counts, links without latency, asymmetric and very slow ones, one device that dominates, memory that just fits, and
    up to seven kinds of devices."""
    random = np.random.default_rng(seed)
    works, edges = GRAPHS[str(random.choice(sorted(GRAPHS)))]
    hardware = _hardware(random, int(random.integers(1, (devices or MOST[len(works)]) + 1, 2).max()))
    sizes = {role: (int(random.integers(3, 13)), int(random.choice([768, 1024, 2048, 4096]))) for _, role in works}
    rows, micro = int(random.integers(1, 48)), int(random.choice([512, 4096, 16384]))
    tasks = tuple(_task(random, kind, role, sizes[role], rows, micro) for kind, role in works)
    syncs = tuple(Edge(source, target, 2.0 * tasks[source].parameters) for source, (kind, role) in enumerate(works)
                  for target, (other, same) in enumerate(works) if kind == TRAIN and other != TRAIN and role == same)
    sent = tuple(Edge(*edge, float(random.choice([0, 2**16, 2**24, 2**31]))) for edge in edges)
    problem = Problem(hardware, tasks, sent, syncs, random.random() >= 0.5)
    return _just_fitting(random, problem) if random.random() < 0.3 else problem


def _hardware(random: np.random.Generator, devices: int) -> Hardware:
    machines: list[int] = []
    while sum(machines) < devices:
        machines.append(min(int(random.choice([1, 1, 2, 3, 5])), devices - sum(machines)))
    groups = [_device_group(random, index, count) for index, count in enumerate(machines)]
    if random.random() < 0.2:
        strong = groups[0]
        groups[0] = replace(strong, kind="dominating", peak=20 * strong.peak, bandwidth=20 * strong.bandwidth)
    between = [[_link(random) for _ in groups] for _ in groups]
    if random.random() < 0.6:  # the same both ways
        between = [[between[min(i, j)][max(i, j)] for j in range(len(groups))] for i in range(len(groups))]
    return Hardware(tuple(groups), tuple(map(tuple, between)))


def _link(random: np.random.Generator) -> NetworkLink:
    return NetworkLink(float(random.choice([0.0, 2e-5, 6e-4, 0.15])), float(random.choice([1e7, 3e8, 2e9, 50e9])))


def _device_group(random: np.random.Generator, index: int, count: int) -> DeviceGroup:
    kind = str(random.choice(sorted(KINDS)))
    peak, memory, bandwidth = KINDS[kind]
    inside = NetworkLink(float(random.choice([0.0, 3e-6, 3e-5])), float(random.choice([0.3e9, 32e9, 300e9])))
    return DeviceGroup(f"m{index}", kind, "zone", 1, count, peak, memory * 2**30, bandwidth,
                       float(random.choice([5e9, 25e9, 200e9])), inside)


def _task(random: np.random.Generator, kind: str, role: str, size: tuple[int, int], rows: int, micro: int) -> ModelTask:
    layers, hidden = size
    return ModelTask(f"{role} {kind}", role, kind, 12 * layers * hidden**2, layers, hidden, hidden, hidden, rows,
                     int(random.integers(16, 1025)), int(random.integers(16, 2049)), outputs=32000, heads=8,
                     micro_tokens=micro, epochs=int(random.integers(1, 3)), recompute=bool(random.integers(0, 2)),
                     activations=64 * hidden)


def _just_fitting(random: np.random.Generator, problem: Problem) -> Problem:
    """Return the problem with all memories scaled so that together they hold the largest trained state a little more
    than once."""
    state = max(20 * task.parameters for task in problem.tasks)
    room = sum(group.memory * group.devices for group in problem.hardware.device_groups)
    factor = float(random.uniform(1.0, 2.5)) * state / room
    groups = tuple(replace(group, memory=group.memory * factor) for group in problem.hardware.device_groups)
    return replace(problem, hardware=replace(problem.hardware, device_groups=groups))


Used = tuple[int, ...]  # devices of each machine


def brute_force(problem: Problem) -> float:
    """Return the seconds of the best placement: every grouping, devices and layout of each task."""
    costs = CostModel(problem)
    options = [_options(costs, number) for number in range(len(problem.tasks))]
    return min((_best(problem, group_of, options) for group_of in _groupings(problem)), default=math.inf)


def _groupings(problem: Problem) -> Iterator[list[int]]:
    """Yield the group of each task; a role is trained in one group."""
    count = len(problem.tasks)
    for group_of in product(range(count), repeat=count):
        first = all(group <= max(group_of[:task], default=-1) + 1 for task, group in enumerate(group_of))
        trained = {(task.role, group) for task, group in zip(problem.tasks, group_of) if task.kind == TRAIN}
        if first and len(dict(trained)) == len(trained):
            yield list(group_of)


def _options(costs: CostModel, number: int) -> tuple[list[Used], np.ndarray]:
    """Return the devices that a task may use, and its seconds there, alone and with swaps; without those that are no
    faster than others with fewer devices of the same machines."""
    machines = [group.each for group in costs.problem.hardware.device_groups]
    found: dict[Used, tuple[float, float]] = {}
    for used in product(*(range(count + 1) for count in machines)):
        layouts = [layout for strategy, arrangement in _splits(costs, number, used)
                   if (layout := costs.layout(number, strategy, arrangement))]
        if layouts:
            mine = (min(layout.seconds for layout in layouts), min(layout.seconds + layout.swap for layout in layouts))
            if not any(all(map(int.__le__, less, used)) and [*map(bool, less)] == [*map(bool, used)]
                       and seconds[0] <= mine[0] and seconds[1] <= mine[1] for less, seconds in found.items()):
                found[used] = mine
    return list(found), np.array(list(found.values())).reshape(-1, 2)


def _splits(costs: CostModel, number: int, used: Used) -> Iterator[tuple[Strategy, tuple[Replicas, ...]]]:
    """Yield every strategy on exactly these devices, in every arrangement."""
    task = costs.problem.tasks[number]
    sizes = [group.each for group, count in zip(costs.problem.hardware.device_groups, used) if count]
    for tp, pp in product((1, 2, 4, 8), range(1, task.layers + 1)):
        dp, rest = divmod(sum(used), tp * pp)
        if not sizes or rest or tp > min(sizes) or task.heads % tp or any(count % tp for count in used) \
                or not 1 <= dp <= task.rows:
            continue
        for shares in _dealt(tuple(count // tp for count in used), pp):
            kinds = tuple(Replicas(stages, shares.count(stages)) for stages in sorted(set(shares)))
            for micro in _micro_batches(task, dp):
                yield Strategy(dp, tp, pp, 1, micro), kinds


def _micro_batches(task: ModelTask, dp: int) -> set[int]:
    tokens = task.prompt if task.kind == GENERATE else task.prompt + task.response
    most = min(max(1, task.micro_tokens // tokens), task.rows)
    return {most, min(most, math.ceil(task.rows / dp))} | {size for size in (1, 2, 4, 8, 16, 32) if size <= most}


@cache
def _dealt(blocks: Used, pp: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the stages of every share: all ways to deal all blocks, whatever the order of the shares."""
    if not any(blocks):
        return [()]
    found = set()
    for stages in product(range(len(blocks)), repeat=pp):
        left = tuple(count - stages.count(machine) for machine, count in enumerate(blocks))
        if min(left) >= 0:
            found |= {tuple(sorted((stages, *rest))) for rest in _dealt(left, pp)}
    return sorted(found)


def _best(problem: Problem, group_of: list[int], options: list[tuple[list[Used], np.ndarray]]) -> float:
    """Return the best choice of an option for each task, all choices at once in arrays."""
    sizes = [len(used) for used, _ in options]
    if 0 in sizes:
        return math.inf
    chosen = np.unravel_index(np.arange(math.prod(sizes)), sizes)
    free = np.array([group.devices for group in problem.hardware.device_groups])
    taken = [np.max([np.array(options[task][0])[chosen[task]] for task in range(len(sizes)) if group_of[task] == group],
                    axis=0) for group in set(group_of)]
    possible = np.nonzero((np.sum(taken, axis=0) <= free).all(axis=1))[0]
    if not len(possible):
        return math.inf
    chosen = [index[possible] for index in chosen]
    items = [{_engine(problem, task) for task in range(len(sizes)) if group_of[task] == group} for group in group_of]
    seconds = [options[task][1][chosen[task], int(len(items[task]) > 1)] for task in range(len(sizes))]

    def sent(edge: Edge, weights: bool) -> np.ndarray:
        own = weights and group_of[edge.source] == group_of[edge.target] \
            and _engine(problem, edge.source) == _engine(problem, edge.target)
        table = np.array([[_transfer(problem, edge, weights, own, one, other) for other in options[edge.target][0]]
                          for one in options[edge.source][0]])
        return table[chosen[edge.source], chosen[edge.target]]

    return float(_iteration(problem, group_of, seconds, [sent(edge, False) for edge in problem.edges],
                            [sent(edge, True) for edge in problem.syncs]).min())


def _engine(problem: Problem, task: int) -> tuple[str, bool]:
    return problem.tasks[task].role, problem.tasks[task].kind == GENERATE


def _iteration(problem: Problem, group_of: list[int], seconds: list[np.ndarray], sent: list[np.ndarray],
               synced: list[np.ndarray]) -> np.ndarray:
    """Return the objective, from the layouts."""
    tasks = range(len(seconds))
    if problem.has_samplers:
        return np.max([sum(seconds[task] for task in tasks if group_of[task] == group)
                       + sum(each for edge, each in zip(problem.edges, sent) if group_of[edge.target] == group)
                       + sum(each for edge, each in zip(problem.syncs, synced) if group_of[edge.target] == group)
                       for group in set(group_of)], axis=0)
    ends: list[np.ndarray] = []
    for task in tasks:
        waits = [ends[other] for other in range(task) if group_of[other] == group_of[task]]
        waits += [ends[edge.source] + each for edge, each in zip(problem.edges, sent) if edge.target == task]
        ends.append(np.max([np.zeros_like(seconds[task]), *waits], axis=0) + seconds[task])
    return np.max([*ends, *(ends[edge.source] + each for edge, each in zip(problem.syncs, synced))], axis=0)


def _transfer(problem: Problem, edge: Edge, weights: bool, own: bool, source: Used, target: Used) -> float:
    """Return the seconds from the machines that one layout uses to those of another. Of weights each machine of the
    source has a part that all others need; rows stay where they are if they can."""
    here, there = ([machine for machine, count in enumerate(used) if count] for used in (source, target))
    if not edge.nbytes or (own and here == there):
        return 0.0
    leave = [[machine] for machine in here if weights or machine not in there]
    latency, bandwidth = 0.0, math.inf
    for begin in leave if weights else [here, *leave]:
        latencies, bandwidths = zip(*_hops(problem.hardware, begin, there))
        latency, bandwidth = max(latency, *latencies), min(bandwidth, *bandwidths)
    return latency + edge.nbytes / bandwidth


def _hops(hardware: Hardware, begin: list[int], there: list[int]) -> list[tuple[float, float]]:
    """Latency and bandwidth of all links used: inside each machine there, and the widest one to each next machine."""
    found = [tuple(hardware.device_groups[machine].inside) for machine in there]
    reached, missing = list(begin), [machine for machine in there if machine not in begin]
    while missing:
        links = sorted((-hardware.between[near][far].bandwidth, hardware.between[near][far].latency, far)
                       for near in reached for far in missing)
        bandwidth, latency, far = links[0]
        found.append((latency, -bandwidth))
        reached.append(far)
        missing.remove(far)
    return found
