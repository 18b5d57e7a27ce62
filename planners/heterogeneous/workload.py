"""Builds the joint problem from a DAG, a run and a cluster: model tasks, what they compute, and their dependencies.

Nodes of type COMPUTE run beside those that read them and count only for the bytes that pass through them: their time is
the host's, which a cluster file does not describe.
"""

from __future__ import annotations

from dataclasses import replace

from distflow.config.groups import Groups
from distflow.config.models import ROLLOUTS, TRAINERS
from distflow.config.run import RoleRun
from distflow.config.sizes import Shape
from distflow.config.spec import Spec
from distflow.errors import Diagnostic, InvalidInput
from distflow.plan import Plan, RowLineage, Task
from planners.heterogeneous.hardware import hardware_of
from planners.heterogeneous.problem import GENERATE, INFER, TRAIN, Edge, ModelTask, Problem
from planners.memory import LOGITS_AT_ONCE, PAGED, activation_bytes, gathered_at_once
from planners.planner import plan
from planners.transfers import through_dock

NAME_A_CLUSTER = ("Measure these machines, which writes such a file:  distflow probe --out cluster.yaml\n"
                  "Then add to this command:  --cluster cluster.yaml\n"
                  "For machines that you do not have here, name a shipped cluster:  --cluster h200_a100")


def problem_of(spec: Spec) -> Problem:
    """Return the joint problem; modes with groups of ranks are planned as async. Raises InvalidInput without a plan,
    machines in the cluster file, or known sizes of a model."""
    if not spec.cluster.machines:
        where = spec.cluster_source.location(()) if spec.cluster_source else None
        raise InvalidInput(Diagnostic("mixed hardware is planned for a cluster with `machines`", where,
                                      NAME_A_CLUSTER))
    single_rank_spec = _of_a_rank(spec)
    single_rank_plan = plan(single_rank_spec, 1)
    tasks = [task for task in single_rank_plan.tasks if task.type != "COMPUTE"]
    models = _models(spec, tasks)
    lineage = RowLineage(single_rank_plan.tasks, single_rank_plan.source)
    response = max((models[task.role][0].generation.max_new_tokens for task in tasks if task.samples),
                   default=spec.run.data.max_target_tokens)
    colocated = not spec.run.has_samplers or spec.run.trainer_samples_alone
    sampling = {task.role for task in tasks if task.samples and colocated}  # by ranks that train
    model_tasks = tuple(_model_task(spec, lineage, task, response, *models[task.role], task.role in sampling)
                        for task in tasks)
    dtype = "float32" if all(model_task.width == 4 for model_task in model_tasks) else "bfloat16"
    return Problem(hardware_of(spec.cluster, dtype), model_tasks, _edges(single_rank_spec, single_rank_plan, tasks),
                   _syncs(model_tasks), spec.run.has_samplers)


def _of_a_rank(spec: Spec) -> Spec:
    """Return a run of the same work by one rank, without what it says of several: groups, splits and replicas."""
    roles = {name: role.model_copy(update={"replicas": 1}) for name, role in spec.run.roles.items()}
    alone = {"mode": "sync", "layouts": {}, "faults": [], "groups": Groups(), "roles": roles}
    return replace(spec, run=spec.run.model_copy(update=alone),
                   cluster=spec.cluster.model_copy(update={"machines": {}, "devices": {}}))


def _models(spec: Spec, tasks: list[Task]) -> dict[str, tuple[RoleRun, Shape]]:
    found = {}
    for role in sorted({task.role for task in tasks}):
        settings, shape = spec.settings_of(role), spec.shape_of(role)
        if settings is None or shape is None:
            raise InvalidInput(Diagnostic(f"role `{role}`: the sizes of its model are not known, so no cost can be",
                                          spec.run_source.location(("roles", role)),
                                          f"Give it a model:  roles: {{{role}: {{model: …}}}}"))
        found[role] = (settings, shape)
    return found


def _model_task(spec: Spec, lineage: RowLineage, task: Task, response: int, settings: RoleRun, shape: Shape,
                samples: bool) -> ModelTask:
    """Return the model task of a plan's task, with rows at the run's longest. `samples`: the role also samples where it
    trains."""
    head = spec.dag.roles[task.role].head
    shape = shape.with_value_head() if head == "value" else shape
    kind = GENERATE if task.samples else TRAIN if task.type == "MODEL_TRAIN" else INFER
    rows = spec.run.data.batch * lineage.times(lineage.of(task.node) if task.samples else task.fan)
    width = 4 if settings.dtype == "float32" else 2
    outputs = shape.labels or shape.vocabulary
    tied = outputs == shape.vocabulary and not shape.vocabulary_head
    adapters = spec.adapters.get(task.role, 0) if kind == TRAIN else 0
    frozen = shape.parameters if adapters else min(spec.frozen.get(task.role, 0), shape.parameters)
    logit_bytes, rescored = _logits(kind, settings, outputs, width)
    follows = kind == INFER and spec.dag.roles[task.role].follow is not None
    return ModelTask(task.node, task.role, kind, shape.parameters, shape.layers, shape.hidden, shape.query_width,
                     width * shape.cached // shape.layers,
                rows, spec.run.data.max_prompt_tokens, response, shape.active_parameters, width, outputs, shape.heads,
                     shape.experts, shape.expert_parameters, shape.experts_per_token, settings.micro_batch_tokens,
                     int(task.settings.get("epochs", 1)), int(task.settings.get("mini_batches", 1)),
                     settings.recomputes(shape.parameters), settings.engine,
                     0 if adapters else gathered_at_once(shape),
                     activation_bytes(shape, width, adapters > 0, settings.engine == "fsdp"),
                     frozen=frozen if kind == TRAIN else 0, follows=follows, adapters=adapters,
                     undivided=adapters > 0 and samples and settings.rollout not in PAGED,
                     stages=_has_stages(spec, kind, settings), states=_states(shape, kind, settings),
                     looked_up=0 if tied else shape.looked_up or shape.vocabulary * shape.hidden,
                     logit_bytes=logit_bytes, rescored=rescored)


def _states(shape: Shape, kind: str, settings: RoleRun) -> float:
    """Return `ModelTask.states` of a task of the engines here: FSDP's models run kernels of their own."""
    return states_of(shape, fused=kind == GENERATE or settings.engine != "fsdp")


def states_of(shape: Shape, fused: bool) -> float:
    """Return how many numbers are read or written for a token of a layer between products, in hidden sizes. Of both
    norms 4 and both sums 6 of the hidden size; of the width of queries and keys together, to normalize those of heads
    2, and to rotate 2 with `fused` kernels, else 10, and 3 of the queries' to divide into heads; to activate and
    multiply, 3 and else 5 of the width of the feed-forward layers that compute."""
    rotated = shape.query_width + shape.kv_width
    attention = 2 * shape.head_norms * rotated + (2 * rotated if fused else 10 * rotated + 3 * shape.query_width)
    return 10 + (attention + (3 if fused else 5) * shape.active_widening) / shape.hidden


def _logits(kind: str, settings: RoleRun, outputs: int, width: int) -> tuple[int, bool]:
    """Return `logit_bytes` and `rescored` of the engines here. In half precision a product writes a logit (2) and a
    kernel reads it (2); for the backward pass it is made and read again (4), and its gradient takes its place (2),
    which two products read (4). In float32 it is made in pieces (`vocabulary.py`): written (4), read for the maximum
    (4), less that (8), and its power (8) is read for the sum (4) and the entropy (8); the backward pass makes it again
    (4), less the normalizer (8), its power (8) and the gradient (8), which two products read (8). What fits at once (4)
    is divided by the temperature (8), goes through a log-softmax (8) and the entropy (24), and has gradients of the
    log-probabilities (4), the log-softmax (12), the division (8) and two products (8)."""
    if kind == GENERATE:
        return 0, False
    if width < 4 and outputs > 1:
        return {INFER: 4, TRAIN: 14}[kind], kind == TRAIN
    pieces = settings.engine == "megatron" or settings.micro_batch_tokens * outputs > LOGITS_AT_ONCE
    return {INFER: 36, TRAIN: 72}[kind] if pieces else {INFER: 44, TRAIN: 76}[kind], pieces and kind == TRAIN


def _has_stages(spec: Spec, kind: str, settings: RoleRun) -> bool:
    """Return whether the engine of a task has pipelines; in modes with groups none that samples has."""
    if kind == GENERATE:
        return not spec.run.has_samplers and "pp" not in ROLLOUTS[settings.rollout].cannot
    return "pp" not in TRAINERS[settings.engine].cannot


def _edges(spec: Spec, single_rank_plan: Plan, tasks: list[Task]) -> tuple[Edge, ...]:
    index = {task.node: number for number, task in enumerate(tasks)}
    read: dict[str, dict[str, int]] = {}
    for edge in through_dock(spec, single_rank_plan, 1).edges:
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
    found: list[tuple[str, int]] = []
    for earlier in dict.fromkeys([*spec.dag.nodes[node].dependencies, *read.get(node, {})]):
        if earlier in index:
            found.append((earlier, read.get(node, {}).get(earlier, 0)))
        elif earlier in spec.dag.nodes:
            found += _sources(spec, read, earlier, index)
    return found


def _syncs(model_tasks: tuple[ModelTask, ...]) -> tuple[Edge, ...]:
    """Return edges from the last training of each role to all tasks that run with its weights, or its adapters."""
    trained = {model_task.role: number for number, model_task in enumerate(model_tasks) if model_task.kind == TRAIN}
    sent = {role: model_tasks[number].adapters or model_tasks[number].parameters for role, number in trained.items()}
    return tuple(Edge(trained[model_task.role], number, float(sent[model_task.role] * model_task.width))
                 for number, model_task in enumerate(model_tasks)
                 if model_task.role in trained and model_task.kind != TRAIN)


