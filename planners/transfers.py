"""Derives the transfers of each task, and estimates the bytes that a step moves with or without the dock.

Columns go by reference where the layout stays and by all-to-all where it changes. Their bytes are estimated as in
MindSpeed RL (§3.1, Eq. 2), column by column: rows × the longest row × the bytes of an element, for prompts and
responses at the run's longest. `through_dock` takes writers and readers from the DAG: each column goes in once, where
it is written, and out once for each node that reads it. Storage shards (the paper's warehouses) divide the rows by
their ids, so each carries an equal part (Eq. 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from distflow.config.spec import Spec
from distflow.contracts.forms import GROUP, Contract, plain_form
from distflow.plan import REWARD_PARTS, ROUTED_EXPERTS, ROW, SOURCE, Column, Layout, Plan, RowLineage, Task, Transfer
from planners.check import bind
from planners.columns import NodeColumns


@dataclass(frozen=True)
class DockEdge:
    """Columns that a producer puts (`reader` is empty) or that a node fetches; bytes of a step's rows."""

    producer: str
    reader: str
    columns: tuple[str, ...]
    bytes_per_step: int


@dataclass(frozen=True)
class DockVolume:
    edges: tuple[DockEdge, ...]
    shards: int

    @property
    def bytes_in(self) -> int:
        return sum(edge.bytes_per_step for edge in self.edges if not edge.reader)

    @property
    def bytes_out(self) -> int:
        return sum(edge.bytes_per_step for edge in self.edges if edge.reader)

    @property
    def bytes_through_each_shard(self) -> float:
        return (self.bytes_in + self.bytes_out) / self.shards


def through_dock(spec: Spec, plan: Plan, shards: int) -> DockVolume:
    """Return the bytes of a step of `plan` with its rows at the run's longest, if every edge passed through the dock.
    Raises ValueError: there is no storage shard."""
    if shards < 1:
        raise ValueError(f"a dock has at least one storage shard, not {shards}")
    return DockVolume(tuple(_edges(spec, plan)), shards)


def _edges(spec: Spec, plan: Plan) -> Iterator[DockEdge]:
    lineage, forms, (bound, *_) = RowLineage(plan.tasks, plan.source), {}, bind(spec)
    readers: dict[str, dict[str, list[str]]] = {}
    for task in plan.tasks:
        for column in task.reads:
            if column.name != ROW:
                forms[column.producer, column.name] = _written(lineage, bound, column) or column.form
                names = readers.setdefault(column.producer, {}).setdefault(task.node, [])
                names += [column.name] if column.name not in names else []
    for producer in (SOURCE, *lineage.tasks):
        rows = spec.run.data.batch * lineage.times(lineage.of(producer))
        size = {name: rows * row_bytes(spec, name, form) for (owner, name), form in forms.items() if owner == producer}
        if size:
            yield DockEdge(producer, "", tuple(size), sum(size.values()))
        for node, names in readers.get(producer, {}).items():
            yield DockEdge(producer, node, tuple(names), sum(size[name] for name in names))


def _written(lineage: RowLineage, bound: dict[str, Contract], column: Column) -> str:
    returns = bound[column.producer].returns if column.producer in bound else ()
    return plain_form(returns[lineage.tasks[column.producer].writes.index(column.name)]) if returns else ""


_TOKEN, _NUMBER, _CHARACTERS, _PIXEL = 8, 4, 4, 3
"""Bytes of a token's id, bytes of a float, bytes of the text of one token, bytes of a pixel."""
_OF_TOKENS = {"prompts", "responses", "targets", GROUP}
_LIMITED = {"prompts": "max_prompt_tokens", "questions": "max_prompt_tokens",
            "targets": "max_target_tokens", "target_mask": "max_target_tokens", "answers": "max_target_tokens"}
_PARTS = 64
"""Bytes of the parts of a reward, as text."""

Moved = set[tuple[str, str, Layout]]
"""(producer, column, layout): what earlier tasks of the chain have moved. The databuffer moves nothing twice."""


def derive(spec: Spec, node: str, flows: dict[str, NodeColumns], layouts: dict[str, Layout], source: Layout,
           moved: Moved) -> tuple[Transfer, ...]:
    """Return one transfer per producer that `node` reads from, in the order of its parameters; updates `moved`."""
    edges: dict[str, list[str]] = {}
    for column in flows[node].reads:
        names = edges.setdefault(column.producer, []) if column.name != ROW else []
        if column.name not in names:
            names.append(column.name)
    edges = edges or {SOURCE: [GROUP]}  # a node that reads nothing works on the rows of the dataset
    result, target = [], layouts[node]
    for producer, names in edges.items():
        origin = source if producer == SOURCE else layouts[producer]
        if origin == target:
            result.append(Transfer(producer, tuple(names), "local"))
            continue
        new = [name for name in names if (producer, name, target) not in moved]
        moved.update((producer, name, target) for name in new)
        rows = spec.run.data.batch
        for repeater in () if producer == SOURCE else flows[producer].out_fan:
            rows *= flows[repeater].repeats
        size = rows * sum(row_bytes(spec, name, flows[node].forms.get(name, "Tensor")) for name in new)
        result.append(Transfer(producer, tuple(names), "all_to_all", size))
    return tuple(result)


def replicated(tasks: tuple[Task, ...], source: Layout) -> tuple[Task, ...]:
    """Return the tasks with the bytes of rows of which several shares have samples."""
    lineage, result = RowLineage(tasks, source), []
    for task in tasks:
        group, arriving = lineage.unit(task.layout), []
        for move in task.transfers:
            copies = min(task.layout.dp, lineage.times(group[len(lineage.of(move.producer)) :])) if group else 1
            origin = source if move.producer == SOURCE else lineage.tasks[move.producer].layout
            size = move.bytes_per_step * copies
            busiest = max(bytes_through_ranks(size, origin, task.layout).values())
            arriving.append(replace(move, bytes_per_step=size, bytes_of_busiest_rank=round(busiest)) if size else move)
        result.append(replace(task, transfers=tuple(arriving)))
    return tuple(result)


def bytes_through_ranks(size: int, origin: Layout, target: Layout) -> dict[int, float]:
    """Return how many of `size` bytes that change their layout leave or reach each rank, when all rows are alike."""
    ranks = range(min(origin.first, target.first), max(origin.last, target.last) + 1)
    has, gets = ({rank: _part(layout, rank) for rank in ranks} for layout in (origin, target))
    return {rank: size * (has[rank] + gets[rank] - 2 * has[rank] * gets[rank]) for rank in ranks}


def _part(layout: Layout, rank: int) -> float:
    share = layout.share(rank)
    return 0.0 if share is None or not layout.leads(rank) else float(layout.part(share))


def routing_bytes(spec: Spec, role: str) -> int:
    """Return the bytes of the experts that a role chooses for the tokens of its longest row, if they are recorded."""
    settings, shape = spec.settings_of(role) if role in spec.dag.roles else None, spec.shape_of(role)
    if settings is None or shape is None or not settings.generation.routing_replay:
        return 0
    tokens = spec.run.data.max_prompt_tokens + settings.generation.max_new_tokens
    return tokens * shape.layers * shape.experts_per_token * (1 if shape.experts < 256 else 2)


def row_bytes(spec: Spec, name: str, form: str) -> int:
    """Return the bytes of a row of a column at the run's longest."""
    if form == "Tensor":
        return _TOKEN if name in _OF_TOKENS else _NUMBER
    if name == REWARD_PARTS:
        return _PARTS
    data = spec.run.data
    if name == "images":  # a prompt that is nothing else
        token = max((shape.token_pixels for shape in spec.shapes.values()), default=0)
        return data.max_prompt_tokens * token * _PIXEL
    if name == ROUTED_EXPERTS:
        return max((routing_bytes(spec, role) for role in spec.run.roles), default=0)
    longest = max((role.generation.max_new_tokens for role in spec.run.roles.values()), default=0)
    length = getattr(data, _LIMITED[name]) if name in _LIMITED else data.max_target_tokens if name in data.columns \
        else max(longest, 1)
    of_tokens = name in _OF_TOKENS or name in data.columns
    return length * (_CHARACTERS if form == "list[str]" else _TOKEN if of_tokens else _NUMBER)
