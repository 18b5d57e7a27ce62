"""The order in which nodes run: by depth, one at a time, with as few model switches as depth order allows."""

from __future__ import annotations

import networkx as nx

from distflow.schema.dag import Dag
from distflow.schema.errors import InvalidInput, Mistake, did_you_mean
from distflow.schema.source import Source


def graph_of(dag: Dag, source: Source) -> tuple[nx.DiGraph, list[Mistake]]:
    """The dependencies as a graph (edges from earlier to later), without those that name no node.

    Raises:
        InvalidInput: nodes wait for each other in a circle; nothing can be planned then.
    """
    graph, mistakes = nx.DiGraph(), []
    graph.add_nodes_from(dag.nodes)
    for name, node in dag.nodes.items():
        for index, dependency in enumerate(node.dependencies):
            if dependency in dag.nodes:
                graph.add_edge(dependency, name)
                continue
            where = source.spot(("nodes", name, "dependencies", index))
            what = f"node `{name}` depends on `{dependency}`, which is not a node"
            mistakes.append(Mistake(what, where, did_you_mean(dependency, [n for n in dag.nodes if n != name])))
    _refuse_cycle(graph, source, mistakes)
    return graph, mistakes


def _refuse_cycle(graph: nx.DiGraph, source: Source, mistakes: list[Mistake]) -> None:
    if nx.is_directed_acyclic_graph(graph):
        return
    cycle = [node for node, _ in nx.find_cycle(graph)]
    first = cycle.index(min(cycle))
    cycle = cycle[first:] + cycle[:first]
    waits = "\n".join(f"    {source.spot(('nodes', node), key=True).line} |  {node}   waits for  {before}"
                      for node, before in zip(cycle, cycle[-1:] + cycle[:-1]))
    hint = ("A DAG describes one step; roles keep their weights between steps, so one of these dependencies is "
            f"probably not needed.\nInstead: take `{cycle[-1]}` out of the dependencies of `{cycle[0]}`.")
    what = f"{source.file}: these nodes wait for each other, so none can run:\n\n{waits}\n"
    raise InvalidInput([*mistakes, Mistake(what, None, hint)])


def serialize(dag: Dag, graph: nx.DiGraph) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    """All nodes in the order in which every rank runs them, and the dependencies added to force it.

    Depth order as in DistFlow §4.2. Within a depth, COMPUTE nodes need no model and go first; the others are
    grouped by role, and the groups are ordered so that over the whole chain models change as rarely as depth
    order allows (exact: dynamic programming over the role that ends each depth). Ties go to the smaller id.
    """
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
    """For each depth, the order of its model roles. State: the role resident at the end of a depth."""
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
    """One order for each possible last role, beginning with the resident one wherever it can."""
    orders = []
    for last in roles:
        others = [role for role in roles if role != last]
        others.sort(key=lambda role: (role != resident, role))
        orders.append((*others, last))
    return orders
