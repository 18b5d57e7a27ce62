"""How each task's columns reach it: by reference where the layout stays, by all-to-all where it changes."""

from __future__ import annotations

from distflow.schema.plan import ROW, SOURCE, Column, Layout, Transfer
from distflow.schema.spec import Spec
from planners.columns import Flow


def derive(spec: Spec, node: str, flow: Flow, flows: dict[str, Flow], layouts: dict[str, Layout],
           source: Layout) -> tuple[Transfer, ...]:
    """One transfer per producer that `node` reads from, in the order of its parameters."""
    edges: dict[str, list[Column]] = {}
    for column in flow.reads:
        if column.name == ROW:
            continue
        edges.setdefault(column.producer, []).append(column)
    transfers = []
    for producer, columns in edges.items():
        origin = source if producer == SOURCE else layouts[producer]
        names = tuple(dict.fromkeys(column.name for column in columns))
        if origin == layouts[node]:
            transfers.append(Transfer(producer, names, "local"))
            continue
        rows = spec.run.data.batch
        for repeater in () if producer == SOURCE else flows[producer].out_fan:
            rows *= flows[repeater].repeats
        size = sum(rows * _row_bytes(spec, column) for column in columns)
        transfers.append(Transfer(producer, names, "all_to_all", size))
    return tuple(transfers)


def _row_bytes(spec: Spec, column: Column) -> int:
    """An upper estimate of one row's size: 8 bytes an element, as long as the run's limits allow."""
    if column.form == "Tensor":
        return 8
    longest = max((role.generation.max_new_tokens for role in spec.run.roles.values()), default=0)
    length = max(spec.run.data.max_prompt_tokens if column.name == "prompts" else 0, longest)
    return 8 * length
