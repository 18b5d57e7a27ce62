"""Chooses the settings of a run on one kind of device, so that it fits with a margin and is fastest by the cost model.

What is chosen: tokens of micro-batches, recomputation, what is swapped with host memory or offloaded to it, how many
ranks split a model that samples and one that trains, and in modes with groups how many ranks sample. Seconds are those
of the cost model for mixed hardware, memory is that of `distflow plan`, times what a run has taken of its own plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from distflow.config.groups import Groups
from distflow.config.run import Parallel
from distflow.config.spec import Spec
from distflow.errors import Diagnostic, InvalidInput
from distflow.plan import Plan
from planners.heterogeneous.layouts import CostedProblem, blocks_of, in_rows
from planners.heterogeneous.problem import (
    GENERATE,
    TRAIN,
    DeviceSubset,
    Grouping,
    Placement,
    Problem,
    Strategy,
    TaskLayout,
    groups_of,
)
from planners.heterogeneous.runnable import has_cut
from planners.heterogeneous.workload import NAME_A_CLUSTER, problem_of
from planners.memory import GIB, needed
from planners.planner import plan

_SLICES = (1, 2, 4, 8)
_MICRO_TOKENS = tuple(2**power for power in range(11, 18))
_HOST = 2.0**60
"""Bytes of memory, more than any model takes: what is offloaded does not lie on the device."""
_SAMPLING_PASSES = (1, 2, 4, 8)
"""Passes in which a rank may sample its rows, one after the other, with a cache for those of one."""


@dataclass(frozen=True)
class Settings:
    """Choice of settings: `sample_tp` and `train_tp` ranks that split a model; `rollout` ranks that sample, 0 where all
    do; `rows` that a rank samples at once. `seconds` of an iteration by the cost model, which knows no cost of
    `offload`."""

    micro_batch_tokens: int
    recompute: bool
    swap: bool
    offload: bool
    sample_tp: int
    train_tp: int
    rollout: int
    rows: int
    seconds: float

    @property
    def memory_last(self) -> tuple[Any, ...]:
        """What is compared to find the settings that need least memory."""
        return (self.offload, self.swap, self.recompute, self.train_tp, self.sample_tp, -self.rows,
                -self.micro_batch_tokens)


@dataclass(frozen=True)
class Fit:
    """Settings that fit, with the bytes of a rank at its fullest and the limit that they keep to."""

    settings: Settings
    need: float
    limit: float


def fit(spec: Spec, margin: float = 0.1, factor: float = 1.0) -> Iterator[Fit]:
    """Yield the settings that fit, fastest first; those that offload only if no others do.

    Args:
        margin: share of a device's memory that stays free.
        factor: bytes that a run has taken over those of its plan.

    Raises:
        InvalidInput: the cluster has several kinds of devices or none, or nothing fits.
    """
    _check(spec)
    problem = problem_of(spec)
    limit = (1 - margin) * problem.hardware.device_groups[0].memory
    problem = replace(problem, filled=1 - margin)
    least: tuple[Settings, str] | None = None
    for offload in (False, True):
        some = False
        for settings in sorted(_candidates(spec, problem, offload), key=_order):
            need, why = _need(spec, settings)
            need *= factor
            if need <= limit:
                some = True
                yield Fit(settings, need, limit)
            elif not some and (least is None or settings.memory_last > least[0].memory_last):
                least = settings, why or f"a rank needs {need / GIB:.2f} GiB"
        if some:
            return
    raise InvalidInput(_nothing_fits(spec, least, limit))


def _order(settings: Settings) -> tuple[Any, ...]:
    """Compare by seconds, and equals by simplicity: fewer splits, nothing swapped or computed again."""
    return (round(settings.seconds, 9), settings.swap, settings.recompute, settings.train_tp, settings.sample_tp,
            settings.micro_batch_tokens)


def _check(spec: Spec) -> None:
    kinds = sorted({machine.device for machine in spec.cluster.machines.values()})
    where = spec.cluster_source.location(("machines",), key=True) if spec.cluster_source else None
    if not kinds:
        raise InvalidInput(Diagnostic("what fits depends on the devices, and no cluster file with `machines` says "
                                      "which they are", where, NAME_A_CLUSTER))
    if len(kinds) > 1:
        raise InvalidInput(Diagnostic(f"cluster `{spec.cluster_name}` has devices of {len(kinds)} kinds, "
                                      f"{', '.join(kinds)}, and settings are chosen for one", where,
                                      "Place it on them:  distflow plan --place --cluster FILE DAG"))


def _candidates(spec: Spec, problem: Problem, offload: bool) -> Iterator[Settings]:
    longest = max(task.tokens for task in problem.tasks)
    micros = [tokens for tokens in _MICRO_TOKENS if tokens >= longest] or [longest]
    fsdp = all(task.engine == "fsdp" for task in problem.tasks)
    colocated = spec.run.trainer_samples and any(task.kind == GENERATE for task in problem.tasks)
    if offload:
        if not (fsdp and any(task.kind == TRAIN for task in problem.tasks)):
            return
        groups = tuple(replace(group, memory=_HOST) for group in problem.hardware.device_groups)
        problem = replace(problem, hardware=replace(problem.hardware, device_groups=groups))  # the plan's memory counts
    for micro, recompute in product(micros, (False, True) if fsdp else (False,)):
        tasks = tuple(replace(task, micro_tokens=micro, recompute=recompute) for task in problem.tasks)
        costed = CostedProblem(replace(problem, tasks=tasks))
        for sample_tp, train_tp in product(_SLICES, _SLICES):
            for placement in _placements(spec, costed, sample_tp, train_tp):
                rollout = 0 if not problem.has_samplers else sum(
                    sum(subset) for group, subset in zip(placement.grouping, placement.subsets)
                    if all(tasks[task].kind == GENERATE for task in group))
                for (rows, sampled), swap in product(_rows_at_once(spec, costed, placement),
                                                     (False, True) if colocated else (False,)):
                    yield Settings(micro, recompute, swap, offload, sample_tp, train_tp, rollout, rows,
                                   _seconds(costed, sampled, swap))


def _rows_at_once(spec: Spec, costed: CostedProblem, placement: Placement) -> Iterator[tuple[int, Placement]]:
    """Yield the rows that a rank samples at once, and the placement with a cache for so many. vLLM and SGLang page
    theirs and need no setting."""
    tasks = costed.problem.tasks
    most = max((max(layout.rows) for task, layout in zip(tasks, placement.layouts) if task.kind == GENERATE), default=0)
    paged = any((settings := spec.settings_of(task.role)) and settings.rollout != "hf" for task in tasks
                if task.kind == GENERATE)
    for rows in dict.fromkeys(-(-most // passes) for passes in (_SAMPLING_PASSES if most and not paged else (1,))):
        if rows == most:
            yield most, placement
            continue
        limited = CostedProblem(replace(costed.problem, tasks=tuple(replace(task, at_once=rows) for task in tasks)))
        found = limited.placed(placement.grouping, placement.subsets, (
            limited.costs.layout(number, layout.strategy, layout.arrangement)
            if tasks[number].kind == GENERATE else layout for number, layout in enumerate(placement.layouts)))
        if found is not None:
            yield rows, found


def _placements(spec: Spec, costed: CostedProblem, sample_tp: int, train_tp: int) -> Iterator[Placement]:
    problem = costed.problem
    if sample_tp > 1 and not any(task.kind == GENERATE for task in problem.tasks):
        return
    for grouping, subsets in _groups(problem):
        found = costed.placed(grouping, subsets, (
            _layout(spec, costed, number, subsets[group], sample_tp if problem.tasks[number].kind == GENERATE else
                    train_tp) for number, group in enumerate(groups_of(grouping))))
        if found is not None:
            yield found


def _groups(problem: Problem) -> Iterator[tuple[Grouping, tuple[DeviceSubset, ...]]]:
    """Yield the tasks of each group and its devices: all on all ranks, or any number of the first ranks trains."""
    everything, tasks = problem.hardware.all, range(len(problem.tasks))
    sampling, training = (tuple(task for task in tasks if (problem.tasks[task].kind == GENERATE) == samples)
                          for samples in (True, False))
    if not problem.has_samplers:
        yield (tuple(tasks),), (everything,)
        return
    for last, group in enumerate(problem.hardware.device_groups) if sampling and training else ():
        for count in group.counts[1:]:
            first = (*everything[:last], count, *(0 for _ in everything[last + 1:]))
            if first != everything:
                rest = tuple(count - taken for count, taken in zip(everything, first))
                divided = sorted([(training, first), (sampling, rest)])
                yield tuple(group for group, _ in divided), tuple(subset for _, subset in divided)


def _layout(spec: Spec, costed: CostedProblem, number: int, subset: DeviceSubset, tp: int) -> TaskLayout | None:
    """Return a task's layout on its group's devices, each model split over `tp`; None if it does not fit, or if its
    engine or the ranks do not allow that. In mode semi_sync the ranks that train sample, too."""
    problem, task = costed.problem, costed.problem.tasks[number]
    colocated = sum(problem.hardware.all) - sum(subset) if spec.run.trainer_samples else 0
    blocks, samples = blocks_of(subset, tp, problem.hardware), task.kind == GENERATE
    apart = problem.has_samplers and samples
    if sum(blocks) * tp != sum(subset) or (apart and colocated % tp) or not has_cut(spec, problem, number, tp, 1):
        return None
    rows = max(1, int(task.micro_tokens // (task.read if samples else task.whole)))
    strategy = Strategy(sum(blocks), tp, 1, 1, min(rows, task.rows))
    return costed.costs.layout(number, strategy, in_rows(blocks, strategy, tuple(range(len(blocks))), False))


def _seconds(costed: CostedProblem, placement: Placement, swap: bool) -> float:
    """Return the seconds of an iteration in which only what trains is swapped, if anything is."""
    tasks = costed.problem.tasks
    durations = [layout.takes(swap and task.kind == TRAIN) for task, layout in zip(tasks, placement.layouts)]
    return costed.objective.seconds(placement.grouping, durations, [layout.sites for layout in placement.layouts])


def applied(spec: Spec, settings: Settings) -> Spec:
    """Return the spec with these settings."""
    roles = {}
    for name, role in spec.run.roles.items():
        found = _role_settings(spec, name, settings)
        found["generation"] = role.generation.model_copy(update=found.get("generation", {}))
        roles[name] = role.model_copy(update=found)
    run = spec.run.model_copy(update={
        "roles": roles, "layouts": {node: Parallel(tp=tp) for node, tp in _splits(spec, settings).items()},
        "groups": Groups(rollout=settings.rollout) if settings.rollout else spec.run.groups})
    return replace(spec, run=run)


def lines(spec: Spec, settings: Settings) -> dict[str, Any]:
    """Return what to write into the run file."""
    roles = {name: _role_settings(spec, name, settings) for name in spec.run.roles}
    splits = {node: {"tp": tp} for node, tp in _splits(spec, settings).items()}
    groups = {"groups": {"rollout": settings.rollout}} if settings.rollout else {}
    return {"roles": roles, **({"layouts": splits} if splits else {}), **groups}


def _role_settings(spec: Spec, name: str, settings: Settings) -> dict[str, Any]:
    found: dict[str, Any]
    role, found = spec.run.roles[name], {"micro_batch_tokens": settings.micro_batch_tokens}
    if role.rollout == "hf" and 0 < settings.rows < role.generation.batch_rows:
        found["generation"] = {"batch_rows": settings.rows}  # the cache is made for so many
    if role.engine == "fsdp" and name in spec.dag.roles and spec.dag.roles[name].trained:
        found |= {"recompute": settings.recompute, "swap": settings.swap, "offload": settings.offload}
    return found


def _splits(spec: Spec, settings: Settings) -> dict[str, int]:
    """Return the tp of each node with a model that is split."""
    found = {}
    for task in plan(_unplaced(spec), 1).tasks if max(settings.sample_tp, settings.train_tp) > 1 else ():
        tp = settings.sample_tp if task.samples else settings.train_tp
        if task.type != "COMPUTE" and tp > 1:
            found[task.node] = tp
    return found


def _unplaced(spec: Spec) -> Spec:
    """Return the spec for one rank in mode sync, of which any DAG can be planned to find what its nodes are."""
    run = spec.run.model_copy(update={"mode": "sync", "layouts": {}, "faults": []})
    return replace(_on_alike_ranks(spec, None), run=run)


def _on_alike_ranks(spec: Spec, memory_gib: float | None) -> Spec:
    """Return the spec for ranks that are alike, as all are here, with their memory."""
    return replace(spec, cluster=spec.cluster.model_copy(
        update={"machines": {}, "devices": {}, "memory_gib": memory_gib}))


def _need(spec: Spec, settings: Settings) -> tuple[float, str]:
    """Return the bytes of the fullest rank; infinite, and why, if no such run is planned."""
    memory_gib = next(iter(spec.cluster.devices.values())).memory_gib
    try:
        made = plan(_on_alike_ranks(applied(spec, settings), memory_gib), spec.cluster.size or 1)
    except InvalidInput as error:
        return math.inf, error.mistakes[0].what
    return most_needed(made), ""


def most_needed(made: Plan) -> float:
    """Return the bytes of the fullest rank of a plan."""
    return max(needed(each.memory) for each in [group.plan for group in made.groups] or [made])


def _nothing_fits(spec: Spec, least: tuple[Settings, str] | None, limit: float) -> Diagnostic:
    where = spec.cluster_source.location(("machines",), key=True) if spec.cluster_source else None
    hint = "Take more devices, a smaller model, shorter rows, or a smaller  --margin"
    if least is None:
        return Diagnostic(f"nothing fits: by the cost model, no layout of these models keeps to {limit / GIB:.2f} GiB "
                          "a device", where, hint)
    return Diagnostic(f"nothing fits into {limit / GIB:.2f} GiB a device. With the settings that need least, "
                      f"micro_batch_tokens {least[0].micro_batch_tokens} and tp {least[0].train_tp}: {least[1]}", where,
                      hint)
