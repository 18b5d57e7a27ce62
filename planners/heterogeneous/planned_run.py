"""Turns a placement on mixed hardware into a run: its shares become the rows of `layouts`, its groups `first` there
and `groups`.

Ranks run one chain together, in which roles may have ranks of their own; or they train on the first of them, where
trained roles may have ranks of their own, perhaps with frozen ones beside them, sample on the next, which may compute
frozen roles too, and on the others infer with frozen roles. A task's shares follow each other. Machines that a
placement leaves out have no ranks; of the others those that train come first, then those that sample, else the order is
that of the cluster file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any

from distflow.config.run import Parallel, RoleRun, Run
from distflow.config.spec import Spec
from distflow.plan import ROLLOUT, SHARES_OUTERMOST, STAGES_OUTERMOST, Layout, RankOrder
from planners.heterogeneous.problem import (
    GENERATE,
    INFER,
    TRAIN,
    DeviceSubset,
    ModelTask,
    Placement,
    Problem,
    TaskLayout,
)


def planned_run(spec: Spec, problem: Problem, placement: Placement) -> Spec | None:
    """Return the run with a placement's layouts, groups and number of ranks; None if ranks cannot stand so."""
    assignment = RankAssignment(problem, placement)
    if not assignment.is_of_a_run(spec.run):
        return None
    mode = "sync" if assignment.together else spec.run.mode
    run = spec.run.model_copy(update={"layouts": _layouts(spec, assignment), "ranks": len(assignment.devices),
                                      "groups": spec.run.groups.model_copy(update=_groups(assignment)),
                                      "mode": mode, "roles": spec.run.roles | _micro_batches(spec, assignment)})
    return replace(spec, run=run)


def machines_in_order(problem: Problem, placement: Placement) -> str:
    """Return the machines that a placement uses, in the order of their ranks, as  3 ampere, 1 ada."""
    assignment = RankAssignment(problem, placement)
    used = dict.fromkeys(assignment.machine_of[device] for device in assignment.devices)
    return ", ".join(f"{len(list(same))} {problem.hardware.device_groups[kind].name}"
                     for kind, same in groupby(kind for kind, _ in used))


def ranks_of(problem: Problem, subsets: Sequence[DeviceSubset]) -> list[list[int]]:
    """Return the devices of each subset, as the cluster file numbers them; of alike machines the largest subsets take
    theirs first, to stay whole."""
    found: list[list[int]] = [[] for _ in subsets]
    for device_group, ranks in enumerate(problem.hardware.ranks):
        free = ranks.start
        for index in sorted(range(len(subsets)), key=lambda index: -subsets[index][device_group]):
            found[index] += range(free, free + subsets[index][device_group])
            free += subsets[index][device_group]
    return found


@dataclass(frozen=True)
class _Group:
    """Group of a placement: its devices, its tasks, and the tasks of other groups."""

    devices: list[int]
    tasks: list[ModelTask]
    others: list[ModelTask]

    @property
    def kinds(self) -> set[str]:
        return {task.kind for task in self.tasks}

    @property
    def roles(self) -> list[str]:
        return list(dict.fromkeys(task.role for task in self.tasks))

    @property
    def frozen(self) -> list[str]:
        """Roles whose models the group only reads."""
        return list(dict.fromkeys(task.role for task in self.tasks if task.kind == INFER))

    @property
    def samples(self) -> bool:
        return GENERATE in self.kinds

    @property
    def trained(self) -> list[str]:
        return list(dict.fromkeys(task.role for task in self.tasks if task.kind == TRAIN))

    @property
    def host(self) -> str:
        """The role that its ranks are said to be for: one that trains, else the first."""
        return [*self.trained, *self.roles][0]

    @property
    def only_infers(self) -> bool:
        """Whether it has all tasks of some roles, which are only read."""
        return self._is_whole(self.roles) and self.kinds == {INFER}

    @property
    def samples_and_reads(self) -> bool:
        """Whether it samples, and has all tasks of frozen roles beside that."""
        return self.kinds == {GENERATE, INFER} and self._is_whole(self.frozen)

    @property
    def trains_one(self) -> bool:
        """Whether it has all tasks of one role that is trained and does not sample, and of any that are only read, and
        others are trained too."""
        return len(self.trained) == 1 and self._is_whole(self.roles) and not self.samples \
            and any(task.kind == TRAIN for task in self.others)

    @property
    def order(self) -> int:
        """Place among the groups: that which trains what samples, which train one role, which samples, which infer."""
        return 1 if self.trains_one else 0 if TRAIN in self.kinds else 2 if self.samples else 3

    def _is_whole(self, roles: list[str]) -> bool:
        return not any(task.role in roles for task in self.others)


class RankAssignment:
    """Ranks of a placement: `groups` in the order of their ranks, and the layout, group and ranks of each task."""

    def __init__(self, problem: Problem, placement: Placement):
        self.problem, tasks = problem, problem.tasks
        groups = [_Group(devices, [tasks[task] for task in group],
                         [task for number, task in enumerate(tasks) if number not in group])
                  for group, devices in zip(placement.grouping, ranks_of(problem, placement.subsets))]
        self.groups = sorted(groups, key=lambda group: (group.order, tasks.index(group.tasks[0])))
        self.group_of = {task.name: group for group in groups for task in group.tasks}
        self.layouts: dict[str, TaskLayout] = {task.name: each for task, each in zip(tasks, placement.layouts)}
        self.ranks: dict[str, range] = {}
        first = 0
        for group in self.groups:
            self.ranks |= {task.name: range(first, first + len(group.devices)) for task in group.tasks}
            first += len(group.devices)
        self.machines = [(kind, own[first:first + device_group.each])
                         for kind, (device_group, own) in enumerate(zip(problem.hardware.device_groups,
                                                                        problem.hardware.ranks))
                         for first in range(0, len(own), device_group.each)]
        """Device group of each machine, and the numbers of its devices, in the order of the cluster file."""
        self.machine_of = {device: (kind, number) for number, (kind, devices) in enumerate(self.machines)
                           for device in devices}

    def is_of_a_run(self, run: Run) -> bool:
        """Return whether the launcher has ranks that stand so: of whole machines, each machine's and each share's one
        after the other, in groups such as the run's mode has."""
        used = {*self.devices}
        return all(used.isdisjoint(devices) or used.issuperset(devices) for _, devices in self.machines) and (
            len(self.groups) == 1 or _are_of_a_run(self.groups, run) and not self._is_torn(self.devices)) \
            and all(map(self._has_ranks, self.problem.tasks))

    @property
    def together(self) -> bool:
        """Whether the first ranks sample what they train on, or nothing samples."""
        return _are_together(self.groups)

    def in_chain(self, task: ModelTask) -> bool:
        """Return whether the ranks that train compute a task."""
        return self.together or self.group_of[task.name].order < 2

    @cached_property
    def devices(self) -> list[int]:
        """Numbers of the cluster file's devices, by rank: those of `ranks_of`, or if they tear a machine others of the
        same kinds. Devices of a machine that two groups share are the last of one and the first of the other."""
        named = [group.devices for group in self.groups]
        dealt: list[list[int]] = [[] for _ in named]
        for own in self.problem.hardware.ranks:
            free = iter(sorted(device for devices in named for device in devices if device in own))
            for devices, group in zip(dealt, named):
                devices += islice(free, sum(device in own for device in group))
        orders = [self._side_by_side(groups) for groups in (named, dealt)]
        return next((order for order in orders if not self._is_torn(order)), orders[0])

    def rows(self, task: ModelTask, ranks: Sequence[int]) -> tuple[list[int], RankOrder] | None:
        """Return the rows of each share of `ranks`, 0 for an idle one, and the order of the ranks of shares and stages;
        None if the placement's stages are elsewhere."""
        _, tp, pp, *_ = self.layouts[task.name].strategy
        for order in (SHARES_OUTERMOST, STAGES_OUTERMOST):
            layout = Layout(len(ranks) // (tp * pp), ranks[0], tp=tp, pp=pp, order=order)
            if rows := self._rows_in(task, layout):
                return rows, order
        return None

    def _side_by_side(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Return the devices of all groups, each one's with those of shared machines at its ends."""
        machines = [{self.machine_of[device] for device in group} for group in groups]

        def end(index: int, device: int) -> int:
            at = self.machine_of[device]
            return any(at in own for own in machines[index + 1:]) - any(at in own for own in machines[:index])

        return [device for index, group in enumerate(groups)
                for device in sorted(group, key=lambda device: (end(index, device), device))]

    def _is_torn(self, order: list[int]) -> bool:
        """Return whether ranks of a machine would not follow each other."""
        rank_of = {device: rank for rank, device in enumerate(order)}
        there = [[rank_of[device] for device in devices if device in rank_of] for _, devices in self.machines]
        return any(at and max(at) - min(at) >= len(at) for at in there)

    def _has_ranks(self, task: ModelTask) -> bool:
        """Return whether the ranks of a task's group can have its shares and stages."""
        _, tp, pp, *_ = self.layouts[task.name].strategy
        ranks, apart = self.ranks[task.name], self.group_of[task.name].samples and not self.in_chain(task)
        if apart and (pp > 1 or (tp > 1 and task.kind == INFER)):
            return False  # each rank that samples has all layers, and the whole model of each frozen role
        if apart and tp == 1:
            return True  # the others take prompts as they get free, whatever shares were expected
        return len(ranks) % (tp * pp) == 0 and self.rows(task, ranks) is not None

    def _rows_in(self, task: ModelTask, layout: Layout) -> list[int] | None:
        members: list[list[tuple[int, int]]] = [[] for _ in range(layout.dp)]  # machines of each share's ranks
        for rank in range(layout.first, layout.last + 1):
            if (share := layout.share(rank)) is not None:
                members[share].append(self.machine_of[self.devices[rank]])
        placed = self.layouts[task.name]
        left = [(kind.stages, rows, kind.count) for kind, rows in zip(placed.arrangement, placed.rows)]
        result = []
        for own in members:
            machines = own[:: layout.tp]
            alike = own == [machine for machine in machines for _ in range(layout.tp)]
            stages = tuple(kind for kind, _ in machines)
            index = next((index for index, (wanted, _, count) in enumerate(left) if count and wanted == stages), None)
            if index is None or not alike:
                result.append(0)
                continue
            wanted, rows, count = left[index]
            left[index] = (wanted, rows, count - 1)
            result.append(rows)
        return result if not any(count for *_, count in left) else None


def are_groups_of_a_run(problem: Problem, grouping: Sequence[Collection[int]], run: Run) -> bool:
    """Return whether ranks can have the groups of a grouping, whatever devices and layouts these get."""
    numbers = range(len(problem.tasks))
    groups = [_Group([], [problem.tasks[task] for task in group],
                     [problem.tasks[other] for other in numbers if other not in group]) for group in grouping]
    return _are_of_a_run(sorted(groups, key=lambda group: group.order), run)


def _are_of_a_run(groups: Sequence[_Group], run: Run) -> bool:
    """Return whether these groups, in the order of their ranks, are such as a run has in its mode."""
    if len(groups) == 1:
        return True
    together, others = _are_together(groups), groups[1:]
    sampling = [group for group in others if group.samples]
    alone = run.has_samplers and not together and len(sampling) == 1 \
        and (sampling[0].kinds == {GENERATE} or (sampling[0].samples_and_reads and not run.trainer_samples))
    return (alone or together) and all(group.only_infers or group.trains_one for group in others
                                       if not (alone and group.samples))


def _are_together(groups: Sequence[_Group]) -> bool:
    return groups[0].samples or not any(group.samples for group in groups)


def _groups(assignment: RankAssignment) -> dict[str, Any]:
    """Return the settings of `groups:` that differ from the run's."""
    if assignment.together:
        return {"inference": {}}
    sampling = next(group for group in assignment.groups if group.samples)
    alone = [group for group in assignment.groups if group.only_infers]
    return {"rollout": len(sampling.devices),
            "inference": {group.host: len(group.devices) for group in alone}
            | {role: group.host for group in alone for role in group.roles if role != group.host}
            | dict.fromkeys(sampling.frozen, ROLLOUT)}


def _layouts(spec: Spec, assignment: RankAssignment) -> dict[str, Parallel]:
    layouts = {}
    for task in assignment.problem.tasks:
        placed, group = assignment.layouts[task.name], assignment.group_of[task.name]
        (_, tp, pp, ep, _), ranks = placed.strategy, assignment.ranks[task.name]
        rows, order = assignment.rows(task, ranks) or ([], SHARES_OUTERMOST)
        if assignment.in_chain(task):
            layouts[task.name] = Parallel(tp=tp, pp=pp, ep=ep, rows=rows, order=order, layers=_unequal(placed),
                                          first=ranks.start)
        elif tp * pp > 1:  # they divide no rows
            layouts[task.name] = Parallel(tp=tp, pp=pp, layers=_unequal(placed))
        elif task.kind == INFER and not group.samples:
            layouts[task.name] = Parallel(dp=len(ranks), rows=rows if len(rows) > 1 else [])
    if assignment.together:
        first = {name: layout for name, layout in layouts.items() if assignment.ranks[name].start == 0}
        layouts = _beside(spec, first) | layouts
    return layouts


def _unequal(placed: TaskLayout) -> list[int]:
    return [*placed.layers] if len({*placed.layers}) > 1 else []


def _micro_batches(spec: Spec, assignment: RankAssignment) -> dict[str, RoleRun]:
    """Return the settings of the roles whose micro-batches are placed smaller than their settings let them be."""
    found = {}
    for task in assignment.problem.tasks:
        settings, placed = spec.run.roles.get(task.role), assignment.layouts[task.name]
        tokens = placed.strategy.micro * task.tokens
        if settings and task.kind == TRAIN and tokens <= settings.micro_batch_tokens - task.tokens \
                and placed.strategy.micro < max(placed.rows):
            found[task.role] = settings.model_copy(update={"micro_batch_tokens": tokens})
    return found


def _beside(spec: Spec, layouts: dict[str, Parallel]) -> dict[str, Parallel]:
    """Return the layouts of nodes without a model: rows stay where the first node that they follow has them, divided
    among the ranks of a share that splits its model. Runs with groups divide what arrives evenly."""
    found = dict(layouts)
    while True:
        more = {name: Parallel(rows=_by_rank(before))
                for name, node in spec.dag.nodes.items() if name not in found
                for before in [next((found[each] for each in node.dependencies if each in found), None)] if before}
        if not more:
            return {name: layout for name, layout in found.items() if name not in layouts}
        found |= more


def _by_rank(split: Parallel) -> list[int]:
    """Return the rows of each rank's share."""
    layout = Layout(len(split.rows), tp=split.tp, pp=split.pp, order=split.order)
    shares = [layout.share(rank) for rank in range(layout.dp * layout.width)]
    return [int(split.rows[share]) for share in shares if share is not None]
