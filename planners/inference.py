"""Moves frozen roles from the trainer to ranks of their own, or to the rollout ranks (`groups.inference`).

    {ROLE: N}          N ranks that only infer: `inference_groups` makes them a group with replicas of the model; where
                       there are no samplers, `ranks_in_chain` gives it the last ones of the trainer
    {ROLE: OTHER}      the ranks that another role has so: `check_colocated_roles` checks
    {ROLE: rollout}    the ranks that sample, each with the whole model, or the first of those that share a rollout's:
                       `check_on_rollouts` checks, `groups.py` cuts

Beside samplers all nodes of such a role must look at each row by itself. A group of its own reads columns that cross
the dock, and waits for groups before it alone, row by row: the rollouts, and groups whose columns it reads. The groups
have an order in which none waits for a later one, or are refused; the trainer, which waits for all of them, is the
last. Rows that a filter ahead of its nodes has dropped it does not compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from distflow.config.models import base_of
from distflow.config.spec import Spec
from distflow.contracts.forms import ENGINE_TYPES, Contract
from distflow.errors import Diagnostic, did_you_mean
from distflow.plan import INFERENCE, KEEP, ROLLOUT, SOURCE, Layout
from planners.check import prompted_role, refusal, role_location
from planners.columns import NodeColumns
from planners.placement import RankGroup, can_leave_out
from planners.resampling import draws_of


def inference_groups(spec: Spec, bound: Mapping[str, Contract], chain: list[str], flows: Mapping[str, NodeColumns],
                     rollout: set[str], first: int) -> tuple[list[RankGroup], list[Diagnostic]]:
    """Return the groups of `groups.inference`, with ranks from `first` on, in an order in which none waits for a later
    one. `rollout`: the nodes of the rollout group."""
    groups = spec.run.groups
    roles = [role for host in groups.inference_ranks for role in groups.roles_on_ranks_of(host)]
    each = _nodes_of(spec, bound, chain, roles)
    mistakes = [mistake for role in each for mistake in _check_role(spec, role, each[role], flows)]
    ahead = {*rollout}
    unfit = {role for role in each if any(_check_role(spec, role, each[role], flows))}
    for node in (node for node in chain if any(node in own for role, own in each.items() if role not in unfit)):
        drops = "drops rows, which ranks that only infer cannot" if KEEP in flows[node].writes else ""
        if why := drops or why_not(spec, bound, chain, flows, node, ahead):
            mistakes.append(refusal(spec, spec.dag.nodes[node].role, f"node `{node}` {why}", node))
        ahead.add(node)
    nodes = {host: [node for node in chain if any(node in each[role] for role in groups.roles_on_ranks_of(host))]
             for host in groups.inference_ranks}
    order, waiting = _ordered({role: _waits_for(nodes, role, flows) for role in nodes})
    if waiting:
        mistakes.append(refusal(spec, waiting[-1], f"it and {' and '.join(f'`{role}`' for role in waiting[:-1])} read "
                                "what the other writes, so that each would wait for the other's ranks"))
    found = []
    for role in order:
        ranks, unsplit = _replica(spec, role, nodes[role])
        mistakes += unsplit
        found.append(RankGroup(f"{INFERENCE} {role}", frozenset(nodes[role]), first, ranks,
                               max(groups.inference_ranks[role] // ranks, 1),
                               filters=_filters_ahead(spec, chain, flows, nodes[role], rollout)))
        first += found[-1].replicas * ranks
    return found, mistakes


def ranks_in_chain(spec: Spec, bound: Mapping[str, Contract], chain: list[str], flows: Mapping[str, NodeColumns],
                   ranks: int) -> tuple[dict[str, int], list[Diagnostic]]:
    """Return the first of the ranks that `groups.inference` gives to roles where there are no samplers, by node: the
    last ranks, as beside samplers, which run the chain with all others."""
    groups, begins, mistakes = spec.run.groups, dict[str, int](), _check_hosts(spec)
    first = least = ranks - sum(groups.inference_ranks.values())
    for host, count in groups.inference_ranks.items():
        here = _nodes_of(spec, bound, chain, groups.roles_on_ranks_of(host))
        mistakes += [mistake for role, nodes in here.items() for mistake in _check_role(spec, role, nodes, flows)]
        begins |= {node: first for nodes in here.values() for node in nodes}
        first += count
    said = {node: asked.first for node, asked in spec.run.layouts.items() if asked.first}
    for node in (node for node in said if begins and (node in begins or said[node] >= least)):
        where = spec.run_source.location(("layouts", node, "first"))
        mistakes.append(Diagnostic(f"`groups.inference` gives ranks {least} to {ranks - 1} to roles of their own, and "
                                   f"`layouts` has node `{node}` begin at {said[node]}", where,
                                   "Leave `first` out of it, or its role out of  groups.inference"))
    if least < 1:
        mistakes.append(Diagnostic(f"`groups.inference` wants {ranks - least} ranks beside those of all other roles, "
                                   f"and there {'is' if ranks == 1 else 'are'} {ranks}",
                                   spec.run_source.location(("groups", "inference"), key=True),
                                   f"Start {ranks - least + 1} ranks or more (--ranks {ranks - least + 1})"))
    return {} if mistakes else begins, mistakes


def check_colocated_roles(spec: Spec, bound: Mapping[str, Contract], chain: list[str]) -> list[Diagnostic]:
    """Check the roles that are to be on the ranks which another role has of its own."""
    groups, mistakes = spec.run.groups, _check_hosts(spec)
    for host in groups.inference_ranks:
        here = _nodes_of(spec, bound, chain, groups.roles_on_ranks_of(host))
        first, *others = [node for nodes in here.values() for node in nodes if node in spec.run.layouts] or [""]
        if odd := next((node for node in others if spec.run.layouts[node] != spec.run.layouts[first]), None):
            mistakes.append(Diagnostic(f"nodes `{first}` and `{odd}` are on the same ranks, which take prompts as they "
                                       "get free, and `layouts` lays them out differently",
                                       spec.run_source.location(("layouts", odd)),
                                       f"Leave `{odd}` out of `layouts`: it is laid out as `{first}` then."))
    return mistakes


def _check_hosts(spec: Spec) -> list[Diagnostic]:
    return [Diagnostic(f"role `{role}` is to be on the ranks of `{host}`, which has none of its own",
                       role_location(spec, role), _host_hint(spec, role, host))
            for role, host in spec.run.groups.colocated_with.items() if host not in spec.run.groups.inference_ranks]


def _host_hint(spec: Spec, role: str, host: str) -> str:
    """Return what to write where the host of a role has no ranks of its own."""
    groups, seen = spec.run.groups, {role}
    if host not in {*spec.dag.roles, *groups.inference}:
        return did_you_mean(host, [*groups.inference_ranks, ROLLOUT], "Ranks")
    while host in groups.colocated_with and host not in seen:
        seen.add(host)
        host = groups.colocated_with[host]
    there = ROLLOUT if host in groups.on_rollouts or host == ROLLOUT else host if host in groups.inference_ranks else 1
    return f"Instead:  groups: {{inference: {{{role}: {there}}}}}"


def with_one_layout(spec: Spec, nodes: Sequence[str]) -> Spec:
    """Return the settings in which the nodes of a group are laid out as the first of them that `layouts` names: a rank
    puts what all of them have written for the same rows."""
    layouts = spec.run.layouts
    named = [layouts[node] for node in nodes if node in layouts][:1]
    same = {node: layout for node in nodes for layout in named}
    return replace(spec, run=spec.run.model_copy(update={"layouts": {**layouts, **same}}))


def check_on_rollouts(spec: Spec, bound: Mapping[str, Contract], chain: list[str],
                      flows: Mapping[str, NodeColumns], width: int = 1) -> list[Diagnostic]:
    """Check the roles that ranks which sample are to compute, as all do in mode sync. `width`: how many share the model
    with which they sample."""
    nodes = _nodes_of(spec, bound, chain, spec.run.groups.on_rollouts)
    mistakes = [mistake for role in nodes for mistake in _check_role(spec, role, nodes[role], flows)]
    for role in nodes:
        split = next((node for node in nodes[role] if node in spec.run.layouts), None)
        if any(bound[node].samples for node in nodes[role]):
            mistakes.append(refusal(spec, role, "it samples, with an engine that does not infer"))
        elif spec.run.trainer_samples:
            mistakes.append(refusal(spec, role, "in mode semi_sync ranks that train sample too, and of its model they "
                                    "have a part. It needs  mode: async"))
        elif split:
            mistakes.append(Diagnostic(f"node `{split}` is computed by ranks that sample (`groups.inference`), each of "
                                       "which has its whole model", spec.run_source.location(("layouts", split)),
                                       f"Leave `{split}` out of `layouts`."))
        elif width > 1 and (own := spec.settings_of(role)) and not can_leave_out(spec, role, False, Layout(width)):
            key, wants = ("replicas", "replicas: 1") if own.engine == "fsdp" else ("engine", "engine: fsdp")
            what = (f"role `{role}` is to be computed by the first of {width} ranks that share the model with which "
                    f"they sample, which needs  {wants}")
            mistakes.append(Diagnostic(what, spec.run_source.location(("roles", role, key)),
                                       f"Instead:  roles.{role}.{wants}  , or ranks of its own:  groups: {{inference: "
                                       f"{{{role}: 1}}}}"))
    return mistakes


def _nodes_of(spec: Spec, bound: Mapping[str, Contract], chain: list[str],
              roles: Iterable[str]) -> dict[str, list[str]]:
    return {role: [node for node in chain if node in bound and spec.dag.nodes[node].role == role
                   and spec.dag.nodes[node].type in ENGINE_TYPES] for role in roles}


def _check_role(spec: Spec, role: str, nodes: list[str], flows: Mapping[str, NodeColumns]) -> Iterator[Diagnostic]:
    if role not in spec.dag.roles:
        what = f"`groups.inference` names `{role}`, which is not a role with a model in DAG `{spec.dag.name}`"
        yield Diagnostic(what, role_location(spec, role), did_you_mean(role, spec.dag.roles, "Roles"))
    elif not nodes:
        yield refusal(spec, role, "no node computes with its model")
    elif spec.dag.roles[role].trained:
        yield Diagnostic(f"role `{role}` cannot have ranks that only infer: it is trained", role_location(spec, role),
                         f"Instead:  layouts: {{{nodes[0]}: {{first: N}}}}  , where N is the first of its ranks")
    elif spec.dag.roles[role].follow:
        yield refusal(spec, role, f"it follows `{spec.dag.roles[role].copy_of}`, whose weights these have")
    elif base := base_of(spec, role):
        yield refusal(spec, role, f"it computes with the model under the adapters of `{base}`, which the ranks that "
                      "train have anyway")
    elif not spec.run.has_samplers:
        return
    elif not any(column.producer in nodes for flow in flows.values() for column in flow.reads):
        yield refusal(spec, role, "nothing reads what its nodes write")
    elif spec.run.data.images and spec.model_of(role) != spec.model_of(prompted_role(spec, spec.dag.nodes.values())):
        yield refusal(spec, role, "prompts have images, and its model is another than the one that reads them first")


def why_not(spec: Spec, bound: Mapping[str, Contract], chain: list[str], flows: Mapping[str, NodeColumns], node: str,
            ahead: set[str]) -> str:
    """Return why a node cannot run on prompts that come one by one from other ranks; empty if it can."""
    if bound[node].samples:
        return "samples, which ranks of `groups.rollout` do"
    if not bound[node].marks.row_wise:
        return (f"may compare a row with others: function `{spec.dag.nodes[node].function}` is not marked as one that "
                "looks at each row by itself (`row_wise`)")
    before = chain[: chain.index(node)]
    if filters := [other for other in before if other in bound and draws_of(spec, other, bound[other]) > 1]:
        return f"waits for the last draw of node `{filters[0]}`, which drops rows"
    if late := sorted(_needs(spec, flows, node) - ahead):
        drops = late[0] in flows and KEEP in flows[late[0]].writes
        return f"waits for node `{late[0]}`, which {'drops rows' if drops else 'runs in the trainer'}"
    return ""


def _needs(spec: Spec, flows: Mapping[str, NodeColumns], node: str) -> set[str]:
    return {column.producer for column in flows[node].reads}.union(spec.dag.nodes[node].dependencies) - {SOURCE}


def _filters_ahead(spec: Spec, chain: list[str], flows: Mapping[str, NodeColumns], nodes: list[str],
                   rollout: set[str]) -> frozenset[str]:
    """Return the filters of the rollouts up to the last of their nodes for which these nodes wait, even if through
    others: what that one writes lacks the rows of all of them."""
    ahead, new = set(), {*nodes}
    while new:
        ahead |= new
        new = set().union(*(_needs(spec, flows, node) for node in new if node in flows)) - ahead
    end = max((chain.index(node) + 1 for node in ahead & rollout), default=0)
    return frozenset(node for node in chain[:end] if node in rollout and KEEP in flows[node].writes)


def _waits_for(nodes: Mapping[str, list[str]], role: str, flows: Mapping[str, NodeColumns]) -> set[str]:
    """Return the other roles with ranks of their own whose columns a role's nodes read."""
    producers = {column.producer for node in nodes[role] for column in flows[node].reads}
    return {other for other in nodes if other != role and producers.intersection(nodes[other])}


def _ordered(waits_for: dict[str, set[str]]) -> tuple[list[str], list[str]]:
    """Return the roles in an order in which none waits for a later one, or those that wait for each other."""
    import networkx as nx

    graph = nx.DiGraph((other, role) for role, others in waits_for.items() for other in sorted(others))
    graph.add_nodes_from(waits_for)
    circle = next((sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1), [])
    return [*waits_for] if circle else [*nx.lexicographical_topological_sort(graph, [*waits_for].index)], circle


def _replica(spec: Spec, role: str, nodes: list[str]) -> tuple[int, list[Diagnostic]]:
    """Return how many ranks have one replica of a role's model."""
    node = next((node for node in nodes if node in spec.run.layouts), None)
    if node is None:
        return 1, []
    asked, ranks = spec.run.layouts[node], spec.run.groups.inference_ranks[role]
    split, dp = asked.tp * asked.cp * asked.pp, asked.dp or 1
    width, mistakes = dp * split, []
    uneven = asked.rows and dp == 1
    if uneven or (dp > 1 and split > 1):
        key = "rows" if uneven else "dp"
        why = "its ranks take prompts as they get free" if uneven else \
            "ranks that only infer either shard a model (dp) or split it, which also divides its memory"
        mistakes.append(Diagnostic(f"node `{node}` says `{key}`, and {why}",
                                   spec.run_source.location(("layouts", node, key)), f"Leave `{key}` out of it."))
    if ranks % width:
        what = f"role `{role}` has {ranks} ranks of its own, and `layouts` wants its model on {width} of them"
        mistakes.append(Diagnostic(what, role_location(spec, role), f"Instead:  groups: {{inference: {{{role}: "
                                   f"{max(ranks // width, 1) * width}}}}}"))
    return width, mistakes
