"""Turns a placement on mixed hardware into a run: its shares become the rows of `layouts`, its groups `first` there
and `groups`.

Solvers may choose more than ranks can do: ranks run one chain together, in which roles may have ranks of their own; or
they train on the first of them, where trained roles may have ranks of their own, perhaps with frozen ones beside them,
sample on the next, which may compute frozen roles too, and on the others infer with frozen roles. A task's shares
follow each other. Machines that a plan leaves out have no ranks; of the others those that train come first, then those
that sample, else the order is that of the cluster file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any

from distflow.config.run import Parallel, RoleRun, Run
from distflow.config.spec import Spec
from distflow.errors import Diagnostic, InvalidInput
from distflow.plan import ROLLOUT, SHARES_OUTERMOST, STAGES_OUTERMOST, Layout, RankOrder
from planners.heterogeneous.placed_plan import PlacedPlan, PlacedTask
from planners.heterogeneous.problem import GENERATE, INFER, TRAIN, ModelTask, Problem
from planners.heterogeneous.workload import problem_of


def planned_run(spec: Spec, plan: PlacedPlan) -> Spec:
    """Return the run with a placement's layouts, groups and number of ranks. Raises InvalidInput if ranks cannot run
    that."""
    problem = problem_of(spec)
    mistakes = list(_check(spec, problem, plan))
    if mistakes:
        raise InvalidInput(mistakes)
    assignment = RankAssignment(problem, plan)
    mode = "sync" if assignment.together else spec.run.mode
    run = spec.run.model_copy(update={"layouts": _layouts(spec, assignment), "ranks": len(plan.ranks), "mode": mode,
                                      "groups": spec.run.groups.model_copy(update=_groups(assignment)),
                                      "roles": spec.run.roles | _micro_batches(spec, assignment)})
    return replace(spec, run=run)


def machines_in_order(problem: Problem, plan: PlacedPlan) -> str:
    """Return the machines that a plan uses, in the order of their ranks, as  3 ampere, 1 ada."""
    assignment = RankAssignment(problem, plan)
    used = dict.fromkeys(assignment.machine_of[device] for device in assignment.devices)
    return ", ".join(f"{len(list(same))} {name}" for name, same in groupby(name for name, _ in used))


@dataclass(frozen=True)
class _Group:
    """Group of a plan: its devices, its tasks, and the tasks of other groups."""

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
    """Ranks of a plan: `groups` in the order of their ranks, and the ranks of each task's group."""

    def __init__(self, problem: Problem, plan: PlacedPlan):
        self.problem, self.plan = problem, plan
        groups = [_Group(group.ranks, [task for task in problem.tasks if task.name in group.tasks],
                         [task for task in problem.tasks if task.name not in group.tasks]) for group in plan.groups]
        self.groups = sorted(groups, key=lambda group: (group.order, problem.tasks.index(group.tasks[0])))
        self.group_of = {task.name: group for group in groups for task in group.tasks}
        self.ranks: dict[str, range] = {}
        first = 0
        for group in self.groups:
            self.ranks |= {task.name: range(first, first + len(group.devices)) for task in group.tasks}
            first += len(group.devices)
        self.machines = [(device_group.name, own[first:first + device_group.each])
                         for device_group, own in zip(problem.hardware.device_groups, problem.hardware.ranks)
                         for first in range(0, len(own), device_group.each)]
        """Name of each machine's kind, and the numbers of its devices, in the order of the cluster file."""
        self.machine_of = {device: (name, number) for number, (name, devices) in enumerate(self.machines)
                           for device in devices}

    @property
    def together(self) -> bool:
        """Whether the first ranks sample what they train on, or nothing samples."""
        return _are_together(self.groups)

    def in_chain(self, task: ModelTask) -> bool:
        """Return whether the ranks that train compute a task."""
        return self.together or self.group_of[task.name].order < 2

    @cached_property
    def devices(self) -> list[int]:
        """Numbers of the cluster file's devices, by rank: those that the plan names, or if they tear a machine others
        of the same kinds. Devices of a machine that two groups share are the last of one and the first of the other."""
        named = [group.devices for group in self.groups]
        dealt: list[list[int]] = [[] for _ in named]
        for own in self.problem.hardware.ranks:
            free = iter(sorted(device for device in self.plan.ranks if device in own))
            for devices, group in zip(dealt, named):
                devices += islice(free, sum(device in own for device in group))
        orders = [self._side_by_side(groups) for groups in (named, dealt)]
        return next((order for order in orders if not [*self._torn(order)]), orders[0])

    @property
    def torn(self) -> Iterator[tuple[str, list[int]]]:
        """The machines whose ranks would not follow each other, and these ranks."""
        return self._torn(self.devices)

    def rows(self, task: ModelTask, ranks: Sequence[int]) -> tuple[list[int], RankOrder] | None:
        """Return the rows of each share of `ranks`, 0 for an idle one, and the order of the ranks of shares and stages;
        None if the plan's stages are elsewhere."""
        placed = self.plan.tasks[task.name]
        shares = len(ranks) // (placed.tp * placed.pp)
        for order in (SHARES_OUTERMOST, STAGES_OUTERMOST):
            layout = Layout(shares, ranks[0], tp=placed.tp, pp=placed.pp, order=order)
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

    def _torn(self, order: list[int]) -> Iterator[tuple[str, list[int]]]:
        rank_of = {device: rank for rank, device in enumerate(order)}
        for machine, devices in self.machines:
            at = sorted(rank_of[device] for device in devices if device in rank_of)
            if at and at[-1] - at[0] >= len(at):
                yield machine, at

    def _rows_in(self, task: ModelTask, layout: Layout) -> list[int] | None:
        members: list[list[tuple[str, int]]] = [[] for _ in range(layout.dp)]  # machines of each share's ranks
        for rank in range(layout.first, layout.last + 1):
            if (share := layout.share(rank)) is not None:
                members[share].append(self.machine_of[self.devices[rank]])
        left = [(shares.stages, shares.rows, shares.count) for shares in self.plan.tasks[task.name].shares]
        result = []
        for own in members:
            machines = own[:: layout.tp]
            alike = own == [machine for machine in machines for _ in range(layout.tp)]
            stages = [name for name, _ in machines]
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


def _check(spec: Spec, problem: Problem, plan: PlacedPlan) -> Iterator[Diagnostic]:
    names = [task.name for task in problem.tasks]
    if sorted(plan.tasks) != sorted(names) or sorted(name for group in plan.groups for name in group.tasks) \
            != sorted(names):
        yield Diagnostic(f"the plan's tasks are not the nodes that run models: {', '.join(names)}, each in one group")
        return
    assignment = RankAssignment(problem, plan)
    found = list(_check_groups(assignment, spec.run))
    yield from found
    for task in problem.tasks if not found else ():
        yield from _check_task(assignment, task)


def _check_groups(assignment: RankAssignment, run: Run) -> Iterator[Diagnostic]:
    plan = assignment.plan
    for machine, devices in assignment.machines:
        part = sum(device in devices for device in plan.ranks)
        if 0 < part < len(devices):
            yield Diagnostic(f"the plan uses {part} of the {len(devices)} devices of a machine `{machine}`, and all of "
                             "a machine take part or none")
    if len(plan.groups) == 1:
        return
    if not _are_of_a_run(assignment.groups, run):
        sampling = " + ".join(sorted(task.name for task in assignment.problem.tasks if task.kind == GENERATE))
        whole = "has all tasks of one trained role, of frozen roles, or of both"
        can = f"one {'samples and ' if sampling else ''}trains, and each of the others {whole}"
        if run.has_samplers and sampling:
            more = "" if run.trainer_samples else ", perhaps with all tasks of frozen roles"
            can = f"one trains, {sampling} samples{more}, and each of the others {whole}; or {can}"
        yield Diagnostic(f"the plan's groups are {', '.join(' + '.join(group.tasks) for group in plan.groups)}, and in "
                         f"this mode {can}")
        return
    for machine, at in assignment.torn:
        yield Diagnostic(f"the first ranks train and the next sample, so that those of a machine `{machine}` would be "
                         f"{_listed(at)}, and ranks of a machine follow each other")


def _check_task(assignment: RankAssignment, task: ModelTask) -> Iterator[Diagnostic]:
    placed = assignment.plan.tasks[task.name]
    width, ranks, group = placed.tp * placed.pp, assignment.ranks[task.name], assignment.group_of[task.name]
    apart = not assignment.in_chain(task)
    beside = apart and task.kind == INFER and group.samples
    if beside and width > 1:
        yield Diagnostic(f"node `{task.name}` splits its model over {width} ranks, and each rank that samples has its "
                         "whole model")
        return
    if apart and task.kind == GENERATE and placed.pp > 1:
        yield Diagnostic(f"node `{task.name}` has its layers in {placed.pp} stages, and in this mode each rank that "
                         "samples has all of them")
        return
    if apart and width == 1 and (task.kind != INFER or beside):
        return  # the others take prompts as they get free, whatever shares were expected
    if len(ranks) % width:
        yield Diagnostic(f"node `{task.name}` takes {placed.dp} × {width} of {len(ranks)} ranks, which {width} does "
                         "not divide")
    elif assignment.rows(task, ranks) is None:
        yield Diagnostic(f"node `{task.name}` has shares whose stages are not at ranks that follow each other")


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
        placed, group = assignment.plan.tasks[task.name], assignment.group_of[task.name]
        ranks = assignment.ranks[task.name]
        rows, order = assignment.rows(task, ranks) or ([], SHARES_OUTERMOST)
        if assignment.in_chain(task):
            layouts[task.name] = Parallel(tp=placed.tp, pp=placed.pp, ep=placed.ep, rows=rows, order=order,
                                          layers=_unequal(placed), first=ranks.start)
        elif placed.tp * placed.pp > 1:  # they divide no rows
            layouts[task.name] = Parallel(tp=placed.tp, pp=placed.pp, layers=_unequal(placed))
        elif task.kind == INFER and not group.samples:
            layouts[task.name] = Parallel(dp=len(ranks), rows=rows if len(rows) > 1 else [])
    if assignment.together:
        first = {name: layout for name, layout in layouts.items() if assignment.ranks[name].start == 0}
        layouts = _beside(spec, first) | layouts
    return layouts


def _unequal(placed: PlacedTask) -> list[int]:
    return placed.layers if len({*placed.layers}) > 1 else []


def _micro_batches(spec: Spec, assignment: RankAssignment) -> dict[str, RoleRun]:
    """Return the settings of the roles whose micro-batches are smaller by the plan than their settings let them be."""
    found = {}
    for task in assignment.problem.tasks:
        settings, placed = spec.run.roles.get(task.role), assignment.plan.tasks[task.name]
        tokens = placed.micro_rows * task.tokens
        if settings and task.kind == TRAIN and tokens <= settings.micro_batch_tokens - task.tokens \
                and placed.micro_rows < max(shares.rows for shares in placed.shares):
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


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
