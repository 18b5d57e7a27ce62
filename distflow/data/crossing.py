"""Columns that cross between the groups of a run with rows of the dock: packed by one, received by another.

    rows_for_others   columns that a group's nodes have written and other groups read
    ReceivedColumns   columns that a plan's tasks get with rows of the dock
    ArrivedRows       one rank's part of such rows, in a databuffer
    report_column     metrics of prompts as a column beside those of nodes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from distflow.data.assignment import assign, assign_near
from distflow.data.batch import Batch, ColumnData, Ragged, from_levels, levels
from distflow.data.databuffer import Databuffer
from distflow.data.dataloader import Dataloader
from distflow.dock.client import DockClient
from distflow.errors import ColumnError
from distflow.plan import ROLLOUT, Plan, RowLineage, Task
from distflow.telemetry.metrics import Metrics

REPORT = "report"  # column beside those of nodes: metrics of a row's prompt
POLICIES = "policies"  # another: by role, versions and fingerprints of the weights that sampled the row


def rows_for_others(plan: Plan, buffer: Databuffer, rows: int, ids: Tensor) -> Batch:
    """Return the columns that other groups need of the rows `ids` [R], of which a prompt has `rows`."""
    lineage, columns = RowLineage(plan.tasks, plan.source), {}
    for move in plan.dock:
        task = lineage.tasks[move.producer]
        written = buffer.step_columns[task.node, task.layout]
        found = columns_of(task, written, move.columns, ids, rows // lineage.times(task.out_fan), buffer)
        columns |= {f"{task.node}/{name}": column for name, column in found.items()}
    return Batch(ids, columns)


def columns_of(task: Task, written: Batch, names: Iterable[str], ids: Tensor, times: int,
               buffer: Databuffer) -> dict[str, ColumnData]:
    """Return columns that a task has `written` for the rows `ids` [R], ascending, of which `times` stem from each of
    its rows. Rows that `buffer` has dropped get those of another one, which no node reads: a prompt's rows are put
    together. Raises ColumnError: others are missing."""
    wanted = ids // times
    if torch.equal(written.ids, wanted):
        return {name: written[name] for name in names}
    missing = ~(torch.isin(wanted, written.ids) | buffer.is_dropped(wanted, task.out_fan))
    if missing.any():
        raise ColumnError(f"node `{task.node}` has not written {', '.join(names)} of the rows "
                          f"{torch.unique(wanted[missing])[:5].tolist()}, which other ranks read and no node has "
                          "dropped")
    if not len(written):
        return {name: _blank(written.columns.get(name, torch.zeros(0)), len(ids)) for name in names}
    written = written.select(torch.searchsorted(written.ids, wanted).clamp(max=len(written) - 1))
    return {name: written[name] for name in names}


def _blank(column: ColumnData, rows: int) -> ColumnData:
    """Return so many rows in the form of a column that has none."""
    lengths, values = levels(column)
    blank = torch.zeros(rows, dtype=torch.int64)
    return from_levels([blank, *lengths[1:]], values) if lengths else values.new_zeros((rows, *values.shape[1:]))


class ReceivedColumns:
    """Columns that a plan's tasks receive with rows of the dock from other groups' nodes. `rows`: of a prompt."""

    def __init__(self, plan: Plan, rows: int):
        lineage = RowLineage(plan.tasks, plan.source)
        self.tasks = [(task, rows // lineage.times(task.out_fan)) for task in plan.tasks
                      if task.arrives and not task.layout.early]
        self.columns = [f"{task.node}/{name}" for task, _ in self.tasks for name in task.writes]

    def of(self, rows: Batch) -> Iterator[tuple[Task, dict[str, ColumnData], Tensor]]:
        """Yield what each node wrote. Of rows that a later node repeated, the first of each repetition has it."""
        for task, times in self.tasks:
            ids = rows.ids // times
            part = rows if times == 1 else rows.select(ids.diff(prepend=ids[:1] - 1).nonzero().squeeze(1))
            yield task, {name: part[f"{task.node}/{name}"] for name in task.writes}, part.ids // times


class ArrivedRows:
    """One rank's part of rows that have come, in a databuffer, for tasks that need no whole step: in the trainer, and
    on ranks that infer. `rows`: of a prompt. `limit`: seconds after which ranks take others for lost."""

    def __init__(self, plan: Plan, rank: int, loader: Dataloader, rows: int, limit: float):
        self.source, self.rank, self.loader, self.rows = plan.source, rank, loader, rows
        self.received = ReceivedColumns(plan, rows)
        self.metrics = Metrics()  # apart from the step's: how evenly a part is spread says nothing about the step
        self.buffer = Databuffer(plan, rank, self.metrics, limit=limit)
        self.mine = torch.empty(0, dtype=torch.int64)  # ids of this rank's rows, those that were dropped too

    def fill(self, dock: DockClient, ids: Tensor, tokens: Tensor) -> None:
        """Begin with these rows [R], of which all ranks of the plan know, and the tokens of each; without those that
        a filter of the plan has dropped."""
        mine, some = self._assigned(ids, tokens)
        self.mine = mine
        rows = dock.fetch(mine if len(mine) else some, self.received.columns).slice(0, len(mine))
        self.buffer.start(self.loader.at(torch.unique(mine // self.rows)))
        self.buffer.receive(self.received.of(rows))

    def _assigned(self, ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's rows, and one row that is there in any case."""
        prompts, index = torch.unique(ids // self.rows, return_inverse=True)
        weights = torch.zeros_like(prompts).index_add(0, index, tokens.clamp(min=1))
        share, parts = self.source.share(self.rank), self.source.rows
        where = assign_near(weights, [0] * self.source.dp, torch.zeros_like(prompts), parts=parts) if parts else \
            assign(weights, self.source.dp)
        return ids[where[index] == (-1 if share is None else share)], ids[:1]


def report_column(reports: list[bytes], rows: int) -> Ragged:
    """Return a column with each prompt's metrics in the first of its rows, and nothing in the others."""
    lengths = torch.zeros(len(reports) * rows, dtype=torch.int64)
    lengths[::rows] = torch.tensor([len(report) for report in reports])
    return Ragged(torch.frombuffer(bytearray(b"".join(reports)), dtype=torch.uint8), lengths)


def report_of(group: str) -> str:
    """Return the name of a group's column of reports."""
    return REPORT if group == ROLLOUT else f"{REPORT} {group}"


def reports_of(rows: Batch, column: str = REPORT) -> list[bytes]:
    """Return what `report_column` has made a column of, of each prompt in a batch."""
    reports = rows[column]
    assert isinstance(reports, Ragged)
    return [report.numpy().tobytes() for report in reports.rows if isinstance(report, Tensor) and len(report)]
