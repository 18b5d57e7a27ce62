"""The planner's front: check everything, then write down one chain."""

from __future__ import annotations

from distflow.schema.contract import ENGINE_TYPES
from distflow.schema.errors import InvalidInput
from distflow.schema.plan import SOURCE, Layout, Plan, Task
from distflow.schema.spec import Spec
from planners import bind as binding
from planners import columns, memory, order, placement, settings, transfers


def plan(spec: Spec, ranks: int) -> Plan:
    """The plan of a DAG and a run for `ranks` ranks (DistFlow §4). Deterministic: every rank computes the same.

    Raises:
        InvalidInput: with every mistake that was found, those of loading included.
    """
    mistakes = list(spec.mistakes)
    try:
        graph, found = order.graph_of(spec.dag, spec.dag_source)
    except InvalidInput as error:
        raise InvalidInput([*mistakes, *error.mistakes]) from None
    bound, unbound = binding.bind(spec)
    chain, added = order.serialize(spec.dag, graph)
    layouts, unplaced = placement.place(spec, ranks)
    mistakes += found + unbound + unplaced
    for node in chain:
        if node in bound:
            mistakes += settings.check_settings(spec, node, bound[node])
    flows, untraced = columns.trace(spec, graph, chain, bound)
    tenants = memory.estimate(spec, _model_roles(spec), _generating(spec, bound), ranks)
    mistakes += untraced + memory.refuse_overflow(spec, tenants)
    if mistakes:
        raise InvalidInput(mistakes)
    source = _source_layout(chain, flows, layouts)
    tasks = tuple(_task(spec, node, bound[node], flows, layouts, source) for node in chain)
    return Plan(spec.dag.name, spec.run.mode, ranks, tasks, source, added, tenants, _notes(spec, bound))


def _task(spec, node, contract, flows, layouts, source) -> Task:
    item, flow = spec.dag.nodes[node], flows[node]
    moved = transfers.derive(spec, node, flow, flows, layouts, source)
    return Task(node, item.role, item.type, contract.key, dict(item.settings), flow.reads, flow.writes, layouts[node],
                moved, flow.repeats, flow.fan, flow.out_fan)


def _source_layout(chain: list[str], flows, layouts) -> Layout:
    """Each worker loads its own share: the layout of the first node that reads the dataset."""
    readers = (node for node in chain if any(column.producer == SOURCE for column in flows[node].reads))
    return layouts[next(readers, chain[0])]


def _model_roles(spec: Spec) -> list[str]:
    return sorted({node.role for node in spec.dag.nodes.values() if node.type in ENGINE_TYPES} & set(spec.dag.roles))


def _generating(spec: Spec, bound) -> set[str]:
    return {spec.dag.nodes[node].role for node, contract in bound.items() if contract.marks.repeats}


def _notes(spec: Spec, bound) -> tuple[str, ...]:
    notes = []
    for role in sorted(_generating(spec, bound)):
        model = spec.model_of(role)
        if model and model.architecture and role in spec.dag.roles and spec.dag.roles[role].trained:
            notes.append(f"role `{role}` starts from random weights, so its samples earn no reward to learn from. Start "
                         f"it from a trained model:  --set roles.{role}.model=FOLDER   (`make demo` shows it)")
    return tuple(notes)
