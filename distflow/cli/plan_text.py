"""A plan as lines of text: the chain of each rank, transfers, added dependencies and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distflow.cli.common import noted, table
from distflow.config.spec import Spec
from distflow.plan import ROLLOUT, SHARES_OUTERMOST, TRAINER, Plan, Task, Transfer

_OF_A_SHARE = ("vllm", "sglang")
"""Engines that page their cache: they take `generation.memory_share` of a device, whatever rows come."""


def describe(plan: Plan, spec: Spec) -> Iterator[str]:
    yield f"{plan.name} on {plan.ranks} rank{'s' * (plan.ranks > 1)}, mode {plan.mode}, digest {plan.digest}"
    yield from _chain(plan, spec)
    yield from ("", "transfers")
    rows = [(f"{move.producer} → {task.node}", ", ".join(move.columns), move.kind.replace("_", "-"),
             _moved(move))
            for task in plan.tasks for move in task.transfers]
    yield from table(rows)
    yield from ("", "dependencies that the planner added (nodes of equal depth run one after the other)")
    yield from [f"  {earlier} → {later}" for earlier, later in plan.added] or ["  none"]
    yield from _memory(plan)
    yield from _device(spec)
    yield from _shares(plan, spec)
    yield from noted(plan.notes)


def _moved(move: Transfer) -> str:
    if move.kind == "local":
        return "by reference"
    if move.kind == "dock":
        return f"{_size(move.bytes_per_step)} a step"
    if not move.bytes_per_step:
        return "moved before"
    return f"{_size(move.bytes_per_step)} a step, {_size(move.bytes_of_busiest_rank)} through the busiest rank"


def _chain(plan: Plan, spec: Spec) -> Iterator[str]:
    batch = spec.run.data.batch
    for group in plan.groups:
        beside = f", {group.replicas} beside each other" if group.replicas > 1 else ""
        beside += f", each over {group.plan.ranks} ranks" if group.kind != TRAINER and group.plan.ranks > 1 else ""
        nodes = {task.node for task in group.plan.chain(0)}
        own = group.ranks if group.replicas else plan.groups[0].ranks
        yield from _tasks(plan, [task for task in plan.tasks if task.node in nodes], batch, own[0], own[-1],
                          f" ({group.name}{beside})")
        sampling = {task.role for task in group.plan.tasks if task.samples}
        for role, samples, layout in group.plan.models if spec.run.trainer_samples and group.name == TRAINER else ():
            if not samples or role not in sampling:
                continue
            shared = f", {layout.width} ranks with one model" if layout.width > 1 else ""
            until = "half of a step is there" if plan.rollouts else "a step is there"
            yield f"these ranks sample with `{role}` too, until {until}{shared}"
        if group.plan.early:
            ahead = ", ".join(f"`{task.node}`" for task in group.plan.early.chain(0))
            yield f"{ahead}: of each prompt as it comes, while others are still sampled"
    if not plan.groups:
        yield from _tasks(plan, list(plan.chain(0)), batch, 0, plan.ranks - 1)
    if plan.rollouts:
        yield from ("", _reserve(plan))


def _reserve(plan: Plan) -> str:
    """Return how many ranks should sample, so that they can replace those of a parallel group that trains where
    machines come and go (RobustRL, §5.1.3: the largest of its sizes)."""
    wanted = max(max(layout.dp, layout.tp, layout.pp, layout.cp, layout.ep)
                 for _, samples, layout in plan.groups[0].plan.models if not samples)
    return f"with --store, {wanted} ranks that sample could replace a whole parallel group that trains; " \
        f"{sum(len(group.ranks) for group in plan.groups if group.kind == ROLLOUT)} sample here"


def _tasks(plan: Plan, tasks: list[Task], batch: int, first: int, last: int, group: str = "") -> Iterator[str]:
    yield from ("", f"chain of rank{f's {first}–{last}' if last > first else f' {first}'}{group}")
    rows = []
    for number, task in enumerate(tasks, 1):
        count = batch * _repeats(plan, task.fan)
        moved = f"{count} rows" if task.repeats == 1 else f"{count} → {count * task.repeats} rows"
        function = task.function.partition(":")[2]
        rows.append((str(number), task.node, task.role, task.type, function, _where(task, last + 1 - first), moved))
    yield from table(rows)
    for number, task in enumerate(tasks, 1):
        if task.draws > 1:
            yield (f"1 to {number} run for each draw of prompts; a step draws up to {task.draws} times, until {batch} "
                   f"are left after `{task.node}`")


def _repeats(plan: Plan, lineage: Sequence[str]) -> int:
    count = 1
    for task in plan.tasks:
        count *= task.repeats if task.node in lineage else 1
    return count


def _where(task: Task, ranks: int) -> str:
    layout = task.layout
    sizes = f"dp {layout.dp}" + "".join(f", {name} {size}" for name, size in layout.split.items() if size > 1)
    sizes += f", {layout.order}" if layout.order != SHARES_OUTERMOST else ""
    sizes += f", layers {':'.join(map(str, layout.layers))}" if layout.layers else ""
    sizes += f", rows {':'.join(map(str, layout.rows))}" if layout.rows else ""
    if layout.dp * layout.width == ranks:
        return sizes
    where = f"ranks {layout.first}–{layout.last}" if layout.last > layout.first else f"rank {layout.first}"
    return f"{sizes} ({where}; others only send)"


def _device(spec: Spec) -> Iterator[str]:
    """Yield for what device memory is counted, where the dtype depends on it."""
    for role, settings in spec.run.roles.items():
        shape = spec.shape_of(role)
        if role in spec.dag.roles and settings.dtype == "auto" and shape and shape.dtype in ("bfloat16", "float16"):
            counted, other = (f"CPUs, where `dtype: auto` is float32. On GPUs it is {shape.dtype}", shape.dtype) \
                if spec.on_cpus else (f"GPUs, where `dtype: auto` is {shape.dtype}. On CPUs it is float32", "float32")
            yield f"  {role}: counted for {counted}, counted by  --set roles.{role}.dtype={other}"


def describe_dock(plan: Plan, spec: Spec, shards: int | None) -> Iterator[str]:
    from planners import through_dock

    if shards is None:
        return
    volume = through_dock(spec, plan, shards)
    yield from ("", "through the dock, if every edge passed it (bytes a step, rows at the run's longest)")
    rows = [(f"{edge.producer} → {edge.reader or 'dock'}", ", ".join(edge.columns), _size(edge.bytes_per_step))
            for edge in volume.edges]
    yield from table([*rows, (f"each of {shards} shards", "", _size(volume.bytes_through_each_shard))])


def _memory(plan: Plan) -> Iterator[str]:
    if plan.groups:
        for group in (group for group in plan.groups if group.replicas):
            yield from _memory_of(group.plan, f" of the {group.name}")
    else:
        yield from _memory_of(plan)
    if plan.host_memory:
        yield from ("", "host memory of a machine that trains, beside that of its ranks (at most)")
        yield from table([(item.name, _size(item.bytes), item.formula) for item in plan.host_memory])


def _shares(plan: Plan, spec: Spec) -> Iterator[str]:
    """Say what engines take that are given a share of a device whose memory is not known."""
    tasks = [*plan.tasks, *(task for group in plan.groups for task in group.plan.tasks)]
    shares = {role: settings for role, settings in spec.run.roles.items() if settings.rollout in _OF_A_SHARE
              and any(task.role == role and task.repeats > 1 for task in tasks)}
    if spec.cluster.memory_gib is None and shares:
        yield from ("", "beside these, of each device that samples, whose memory is not known")
        yield from table([(f"{role}: rollout engine", f"{settings.generation.memory_share:.0%}",
                           f"{settings.rollout}: generation.memory_share, weights and cache")
                          for role, settings in shares.items()])
        yield "  In GiB, and checked, with a  --cluster FILE  that says how much each has:  memory_gib: 80"


def _memory_of(plan: Plan, where: str = "") -> Iterator[str]:
    from planners.memory import needed

    yield from ("", f"memory of a rank{where} (estimate)")
    if not plan.memory:
        yield "  unknown: the sizes of its models are not"
        return
    rows = [(item.name, _size(item.bytes), item.formula + (f"  (while {item.phase})" if item.phase else ""))
            for item in plan.memory]
    yield from table([*rows, ("at its fullest" if any(item.phase for item in plan.memory) else "total",
                               _size(needed(plan.memory)), "")])


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
