"""Applies a plan for mixed hardware to a run: its shares become the rows of `layouts`, its groups `groups`.

Solvers may choose more than ranks can do: ranks run one chain together; or they train on the first of them, sample on
the next, which may compute frozen roles too, and on the others infer with one frozen role each, or train one; or they
sample and train on the first of them, and have one other role each on the others. A task's shares follow each other,
each with equally many layers in each stage. Machines that a plan leaves out have no ranks; of the others those that
train come first, then those that sample, else the order is that of the cluster file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice

from distflow.config.load import Spec
from distflow.config.run import Parallel, RoleRun
from distflow.config.yaml_source import YamlSource
from distflow.errors import Diagnostic, InvalidInput
from distflow.plan import ROLLOUT, SHARES_OUTERMOST, STAGES_OUTERMOST, Layout, RankOrder
from distflow.plan_file import PlacedGroup, PlacedPlan, read_plan_file
from planners.heterogeneous.plan_file import digests_of
from planners.heterogeneous.problem import GENERATE, INFER, SYNC, TRAIN, ModelTask, Problem
from planners.heterogeneous.workload import problem_of

AGAIN = "Plan for what ranks can do:  distflow plan mixed DAG --cluster FILE --runnable --out FILE"


def apply_plan_file(spec: Spec, source: YamlSource, ranks: int) -> Spec:
    """Return the run with a plan file's layouts and groups. Raises InvalidInput if ranks cannot run that."""
    problem = problem_of(spec)
    plan = read_plan_file(source, digests_of(spec, problem))
    mistakes = list(_check(spec, problem, plan, source, ranks))
    if mistakes:
        raise InvalidInput(mistakes)
    own, first, *others = _ranks(problem, plan), *_in_order(problem, plan)
    together, layouts = _samples(problem, first), {}
    trained = [group for group in others if _trains_one(problem, group)]
    on_rollouts = [] if together else _frozen(problem, others[0])
    for task in problem.tasks:
        placed = plan.tasks[task.name]
        if own[task.name].start == 0 or any(task.name in group.tasks for group in trained):
            layouts[task.name] = _parallel(problem, plan, task, own[task.name])
        elif placed.tp * placed.pp > 1:  # they divide no rows
            layouts[task.name] = Parallel(tp=placed.tp, pp=placed.pp)
        elif task.kind == INFER and task.role not in on_rollouts:
            rows, _ = _rows(problem, plan, task, own[task.name]) or ([], "")
            layouts[task.name] = Parallel(dp=len(own[task.name]), rows=rows if len(rows) > 1 else [])
    if together:
        layouts = _beside(spec, {name: layout for name, layout in layouts.items() if own[name].start == 0}) | layouts
    ranks_of = {_tasks(problem, group)[0].role: len(group.ranks) for group in (others if together else others[1:])}
    apart = {_tasks(problem, group)[0].role for group in trained}
    groups = spec.run.groups.model_copy(update={
        "rollout": spec.run.groups.rollout if together else len(others[0].ranks),
        "inference": {role: count for role, count in ranks_of.items() if role not in apart}
        | dict.fromkeys(on_rollouts, ROLLOUT),
        "trainers": {role: count for role, count in ranks_of.items() if role in apart}})
    run = spec.run.model_copy(update={"layouts": layouts, "groups": groups, "ranks": ranks,
                                      "mode": SYNC if together else spec.run.mode,
                                      "roles": spec.run.roles | _micro_batches(spec, problem, plan)})
    return replace(spec, run=run, run_source=_overlaid(spec.run_source, source))


def _check(spec: Spec, problem: Problem, plan: PlacedPlan, source: YamlSource, ranks: int) -> Iterator[Diagnostic]:
    devices, idle = len(plan.ranks), sum(problem.hardware.all) - len(plan.ranks)
    if ranks != devices:
        those = f"{devices} of the {devices + idle} devices" if idle else f"the {devices} devices"
        yield Diagnostic(f"the plan is for {those} of cluster `{spec.cluster.name}`, and {ranks} "
                         f"rank{'s are' if ranks > 1 else ' is'} started", source.location(("groups",), key=True),
                         f"Start {devices} ranks, one for each device{' that it uses' if idle else ''}, in this order "
                         f"of machines:  {machines_in_order(problem, plan)}")
    if spec.run.layouts:
        yield Diagnostic("`layouts` says how nodes are split, and so does the plan",
                         spec.run_source.location(("layouts",), key=True),
                         "Leave it out of the run file, or start without  --plan")
    names = [task.name for task in problem.tasks]
    if sorted(plan.tasks) != sorted(names) or sorted(name for group in plan.groups for name in group.tasks) \
            != sorted(names):
        yield Diagnostic(f"the plan's tasks are not the nodes that run models: {', '.join(names)}, each in one group",
                         source.location(("tasks",), key=True), AGAIN)
        return
    found = list(_check_groups(problem, plan, source, spec.run.mode))
    yield from found
    for task in problem.tasks if not found else ():
        yield from _check_task(problem, plan, task, source)


def _check_groups(problem: Problem, plan: PlacedPlan, source: YamlSource, mode: str) -> Iterator[Diagnostic]:
    where = source.location(("groups",), key=True)
    for machine, ranks in _machines_of(problem):
        part = sum(rank in ranks for rank in plan.ranks)
        if 0 < part < len(ranks):
            yield Diagnostic(f"the plan uses {part} of the {len(ranks)} devices of a machine `{machine}`, and all of a "
                             "machine take part or none", source.location(("groups", 0, "ranks"), key=True), AGAIN)
    if len(plan.groups) == 1:
        return
    first, second, *others = _in_order(problem, plan)
    kinds, alone = {task.kind for task in _tasks(problem, second)}, not _samples(problem, first)
    beside = mode == "async" and _samples_and_reads(problem, second)
    alone = alone and mode != SYNC and (kinds == {GENERATE} or beside)
    of_one_role = others if alone else (second, *others)
    if not (alone or _samples(problem, first)) or not all(
            _only_infers(problem, group) or _trains_one(problem, group) for group in of_one_role):
        sampling = " + ".join(sorted(task.name for task in problem.tasks if task.kind == GENERATE))
        can = "one samples and trains, and each of the others has all tasks of one other role"
        if mode != SYNC:
            more = ", perhaps with all tasks of frozen roles" if mode == "async" else ""
            can = f"one trains, {sampling} samples{more}, and each of the others has all tasks of one role; or {can}"
        yield Diagnostic(f"the plan's groups are {', '.join(' + '.join(group.tasks) for group in plan.groups)}, and in "
                         f"this mode {can}", where, AGAIN)
        return
    for machine, at in _torn(problem, devices_of(problem, plan)):
        yield Diagnostic(f"the first ranks train and the next sample, so that those of a machine `{machine}` would be "
                         f"{_listed(at)}, and ranks of a machine follow each other", where, AGAIN)


def _check_task(problem: Problem, plan: PlacedPlan, task: ModelTask, source: YamlSource) -> Iterator[Diagnostic]:
    placed, path = plan.tasks[task.name], ("tasks", task.name)
    width, ranks = placed.tp * placed.pp, _ranks(problem, plan)[task.name]
    apart = ranks.start > 0 and not any(task.name in group.tasks and _trains_one(problem, group)
                                        for group in plan.groups)
    beside = apart and task.kind == INFER and any(task.name in group.tasks and _samples(problem, group)
                                                  for group in plan.groups)
    if beside and width > 1:
        yield Diagnostic(f"node `{task.name}` splits its model over {width} ranks, and each rank that samples has its "
                         "whole model", source.location(path, key=True), AGAIN)
        return
    if apart and task.kind == GENERATE and placed.pp > 1:
        yield Diagnostic(f"node `{task.name}` has its layers in {placed.pp} stages, and in this mode each rank that "
                         "samples has all of them", source.location(path, key=True), AGAIN)
        return
    if apart and width == 1 and (task.kind != INFER or beside):
        return  # the others take prompts as they get free, whatever shares were expected
    if len(set(placed.layers)) > 1:
        yield Diagnostic(f"node `{task.name}` has {', '.join(map(str, placed.layers))} layers in its stages, and an "
                         "engine has as many in each", source.location((*path, "layers"), key=True), AGAIN)
    if len(ranks) % width:
        yield Diagnostic(f"node `{task.name}` takes {placed.dp} × {width} of {len(ranks)} ranks, which {width} does "
                         "not divide", source.location(path, key=True), AGAIN)
    elif _rows(problem, plan, task, ranks) is None:
        yield Diagnostic(f"node `{task.name}` has shares whose stages are not at ranks that follow each other",
                         source.location((*path, "shares"), key=True), AGAIN)


def devices_of(problem: Problem, plan: PlacedPlan) -> list[int]:
    """Return the numbers of the cluster file's devices, by rank: those that the plan names, or if they tear a machine
    others of the same kinds. Devices of a machine that two groups share are the last of one and the first of the other.
    """
    named = [group.ranks for group in _in_order(problem, plan)]
    dealt: list[list[int]] = [[] for _ in named]
    for own in problem.hardware.ranks:
        free = iter(sorted(device for device in plan.ranks if device in own))
        for devices, group in zip(dealt, named):
            devices += islice(free, sum(device in own for device in group))
    orders = [_side_by_side(problem, groups) for groups in (named, dealt)]
    return next((order for order in orders if not [*_torn(problem, order)]), orders[0])


def _side_by_side(problem: Problem, groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the devices of all groups, each one's with those of shared machines at its ends."""
    at = {device: number for number, (_, devices) in enumerate(_machines_of(problem)) for device in devices}
    machines = [{at[device] for device in group} for group in groups]

    def end(index: int, device: int) -> int:
        earlier, later = (any(at[device] in own for own in part) for part in (machines[:index], machines[index + 1:]))
        return later - earlier

    return [device for index, group in enumerate(groups)
            for device in sorted(group, key=lambda device: (end(index, device), device))]


def _torn(problem: Problem, order: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Yield the machines whose ranks would not follow each other, and these ranks."""
    place = {device: rank for rank, device in enumerate(order)}
    for machine, devices in _machines_of(problem):
        at = sorted(place[device] for device in devices if device in place)
        if at and at[-1] - at[0] >= len(at):
            yield machine, at


def _in_order(problem: Problem, plan: PlacedPlan) -> list[PlacedGroup]:
    """Return the groups in the order of their ranks: that which trains what samples, which samples, and by their tasks
    those that infer and those that train another role."""
    def kind(group: PlacedGroup) -> int:
        kinds = {task.kind for task in _tasks(problem, group)}
        return 3 if _trains_one(problem, group) else 0 if TRAIN in kinds else 1 if GENERATE in kinds else 2

    return sorted(plan.groups, key=lambda group: (kind(group), min(
        number for number, task in enumerate(problem.tasks) if task.name in group.tasks)))


def _ranks(problem: Problem, plan: PlacedPlan) -> dict[str, range]:
    """Return the ranks of each task's group."""
    found, first = {}, 0
    for group in _in_order(problem, plan):
        found |= dict.fromkeys(group.tasks, range(first, first + len(group.ranks)))
        first += len(group.ranks)
    return found


def _tasks(problem: Problem, group: PlacedGroup) -> list[ModelTask]:
    return [task for task in problem.tasks if task.name in group.tasks]


def _only_infers(problem: Problem, group: PlacedGroup) -> bool:
    """Return whether a group has all tasks of one role, which is only read."""
    roles = {task.role for task in _tasks(problem, group)}
    return len(roles) == 1 and all(task.kind == INFER and task.name in group.tasks for task in problem.tasks
                                   if task.role in roles)


def _frozen(problem: Problem, group: PlacedGroup) -> list[str]:
    """Return the roles whose models a group only reads."""
    return list(dict.fromkeys(task.role for task in _tasks(problem, group) if task.kind == INFER))


def _samples_and_reads(problem: Problem, group: PlacedGroup) -> bool:
    """Return whether a group samples, and has all tasks of frozen roles beside that."""
    frozen, own = _frozen(problem, group), {task.kind for task in _tasks(problem, group)}
    return own == {GENERATE, INFER} and all(
        task.name in group.tasks for task in problem.tasks if task.role in frozen)


def _samples(problem: Problem, group: PlacedGroup) -> bool:
    return any(task.kind == GENERATE for task in _tasks(problem, group))


def _trains_one(problem: Problem, group: PlacedGroup) -> bool:
    """Return whether a group has all tasks of one role, which is trained and does not sample, and other roles are
    trained too."""
    of_role = [task for task in problem.tasks if task.role in {task.role for task in _tasks(problem, group)}]
    others = any(task.kind == TRAIN and task not in of_role for task in problem.tasks)
    return len({task.role for task in of_role}) == 1 and {task.name for task in of_role} == {*group.tasks} and others \
        and any(task.kind == TRAIN for task in of_role) and all(task.kind != GENERATE for task in of_role)


def _machines_of(problem: Problem) -> Iterator[tuple[str, range]]:
    """Yield each machine and the numbers of its devices, in the order of the cluster file."""
    for device_group, own in zip(problem.hardware.device_groups, problem.hardware.ranks):
        yield from ((device_group.name, own[first:first + device_group.each])
                    for first in range(0, len(own), device_group.each))


def machines_in_order(problem: Problem, plan: PlacedPlan) -> str:
    """Return the machines that a plan uses, in the order of their ranks, as  3 ampere, 1 ada."""
    at = {device: number for number, (_, devices) in enumerate(_machines_of(problem)) for device in devices}
    names = [name for name, _ in _machines_of(problem)]
    order = dict.fromkeys(at[device] for device in devices_of(problem, plan))
    return ", ".join(f"{len(list(same))} {name}" for name, same in groupby(names[number] for number in order))


def _parallel(problem: Problem, plan: PlacedPlan, task: ModelTask, ranks: Sequence[int]) -> Parallel:
    placed = plan.tasks[task.name]
    rows, order = _rows(problem, plan, task, ranks) or ([], SHARES_OUTERMOST)
    return Parallel(tp=placed.tp, pp=placed.pp, ep=placed.ep, rows=rows, order=order)


def _micro_batches(spec: Spec, problem: Problem, plan: PlacedPlan) -> dict[str, RoleRun]:
    """Return the settings of the roles whose micro-batches are smaller by the plan than their settings let them be."""
    found = {}
    for task in problem.tasks:
        settings, tokens = spec.run.roles.get(task.role), plan.tasks[task.name].micro_rows * task.tokens
        if settings and task.kind == TRAIN and tokens <= settings.micro_batch_tokens - task.tokens \
                and plan.tasks[task.name].micro_rows < max(shares.rows for shares in plan.tasks[task.name].shares):
            found[task.role] = settings.model_copy(update={"micro_batch_tokens": tokens})
    return found


def _rows(problem: Problem, plan: PlacedPlan, task: ModelTask,
          ranks: Sequence[int]) -> tuple[list[int], RankOrder] | None:
    """Return the rows of each share of `ranks`, 0 for an idle one, and the order of the ranks of shares and stages;
    None if the plan's stages are elsewhere."""
    placed = plan.tasks[task.name]
    shares = len(ranks) // (placed.tp * placed.pp)
    for order in (SHARES_OUTERMOST, STAGES_OUTERMOST):
        layout = Layout(shares, ranks[0], tp=placed.tp, pp=placed.pp, order=order)
        if rows := _rows_in(problem, plan, task, layout):
            return rows, order
    return None


def _rows_in(problem: Problem, plan: PlacedPlan, task: ModelTask, layout: Layout) -> list[int] | None:
    every = {device: (name, number) for number, (name, devices) in enumerate(_machines_of(problem))
             for device in devices}
    at, placed = [every[device] for device in devices_of(problem, plan)], plan.tasks[task.name]
    left = [(shares.stages, shares.rows, shares.count) for shares in placed.shares]
    result = []
    for share in range(layout.dp):
        own = [at[rank] for rank in layout.ranks_of(share)]
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


def _overlaid(run: YamlSource, plan: YamlSource) -> YamlSource:
    def moved(spots: dict) -> dict:
        found = {("layouts", *path[1:]): spot for path, spot in spots.items() if path[:1] == ("tasks",)}
        found |= {(*path[:-1], "rows"): spot for path, spot in found.items() if path[2:] == ("shares",)}
        return found | {("groups", name): spots[("groups",)] for name in ("rollout", "inference", "trainers")}

    return replace(run, keys=run.keys | moved(plan.keys), values=run.values | moved(plan.values))


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
