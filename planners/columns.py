"""Who writes what each node reads, and the rows that each node works on."""

from __future__ import annotations

import re
from dataclasses import dataclass

import networkx as nx

from distflow.schema.contract import Contract
from distflow.schema.errors import Mistake, did_you_mean
from distflow.schema.plan import ROW, SOURCE, Column
from distflow.schema.spec import Spec
from planners.settings import setting_value

SOURCE_FORMS = {"prompts": "Ragged", "targets": "Ragged", "questions": "list[str]", "answers": "list[str]",
                "group": "Tensor", ROW: "Tensor"}
"""Columns that every dataset gives: tokens of the question and of the answer, both as text, and the prompt's id.
`row` is each row's own id; it is there wherever rows are."""


@dataclass(frozen=True)
class Flow:
    """What one node reads and writes. `fan`: the nodes that repeated its input rows, outermost first."""

    reads: tuple[Column, ...]
    writes: tuple[str, ...]
    fan: tuple[str, ...]
    out_fan: tuple[str, ...]
    repeats: int


def trace(spec: Spec, graph: nx.DiGraph, order: list[str],
          bound: dict[str, Contract]) -> tuple[dict[str, Flow], list[Mistake]]:
    """The flow of each bound node, in order."""
    tracer = _Tracer(spec, graph, bound)
    flows = {}
    for node in order:
        if node in bound:
            flows[node] = tracer.visit(node)
    tracer.check_writers()
    return flows, tracer.mistakes


class _Tracer:
    def __init__(self, spec: Spec, graph: nx.DiGraph, bound: dict[str, Contract]):
        self.spec, self.bound = spec, bound
        self.mistakes: list[Mistake] = []
        self.ancestors = {node: nx.ancestors(graph, node) for node in graph}
        self.written = {node: self._writes(node) for node in bound}
        self.writers: dict[str, list[str]] = {}
        for node, columns in self.written.items():
            for column in columns:
                self.writers.setdefault(column, []).append(node)
        self.forms = {**SOURCE_FORMS, **dict.fromkeys(spec.run.data.columns, "list[str]")}
        self.fans: dict[str, tuple[str, ...]] = {SOURCE: ()}

    def visit(self, node: str) -> Flow:
        contract, settings = self.bound[node], self.spec.dag.nodes[node]
        self._check_renames(node)
        reads = []
        for read in contract.reads:
            column = settings.reads.get(read.name, read.name)
            producer = self._producer(node, column, read.optional and read.name not in settings.reads)
            if producer:
                self._check_form(node, column, producer, read.form)
                reads.append(Column(read.name, column, producer, _plain_form(read.form)))
        self._check_requirements(node, {column.parameter for column in reads})
        fan = self._fan(node, reads)
        repeats = 1
        if contract.marks.repeats:
            value = setting_value(self.spec, node, contract, contract.marks.repeats)
            repeats = value if isinstance(value, int) and value > 0 else 1
        self.fans[node] = (*fan, node) if contract.marks.repeats else fan
        return Flow(tuple(reads), self.written[node], fan, self.fans[node], repeats)

    def check_writers(self) -> None:
        """Two nodes that write one column must run in a known order, and not a column of the dataset."""
        for column, nodes in self.writers.items():
            unordered = [(first, second) for index, first in enumerate(nodes) for second in nodes[index + 1 :]
                         if first not in self.ancestors[second] and second not in self.ancestors[first]]
            for first, second in unordered:
                spots = tuple(self._spot(node) for node in (first, second))
                what = f"nodes `{first}` and `{second}` both write column `{column}`, and neither waits for the other"
                hint = f"Rename one:  writes: {{{column}: {second}_{column}}}   or add a dependency between them."
                self.mistakes.append(Mistake(what, spots[1], hint, spots))
            if column in self.forms:
                what = f"node `{nodes[0]}` writes column `{column}`, which comes from the dataset"
                self.mistakes.append(Mistake(what, self._spot(nodes[0]), f"Rename it:  writes: {{{column}: …}}"))

    def _writes(self, node: str) -> tuple[str, ...]:
        settings = self.spec.dag.nodes[node]
        names = [name.format(role=settings.role) for name in self.bound[node].marks.writes]
        return tuple(settings.writes.get(name, name) for name in names)

    def _producer(self, node: str, column: str, optional: bool) -> str | None:
        upstream = [writer for writer in self.writers.get(column, ()) if writer in self.ancestors[node]]
        if upstream:
            return max(upstream, key=lambda writer: len(self.ancestors[writer]))
        if column in self.forms:
            return SOURCE
        others = [writer for writer in self.writers.get(column, ()) if writer != node]
        if not optional or others:
            self._missing_column(node, column, others)
        return None

    def _missing_column(self, node: str, column: str, writers: list[str]) -> None:
        where = self._spot(node)
        function = self.bound[node].name
        if writers:
            dependencies = ", ".join([*self.spec.dag.nodes[node].dependencies, writers[0]])
            what = f"node `{node}` reads column `{column}`, which node `{writers[0]}` writes, but does not wait for it"
            hint = f"Instead:  {node}: {{…, dependencies: [{dependencies}]}}"
        else:
            what = f"node `{node}`: function `{function}` reads column `{column}`, which no node before it writes"
            hint = did_you_mean(column, sorted({*self.writers, *self.forms}))
        self.mistakes.append(Mistake(what, where, hint))

    def _check_form(self, node: str, column: str, producer: str, wanted: str) -> None:
        if producer == SOURCE:
            given = self.forms[column]
        else:
            forms = self.bound[producer].returns
            given = _plain_form(forms[self.written[producer].index(column)]) if forms else ""
        accepted = {_plain_form(part) for part in wanted.split("|")} - {"None"}
        if wanted and given and accepted <= {"Tensor", "Ragged", "list[str]"} and given not in accepted:
            what = (f"node `{node}`: function `{self.bound[node].name}` wants column `{column}` as {wanted}, but "
                    f"{'the dataset' if producer == SOURCE else f'node `{producer}`'} gives {given}")
            self.mistakes.append(Mistake(what, self._spot(node)))

    def _check_requirements(self, node: str, read: set[str]) -> None:
        contract = self.bound[node]
        for setting, column in contract.marks.requires.items():
            if setting_value(self.spec, node, contract, setting) and column not in read:
                what = f"node `{node}`: setting `{setting}` needs column `{column}`, which no node before it writes"
                hint = f"Add the node that writes it to the dependencies, or set  {setting}: 0"
                path = ("nodes", node, "with", setting)
                self.mistakes.append(Mistake(what, self.spec.dag_source.spot(path, key=True), hint))

    def _check_renames(self, node: str) -> None:
        contract, settings = self.bound[node], self.spec.dag.nodes[node]
        known = {"reads": [read.name for read in contract.reads],
                 "writes": [name.format(role=settings.role) for name in contract.marks.writes]}
        for kind, names in known.items():
            for name in getattr(settings, kind):
                if name not in names:
                    what = f"node `{node}`: function `{contract.name}` {kind} no `{name}`"
                    where = self.spec.dag_source.spot(("nodes", node, kind, name), key=True)
                    self.mistakes.append(Mistake(what, where, did_you_mean(name, names)))

    def _fan(self, node: str, reads: list[Column]) -> tuple[str, ...]:
        fan: tuple[str, ...] = ()
        for column in reads:
            other = self.fans.get(column.producer, ())
            shorter, longer = sorted((fan, other), key=len)
            if longer[: len(shorter)] != shorter:
                what = (f"node `{node}` reads columns of `{shorter[-1]}` and of `{longer[-1]}`, which repeat the same "
                        "rows independently, so that their rows do not match")
                self.mistakes.append(Mistake(what, self._spot(node), "Let one depend on the other's output."))
            fan = longer
        return fan

    def _spot(self, node: str):
        return self.spec.dag_source.spot(("nodes", node), key=True)


def _plain_form(annotation: str) -> str:
    """`torch.Tensor` and `Ragged | None` as `Tensor` and `Ragged`."""
    text = re.sub(r"\s*\|\s*None|None\s*\|\s*", "", annotation).strip()
    return text.removeprefix("torch.").removeprefix("distflow.")
