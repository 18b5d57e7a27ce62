"""How each task's columns reach it: by reference where the layout stays, by all-to-all where it changes."""

from __future__ import annotations

from distflow.schema.contract import GROUP
from distflow.schema.plan import ROW, SOURCE, Layout, Transfer
from distflow.schema.spec import Spec
from planners.columns import Flow

_ELEMENT = 8
"""Bytes of an element; an upper estimate for all that columns hold."""


def derive(spec: Spec, node: str, flow: Flow, flows: dict[str, Flow], layouts: dict[str, Layout],
           source: Layout) -> tuple[Transfer, ...]:
    """One transfer per producer that `node` reads from, in the order of its parameters."""
    edges: dict[str, list[str]] = {}
    for column in flow.reads:
        names = edges.setdefault(column.producer, []) if column.name != ROW else []
        if column.name not in names:
            names.append(column.name)
    edges = edges or {SOURCE: [GROUP]}  # a node that reads nothing works on the rows of the dataset
    return tuple(_transfer(spec, flow, producer, names, source if producer == SOURCE else layouts[producer],
                           layouts[node], flows) for producer, names in edges.items())


def _transfer(spec: Spec, flow: Flow, producer: str, names: list[str], origin: Layout, target: Layout,
              flows: dict[str, Flow]) -> Transfer:
    if origin == target:
        return Transfer(producer, tuple(names), "local")
    rows = spec.run.data.batch
    for repeater in () if producer == SOURCE else flows[producer].out_fan:
        rows *= flows[repeater].repeats
    size = rows * sum(_row_bytes(spec, name, flow.forms.get(name, "Tensor")) for name in names)
    return Transfer(producer, tuple(names), "all_to_all", size)


def _row_bytes(spec: Spec, name: str, form: str) -> int:
    """An upper estimate of one row's size, as long as the run's limits allow."""
    if form == "Tensor":
        return _ELEMENT
    data = spec.run.data
    limits = {"prompts": data.max_prompt_tokens, "questions": data.max_prompt_tokens,
              "targets": data.max_target_tokens, "answers": data.max_target_tokens}
    longest = max((role.generation.max_new_tokens for role in spec.run.roles.values()), default=0)
    return _ELEMENT * limits.get(name, max(longest, 1))
