"""A task's function, called on its columns."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from distflow.contracts.signature import ENGINE_TYPES
from distflow.data.batch import Batch, ColumnData, Ragged, decode_text, encode_text
from distflow.errors import ColumnError, shown
from distflow.plan import Task
from distflow.plan_file import NodeTiming
from distflow.telemetry import timings
from distflow.telemetry.metrics import current
from workers.roles import RoleEngines

_BEHIND = 1_000
"""No run has as many roles. Which of them are on a rank must not matter."""


class Execution:
    """Runs the tasks of a chain with a rank's roles."""

    def __init__(self, chain: Sequence[Task], functions: Mapping[str, Callable[..., Any]],
                 roles: Mapping[str, RoleEngines],
                 rank: int):
        self.functions, self.roles, self.rank = functions, roles, rank
        count = Counter(task.function for task in chain)
        self.shared = {function for function, nodes in count.items() if nodes > 1}
        """Functions of several nodes; what they report is told apart."""
        self.seconds: Counter[str] = Counter()
        """Of each node since they were cleared, which is when a step begins."""
        self.streams = streams_of(chain, {name: role.stream for name, role in roles.items()})

    def run(self, task: Task, inputs: Batch) -> tuple[dict[str, ColumnData], torch.Tensor]:
        """What a task's function wrote, and the ids of the rows it wrote."""
        ids = inputs.repeat(task.repeats).ids if task.repeats > 1 else inputs.ids
        if not len(inputs) and task.type not in ENGINE_TYPES:
            return {}, ids  # a rank without rows has nothing to compute; model functions are collective
        arguments = {column.parameter: _as_form(inputs[column.parameter], column.form) for column in task.reads}
        engine = (self.roles[task.role],) if task.type in ENGINE_TYPES else ()
        if task.node in self.streams:
            self.roles[task.role].stream = self.streams[task.node]
        start = time.perf_counter()
        before = {name: _versions(column) for name, column in arguments.items()}
        function = self.functions[task.node]
        with self._speaking_for(task):
            result = function(*engine, **arguments, **task.settings)
        for name in (name for name, column in arguments.items() if _versions(column) != before[name]):
            raise ColumnError(f"{_place(function)}{task.function} changed its input `{name}` in place, which other "
                              f"nodes read too. Write to a copy:  {name} = {name}.clone()")
        seconds = time.perf_counter() - start
        self.seconds[task.node] += seconds
        current().maximum(f"seconds/{task.node}", self.seconds[task.node])
        columns = _as_columns(task, _place(function), result, len(ids))
        if timings.current().path is not None and task.type in ENGINE_TYPES:
            timings.current().add(task.node, _taken(task, seconds, len(ids), arguments, columns))
        return columns, ids

    @contextlib.contextmanager
    def _speaking_for(self, task: Task) -> Iterator[None]:
        """What is reported meanwhile is the task's; of the ranks that share its rows, one reports."""
        metrics, layout = current(), task.layout
        speaks = self.roles[task.role].engine.speaks if task.type == "MODEL_TRAIN" else layout.leads(self.rank)
        metrics.scope = task.node if task.function in self.shared else ""
        metrics.muted = layout.width > 1 and not speaks
        try:
            yield
        finally:
            metrics.scope, metrics.muted = "", False


def streams_of(chain: Iterable[Task], of_role: Mapping[str, int | None]) -> dict[str, int]:
    """The number under which each sampling node draws: its role's, or one of its own behind all roles' where the role
    has sampled before, since rows of two nodes may have equal ids."""
    found: dict[str, int] = {}
    for task in (task for task in chain if task.samples):
        own = of_role[task.role]
        found[task.node] = _BEHIND + len(found) if own in found.values() else own
    return found


def _as_form(column: ColumnData, form: str) -> Any:
    return decode_text(column) if form == "list[str]" and isinstance(column, Ragged) else column


def _as_columns(task: Task, place: str, result: Any, rows: int) -> dict[str, ColumnData]:
    """What a function returned, by the names of the columns. `place`: where it is written."""
    values = () if not task.writes else result if isinstance(result, tuple) else (result,)
    who = f"{place}{task.function} returned"
    if len(values) != len(task.writes):
        raise ColumnError(f"{who} {len(values)} columns; it declares {', '.join(task.writes)}")
    for name, value in zip(task.writes, values):
        if wrong := _wrong(value, rows):
            raise ColumnError(f"{who} {wrong} for column `{name}`. Return one value for each of the {rows} rows: a "
                              "Tensor, a Ragged or a list of str")
    return {name: encode_text(value) if isinstance(value, list) else _without_graph(value)
            for name, value in zip(task.writes, values)}


def _wrong(value: Any, rows: int) -> str:
    """What keeps a value from being a column of so many rows; empty if nothing does."""
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


def _place(function: Callable[..., Any]) -> str:
    """Where a function is written, as `file.py:12: `; empty if it is not Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{shown(code.co_filename)}:{code.co_firstlineno}: " if code else ""


def _taken(task: Task, seconds: float, rows: int, arguments: Mapping[str, Any],
           columns: Mapping[str, ColumnData]) -> NodeTiming:
    """With the tokens of the prompts and the responses that a task reads or writes."""
    prompt = arguments.get("prompts")
    prompts = (int(prompt.lengths.sum()) * task.repeats, _read(prompt)) if isinstance(prompt, Ragged) else (0, 0)
    answers = (*(arguments.get(name) for name in ("responses", "targets")), *columns.values())
    response = next((column for column in answers if isinstance(column, Ragged)), None)
    return NodeTiming(seconds, rows, *prompts, int(response.lengths.sum()) if response is not None else 0,
                      int(response.lengths.max()) if response is not None and len(response) else 0)


def _read(prompts: Ragged) -> int:
    """Tokens of prompts, without those that are equal to the one before: engines read them once."""
    lengths = prompts.lengths
    before = torch.cat([torch.zeros_like(lengths[:1]), lengths[:-1]])
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    unlike = prompts.values != prompts.values[torch.arange(len(rows)) - before[rows]]
    again = lengths == before
    again[:1] = False
    again[rows[unlike]] = False
    return int(lengths[~again].sum())


def _without_graph(column: Any) -> Any:
    """A column for later nodes is on the CPU, wherever it was made, and keeps nothing alive that it was made from."""
    if isinstance(column, Ragged):
        return Ragged(_without_graph(column.values), column.lengths.cpu())
    return column.detach().cpu() if isinstance(column, torch.Tensor) else column


def _versions(column: Any) -> list[int]:
    """How often each tensor of a column was written to."""
    if isinstance(column, Ragged):
        return [*_versions(column.values), *_versions(column.lengths)]
    if not isinstance(column, torch.Tensor) or column.is_inference():  # torch refuses to write into the latter
        return []
    return [column._version]
