"""Answers the next questions about a placement: alternatives, weights that are sent, memory, price, a lost machine.

What a lost machine costs follows how elastic runs recover: after `machine_silence` seconds ranks
that train start again, with all ranks of mode sync, and rollouts alone. The state after the last step is in the memory
of a second machine, so that half a step is lost on the mean; without such a copy it is that of the last
checkpoint, and half of the steps between two are lost. The state of the lost ranks is counted as brought over the
slowest link. How long processes take to start is not in the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from distflow.config.cluster import Cluster
from distflow.config.spec import Spec
from distflow.errors import InvalidInput, did_you_mean
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.plan_file import ranks_of
from planners.heterogeneous.problem import GENERATE, SYNC, TRAIN, Freedom, Placement, groups_of
from planners.heterogeneous.search import search

_BUDGET = 500
"""Layouts and placements that the search for an alternative looks at."""
_LLAMA_DEVICES = 8
MACHINE_HOURS = 54 * 24 * (16384 // _LLAMA_DEVICES) / 419
"""Hours between interruptions of one machine of eight GPUs: 54 days · 24 hours · 2,048 machines / 419 unexpected
interruptions = 6,335, of Llama 3's pre-training on 16,384 H100 (Llama Team 2024, The Llama 3 Herd of Models, §3.3.4).
"""


def alternatives(costed: CostedProblem, placement: Placement) -> Iterator[tuple[str, float]]:
    """Yield simple alternatives and their seconds; infinite where one fits no memory."""
    problem, tasks = costed.problem, range(len(costed.problem.tasks))
    together = costed.placement((tuple(tasks),), (problem.hardware.all,))
    yield "all tasks in one group", together.seconds if together else math.inf
    if len(tasks) > 1:
        apart = replace(problem, freedom=replace(problem.freedom, groupings=(tuple((task,) for task in tasks),)))
        found = [progress.placement for progress in search(apart, budget=_BUDGET) if progress.placement]
        yield "each task in a group of its own", found[-1].seconds if found else math.inf
    even = CostedProblem(replace(problem, freedom=Freedom(balance=False)))
    equal = even.placed(placement.grouping, placement.subsets, (
        even.costs.layout(number, layout.strategy, layout.arrangement)
        for number, layout in enumerate(placement.layouts)))
    yield "this placement with equal shares", equal.seconds if equal else math.inf


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


def price_of_samples(costed: CostedProblem, cluster: Cluster, seconds: float) -> float | None:
    """Return the price of a thousand samples on all machines of the cluster; None if one has no price."""
    prices = [(machine.count, machine.price_per_hour) for machine in cluster.machines.values()]
    rows = sum(task.rows for task in costed.problem.tasks if task.kind == GENERATE) or \
        max(task.rows for task in costed.problem.tasks)
    if any(price is None for _, price in prices):
        return None
    return sum(count * (price or 0.0) for count, price in prices) / 3600 * seconds / rows * 1000


@dataclass(frozen=True)
class MachineLoss:
    """What restarts when a machine is lost, and the seconds that this costs: of `work` that is done again (infinite:
    there is nothing to go on from), of `detecting` the loss, and of `fetching` the state. What stops rollouts alone
    counts by their part of all that sample."""

    machine: str
    devices: int
    restarts: str
    work: float
    detecting: float
    fetching: float

    @property
    def seconds(self) -> float:
        return self.work + self.detecting + self.fetching


def machines_of(cluster: Cluster) -> list[tuple[str, range]]:
    """Return the machines in the cluster file's order, as `NAME:2`, and their ranks."""
    found, first = [], 0
    for name, machine in cluster.machines.items():
        for number in range(1, machine.count + 1):
            found.append((f"{name}:{number}", range(first, first + machine.devices)))
            first += machine.devices
    return found


def chosen_machine(cluster: Cluster, text: str) -> int:
    """Return the index of a machine: `NAME:2` is the second one of a name, `machine:2` of all. Raises InvalidInput."""
    machines = [name for name, _ in machines_of(cluster)]
    name, _, number = text.partition(":")
    if name == "machine" and name not in cluster.machines and number.isdigit() and 0 < int(number) <= len(machines):
        return int(number) - 1
    if text in machines:
        return machines.index(text)
    raise InvalidInput(f"--lose {text}: cluster `{cluster.name}` has no such machine. "
                       f"{did_you_mean(text, machines[:20], 'Machines')} Or count all:  --lose machine:{len(machines)}")


def steps_again(spec: Spec) -> float:
    """Return how many steps are trained again on the mean when a machine that trains is lost; infinite if its state is
    nowhere else."""
    robust, every = spec.run.robust, spec.run.checkpoint.every
    if robust.replicates and len(machines_of(spec.cluster)) > 1:
        return 0.5
    return every / 2 if every else math.inf


def loss_of(costed: CostedProblem, placement: Placement, spec: Spec, index: int,
            ranks: list[list[int]] | None = None) -> MachineLoss:
    """Return what the loss of a machine costs. `ranks`: of each group; default: those that a plan file gives them."""
    problem, (name, lost) = costed.problem, machines_of(spec.cluster)[index]
    restarts, steps, part, fetching = [], 0.0, 0.0, 0.0
    for group, own in zip(placement.grouping, ranks or ranks_of(problem, placement.subsets)):
        gone = [rank for rank in own if rank in lost]
        if not gone:
            continue
        trains = problem.mode == SYNC or any(problem.tasks[task].kind == TRAIN for task in group)
        share = 1.0 if trains else len(gone) / len(own)
        part, steps = max(part, share), max(steps, steps_again(spec) if trains else share / 2)
        fetching = max(fetching, max(_fetched(costed, placement, task, len(gone) / len(own)) for task in group))
        names = ", ".join(problem.tasks[task].name for task in group)
        restarts.append(f"all {len(own)} ranks of {names}" if trains else f"{len(gone)} of {len(own)} ranks of {names}")
    if problem.mode == SYNC and restarts:
        restarts = [f"all {sum(map(sum, placement.subsets))} ranks: mode sync runs one chain"]
    return MachineLoss(name, len(lost), "; ".join(restarts) or "nothing: no rank of it is used",
                       steps * placement.seconds, part * spec.run.robust.machine_silence, fetching)


def _fetched(costed: CostedProblem, placement: Placement, number: int, part: float) -> float:
    """Return the seconds of bringing a part of a task's state to a machine: weights, of training the optimizer too."""
    task, layout = costed.problem.tasks[number], placement.layouts[number]
    nbytes = part * task.parameters * (12 if task.kind == TRAIN else task.width)
    return costed.costs.network.weights(layout.sites, layout.sites).seconds(nbytes)


def hours_of(loss: MachineLoss) -> float:
    """Return the hours between interruptions of a machine, in proportion to its devices as Llama 3's training had
    them."""
    return MACHINE_HOURS * _LLAMA_DEVICES / loss.devices


def share_of_training(losses: list[MachineLoss], hours: float | None, starting: float = 0.0) -> float:
    """Return the share of all time that is left to train if each machine is interrupted once in so many hours: without
    what interruptions cost, work that is done again included. It is not the ETTR of a run, by which the ranks of other
    groups count as effective meanwhile, and so does work that is done twice.

    Args:
        hours: between interruptions of a machine; None: by `hours_of`.
        starting: seconds until the processes of a loss run again.
    """
    lost = math.fsum((loss.seconds + starting) / (3600 * (hours or hours_of(loss))) for loss in losses if loss.seconds)
    return 1 / (1 + lost)
