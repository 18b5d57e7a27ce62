"""From any DAG, as the planner has it, to works: its nodes that run models, what they compute, and who waits for whom.

Nodes of type COMPUTE run beside those that read them and count for nothing but the bytes that pass through them: their
time is the host's, of which a cluster file says nothing.
"""

from __future__ import annotations

from dataclasses import replace

from distflow.config.load import Spec
from distflow.errors import Diagnostic, InvalidInput
from distflow.plan import Plan, RowLineage, Task
from planners.heterogeneous.hardware import hardware_of
from planners.heterogeneous.problem import ASYNC, GENERATE, INFER, SYNC, TRAIN, Coefficients, Edge, ModelTask, Problem
from planners.planner import plan
from planners.transfers import through_dock


def problem_of(spec: Spec, coefficients: Coefficients | None = None) -> Problem:
    """The joint problem of a DAG, a run and a cluster. Modes that divide the ranks into groups are planned as async.

    Raises:
        InvalidInput: there is no plan, the cluster describes no machines, or the sizes of a model are not known.
    """
    if not spec.cluster.machines:
        where = spec.cluster_source.spot(()) if spec.cluster_source else None
        raise InvalidInput(Diagnostic("mixed hardware is planned for a cluster with `machines`", where,
                                      "Name one with  --cluster FILE  , as  --cluster h200_a100"))
    alone = replace(spec, run=spec.run.model_copy(update={"mode": SYNC, "layouts": {}, "faults": []}),
                    cluster=spec.cluster.model_copy(update={"machines": {}, "devices": {}}))
    whole = plan(alone, 1)
    tasks = [task for task in whole.tasks if task.type != "COMPUTE"]
    _check_sizes(spec, tasks)
    fans = RowLineage(whole.tasks, whole.source)
    response = max((spec.settings_of(task.role).generation.max_new_tokens for task in tasks if task.samples),
                   default=spec.run.data.max_target_tokens)
    works = tuple(_work(spec, fans, task, response) for task in tasks)
    mode = SYNC if spec.run.mode == SYNC else ASYNC
    dtype = "float32" if all(work.width == 4 for work in works) else "bfloat16"
    return Problem(hardware_of(spec.cluster, dtype), works, _edges(alone, whole, tasks), _syncs(spec, works), mode,
                   coefficients or Coefficients())


def _check_sizes(spec: Spec, tasks: list[Task]) -> None:
    unknown = sorted({task.role for task in tasks if spec.shape_of(task.role) is None})
    if unknown:
        role = unknown[0]
        raise InvalidInput(Diagnostic(f"role `{role}`: the sizes of its model are not known, so no cost can be",
                                      spec.run_source.spot(("roles", role)),
                                      f"Give it a model:  roles: {{{role}: {{model: …}}}}"))


def _work(spec: Spec, fans: RowLineage, task: Task, response: int) -> ModelTask:
    """A task's work, with rows at the run's longest."""
    settings, shape = spec.settings_of(task.role), spec.shape_of(task.role)
    head = spec.dag.roles[task.role].head
    shape = shape.with_value_head() if head == "value" else shape
    kind = GENERATE if task.samples else TRAIN if task.type == "MODEL_TRAIN" else INFER
    rows = spec.run.data.batch * fans.times(fans.of(task.node) if task.samples else task.fan)
    width = 4 if settings.dtype == "float32" else 2
    outputs = 1 if head == "value" else shape.vocabulary
    return ModelTask(task.node, task.role, kind, shape.parameters, shape.layers, shape.hidden,
                     2 * width * shape.kv_width,
                rows, spec.run.data.max_prompt_tokens, response, shape.active_parameters, width, outputs, shape.heads,
                     shape.experts, shape.expert_parameters, shape.experts_per_token, settings.micro_batch_tokens,
                     int(task.settings.get("epochs", 1)), int(task.settings.get("mini_batches", 1)), settings.recompute)


def _edges(spec: Spec, whole: Plan, tasks: list[Task]) -> tuple[Edge, ...]:
    """Who waits for whom, through nodes of type COMPUTE too, and the bytes that come that way."""
    index = {task.node: number for number, task in enumerate(tasks)}
    read: dict[str, dict[str, int]] = {}
    for edge in through_dock(spec, whole, 1).edges:
        if edge.reader:
            read.setdefault(edge.reader, {})[edge.producer] = edge.bytes_per_step
    found = []
    for task in tasks:
        arriving: dict[int, int] = {}
        for producer, nbytes in _sources(spec, read, task.node, index):
            arriving[index[producer]] = arriving.get(index[producer], 0) + nbytes
        found += [Edge(source, index[task.node], nbytes) for source, nbytes in sorted(arriving.items())]
    return tuple(found)


def _sources(spec: Spec, read: dict[str, dict[str, int]], node: str, index: dict[str, int]) -> list[tuple[str, int]]:
    """The works that a node follows directly or through nodes that run no model, with the bytes read from each."""
    found: list[tuple[str, int]] = []
    for earlier in dict.fromkeys([*spec.dag.nodes[node].dependencies, *read.get(node, {})]):
        if earlier in index:
            found.append((earlier, read.get(node, {}).get(earlier, 0)))
        elif earlier in spec.dag.nodes:
            found += _sources(spec, read, earlier, index)
    return found


def _syncs(spec: Spec, works: tuple[ModelTask, ...]) -> tuple[Edge, ...]:
    """From the last training of each role to all that run with its weights."""
    trained = {work.role: number for number, work in enumerate(works) if work.kind == TRAIN}
    return tuple(Edge(trained[work.role], number, float(work.parameters * work.width))
                 for number, work in enumerate(works) if work.role in trained and work.kind != TRAIN)


