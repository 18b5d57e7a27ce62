"""Computes tasks: calls a task's function on its columns, or takes the rows that an earlier worker has sampled for it.

    Executor        calls functions, on any rank
    TrainExecutor   also says what the rank does, measures it and keeps what was sampled, on ranks that train
    InferenceExecutor   says what the rank does, on ranks that only infer
"""

from __future__ import annotations

import contextlib
import inspect
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from distflow.config.robust import Phase
from distflow.contracts.forms import ENGINE_TYPES
from distflow.data.batch import Batch, ColumnData, Ragged, decode_text, encode_text
from distflow.data.exchange import gather, peer_errors
from distflow.errors import ColumnError, RankMissing, shown
from distflow.measurements import NodeTiming
from distflow.plan import KEEP, Plan, Task, passed_on
from distflow.recovery.rank_status import RankStatus
from distflow.recovery.rollout_cache import RolloutCache
from distflow.telemetry import events, heartbeat, timings
from distflow.telemetry.metrics import Metrics, current, recording
from workers.engines.role_engines import RoleEngines
from workers.engines.rollout import TurnLog
from workers.engines.sampling import key_of

"""Metric of each rank: the seconds that it took to sample in a step, without waits for other ranks and loading of
weights before, and the rows."""
_TURNS = "turns of "  # begins the keys under which a rollout cache has turns of conversations
_NODE_STREAMS = 1_000  # the first stream of random numbers of a node of its own; no run has as many roles
Written = tuple[dict[str, ColumnData], torch.Tensor]  # what a task's function wrote, and the ids of the rows


class Executor:

    def __init__(self, chain: Sequence[Task], functions: Mapping[str, Callable[..., Any]],
                 roles: Mapping[str, RoleEngines], rank: int):
        self.functions, self.roles, self.rank = functions, roles, rank
        count = Counter(task.function for task in chain)
        self.shared = {function for function, nodes in count.items() if nodes > 1}  # their metrics are named by node
        self.seconds: defaultdict[str, float] = defaultdict(float)  # of each node since the step began
        self.streams = random_streams(chain, {name: role.stream for name, role in roles.items()})

    def watch(self, task: Task) -> contextlib.AbstractContextManager[None]:
        """Surround a task from taking its inputs to putting its outputs."""
        return contextlib.nullcontext()

    def run(self, task: Task, inputs: Batch) -> Written:
        """Return what the task's function writes, and the ids of these rows."""
        ids = inputs.repeat(task.repeats).ids if task.repeats > 1 else inputs.ids
        if not len(inputs) and not (task.type in ENGINE_TYPES and self.roles[task.role].takes_part(task.samples)):
            return {}, ids  # a rank without rows has nothing to compute; functions of models that it has are collective
        arguments = {column.parameter: _as_form(inputs[column.parameter], column.form) for column in task.reads}
        engine = (self.roles[task.role],) if task.type in ENGINE_TYPES else ()
        if task.node in self.streams:
            self.roles[task.role].stream = self.streams[task.node]
        start = time.perf_counter()
        before = {name: _versions(column) for name, column in arguments.items()}
        function = self.functions[task.node]
        with self._metrics_of(task):
            result = function(*engine, **arguments, **task.settings)
        for name in (name for name, column in arguments.items() if _versions(column) != before[name]):
            raise ColumnError(f"{_location(function)}{task.function} changed its input `{name}` in place, which other "
                              f"nodes read too. Write to a copy:  {name} = {name}.clone()")
        seconds = time.perf_counter() - start
        self.seconds[task.node] += seconds
        current().maximum(f"seconds/{task.node}", self.seconds[task.node])
        columns = _as_columns(task, _location(function), result, len(ids))
        if timings.current().path is not None and task.type in ENGINE_TYPES:
            timings.current().add(task.node, _node_timing(task, seconds, len(ids), arguments, columns))
        return columns, ids

    def _metrics_of(self, task: Task) -> contextlib.AbstractContextManager[None]:
        """Attribute metrics to the task. Of the ranks that share its rows one reports."""
        layout = task.layout
        reports = self.roles[task.role].engine.reports if task.type == "MODEL_TRAIN" else layout.leads(self.rank)
        return current().attributed(task.node if task.function in self.shared else "", layout.width > 1 and not reports)


class TrainExecutor(Executor):
    """Executor of a rank that trains. The loop sets `step`, and `before_update`, called first by a task that trains."""

    def __init__(self, plan: Plan, functions: Mapping[str, Callable[..., Any]], roles: Mapping[str, RoleEngines],
                 rank: int, status: RankStatus, seed: int):
        super().__init__(plan.chain(rank), functions, roles, rank)
        self.status, self.seed, self.step = status, seed, 0
        self.sampled, self.passes_on = SampledRows(None, None), passed_on(plan)
        self.before_update: Callable[[], None] = lambda: None
        self.early = {task.node for task in plan.early.tasks} if plan.early else set()
        models = [task for task in plan.chain(rank) if task.type in ENGINE_TYPES]
        self.last_of_role = {task.node for task, following in zip(models, [*models[1:], *models[:1]])
                             if following.role != task.role}
        """Nodes with a model before those that compute with another one."""
        self.cuda_devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []

    @contextlib.contextmanager
    def watch(self, task: Task) -> Iterator[None]:
        with Watch(self.status, f"waiting for the inputs of node `{task.node}`",
                   f"in node `{task.node}` (function {task.function})", node=task.node), peer_errors(), \
                torch.profiler.record_function(f"node {task.node}"):
            yield

    def run(self, task: Task, inputs: Batch) -> Written:
        if task.node in self.early:
            return self._run_early(task, inputs)
        written = self._measured(task, inputs)
        if KEEP in task.writes:
            self.status.set(f"waiting to drop rows after node `{task.node}`", node=task.node)
        elif task.node in self.passes_on:
            self.status.set(f"waiting to pass on the rows of node `{task.node}`", node=task.node)
        return written

    def _run_early(self, task: Task, inputs: Batch) -> Written:
        """Compute a task on the prompts that have come. The random numbers of later nodes do not depend on it."""
        with torch.random.fork_rng(self.cuda_devices):
            torch.manual_seed(key_of(self.seed, self.step, *inputs.ids[:1].tolist()))
            written = self._measured(task, inputs)
        self.status.set("waiting for the samples of further prompts")
        return written

    def _measured(self, task: Task, inputs: Batch) -> Written:
        if task.type == "MODEL_TRAIN":
            self.before_update()
        began, phase = time.perf_counter(), _phase(task)
        self.status.set(f"computing node `{task.node}`", phase, task.node)
        with _rank_timer(phase, len(inputs), began):
            written = self.sampled.run(task, self.step, self.roles, partial(super().run, task, inputs))
        self._release(task)
        return written

    def _release(self, task: Task) -> None:
        """Let a role that swaps leave the device once a node of another one is next."""
        if task.node in self.last_of_role:
            self.roles[task.role].release()


class InferenceExecutor(TrainExecutor):
    """Executor of a rank that only infers. No rank waits for it within a step, so that it is compared with none."""

    def run(self, task: Task, inputs: Batch) -> Written:
        return self._run_early(task, inputs)

    def _measured(self, task: Task, inputs: Batch) -> Written:
        self.status.set(f"computing node `{task.node}`", "inference", task.node)
        written = Executor.run(self, task, inputs)
        self._release(task)
        return written


def _phase(task: Task) -> Phase:
    if task.type == "MODEL_TRAIN":
        return "training"
    return "computing" if task.type == "COMPUTE" else "generating" if task.samples else "inference"


@contextlib.contextmanager
def _rank_timer(phase: Phase, rows: int, began: float) -> Iterator[None]:
    """Measure the seconds that this rank itself computes for one task, by which the others see who holds them up. The
    time since `began` counts in any case. Where a model computes, ranks wait for each other inside collectives, so that
    only the CPU time of this thread counts. A GPU computes its collectives too: a slow one shows while it samples, and
    when it trains all ranks look alike. An engine with processes of its own shows nothing."""
    clock = time.perf_counter if phase == "computing" else time.thread_time
    before, since = time.perf_counter() - began, clock()
    yield
    current().per_rank(phase, before + clock() - since, rows)


class Watch:
    """Publishes what this rank does; adds to an error that passes where it was raised and which ranks are missing."""

    def __init__(self, status: RankStatus, doing: str, where: str, phase: Phase = "waiting", node: str = ""):
        step = heartbeat.current().page.step
        self.status, self.note = status, f"{where}{f', step {step}' if step else ''}, rank {status.rank}"
        status.set(doing, phase, node)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(self.note)
        if isinstance(error, RankMissing) and (missing := self.status.missing()):
            error.add_note(f"missing: {missing}")


class CachedTurns(TurnLog):
    """Turns of one node's conversations in a rollout cache, under keys that begin with `prefix`."""

    appends = True

    def __init__(self, cache: RolloutCache, step: int, prefix: str, found: list[Batch]):
        self.cache, self.step, self.prefix, self.found, self.count = cache, step, prefix, found, len(found)

    def recorded(self) -> Batch:
        return Batch.concat(self.found) if self.found else Batch(torch.empty(0, dtype=torch.int64))

    def save(self, rows: Batch) -> None:
        self.cache.add(self.step, f"{self.prefix}{self.count}", rows, b"")
        self.count += 1


class SampledRows:
    """Rows that were sampled for the step under way, which outlive the worker in the supervisor's `cache`. Sampling is
    collective where a model is split: a node's rows are taken from there only if all ranks have theirs, and else the
    turns of its conversations. `step` is what this worker goes on with; None: a new run."""

    def __init__(self, cache: RolloutCache | None, step: int | None):
        self.cache, self.found = cache, {}
        self.turns: dict[str, list[Batch]] = {}  # of conversations, by node
        if cache is not None and step is not None:
            mine = cache.rows_of_step(step)
            for key in [key for key in mine if key.startswith(_TURNS)]:
                self.turns.setdefault(key[: key.rindex(" ") + 1], []).append(mine.pop(key)[0])
            all_have = set.intersection(*(set(json.loads(keys)) for keys in gather(json.dumps([*mine]).encode())))
            self.found = {key: mine[key] for key in sorted(all_have)}

    def run(self, task: Task, step: int, roles: Mapping[str, RoleEngines], execute: Callable[[], Written]) -> Written:
        """Return the task's rows from the cache, or those of `execute`, which the cache keeps."""
        if self.cache is None or not task.samples:
            return execute()
        key = f"{roles[task.role].draw}/{task.node}"
        if key in self.found:
            rows, report = self.found.pop(key)
            current().add_all(report)
            events.record("cached_rows_used", node=task.node, rows=len(rows))
            return rows.columns, rows.ids
        metrics, outer, role, turns = Metrics(), current(), roles[task.role], f"{_TURNS}{key} "
        role.turn_log = CachedTurns(self.cache, step, turns, self.turns.pop(turns, []))
        with recording(metrics):
            columns, ids = execute()
        role.turn_log = None
        report = metrics.take()
        outer.add_all(report)
        self.cache.add(step, key, Batch(ids, columns), report)
        return columns, ids

    def clear(self) -> None:
        self.found, self.turns = {}, {}
        if self.cache is not None:
            self.cache.clear()


def random_streams(chain: Iterable[Task], of_role: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return each sampling node's random stream: its role's, or its own if a node of the role samples before it."""
    found: dict[str, int | None] = {}
    for task in (task for task in chain if task.samples):
        own = of_role[task.role]
        found[task.node] = _NODE_STREAMS + len(found) if own in found.values() else own
    return found


def _as_form(column: ColumnData, form: str) -> Any:
    return decode_text(column) if form == "list[str]" and isinstance(column, Ragged) else column


def _as_columns(task: Task, location: str, result: Any, rows: int) -> dict[str, ColumnData]:
    values = () if not task.writes else result if isinstance(result, tuple) else (result,)
    who = f"{location}{task.function} returned"
    if len(values) != len(task.writes):
        raise ColumnError(f"{who} {len(values)} columns; it declares {', '.join(task.writes)}")
    for name, value in zip(task.writes, values):
        if wrong := _column_error(value, rows):
            raise ColumnError(f"{who} {wrong} for column `{name}`. Return one value for each of the {rows} rows: a "
                              "Tensor, a Ragged or a list of str")
    return {name: encode_text(value) if isinstance(value, list) else _without_graph(value)
            for name, value in zip(task.writes, values)}


def _column_error(value: Any, rows: int) -> str:
    """Return why a value is no column of so many rows; empty if it is one."""
    if value is None:
        return "None"
    if isinstance(value, list):
        odd = [type(each).__name__ for each in value if not isinstance(each, str)]
        if odd:
            return f"a list with a {odd[0]} in it"
    elif not isinstance(value, torch.Tensor | Ragged):
        return f"a {type(value).__name__}"
    elif isinstance(value, torch.Tensor) and not value.ndim:
        return "a single number"
    return "" if len(value) == rows else f"{len(value)} rows"


def _location(function: Callable[..., Any]) -> str:
    """Return where a function is defined, as `file.py:12: `; empty if it is not Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{shown(code.co_filename)}:{code.co_firstlineno}: " if code else ""


def _node_timing(task: Task, seconds: float, rows: int, arguments: Mapping[str, Any],
                 columns: Mapping[str, ColumnData]) -> NodeTiming:
    prompt = arguments.get("prompts")
    tokens = (0, 0)
    if isinstance(prompt, Ragged):
        tokens = int(prompt.lengths.sum()) * task.repeats, _distinct_tokens(prompt)
    answers = (*(arguments.get(name) for name in ("responses", "targets")), *columns.values())
    response = next((column for column in answers if isinstance(column, Ragged)), None)
    return NodeTiming(seconds, rows, *tokens, int(response.lengths.sum()) if response is not None else 0,
                      int(response.lengths.max()) if response is not None and len(response) else 0)


def _distinct_tokens(prompts: Ragged) -> int:
    """Count the tokens of prompts that differ from the one before: engines read equal neighbours once."""
    lengths = prompts.lengths
    before = torch.cat([torch.zeros_like(lengths[:1]), lengths[:-1]])
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    values = prompts.values
    assert isinstance(values, torch.Tensor)
    unlike = values != values[torch.arange(len(rows)) - before[rows]]
    again = lengths == before
    again[:1] = False
    again[rows[unlike]] = False
    return int(lengths[~again].sum())


def _without_graph(column: Any) -> Any:
    if isinstance(column, Ragged):
        return Ragged(_without_graph(column.values), column.lengths.cpu())
    return column.detach().cpu() if isinstance(column, torch.Tensor) else column


def _versions(column: Any) -> list[int]:
    if isinstance(column, Ragged):
        return [*_versions(column.values), *_versions(column.lengths)]
    if not isinstance(column, torch.Tensor) or column.is_inference():  # torch refuses to write into the latter
        return []
    return [column._version]
