"""Traces columns through the DAG: the writer of each column read, its form, and the rows that each node works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distflow.config.spec import Spec
from distflow.contracts.forms import ENGINE_TYPES, OTHER_NAMES, Contract, Read, plain_form
from distflow.contracts.nodes import token_columns
from distflow.contracts.rewards import TEXTS
from distflow.errors import Diagnostic, Location, did_you_mean, nearest
from distflow.plan import CUT_THOUGHTS, FINISHED, ROUTED_EXPERTS, ROW, SOURCE, Column
from planners.settings import repeats_of, setting_value

if TYPE_CHECKING:
    from networkx import DiGraph

KNOWN = {"Tensor", "Ragged", "list[str]"}


def fits(given: str, wanted: str) -> bool:
    """Return whether a column of the form `given` can be passed as `wanted`. Unknown forms fit."""
    forms = set(wanted.split(" | ")) - {"None"}
    return not given or given not in KNOWN or not forms <= KNOWN or given in forms


SOURCE_FORMS = {"prompts": "Ragged", "targets": "Ragged", "questions": "list[str]", "answers": "list[str]",
                "group": "Tensor", ROW: "Tensor"}
"""Columns that every dataset gives: tokens of the question and of the answer, both as text, and the prompt's id.
`row` is each row's own id; it is there wherever rows are."""

_REPLACEABLE = {"prompts"}
"""Columns of the dataset that a function may replace for the nodes behind it, where it repeats rows: it samples after
prompts of its own."""

_OF_RESPONSES = {"responses", "completions", "response_mask", "versions", "importance", "values", "returns",
                 "token_rewards", FINISHED, CUT_THOUGHTS, ROUTED_EXPERTS}
"""Parameters about a response's tokens, as are `…_logprobs` and `…_entropies`. All that a node reads must be of the
same responses."""

_BESIDE = {CUT_THOUGHTS: "completions"}
"""Parameter → the column that its own one goes with: `completions.cut_thoughts` is written, renamed and read with
`completions`."""

SHOWN = ("completions", "rewards", "turns")
"""Columns that samples.jsonl shows, whether or not a node reads them."""


@dataclass(frozen=True)
class NodeColumns:
    """Columns that a node reads and writes. `fan`: the nodes that repeated its input rows, outermost first."""

    reads: tuple[Column, ...]
    writes: tuple[str, ...]
    fan: tuple[str, ...]
    out_fan: tuple[str, ...]
    repeats: int
    forms: dict[str, str]
    """Form of each column read, as its writer declares it, else as the reader does."""


def written(spec: Spec, bound: dict[str, Contract]) -> dict[str, tuple[str, ...]]:
    """Return the columns that each bound node writes."""
    result = {}
    for node, contract in bound.items():
        settings = spec.dag.nodes[node]
        names = [name.replace("{role}", settings.role) for name in contract.marks.writes]
        result[node] = tuple(_renamed(settings.writes, name) for name in names
                             if name != ROUTED_EXPERTS or _replays(spec, settings.role))
    return result


def _renamed(names: dict[str, str], column: str) -> str:
    """Return a column's name in the DAG. `X.y` goes with `X`, unless it is renamed itself."""
    whole, *beside = column.split(".")
    return names.get(column) or ".".join([names.get(whole, whole), *beside])


def _column_read(names: dict[str, str], parameter: str) -> str:
    return _renamed(names, f"{_BESIDE[parameter]}.{parameter}" if parameter in _BESIDE else parameter)


def _replays(spec: Spec, role: str) -> bool:
    settings = spec.settings_of(role) if role in spec.dag.roles else None
    return settings is not None and settings.generation.routing_replay


def trace(spec: Spec, graph: DiGraph, order: list[str], bound: dict[str, Contract],
          unsure: set[str]) -> tuple[dict[str, NodeColumns], list[Diagnostic]]:
    """Return the columns of each bound node, in order, and the mistakes found.

    Behind a node of `unsure` (it, its function or its dependencies were refused) no column is reported as missing:
    it may be there once that mistake is fixed.
    """
    tracer = _Tracer(spec, graph, bound, unsure)
    flows = {node: tracer.visit(node) for node in order if node in bound}
    tracer.check_writers()
    return flows, tracer.mistakes


class _Tracer:
    def __init__(self, spec: Spec, graph: DiGraph, bound: dict[str, Contract], unsure: set[str]):
        import networkx as nx

        self.spec, self.bound = spec, bound
        self.closure = nx.transitive_closure_dag(graph)
        """Has an edge from each node to every node that waits for it, directly or not."""
        self.mistakes: list[Diagnostic] = []
        self.written = written(spec, bound)
        self.writers: dict[str, list[str]] = {}
        for node, columns in self.written.items():
            for column in dict.fromkeys(columns):
                self.writers.setdefault(column, []).append(node)
        self.given = {**dict.fromkeys(spec.run.data.columns, "list[str]"),
                      **dict.fromkeys(token_columns(spec), "Ragged"), **SOURCE_FORMS}
        if spec.run.data.images:
            self.given["images"] = "Ragged"
        if spec.run.data.targets == "all":
            self.given["target_mask"] = "Ragged"
        self._check_fields()
        self.fans: dict[str, tuple[str, ...]] = {SOURCE: ()}
        self.prompts: dict[str, str | None] = {}
        """Whose `prompts` stand before the responses that a node's columns are of; None: it has none of responses."""
        misnamed = [node for node in bound if not (self._check_renames(node) and self._check_names(node))]
        self.unsure = {*unsure, *misnamed}.union(*map(self.closure.successors, [*unsure, *misnamed]))

    def visit(self, node: str) -> NodeColumns:
        contract, settings = self.bound[node], self.spec.dag.nodes[node]
        reads, forms, own = [], {}, None
        for read in contract.reads:
            column = _column_read(settings.reads, read.name)
            producer = self._producer(node, read, column)
            if producer and read.name == ROUTED_EXPERTS and self._role(producer) != settings.role:
                continue  # the experts of one model mean nothing to another
            if producer and not self._of_others(node, read, own, producer):
                given = self._form(column, producer)
                self._check_form(node, column, producer, given, read)
                forms[column] = given or plain_form(read.form)
                reads.append(Column(read.name, column, producer, plain_form(read.form)))
                own = own or (reads[-1] if _is_of_responses(read.name) else None)
        self._check_requirements(node, {column.parameter for column in reads})
        self._check_images(node, {column.name for column in reads})
        self.prompts[node] = self._prompts(node, reads)
        fan = self._fan(node, reads)
        self.fans[node] = (*fan, node) if contract.marks.repeats else fan
        repeats = repeats_of(self.spec, node, contract)
        return NodeColumns(tuple(reads), self.written[node], fan, self.fans[node], repeats, forms)

    def check_writers(self) -> None:
        for column, nodes in self.writers.items():
            if not self._is_read(column):
                continue  # such as `keep`, by which each writer drops rows: whose it is matters to no node
            for index, first in enumerate(nodes):
                for second in nodes[index + 1 :]:
                    ordered = self.closure.has_edge(first, second) or self.closure.has_edge(second, first)
                    if not ordered and not {first, second} & self.unsure:
                        self._unordered(column, first, second)

    def _is_read(self, column: str) -> bool:
        return column in SHOWN or any(_column_read(self.spec.dag.nodes[node].reads, read.name) == column
                                      for node, contract in self.bound.items() for read in contract.reads)

    def _unordered(self, column: str, first: str, second: str) -> None:
        spots = tuple(self._spot(node) for node in (first, second))
        what = f"nodes `{first}` and `{second}` both write column `{column}`, and neither waits for the other"
        hint = f"{self._rename(second, column)}   or let one depend on the other."
        self.mistakes.append(Diagnostic(what, spots[1], hint, spots))

    def _rename(self, node: str, column: str) -> str:
        return f"Rename it:  {node}: {{…, writes: {{{column}: {node}_{column}}}}}"

    def _producer(self, node: str, read: Read, column: str) -> str | None:
        """Return the last of the upstream nodes that write a column, else the dataset."""
        writers = [writer for writer in self.writers.get(column, ()) if writer != node]
        upstream = [writer for writer in writers if self.closure.has_edge(writer, node)]
        if upstream:
            return max(upstream, key=self.closure.in_degree)
        if column in self.given:
            return SOURCE
        earlier = [writer for writer in writers if not self.closure.has_edge(node, writer)]
        if node not in self.unsure and (earlier or not self._is_optional(node, read)):
            self._missing_column(node, read, column, earlier, writers)
        return None

    def _of_others(self, node: str, read: Read, own: Column | None, producer: str) -> bool:
        """Return whether an optional column is there, but of other responses than `own`: of an earlier turn, say."""
        if own is None or not _is_of_responses(read.name) or node in self.unsure:
            return False
        ours, theirs = self.fans.get(own.producer, ()), self.fans.get(producer, ())
        if ours == theirs:
            return False
        if self._is_optional(node, read):
            return True
        shorter, longer = sorted((ours, theirs), key=len)
        if longer[: len(shorter)] == shorter:  # else `_fan` reports it
            self._mixed(node, read, own, producer)
        return False

    def _mixed(self, node: str, read: Read, own: Column, producer: str) -> None:
        column = _column_read(self.spec.dag.nodes[node].reads, read.name)
        what = (f"node `{node}` reads column `{own.name}` of node `{own.producer}` and column `{column}` of node "
                f"`{producer}`, which are not of the same responses")
        same = [name for name, mark in zip(self.written.get(own.producer, ()), self._marked(own.producer))
                if mark == read.name]
        hint = f"Instead:  {node}: {{…, reads: {{{read.name}: {same[0]}}}}}" if same else \
            f"Say under `reads:` which column of the responses of `{own.producer}` is meant."
        self.mistakes.append(Diagnostic(what, self._spot(node), hint))

    def _marked(self, node: str) -> tuple[str, ...]:
        return self.bound[node].marks.writes if node in self.bound else ()

    def _is_optional(self, node: str, read: Read) -> bool:
        return read.optional and read.name not in self.spec.dag.nodes[node].reads

    def _missing_column(self, node: str, read: Read, column: str, earlier: list[str], writers: list[str]) -> None:
        settings, function, where = self.spec.dag.nodes[node], self.bound[node].name, self._spot(node)
        if earlier:
            where = self.spec.dag_source.location(("nodes", node, "dependencies"))
            dependencies = ", ".join([*settings.dependencies, earlier[0]])
            what = f"node `{node}` reads column `{column}`, which node `{earlier[0]}` writes, but does not wait for it"
            hint = f"Instead:  {node}: {{…, dependencies: [{dependencies}]}}"
        elif writers:
            what = (f"node `{node}` reads column `{column}`, which only node `{writers[0]}` writes, and that waits for "
                    f"`{node}`")
            hint = f"Another node before `{node}` must write it, or `{writers[0]}` must not wait for `{node}`."
        else:
            reader = read.reader or f"function `{function}`"
            what = f"node `{node}`: {reader} reads column `{column}`, which no node writes"
            known = sorted({name.rpartition(".")[2] for name in (*self.writers, *self.given)})  # as parameters say it
            field = next((key for key in ("answer", "question")
                          if read.reader and getattr(self.spec.run.data, key) == column), "")
            meant = f"{field}s" if field else nearest(column, known)
            other = OTHER_NAMES.get(column, "") if read.reader else ""
            hint = f"`data.{field}` is `{column}`, which a parameter `{field}` reads: rename it." if field else \
                f"What TRL and verl call so is `{other}` here." if other else \
                did_you_mean(column, read.called(known), "Columns")
            if field or not read.reader or meant in ("", *self.spec.run.data.columns):  # else a parameter is misspelt
                hint += f"\nTo read another one:  {node}: {{…, reads: {{{read.name}: {meant or 'COLUMN'}}}}}"
            if plain_form(read.form) == "list[str]" or read.reader:
                fields = ", ".join([*self.spec.run.data.columns, column])
                hint += f"\nIf it is a field of the data, write in the run file:  data: {{…, columns: [{fields}]}}"
        self.mistakes.append(Diagnostic(what, where, hint))

    def _check_fields(self) -> None:
        for index, name in enumerate(self.spec.run.data.columns):
            if name in SOURCE_FORMS or (name == "images" and self.spec.run.data.images):
                what = f"`data.columns` names `{name}`, but every dataset gives a column of that name"
                hint = f"Take it out, or give the field another name in the data. Taken: {', '.join(SOURCE_FORMS)}."
                where = self.spec.run_source.location(("data", "columns", index))
                self.mistakes.append(Diagnostic(what, where, hint))

    def _role(self, producer: str) -> str:
        return "" if producer == SOURCE else self.spec.dag.nodes[producer].role

    def _form(self, column: str, producer: str) -> str:
        """Return the form in which a column is written; "" if its writer declares none."""
        if producer == SOURCE:
            return self.given[column]
        forms = self.bound[producer].returns
        return plain_form(forms[self.written[producer].index(column)]) if forms else ""

    def _check_form(self, node: str, column: str, producer: str, given: str, read: Read) -> None:
        is_field = producer == SOURCE and column in self.spec.run.data.columns
        wanted = read.form or ("list[str]" if is_field and read.reader else "")
        if not fits(given, wanted):
            writer = "the dataset" if producer == SOURCE else f"node `{producer}`"
            what = (f"node `{node}`: {read.reader or f'function `{self.bound[node].name}`'} wants column `{column}` as "
                    f"{plain_form(wanted)}, but {writer} gives {given}")
            hint = "Ragged: one row of values per sample. Tensor: one value per sample. list[str]: text."
            if is_field and given == "list[str]" and read.reader:
                hint = TEXTS
            elif is_field and given == "Ragged":
                hint += f"\nAnother node reads field `{column}` as tokens, and a field has one form. Read it as " \
                        "Ragged too, or the texts of that node's `completions`."
            self.mistakes.append(Diagnostic(what, self._spot(node), hint))

    def _check_requirements(self, node: str, read: set[str]) -> None:
        contract = self.bound[node]
        for setting, column in contract.marks.requires.items():
            if node not in self.unsure and column not in read and setting_value(self.spec, node, contract, setting):
                what = f"node `{node}`: setting `{setting}` needs column `{column}`, which no node before it writes"
                hint = f"Add a node that writes it to its dependencies, or set  {setting}: 0"
                path = ("nodes", node, "with", setting)
                self.mistakes.append(Diagnostic(what, self.spec.dag_source.location(path, key=True), hint))

    def _check_images(self, node: str, read: set[str]) -> None:
        """Check that a model that reads prompts with image placeholders reads the images too."""
        contract = self.bound[node]
        blind = "prompts" in read and "images" not in read
        if self.spec.run.data.images and contract.marks.type in ENGINE_TYPES and blind:
            function = contract.name
            what = f"node `{node}`: function `{function}` reads prompts without the images that `data.images` gives"
            hint = f"Take `data.images` out, or let the function read them:  def {function}(…, images: Ragged)"
            self.mistakes.append(Diagnostic(what, self._spot(node), hint))

    def _check_renames(self, node: str) -> bool:
        """Check that a node renames what it reads and writes. What goes with another column has no name of its own."""
        contract, settings = self.bound[node], self.spec.dag.nodes[node]
        known = {"reads": [read.name for read in contract.reads],
                 "writes": [name.replace("{role}", settings.role) for name in contract.marks.writes]}
        right = True
        for kind, names in known.items():
            for name in getattr(settings, kind):
                if name not in names and _BESIDE.get(name) not in names:
                    what = f"node `{node}`: function `{contract.name}` {kind} no `{name}`"
                    where = self.spec.dag_source.location(("nodes", node, kind, name), key=True)
                    self.mistakes.append(Diagnostic(what, where, did_you_mean(name, names, f"It {kind}")))
                    right = False
        return right

    def _check_names(self, node: str) -> bool:
        right, names, marks = True, self.written[node], self.bound[node].marks
        given = {column for column in names if column in self.given
                 and not (column in _REPLACEABLE and column in marks.writes and marks.repeats)}
        for column in dict.fromkeys(names):
            what, hint = f"node `{node}` writes column `{column}` twice", "Give each another name under `writes:`."
            if column in given:
                what = f"node `{node}` writes column `{column}`, which comes from the dataset"
                hint = self._rename(node, column)
            if column in given or names.count(column) > 1:
                self.mistakes.append(Diagnostic(what, self._spot(node), hint))
                right = False
        return right

    def _prompts(self, node: str, reads: list[Column]) -> str | None:
        """Return whose prompts a node's responses follow. Responses behind the prompts of others are a mistake."""
        given = next((column for column in reads if column.parameter == "prompts"), None)
        follow = {column.name: origin for column in reads if _is_of_responses(column.parameter)
                  and (origin := self.prompts.get(column.producer))}
        wrong = next((name for name, origin in follow.items() if given and origin != given.producer), None)
        if given and wrong and node not in self.unsure:
            self._other_prompts(node, given, wrong, follow[wrong])
        if "prompts" in self._marked(node):
            return node
        return given.producer if given else next(iter(follow.values()), None)

    def _other_prompts(self, node: str, given: Column, responses: str, origin: str) -> None:
        writer = "the dataset" if given.producer == SOURCE else f"node `{given.producer}`"
        what = (f"node `{node}` reads `{given.name}` of {writer} and column `{responses}`, whose tokens were sampled "
                f"after the prompts of {'the dataset' if origin == SOURCE else f'node `{origin}`'}")
        hint = f"Keep the dataset's:  {given.producer}: {{…, writes: {{prompts: {given.producer}_prompts}}}}"
        if origin != SOURCE:
            name = self.written[origin][self._marked(origin).index("prompts")]
            hint = f"Instead:  {node}: {{…, reads: {{prompts: {name}}}}}"
        self.mistakes.append(Diagnostic(what, self._spot(node), hint))

    def _fan(self, node: str, reads: list[Column]) -> tuple[str, ...]:
        fan = self.fans[SOURCE]
        for column in reads:
            other = self.fans.get(column.producer, ())
            shorter, longer = sorted((fan, other), key=len)
            if longer[: len(shorter)] != shorter:
                what = (f"node `{node}` reads columns of `{shorter[-1]}` and of `{longer[-1]}`, which repeat the same "
                        "rows independently, so that their rows do not match")
                self.mistakes.append(Diagnostic(what, self._spot(node), "Let one depend on the other's output."))
            else:
                fan = longer
        return fan

    def _spot(self, node: str) -> Location:
        return self.spec.dag_source.location(("nodes", node), key=True)


def _is_of_responses(parameter: str) -> bool:
    return parameter in _OF_RESPONSES or parameter.endswith(("_logprobs", "_entropies"))
