"""Consumers of a run's dock: which columns each group of the plan reads and writes, and of which rows.

A prompt to sample has rows with the column ORDER alone. A part of a validation is such a prompt too, with ids of their
own range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from distflow.data.crossing import POLICIES, REPORT, ReceivedColumns, report_of
from distflow.dock.selection import Consumer
from distflow.plan import INFERENCE, ROLLOUT, TRAINER, Plan

ORDER = "order"  # column beside those of nodes: a row may be sampled
VALIDATION, ANSWERED = "validation", "validated"  # consumers: rollouts that validate, the trainer that has the results
RESULT = "result"  # column of an answered part of a validation
SAMPLES, REQUESTS = (0, 1 << 48), (1 << 48, 1 << 50)
"""Ids of prompts, and of parts of validations, which are prompts to the dock."""


def run_consumers(plan: Plan, rows: int, prompts: int, in_order: bool) -> list[Consumer]:
    """Return the consumers of a run. `in_order`: the trainer takes the prompts of a step, and not those that are done.
    """
    step_rows, trainer = rows * prompts, plan.groups[0]
    longest = -(-sum(move.bytes_per_step for move in trainer.plan.dock) // step_rows)
    written = {group.name: [f"{move.producer}/{name}" for move in group.plan.dock for name in move.columns
                            if not group.plan.task(move.producer).arrives] for group in plan.groups}
    inference = {group.name: (ReceivedColumns(group.plan, rows).columns, written[group.name])
                 for group in plan.groups if group.kind == INFERENCE}
    return consumers_of(written.get(ROLLOUT, ()), rows, step_rows if in_order else None, longest, inference,
                        written[trainer.name])


def at_home(consumers: Sequence[Consumer], plan: Plan, local: int) -> list[Consumer]:
    """Return the consumers with their indexes on the machines of their first ranks, of which each machine has `local`.
    """
    machines = {group.name: group.first // local for group in plan.groups}
    machines |= {VALIDATION: machines.get(ROLLOUT, 0), ANSWERED: machines[plan.groups[0].name]}
    return [replace(each, home=machines.get(each.name.partition(":")[0], 0)) for each in consumers]


def consumers_of(written: Sequence[str], rows: int, step_rows: int | None, longest: int,
                 inference: Mapping[str, tuple[Sequence[str], Sequence[str]]] = MappingProxyType({}),
                 trained: Sequence[str] = ()) -> list[Consumer]:
    """Return the stages of the run: samples have columns `written`; groups of `inference` read and write some, by name;
    the trainer writes `trained`. All take at most `longest` bytes a row: where a prompt may be sampled there is room
    for what others add to it, so that only rollouts wait for room. Without `step_rows` samples are taken as they come.
    """
    written = (*written, REPORT, POLICIES)
    samples, requests = ((first * rows, end * rows) for first, end in (SAMPLES, REQUESTS))
    readers = [Consumer(name, tuple(reads) or (ORDER,), (*writes, report_of(name)), rows, step_rows, ids=samples)
             for name, (reads, writes) in inference.items()]
    complete = (*written, *(column for each in readers for column in each.writes))
    return [Consumer(ROLLOUT, (ORDER,), written, rows, step_rows, row_bytes=longest, ids=samples), *readers,
            Consumer(TRAINER, complete, tuple(trained), rows, step_rows, seconds=3600.0, can_roll_back=True,
                     ids=samples),
            Consumer(VALIDATION, (ORDER,), (RESULT,), rows, ids=requests),
            Consumer(ANSWERED, (RESULT,), (), rows, seconds=3600.0, ids=requests)]
