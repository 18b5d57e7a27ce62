"""Gives each node its layout: all ranks of its group unless the run says less; in sync mode, all are one group.

`first` gives a role ranks to itself, up to the next `first`; nodes that do not say it are on the ranks before. A rank
skips what is on others, and takes part in no move of rows that it neither has nor gets. So nodes on different ranks
that read nothing of each other run side by side.

A model is split alike for all nodes that compute with the same engine: those of a role that train and infer share one,
those that sample another. A node that the run file does not name follows another one of its engine, and a frozen copy
without settings of its own the role that it copies, on the same ranks. Rows of measured shares stay there for nodes
without a model.

A model is on the ranks that have rows of any of its engine's nodes (`place_models`), if the engine can leave out the
others: FSDP without `cp` and `replicas`, and transformers' rollouts. Else those have shares of 0 rows, and their part
of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from distflow.config.models import adapted, base_of
from distflow.config.spec import Spec
from distflow.contracts.agents import agent_nodes
from distflow.contracts.forms import ENGINE_TYPES
from distflow.errors import Diagnostic, did_you_mean
from distflow.plan import SHARES_OUTERMOST, Layout, RankOrder, proportion
from planners.splits import check_split

_WHOLE = Layout(1).split


@dataclass(frozen=True)
class _LayoutRequest:
    node: str
    role: str
    engine: tuple[str, bool] | None
    """Role of the engine and whether that samples; None for a node without a model."""
    split: dict[str, int] | None
    """None if the run file does not name it."""
    dp: int | None
    rows: tuple[int, ...] = ()
    order: RankOrder = SHARES_OUTERMOST
    layers: tuple[int, ...] = ()
    first: int = 0

    @property
    def unequal(self) -> tuple[int, ...]:
        """Layers of each stage; empty if they have equally many."""
        return self.layers if len({*self.layers}) > 1 else ()

    @property
    def model(self) -> tuple[dict[str, int] | None, RankOrder, tuple[int, ...]]:
        """How the engine's model is split."""
        return self.split, self.order, self.unequal


@dataclass(frozen=True)
class RankGroup:
    """Ranks from `first` on that run `nodes`: `replicas` sets of `ranks`, one after the other. `begins`: the first of
    the ranks that a role has to itself there, by node. `filters`: nodes that have dropped rows before these read them,
    on ranks that only infer."""

    name: str
    nodes: frozenset[str]
    first: int
    ranks: int
    replicas: int = 1
    begins: Mapping[str, int] = field(default_factory=dict)
    filters: frozenset[str] = frozenset()

    @property
    def blocks(self) -> dict[int, int]:
        """How many ranks each role has that has some to itself, by the first of them; 0: all others."""
        begins = sorted({0, *(begin for begin in self.begins.values() if begin < self.ranks)})
        return {begin: end - begin for begin, end in zip(begins, [*begins[1:], max(self.ranks, 1)])}


def place_nodes(spec: Spec, group: RankGroup, sampling: set[str]) -> tuple[dict[str, Layout], list[Diagnostic]]:
    """Return the layout of each node on the ranks of a group, and mistakes for those that they cannot host. Of nodes
    that other groups run only rows are here. `sampling`: the nodes that sample."""
    mistakes, source, blocks = _check_ranks(spec, group.ranks), spec.run_source, group.blocks
    for name in spec.run.layouts:
        if name not in spec.dag.nodes:
            what = f"`layouts` names `{name}`, which is not a node of DAG `{spec.dag.name}`"
            where = source.location(("layouts", name), key=True)
            mistakes.append(Diagnostic(what, where, did_you_mean(name, spec.dag.nodes, "Nodes")))
    requests = [_request(spec, name, sampling, group.begins.get(name, 0)) if name in group.nodes else
                _LayoutRequest(name, "", None, None, None) for name in spec.dag.nodes]
    mistakes += _check_first(spec, requests, group)
    leaders: dict[Any, _LayoutRequest] = {}
    for request in requests:
        if request.engine and request.split is not None:
            leaders.setdefault(request.engine, request)
    begins = {_owner(spec, request.engine): request.first for request in requests
              if request.engine and request.first and request.first in blocks}
    layouts = {}
    for request in requests:
        begin = begins.get(_owner(spec, request.engine), request.first if request.first in blocks else 0)
        leader = next((leaders[engine] for engine in _models(spec, request) if engine in leaders
                       and (engine == request.engine or begins.get(_owner(spec, engine), 0) == begin)), request)
        layout, found = _place(spec, request, leader, blocks[begin] if request.node in group.nodes else group.ranks)
        layouts[request.node] = replace(layout, first=begin)
        mistakes += found or (_check_apart(spec, request, begins) if len(blocks) > 1 else [])
    return layouts, mistakes + _check_replicas(spec, requests, layouts, blocks)


def _place(spec: Spec, request: _LayoutRequest, leader: _LayoutRequest,
           ranks: int) -> tuple[Layout, list[Diagnostic]]:
    """Return the layout of a node on `ranks`, whose model is split as the `leader` says, and what is wrong with it."""
    split, found = leader.split or _WHOLE, _check_node(spec, request, leader, ranks)
    if leader is request and request.split and request.engine and not found:
        found = check_split(spec, request.node, request.engine, split, request.layers)
    layout = replace(Layout(1), **split, order=leader.order, layers=leader.unequal) if not found else Layout(1)
    shares = max(ranks // layout.width, 1)
    found = found or _check_shares(spec, request, layout, ranks, shares) + _check_environment(spec, request, layout)
    found = found or ([] if can_leave_out(spec, request.role, False, layout) else
                      _check_trained(spec, request, layout, ranks, shares))
    rows = proportion(request.rows) if not found else ()
    return replace(layout, dp=min(request.dp or shares, shares), rows=rows), found


def _check_first(spec: Spec, requests: list[_LayoutRequest], group: RankGroup) -> list[Diagnostic]:
    """Check that nodes which say the `first` of their ranks run here, on ranks that there are, and agree."""
    mistakes, said = [], {request.node: request for request in requests if request.first}
    for name, request in said.items():
        other = next((each for each in said.values() if request.engine and each.first != request.first
                      and _owner(spec, each.engine) == _owner(spec, request.engine)), None)
        where = spec.run_source.location(("layouts", name, "first"))
        if request.first >= group.ranks > 0:
            mistakes.append(Diagnostic(f"the ranks of node `{name}` begin at {request.first}, and those that train are "
                                       f"0 to {group.ranks - 1}", where,
                                       f"Start more ranks, or  first: {group.ranks - 1}"))
        elif other:
            mistakes.append(Diagnostic(f"nodes `{name}` and `{other.node}` compute with one model, or with one that "
                                       f"follows the other, and `layouts` has them begin at ranks {request.first} and "
                                       f"{other.first}", where, f"Instead:  first: {other.first}"))
    return mistakes + [Diagnostic(f"node `{name}` says the first of its ranks among those that train, and other ranks "
                                  "compute it", spec.run_source.location(("layouts", name, "first")),
                                  "Leave `first` out of it.")
                       for name in group.begins if name in spec.dag.nodes and name not in group.nodes]


def _check_apart(spec: Spec, request: _LayoutRequest, begins: Mapping[Any, int]) -> list[Diagnostic]:
    """Check that the model with which a node samples can be on some of the ranks that train alone."""
    role, samples = request.engine or ("", False)
    if not samples:
        return []
    if adapted(spec, role) is not None and begins.get((role, True), 0) != begins.get((role, False), 0):
        what = (f"node `{request.node}` samples on other ranks than those that train role `{role}`, whose adapters are "
                "on the base that both share")
        where = spec.run_source.location(("layouts", request.node, "first"))
        return [Diagnostic(what, where, "Instead:  the same `first` for all nodes of the role.")]
    return []


def _owner(spec: Spec, engine: tuple[str, bool] | None) -> tuple[str, bool] | None:
    """Return the engine on whose ranks another one must be."""
    return engine if engine is None or engine[1] else (owner_of(spec, engine[0]), False)


def _check_replicas(spec: Spec, requests: list[_LayoutRequest], layouts: dict[str, Layout],
                    blocks: Mapping[int, int]) -> list[Diagnostic]:
    found: dict[str, Diagnostic] = {}
    for request in requests:
        own, layout = spec.settings_of(request.role), layouts[request.node]
        ranks = blocks.get(layout.first, 0)
        if own and request.engine == (request.role, False) and ranks > 0:
            shards = ranks // layout.width * layout.cp
            if shards % own.replicas:
                said = next((role for role in spec.lineage(request.role) if role in spec.run.roles), request.role)
                what = (f"role `{said}` wants {own.replicas} replicas, which do not divide the {shards} ranks that "
                        "share a model")
                fitting = ", ".join(str(count) for count in range(1, shards + 1) if not shards % count)
                where = spec.run_source.location(("roles", said, "replicas"))
                found.setdefault(said, Diagnostic(what, where, f"One of  replicas: {fitting}"))
    return list(found.values())


def place_models(spec: Spec, roles: Collection[str], layouts: Mapping[str, Layout], sampling: Collection[str],
                 blocks: Mapping[int, int], samplers: Mapping[str, Layout],
                 fused: Collection[str] = ()) -> dict[tuple[str, bool], Layout]:
    """Return the layout of each role's model, in the engine that samples and in the other one, by role and whether it
    samples: on the block of its nodes, with 0 rows for the shares that have nothing of it. `layouts`: of the nodes that
    these ranks run; `samplers`: of the models with which they sample for other nodes' sake; `fused`: nodes whose rows
    go to whichever rank is free."""
    placed = {}
    for role, samples in product(roles, (False, True)):
        shared = [name for name in layouts if spec.dag.nodes[name].type in ENGINE_TYPES
                  and (name in sampling) == samples and spec.dag.nodes[name].role in ({role} if samples else
                  {other for other in spec.dag.roles if owner_of(spec, other) == owner_of(spec, role)})]
        own = [layouts[name] for name in shared if spec.dag.nodes[name].role == role]
        split = replace(own[0], dp=1, rows=(), early=False) if own else Layout(1)
        model = replace(split, dp=(blocks[split.first] if own else sum(blocks.values())) // split.width)
        used = {rank for name in shared for rank in layouts[name].active_ranks}
        marks = tuple(int(model.leader(share) in used) for share in range(model.dp))
        if own and 0 in marks and not {*fused} & {*shared} and can_leave_out(spec, role, samples, model):
            model = replace(model, rows=marks)
        placed[role, samples] = samplers.get(role, model) if samples else model
    return placed


def can_leave_out(spec: Spec, role: str, samples: bool, layout: Layout) -> bool:
    """Return whether ranks without rows of a role need no part of its model, in the engine that samples or in the one
    that trains and infers."""
    settings = spec.settings_of(role)
    if settings is None:
        return False
    if samples:
        return settings.rollout == "hf" and adapted(spec, role) is None  # trainers keep the base as rollouts share it
    alike = [other for name in spec.dag.roles if owner_of(spec, name) == owner_of(spec, role)
             and (other := spec.settings_of(name))]
    return layout.width == layout.tp and all(each.engine == "fsdp" and each.replicas == 1 for each in alike)


def owner_of(spec: Spec, role: str) -> str:
    """Return the role on whose ranks another one's shards must be: whose model it uses, or which it follows."""
    item = spec.dag.roles.get(role)
    return role if item is None else base_of(spec, role) or (item.copy_of if item.follow else None) or role


def _models(spec: Spec, request: _LayoutRequest) -> list[tuple[str, bool]]:
    """Return the engines whose split the node follows, in order of preference."""
    if request.engine is None:
        return []
    role, samples = request.engine
    alike = [name for name in spec.lineage(role)[1:] if spec.settings_of(name) is spec.settings_of(role)]
    return [request.engine, *((name, False) for name in alike if not samples and request.split is None)]


def _request(spec: Spec, name: str, sampling: set[str], first: int) -> _LayoutRequest:
    node, asked = spec.dag.nodes[name], spec.run.layouts.get(name)
    engine = None
    if node.type in ENGINE_TYPES and node.role in spec.dag.roles:
        engine = (node.role, True) if name in sampling else (base_of(spec, node.role) or node.role, False)
    said = asked.model_fields_set & _WHOLE.keys() if asked else set()
    split = {size: getattr(asked, size) for size in _WHOLE} if said else None
    return _LayoutRequest(name, node.role, engine, split, asked.dp if asked else None,
                          tuple(asked.rows) if asked else (),
                          asked.order if asked else SHARES_OUTERMOST,
                          tuple(asked.layers) if asked else (), first)


def _check_node(spec: Spec, request: _LayoutRequest, leader: _LayoutRequest, ranks: int) -> list[Diagnostic]:
    where = spec.run_source.location(("layouts", request.node))
    split = {size: count for size, count in (request.split or {}).items() if count > 1}
    if request.engine is None and split:
        what = f"node `{request.node}` wants {_split_text(split)}, but it computes with no model that could be split"
        return [Diagnostic(what, where, f"Instead:  layouts: {{{request.node}: {{dp: N}}}}")]
    if request.split is not None and leader.split is not None and request.model != leader.model:
        ours, theirs = map(_request_text, (leader, request))
        what = (f"nodes `{leader.node}` and `{request.node}` compute with the same engine of role `{request.role}`, "
                f"but split its model differently: {ours} and {theirs}")
        return [Diagnostic(what, where, f"Instead:  layouts: {{{request.node}: {{{ours}}}}}")]
    for key, given in (("order", request.order != SHARES_OUTERMOST), ("layers", request.layers)):
        if given and split.get("pp", 1) == 1:
            return [Diagnostic(f"node `{request.node}` says the {key} of stages, and has one",
                               spec.run_source.location(("layouts", request.node, key), key=True),
                               f"Leave `{key}` out of it, or set `pp`.")]
    width = replace(Layout(1), **request.split).width if request.split else 1
    if request.split is not None and ranks > 0 and ranks % width:
        what = (f"node `{request.node}` splits its model over {width} ranks ({_split_text(split)}), which do not "
                f"divide {ranks}")
        return [Diagnostic(what, where, f"Start a multiple of {width} ranks, or split it otherwise.")]
    if request.split and (over := ranks // request.split["pp"]) % request.split["ep"]:
        what = (f"node `{request.node}` cuts the experts {request.split['ep']} ways (ep) over the {over} ranks that "
                f"have a layer, which {request.split['ep']} does not divide")
        shape = spec.shape_of(request.role)
        fitting = [str(ep) for ep in range(1, over + 1) if not over % ep and not (shape.experts if shape else ep) % ep]
        return [Diagnostic(what, where, f"One of  ep: {', '.join(fitting)}")]
    return []


def _check_shares(spec: Spec, request: _LayoutRequest, layout: Layout, ranks: int, shares: int) -> list[Diagnostic]:
    dp, where = min(request.dp or shares, shares), spec.run_source.location(("layouts", request.node, "rows"))
    if request.rows and spec.run.has_samplers and request.engine and request.engine[1]:
        what = (f"node `{request.node}` says the rows of its shares, and in mode {spec.run.mode} ranks that sample "
                "take prompts as they get free")
        return [Diagnostic(what, where, "Leave `rows` out of it.")]
    if request.rows and len(request.rows) != dp and ranks > 0:
        each = f" of {layout.width} ranks" if layout.width > 1 else ""
        what = f"node `{request.node}` says the rows of {len(request.rows)} shares, and {ranks} ranks make {dp}{each}"
        return [Diagnostic(what, where, f"Start {len(request.rows) * layout.width} ranks, say the rows of {dp}, in "
                           "proportion, or divide rows evenly:  --set layouts={}")]
    return _check_dp(spec, request, layout, ranks, shares)


def _check_dp(spec: Spec, request: _LayoutRequest, layout: Layout, ranks: int, shares: int) -> list[Diagnostic]:
    where, node = spec.run_source.location(("layouts", request.node, "dp")), request.node
    if (request.dp or 1) > shares and spec.run.has_samplers and request.engine and request.engine[1]:
        what = f"node `{node}` wants dp {request.dp}, and in mode {spec.run.mode} each rollout is a share of its own"
        return [Diagnostic(what, where, f"Leave `dp` out of it, and say how many ranks sample:  "
                           f"groups: {{rollout: {(request.dp or 1) * layout.width}}}")]
    if request.dp is not None and request.dp > shares and ranks > 0:
        there = "is only 1 rank" if ranks == 1 else f"are only {ranks} ranks"
        more = f" of {layout.width} ranks each" if layout.width > 1 else ""
        needed, role, groups = request.dp * layout.width, spec.dag.nodes[node].role, spec.run.groups
        grown = f"Give its role more ranks:  groups: {{inference: {{{role}: {needed}}}}}" \
            if role in groups.inference_ranks else None
        start = needed + sum(groups.inference_ranks.values())
        hint = f"{grown or f'Start {start} ranks (--nproc-per-node {start})'}, or instead:  " \
               f"layouts: {{{node}: {{dp: {shares}}}}}"
        return [Diagnostic(f"node `{node}` wants dp {request.dp}{more}, but there {there}", where, hint)]
    return []


def _check_trained(spec: Spec, request: _LayoutRequest, layout: Layout, ranks: int, shares: int) -> list[Diagnostic]:
    node = request.node
    if request.dp is None or request.dp >= shares or spec.dag.nodes[node].type != "MODEL_TRAIN":
        return []
    what = (f"node `{node}` trains on {request.dp * layout.width} of {ranks} ranks, and its role's model is on all of "
            "them: only  engine: fsdp  without cp and replicas can leave some out")
    remedy = f"Leave `{node}` out of `layouts`." if layout.width == 1 else "Leave `dp` out of it."
    return [Diagnostic(what, spec.run_source.location(("layouts", node, "dp")), remedy)]


def _check_environment(spec: Spec, request: _LayoutRequest, layout: Layout) -> list[Diagnostic]:
    answering = {*spec.environments, *agent_nodes(spec)}
    if layout.width == 1 or request.node not in answering or spec.run.has_samplers:  # there one rank leads
        return []
    kind = "environment" if request.node in spec.environments else "agent"
    what = (f"node `{request.node}` talks with an {kind}, and its model is split over {layout.width} ranks: each "
            f"would have an {kind} of its own, which may answer otherwise")
    where = spec.run_source.location(("layouts", request.node))
    return [Diagnostic(what, where, f"Instead:  layouts: {{{request.node}: {{tp: 1}}}}")]


def _request_text(request: _LayoutRequest) -> str:
    said = _split_text(request.split or {}, request.order)
    return f"{said}, layers: {[*request.unequal]}" if request.unequal else said


def _split_text(split: dict[str, int], order: str = SHARES_OUTERMOST) -> str:
    sizes = ", ".join(f"{size}: {count}" for size, count in split.items() if count > 1) or "tp: 1"
    return sizes if order == SHARES_OUTERMOST else f"{sizes}, order: {order}"


def _check_ranks(spec: Spec, ranks: int) -> list[Diagnostic]:
    if ranks < 1:
        return [Diagnostic(f"a plan needs at least 1 rank, not {ranks}")]
    has = spec.cluster.size
    if has is not None and ranks > has and spec.cluster_source:
        what = f"cluster `{spec.cluster_name}` has {has} rank{'s' * (has > 1)}, and the plan is for {ranks}"
        return [Diagnostic(what, spec.cluster_source.location(("machines",), key=True),
                           f"Start {has}, or plan for another cluster.")]
    return []
