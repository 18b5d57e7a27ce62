"""Plans that are run with contents which can be checked anywhere: for tests of what moves rows between ranks.

A row's contents follow from its column, step and id.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from ranks import run_ranks

from distflow.data.batch import Batch, ColumnData, Ragged, encode_text, levels
from distflow.data.databuffer import Databuffer
from distflow.data.dataloader import Dataloader
from distflow.data.exchange import gather
from distflow.data.redistribute import LONG_RUN, ROUND_BYTES
from distflow.plan import ROW, SOURCE, Column, Layout, Plan, RowLineage, Task, Transfer
from distflow.telemetry.metrics import Metrics

FORMS = {"r": "Ragged", "d": "Tensor", "t": "list[str]", "i": "Ragged", "n": "Ragged", "m": "Tensor", "k": "Tensor"}
"""By a column's first letter: token ids, a number a row, text, ragged pixels (float16, three to an element), turns of
tokens, an image of one size (bfloat16), which rows are kept."""


def contents(name: str, step: int, ids: list[int]) -> ColumnData:
    kind, salt = name[0], sum(map(ord, name)) + 100 * step
    if kind == "d":
        return torch.tensor([7 * row + salt for row in ids], dtype=torch.float64)
    if kind == "k":
        return torch.tensor([keeps(step, row) for row in ids], dtype=torch.bool)
    if kind == "t":
        return encode_text("é" * (row % 3) + f"{name}/{step}/{row}" * (row % 4 > 0) for row in ids)
    if kind == "m":
        return (torch.tensor(ids, dtype=torch.float32)[:, None, None] % 7 + torch.arange(300.0).view(2, 150)).bfloat16()
    if kind == "n":
        return Ragged.from_rows([Ragged.from_rows([torch.arange((row + turn) % 3) + row for turn in range(row % 4)])
                                 for row in ids])
    rows = [torch.arange((3 * row + salt) % 5) + 1000 * row + salt for row in ids]
    column = Ragged.from_rows(rows)
    return column if kind == "r" else column.with_values(column.values[:, None].half().expand(-1, 3))


def keeps(step: int, row: int) -> bool:
    """Whether a filter keeps a row: about half of them."""
    return (row * 2_654_435_761 + 97 * step) >> 7 & 3 < 2


def bits(column: ColumnData) -> tuple:
    lengths, values = levels(column)
    return values.dtype, values.tolist(), [level.tolist() for level in lengths]


class Drawn:
    """A dataset of which only positions matter."""

    def __len__(self) -> int:
        return 1_000_000

    def get(self, indices):
        return list(indices)


class Builder:
    """Builds a plan node by node, as the planner would."""

    def __init__(self, ranks: int, source: Layout, columns: str = "r_prompt t_question"):
        self.ranks, self.source, self.tasks = ranks, source, {}
        self.writers = dict.fromkeys(columns.split(), SOURCE)

    def node(self, name: str, reads: str, writes: str, layout: Layout, repeats: int = 1,
             together: bool = False, draws: int = 1) -> Builder:
        wanted = reads.split()
        producers = dict.fromkeys(self.writers[column] for column in wanted)
        transfers = []
        for producer in producers:
            kind = "local" if self.layout(producer) == layout else "all_to_all"
            names = tuple(column for column in wanted if self.writers[column] == producer)
            transfers.append(Transfer(producer, names, kind))
        fan = max((self.fan(producer) for producer in producers), key=len)
        columns = [Column(column, column, self.writers[column], FORMS[column[0]]) for column in wanted]
        self.tasks[name] = Task(name, "role", "COMPUTE", "function", {}, (*columns, Column(ROW, ROW, SOURCE, "Tensor")),
                                tuple(writes.split()), layout, tuple(transfers), repeats, fan,
                                (*fan, name) if repeats > 1 else fan, together, draws)
        self.writers |= dict.fromkeys(writes.split(), name)
        return self

    def layout(self, producer: str) -> Layout:
        return self.source if producer == SOURCE else self.tasks[producer].layout

    def fan(self, producer: str) -> tuple[str, ...]:
        return () if producer == SOURCE else self.tasks[producer].out_fan

    def plan(self) -> Plan:
        return Plan("test", "sync", self.ranks, tuple(self.tasks.values()), self.source)


class Walk:
    """A rank that runs a plan and checks the contents of all that it takes."""

    def __init__(self, plan: Plan, batch: int):
        self.plan, self.metrics = plan, Metrics()
        self.buffer = Databuffer(plan, dist.get_rank(), self.metrics)
        self.step, self.seen, self.exchanges = 0, [], 0
        share = plan.source.share(dist.get_rank())
        self.loader = Dataloader(Drawn(), lambda records: {}, batch, 0, share, plan.source)

    def draw(self) -> Batch:
        """Return the next prompts, with the columns that are read of them."""
        prompts = self.loader.next()
        names = {column.name for task in self.plan.tasks for column in task.reads if column.producer == SOURCE} - {ROW}
        return prompts.with_columns({name: contents(name, self.step, prompts.ids.tolist()) for name in names}
                                    if len(prompts) else {})

    def run_step(self) -> None:
        for task in self.tasks():
            inputs = self.buffer.take(task)
            self.check(task, inputs)
            ids = inputs.repeat(task.repeats).ids if task.repeats > 1 else inputs.ids
            columns = {name: contents(name, self.step, ids.tolist()) for name in task.writes} if len(ids) else {}
            self.buffer.put(task, columns, ids)
        self.step += 1

    def tasks(self) -> Iterator[Task]:
        """Yield a step's tasks in order, and again those before a further draw of prompts, as `run_chain` runs them."""
        self.buffer.start(self.draw())
        for index, task in enumerate(self.plan.tasks):
            yield task
            while task.draws > 1 and not self.buffer.try_finish_draw(task, self.loader.batch):
                self.buffer.draw_again(self.draw())
                yield from self.plan.tasks[: index + 1]

    def check(self, task: Task, inputs: Batch) -> None:
        self.seen.append((self.step, task.node, inputs.ids.tolist()))
        assert bool((inputs.ids.diff() > 0).all())
        assert torch.equal(inputs[ROW], inputs.ids)
        for column in task.reads:
            if column.name != ROW and len(inputs):
                origin = inputs.ids // self.times(task, column.producer)
                assert bits(inputs[column.parameter]) == bits(contents(column.name, self.step, origin.tolist())), column

    def times(self, task: Task, producer: str) -> int:
        result = 1
        for node in task.fan[len(self.buffer.lineage.of(producer)) :]:
            result *= self.buffer.lineage.tasks[node].repeats
        return result


def walk(plan: Plan, batch: int, steps: int = 2, machines: str = "",
         sizes: tuple[int, int] = (ROUND_BYTES, LONG_RUN)) -> tuple[list, list, list]:
    """What a rank saw, its metrics, and how many redistributions each step took.

    Args:
        machines: a letter for each rank; those with the same one share memory. "-" is a rank that shares none. Without
            it they are as they are.
        sizes: bytes that go to other machines at once, and of runs that go in place.
    """
    if machines:
        os.environ["DISTFLOW_MACHINE"] = machines[dist.get_rank()].strip("-")
    counted, walker, metrics, moves = [], Walk(plan, batch), [], []
    for each in walker.buffer.redistributors.values():
        each.move = lambda *arguments, move=each.move: counted.append(1) or move(*arguments)
    for _ in range(steps):
        with mock.patch.multiple("distflow.data.redistribute", ROUND_BYTES=sizes[0], LONG_RUN=sizes[1]):
            walker.run_step()
        moves.append(len(counted) - sum(moves))
        metrics.append(walker.metrics.collect(gather))
    os.environ.pop("DISTFLOW_MACHINE", None)  # the next test has this process too
    return walker.seen, metrics, moves


def check_run(plan: Plan, batch: int, steps: int = 2, machines: str = "",
              sizes: tuple[int, int] = (ROUND_BYTES, LONG_RUN)) -> list[tuple]:
    """Run on real ranks; then each row was at each node on exactly one rank, all rows of a unit on the same."""
    results = run_ranks(plan.ranks, walk, plan, batch, steps, machines, sizes)
    for step in range(steps):
        for task in plan.tasks:
            held = [next(ids for when, node, ids in seen if (when, node) == (step, task.node)) for seen, *_ in results]
            for rank, ids in enumerate(held):
                share, leader = task.layout.share(rank), (rank - task.layout.first) // task.layout.tp * task.layout.tp
                assert ids == (held[task.layout.first + leader] if share is not None else []), (task.node, held)
            held = [ids for rank, ids in enumerate(held) if task.layout.leads(rank)]
            fan = 1
            for node in task.fan:
                fan *= next(other.repeats for other in plan.tasks if other.node == node)
            rows = sorted(row for ids in held for row in ids)
            assert rows == list(range(step * batch * fan, (step + 1) * batch * fan)), (task.node, held)
            coarse = RowLineage(plan.tasks, plan.source).unit(task.layout)
            units = fan // math.prod(other.repeats for other in plan.tasks if other.node in coarse)
            kept = [{row // units for row in ids} for ids in held]
            assert sum(map(len, kept)) == batch * fan // units, (task.node, held)
    return results
