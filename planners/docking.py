"""What a step moves if its columns pass through the transfer dock (MindSpeed RL, its dataflow section, Eq. 1, 2, 4).

The paper's Eq. 2 counts the columns of one algorithm by hand: the long ones three times, prompts twice. Here the DAG
says who writes and who reads, as `transfers` has it: each column goes in once, where it is written, and out once for
each node that reads it. Warehouses split the rows by their ids, so each carries an equal part (Eq. 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distflow.schema.contract import Contract
from distflow.schema.plan import ROW, SOURCE, Column, Fans, Plan
from distflow.schema.spec import Spec
from planners.bind import bind
from planners.forms import plain_form
from planners.transfers import row_bytes


@dataclass(frozen=True)
class DockEdge:
    """Columns that a producer puts (`reader` is empty) or that a node fetches; bytes of a step's rows."""

    producer: str
    reader: str
    columns: tuple[str, ...]
    bytes_per_step: int


@dataclass(frozen=True)
class DockVolume:
    """All of a step's way through the dock. Ids, lengths and metadata are not counted; they were 1% of rows of 512
    tokens."""

    edges: tuple[DockEdge, ...]
    warehouses: int

    @property
    def bytes_in(self) -> int:
        return sum(edge.bytes_per_step for edge in self.edges if not edge.reader)

    @property
    def bytes_out(self) -> int:
        return sum(edge.bytes_per_step for edge in self.edges if edge.reader)

    @property
    def through_each_warehouse(self) -> float:
        return (self.bytes_in + self.bytes_out) / self.warehouses


def through_dock(spec: Spec, plan: Plan, warehouses: int) -> DockVolume:
    """The bytes of a step of `plan` with its rows at the run's longest, if every edge passed through the dock.

    Raises:
        ValueError: there is no warehouse.
    """
    if warehouses < 1:
        raise ValueError(f"a dock has at least one warehouse, not {warehouses}")
    return DockVolume(tuple(_edges(spec, plan)), warehouses)


def _edges(spec: Spec, plan: Plan) -> Iterator[DockEdge]:
    """What is put, in the order of the chain, each followed by those who fetch it."""
    fans, forms, (bound, *_) = Fans(plan.tasks, plan.source), {}, bind(spec)
    readers: dict[str, dict[str, list[str]]] = {}
    for task in plan.tasks:
        for column in task.reads:
            if column.name != ROW:
                forms[column.producer, column.name] = _written(fans, bound, column) or column.form
                names = readers.setdefault(column.producer, {}).setdefault(task.node, [])
                names += [column.name] if column.name not in names else []
    for producer in (SOURCE, *fans.tasks):
        rows = spec.run.data.batch * fans.times(fans.of(producer))
        size = {name: rows * row_bytes(spec, name, form) for (owner, name), form in forms.items() if owner == producer}
        if size:
            yield DockEdge(producer, "", tuple(size), sum(size.values()))
        for node, names in readers.get(producer, {}).items():
            yield DockEdge(producer, node, tuple(names), sum(size[name] for name in names))


def _written(fans: Fans, bound: dict[str, Contract], column: Column) -> str:
    """The form in which its producer says that it writes a column; empty if it does not say."""
    returns = bound[column.producer].returns if column.producer in bound else ()
    return plain_form(returns[fans.tasks[column.producer].writes.index(column.name)]) if returns else ""
