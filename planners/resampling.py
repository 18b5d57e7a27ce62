"""Plans dynamic resampling: which nodes each draw of further prompts repeats, and which wait for the last draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distflow.config.spec import Spec
from distflow.contracts.forms import Contract
from distflow.errors import Diagnostic
from distflow.plan import KEEP
from planners.settings import setting_value

if TYPE_CHECKING:
    from networkx import DiGraph

Edges = tuple[tuple[str, str], ...]


def draws_of(spec: Spec, node: str, contract: Contract) -> int:
    """Return how often a step may draw, at most, until enough prompts are left after a node; 1 where it drops none."""
    drops = KEEP in contract.marks.writes and KEEP not in spec.dag.nodes[node].writes
    value = setting_value(spec, node, contract, contract.marks.refills) if contract.marks.refills and drops else 1
    return value if type(value) is int and value > 0 else 1


def after_drawing(spec: Spec, bound: dict[str, Contract], graph: DiGraph) -> tuple[DiGraph, Edges, list[Diagnostic]]:
    """Return the graph in which all that a filter does not need comes after the step's last draw, so that it runs
    once; the dependencies (filter, node) that this adds; and the mistakes found."""
    import networkx as nx

    filters = [node for node in bound if draws_of(spec, node, bound[node]) > 1]
    if not filters:
        return graph, (), []
    mistakes = [_second(spec, filters[0], other, bound[other]) for other in filters[1:]]
    first = filters[0]
    needed = {first, *nx.ancestors(graph, first)}
    mistakes += [_trains(spec, first, node) for node in sorted(needed) if spec.dag.nodes[node].type == "MODEL_TRAIN"]
    added = tuple((first, node) for node in sorted(graph.nodes - needed)
                  if needed.issuperset(graph.predecessors(node)) and not graph.has_edge(first, node))
    ordered = graph.copy()
    ordered.add_edges_from(added)
    return ordered, added, mistakes


def _second(spec: Spec, first: str, node: str, contract: Contract) -> Diagnostic:
    what = f"nodes `{first}` and `{node}` both draw prompts again, but a step has one place where it does"
    hint = f"Let `{node}` only drop rows:  with: {{{contract.marks.refills}: 1}}"
    return Diagnostic(what, spec.dag_source.location(("nodes", node), key=True), hint)


def _trains(spec: Spec, first: str, node: str) -> Diagnostic:
    role = spec.dag.nodes[node].role
    what = (f"node `{first}` draws prompts again and waits for node `{node}`, which trains role `{role}`, once for "
            "each draw")
    return Diagnostic(what, spec.dag_source.location(("nodes", node), key=True),
                      f"Let `{node}` depend on `{first}`, not the other way round.")
