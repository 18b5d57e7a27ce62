"""How each task's columns reach it: by reference where the layout stays, by all-to-all where it changes.

What moves is estimated as MindSpeed RL does (§3.1, Eq. 2), column by column: rows × the longest row × the bytes of an
element, for prompts and responses as long as the run allows.
"""

from __future__ import annotations

from dataclasses import replace

from distflow.schema.contract import GROUP
from distflow.schema.plan import REWARD_PARTS, ROW, SOURCE, Fans, Layout, Task, Transfer
from distflow.schema.spec import Spec
from planners.columns import Flow

_TOKEN, _NUMBER, _CHARACTERS, _PIXEL = 8, 4, 4, 3
"""Bytes of a token's id, bytes of a float, bytes of the text of one token, bytes of a pixel."""
_OF_TOKENS = {"prompts", "responses", "targets", GROUP}
_LIMITED = {"prompts": "max_prompt_tokens", "questions": "max_prompt_tokens",
            "targets": "max_target_tokens", "answers": "max_target_tokens"}
_PARTS = 64
"""Bytes of what the parts of a reward gave, as text."""

Moved = set[tuple[str, str, Layout]]
"""(producer, column, layout): what earlier tasks of the chain have moved. The databuffer moves nothing twice."""


def derive(spec: Spec, node: str, flows: dict[str, Flow], layouts: dict[str, Layout], source: Layout,
           moved: Moved) -> tuple[Transfer, ...]:
    """One transfer per producer that `node` reads from, in the order of its parameters; `moved` learns of them."""
    edges: dict[str, list[str]] = {}
    for column in flows[node].reads:
        names = edges.setdefault(column.producer, []) if column.name != ROW else []
        if column.name not in names:
            names.append(column.name)
    edges = edges or {SOURCE: [GROUP]}  # a node that reads nothing works on the rows of the dataset
    result, target = [], layouts[node]
    for producer, names in edges.items():
        origin = source if producer == SOURCE else layouts[producer]
        if origin == target:
            result.append(Transfer(producer, tuple(names), "local"))
            continue
        new = [name for name in names if (producer, name, target) not in moved]
        moved.update((producer, name, target) for name in new)
        rows = spec.run.data.batch
        for repeater in () if producer == SOURCE else flows[producer].out_fan:
            rows *= flows[repeater].repeats
        size = rows * sum(row_bytes(spec, name, flows[node].forms.get(name, "Tensor")) for name in new)
        result.append(Transfer(producer, tuple(names), "all_to_all", size))
    return tuple(result)


def replicated(tasks: tuple[Task, ...], source: Layout) -> tuple[Task, ...]:
    """The tasks with the bytes of rows that go to several shares: a prompt goes wherever some of its samples are, and
    samples of equal length are dealt out in turn."""
    fans, result = Fans(tasks, source), []
    for task in tasks:
        unit, arriving = fans.unit(task.layout), []
        for move in task.transfers:
            copies = min(task.layout.dp, fans.times(unit[len(fans.of(move.producer)) :])) if unit else 1
            origin = source if move.producer == SOURCE else fans.tasks[move.producer].layout
            size = move.bytes_per_step * copies
            busiest = max(through_ranks(size, origin, task.layout).values())
            arriving.append(replace(move, bytes_per_step=size, bytes_of_busiest_rank=round(busiest)) if size else move)
        result.append(replace(task, transfers=tuple(arriving)))
    return tuple(result)


def through_ranks(size: int, origin: Layout, target: Layout) -> dict[int, float]:
    """Of `size` bytes that change their layout, those that leave or reach each rank, when all rows are alike.

    A rank of both layouts keeps what it has of its own share.
    """
    ranks = range(min(origin.first, target.first), max(origin.last, target.last) + 1)
    has, gets = ({rank: float(layout.part(layout.share(rank))) if layout.leads(rank) else 0.0 for rank in ranks}
                 for layout in (origin, target))
    return {rank: size * (has[rank] + gets[rank] - 2 * has[rank] * gets[rank]) for rank in ranks}


def row_bytes(spec: Spec, name: str, form: str) -> int:
    """One row's size at the run's longest."""
    if form == "Tensor":
        return _TOKEN if name in _OF_TOKENS else _NUMBER
    if name == REWARD_PARTS:
        return _PARTS
    data = spec.run.data
    if name == "images":  # a prompt that is nothing else
        token = max((shape.token_pixels for shape in spec.shapes.values()), default=0)
        return data.max_prompt_tokens * token * _PIXEL
    longest = max((role.generation.max_new_tokens for role in spec.run.roles.values()), default=0)
    length = getattr(data, _LIMITED[name]) if name in _LIMITED else max(longest, 1)
    return length * (_CHARACTERS if form == "list[str]" else _TOKEN if name in _OF_TOKENS else _NUMBER)
