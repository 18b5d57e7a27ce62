"""Plans a run: checks everything, then serialises the DAG into one chain with layouts, transfers and memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distflow.config.spec import Spec
from distflow.contracts.agents import agent_nodes
from distflow.contracts.forms import ENGINE_TYPES, Contract
from distflow.errors import Diagnostic, InvalidInput
from distflow.plan import ROLLOUT, SOURCE, Layout, Plan, Task
from planners import columns, memory, order, placement, settings, transfers
from planners.check import bind, check_faults, check_profile, check_temperatures, model_roles, notes_of, prompted_role
from planners.columns import NodeColumns
from planners.follow import check_layouts
from planners.groups import GroupCut, assign_ranks, crossings, joined, of_arriving, tasks_of
from planners.inference import with_one_layout
from planners.learning import check_learning
from planners.lengths import check_lengths
from planners.placement import RankGroup
from planners.resampling import after_drawing, draws_of

_MOST_RANKS = 65_536
"""Ranks of which a plan is made in a minute."""


def plan(spec: Spec, ranks: int) -> Plan:
    """Return the plan of a run for `ranks` ranks (DistFlow §4). Raises InvalidInput with every mistake found."""
    if ranks > _MOST_RANKS:
        raise InvalidInput(f"{ranks:,} ranks are more than a run may have, which is {_MOST_RANKS:,}")
    draft = _draft(spec)
    cut, mistakes = assign_ranks(spec, draft.bound, draft.chain, draft.flows, ranks)
    mistakes += check_faults(spec, cut.ranks)
    draft = replace(draft, mistakes=[*draft.mistakes, *mistakes])
    plans = [_lay_out(spec, draft, cut, group) for group in cut.groups]
    if len(plans) == 1:
        return plans[0]
    held = (*memory.of_dock(spec, plans[0].dock), *plans[0].host_memory)
    return replace(joined(plans, cut, ranks), host_memory=held)


def roles_apart(spec: Spec) -> list[str]:
    """Return the roles of which each could have ranks of its own: `first` of `layouts`, or for frozen ones beside ranks
    that sample `groups.inference`. Roles that sample are none of these, nor those that must be where another one is."""
    nodes, roles = spec.dag.nodes, model_roles(spec)
    sampling = {nodes[node].role for node in _draft(spec).sampling}
    trained = {node.role for node in nodes.values() if node.type == "MODEL_TRAIN"}
    owners = {role: placement.owner_of(spec, role) for role in roles}
    tied = {role for role, owner in owners.items() if [*owners.values()].count(owner) > 1}
    free = [role for role in roles if role not in sampling | tied and trained != {role}]
    if not spec.run.has_samplers:
        return free
    frozen = [role for role in roles if not spec.dag.roles[role].trained]
    apart = {*_accepted(spec, {role: {role: 1} for role in frozen})}
    return [role for role in roles if role in apart or (role in free and role in trained)]


def roles_on_rollouts(spec: Spec) -> list[str]:
    """Return the roles of which each could be computed by ranks that sample (`groups.inference`)."""
    frozen = [role for role in model_roles(spec) if not spec.dag.roles[role].trained]
    return [] if spec.run.trainer_samples else _accepted(spec, {role: {role: ROLLOUT} for role in frozen})


def _accepted(spec: Spec, wanted: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the roles for which the DAG allows `groups.inference`."""
    draft = _draft(spec)

    def mistakes(inference: dict[str, Any]) -> int:
        groups = spec.run.groups.model_copy(update={"inference": inference, "rollout": 1})
        own = replace(spec, run=spec.run.model_copy(update={"groups": groups, "layouts": {}}))
        return len(assign_ranks(own, draft.bound, draft.chain, draft.flows, 3)[1])

    least = mistakes({})
    return [role for role, groups in wanted.items() if mistakes(groups) <= least]


@dataclass(frozen=True)
class _Draft:
    bound: dict[str, Contract]
    chain: list[str]
    added: tuple[tuple[str, str], ...]
    flows: dict[str, NodeColumns]
    mistakes: list[Diagnostic]

    @property
    def sampling(self) -> set[str]:
        return {node for node, contract in self.bound.items() if contract.samples}


def _draft(spec: Spec) -> _Draft:
    bound, unbound, mistakes = bind(spec)
    writers = {column: node for node, names in columns.written(spec, bound).items() for column in names}
    graph, tangled, found = order.graph_of(spec.dag, spec.dag_source, writers)
    drawn, later, found_late = after_drawing(spec, bound, graph)
    chain, added = order.serialize(spec.dag, drawn)
    for node in chain:
        found += settings.check_settings(spec, node, bound[node]) if node in bound else []
    guessed = {path[1] for path in spec.dag_source.recovered if path[:1] == ("nodes",) and len(path) > 1}
    flows, untraced = columns.trace(spec, graph, chain, bound, unbound | tangled | guessed.intersection(chain))
    return _Draft(bound, chain, later + added, flows, [*spec.mistakes, *mistakes, *found, *found_late, *untraced,
                                                       *check_temperatures(spec, bound, flows),
                                                       *check_learning(spec, bound, flows), *check_profile(spec),
                                                       *check_lengths(spec, bound)])


def _lay_out(spec: Spec, draft: _Draft, cut: GroupCut, group: RankGroup) -> Plan:
    """Return the plan of a group of ranks."""
    bound, flows, ranks, trains = draft.bound, draft.flows, group.ranks, group is cut.trainer
    own, samples = [node for node in draft.chain if node in group.nodes], group.name == ROLLOUT
    if not (trains or samples):
        spec = with_one_layout(spec, own)
    layouts, mistakes = placement.place_nodes(spec, group, draft.sampling)
    roles = _engine_roles(spec, own)
    generating = {spec.dag.nodes[node].role for node in draft.sampling & group.nodes}
    generating |= cut.samplers.keys() if trains else set()
    held = {node: layouts[node] for node in own}
    if samples and ranks > 1:  # the first rank of a rollout runs all of its chain, and with others samples
        held |= dict.fromkeys(group.nodes - draft.sampling, Layout(ranks, rows=(1, *[0] * (ranks - 1))))
    engines = placement.place_models(spec, roles, held, draft.sampling, group.blocks, cut.samplers if trains else {},
                                     cut.fused)
    rows = {role: _rows_at_once(spec, draft, role, layouts, trains) for role in generating}
    kinds = [] if mistakes else memory.of_each_kind(spec, roles, generating, engines, rows, ranks) if not samples else \
        [memory.estimate(spec, roles, generating, engines, rows, False, _validated(spec, draft))]
    items = max(kinds, key=memory.needed, default=())
    if mistakes := [*draft.mistakes, *mistakes, *check_layouts(spec, engines, draft.sampling),
                    *memory.refuse_overflow(spec, items)]:
        raise InvalidInput(sorted(dict.fromkeys(mistakes), key=_position))
    first = layouts[own[0]]
    if samples:
        layouts = dict.fromkeys(layouts, next(layouts[node] for node in draft.chain if node in draft.sampling))
    elif not trains and first.width == 1:  # rows come to where they are read
        layouts = dict.fromkeys(layouts, first)
    source = _source_layout(draft.chain, flows, layouts)
    tasks = _tasks(spec, draft, layouts, source)
    dock = crossings(spec, cut, flows, bound, group)
    early = None
    if trains and cut.fused:
        early = Plan(spec.dag.name, spec.run.mode, ranks, of_arriving(tasks, cut, cut.fused, cut.crossing), source,
                     dock=dock)
        early_layouts = {node: replace(layouts[node], early=True) for node in cut.fused}
        tasks = _tasks(spec, draft, layouts | early_layouts, source)
    notes = notes_of(spec, bound, flows, _generating(spec, bound))
    return Plan(spec.dag.name, spec.run.mode, ranks, tasks_of(group, tasks, cut), source, draft.added, items, notes,
                _inputs(spec), dock, early, tuple((*engine, layout) for engine, layout in sorted(engines.items())),
                host_memory=memory.of_snapshots(spec, kinds))


def _rows_at_once(spec: Spec, draft: _Draft, role: str, layouts: Mapping[str, Layout], trains: bool) -> int:
    """Return the most rows that a rank samples at a time with a role: those of a step, or of a validation, that it has,
    unless agents and clients ask for as many as they like. Where groups are cut, one may have all rows of a step, with
    those of the steps before it that are still sampled."""
    settings = spec.settings_of(role)
    most = settings.generation.batch_rows if settings else 1
    nodes = [node for node in draft.sampling if spec.dag.nodes[node].role == role]
    validates = trains and spec.run.trainer_validates
    if (validates and spec.validated is None) or spec.run.training_api or agent_nodes(spec) & {*nodes}:
        return most
    rows = 1
    for node in nodes:
        layout, repeats = layouts[node], (draft.flows[each].repeats for each in draft.flows[node].out_fan)
        part = 1 + spec.run.staleness if spec.run.has_samplers else max(map(layout.part, layout.active_shares))
        rows = max(rows, math.ceil(spec.run.data.batch * part) * math.prod(repeats),
                   math.ceil((spec.validated or 0) * part) if validates else 0)
    return min(most, rows)


def _validated(spec: Spec, draft: _Draft) -> str | None:
    """Return the role that ranks which only sample validate."""
    return prompted_role(spec, [spec.dag.nodes[node] for node in draft.chain]) if spec.run.rollouts_validate else None


def _engine_roles(spec: Spec, own: Collection[str]) -> list[str]:
    found = {node.role for name, node in spec.dag.nodes.items() if name in own and node.type in ENGINE_TYPES}
    return sorted(found.intersection(model_roles(spec)))


def _tasks(spec: Spec, draft: _Draft, layouts: dict[str, Layout], source: Layout) -> tuple[Task, ...]:
    moved: transfers.Moved = set()
    tasks = tuple(_task(spec, node, draft.bound[node], draft.flows, layouts, source, moved) for node in draft.chain)
    return transfers.replicated(tasks, source)


def _position(mistake: Diagnostic) -> tuple[str, int]:
    return (mistake.where.file, mistake.where.line) if mistake.where else ("", 0)


def _task(spec: Spec, node: str, contract: Contract, flows: dict[str, NodeColumns], layouts: dict[str, Layout],
          source: Layout, moved: transfers.Moved) -> Task:
    item, flow = spec.dag.nodes[node], flows[node]
    arriving = transfers.derive(spec, node, flows, layouts, source, moved)
    return Task(node, item.role, item.type, contract.key, dict(item.settings), flow.reads, flow.writes, layouts[node],
                arriving, flow.repeats, flow.fan, flow.out_fan, contract.marks.keep_together is not None,
                draws_of(spec, node, contract), contract.samples)


def _source_layout(chain: list[str], flows: dict[str, NodeColumns], layouts: dict[str, Layout]) -> Layout:
    """Return the layout of the first node that reads the dataset: each worker loads its own share."""
    readers = (node for node in chain if any(column.producer == SOURCE for column in flows[node].reads))
    return layouts[next(readers, chain[0])]


def _generating(spec: Spec, bound: dict[str, Contract]) -> set[str]:
    return {spec.dag.nodes[node].role for node, contract in bound.items() if contract.samples}


def _inputs(spec: Spec) -> str:
    run = spec.run.model_dump(mode="json", exclude={"output": True, "data": {"train"}, "validation": {"data"}})
    for role in run["roles"].values():
        role["model"] = {**role["model"], "path": bool(role["model"]["path"])} if role["model"] else None
    run["data"]["turns"] = spec.run.data.turns  # their names may differ between machines
    said = json.dumps({"dag": spec.dag.model_dump(mode="json"), "run": run}, sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]
