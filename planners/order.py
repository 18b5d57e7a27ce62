"""Serialises the DAG: by depth, one node at a time, with as few model switches as depth order allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distflow.config.dag import Dag
from distflow.config.yaml_source import YamlSource
from distflow.errors import Diagnostic, Location, listing, nearest

if TYPE_CHECKING:  # its import takes 0.1 s, which help need not wait for
    from networkx import DiGraph


def graph_of(dag: Dag, source: YamlSource, writers: Mapping[str, str]) -> tuple[DiGraph, set[str], list[Diagnostic]]:
    """Return an acyclic graph from dependencies to the nodes that wait for them, the nodes with wrong ones (left out of
    it), and the mistakes. `writers`: the node that writes each column that a dependency may name by mistake."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(dag.nodes)
    mistakes, unsure = [], set()
    for name, node in dag.nodes.items():
        for index, dependency in enumerate(node.dependencies):
            if dependency in dag.nodes and dependency != name:
                graph.add_edge(dependency, name)
                continue
            where = source.location(("nodes", name, "dependencies", index))
            describe = _itself if dependency == name else _unknown
            mistakes.append(describe(dag, name, dependency, where, writers))
            unsure.add(name)
    while not nx.is_directed_acyclic_graph(graph):
        cycle = [node for node, _ in nx.find_cycle(graph.reverse(copy=False))]
        node, dependency = _edge_to_remove(dag, source, cycle)
        mistakes.append(_cycle(dag, source, cycle, node, dependency))
        graph.remove_edge(dependency, node)
        unsure.update(cycle)
    return graph, unsure, mistakes


def _itself(dag: Dag, node: str, dependency: str, where: Location, writers: Mapping[str, str]) -> Diagnostic:
    return Diagnostic(f"node `{node}` depends on itself", where, f"Instead:  {_without(dag, node, dependency)}")


def _unknown(dag: Dag, node: str, dependency: str, where: Location, writers: Mapping[str, str]) -> Diagnostic:
    others = [other for other in dag.nodes if other != node]
    meant, note = nearest(dependency, others), ""
    if dependency in writers and writers[dependency] != node:
        meant = writers[dependency]
        note = f"  (`{dependency}` is a column that it writes.)"
    hint = [f"Did you mean `{meant}`?{note}" if meant else "", listing(others, "Nodes")]
    what = f"node `{node}` depends on `{dependency}`, which is not a node"
    return Diagnostic(what, where, "\n".join(part for part in hint if part))


def _edge_to_remove(dag: Dag, source: YamlSource, cycle: list[str]) -> tuple[str, str]:
    """Return the edge (node, dependency) of a cycle that is least likely meant: one that waits for training, whose new
    weights come by themselves in the next step; else the one that points furthest down the file."""
    def suspicion(edge: tuple[str, str]) -> tuple[bool, int]:
        lines = [source.location(("nodes", end), key=True).line for end in edge]
        return dag.nodes[edge[1]].type == "MODEL_TRAIN", lines[1] - lines[0]

    return max(zip(cycle, [*cycle[1:], cycle[0]]), key=suspicion)


def _cycle(dag: Dag, source: YamlSource, cycle: list[str], node: str, dependency: str) -> Diagnostic:
    edges = list(zip(cycle, [*cycle[1:], cycle[0]]))
    lines = {name: source.location(("nodes", name), key=True).line for name in cycle}
    edges.sort(key=lambda edge: lines[edge[0]])
    digits, width = max(len(str(line)) for line in lines.values()), max(map(len, cycle))
    waits = "\n".join(f"    {lines[name]:>{digits}} |  {name:<{width}}   waits for  {other}" for name, other in edges)
    reason = "roles keep their weights between steps, so " if dag.nodes[dependency].type == "MODEL_TRAIN" else ""
    hint = (f"A DAG describes one step; {reason}`{node}` probably needs no dependency on `{dependency}`.\n"
            f"Instead:  {_without(dag, node, dependency)}")
    what = f"these nodes wait for each other, so none can run:\n\n{waits}\n"
    return Diagnostic(what, Location(source.file), hint)


def _without(dag: Dag, node: str, dependency: str) -> str:
    rest = [other for other in dag.nodes[node].dependencies if other != dependency]
    return f"{node}: {{…, dependencies: [{', '.join(rest)}]}}" if rest else f"{node}: {{…}}  without `dependencies`"


def serialize(dag: Dag, graph: DiGraph) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    """Return all nodes in the order in which every rank runs them, and the dependencies added to force it: by depth
    (DistFlow §4.2), COMPUTE nodes first, then grouped by role such that over the whole chain models change as rarely as
    depth order allows (exact, dynamic programming). Ties go to the smaller id."""
    import networkx as nx

    levels = [sorted(level) for level in nx.topological_generations(graph)]
    order: list[str] = []
    added: list[tuple[str, str]] = []
    for level, roles in zip(levels, _role_orders(dag, levels)):
        compute = [node for node in level if dag.nodes[node].type == "COMPUTE"]
        models = [node for role in roles for node in level
                  if dag.nodes[node].role == role and dag.nodes[node].type != "COMPUTE"]
        chain = compute + models
        added += zip(chain, chain[1:])
        order += chain
    return order, tuple(added)


def _role_orders(dag: Dag, levels: list[list[str]]) -> list[list[str]]:
    """Return the order of the model roles of each depth. State: the role resident at the end of a depth."""
    best: dict[str, tuple[int, tuple[tuple[str, ...], ...]]] = {"": (0, ())}
    for level in levels:
        roles = sorted({dag.nodes[node].role for node in level if dag.nodes[node].type != "COMPUTE"})
        if not roles:
            best = {last: (cost, (*path, ())) for last, (cost, path) in best.items()}
            continue
        following: dict[str, tuple[int, tuple[tuple[str, ...], ...]]] = {}
        for resident, (cost, path) in sorted(best.items()):
            for order in _with_ends(roles, resident):
                candidate = (cost + len(roles) - (order[0] == resident), (*path, order))
                if order[-1] not in following or candidate < following[order[-1]]:
                    following[order[-1]] = candidate
        best = following
    return [list(order) for order in min(best.values())[1]]


def _with_ends(roles: list[str], resident: str) -> list[tuple[str, ...]]:
    """Return one order for each possible last role, beginning with the resident one where possible."""
    orders = []
    for last in roles:
        others = [role for role in roles if role != last]
        others.sort(key=lambda role: (role != resident, role))
        orders.append((*others, last))
    return orders
