"""Databuffer: hands columns from task to task within a step (DistFlow §6.2).

Columns are kept by producer and layout, so that fan-outs, joins and repeated redistributions in one step each find
their own. A task in its producer's layout gets the columns by reference. Otherwise the rows move, each once and
directly to the rank that needs it.

    start      begin a step with rows of the dataset; `draw_again` adds further rows (resampling)
    put        keep what a task wrote, drop rows where it wrote `keep`, and move what later tasks on other ranks read
    take       return the columns that a task reads, redistributed to its layout

Whether a collective runs depends on the plan and on what ran before in the step, never on the rows of a rank. Ranks
that neither have nor get rows of it take no part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy
import torch
from torch import Tensor

from distflow.data.assignment import RowCounts, ShardAssignment
from distflow.data.batch import Batch, ColumnData, Ragged, encode_text, to_list
from distflow.data.redistribute import Redistributor
from distflow.data.row_filter import KeptRows, concat_non_empty
from distflow.errors import ColumnError, RankMissing
from distflow.plan import KEEP, ROW, SOURCE, Layout, Lineage, Plan, RowLineage, Task, Transfer, meetings, passed_on
from distflow.telemetry import timeline
from distflow.telemetry.metrics import Metrics

_TEXT = "list[str]"
_NOTHING = Batch(torch.empty(0, dtype=torch.int64))
_ALL = KeptRows(_NOTHING.ids, ())  # as long as no task has dropped any
StepColumns = dict[tuple[str, Layout], Batch]
_Draw = tuple[StepColumns, dict[Layout, ShardAssignment], KeptRows]


class Databuffer:
    """One rank's view of its group's databuffer.

    A rank outside a layout holds zero rows of it; of ranks that share one model, the first puts rows for all. Rows
    stand in the order of their ids. A wait for another rank ends after `limit` seconds.
    """

    def __init__(self, plan: Plan, rank: int, metrics: Metrics, limit: float = 600.0):
        self.rank, self.metrics = rank, metrics
        self.lineage = RowLineage(plan.tasks, plan.source)
        self.source_layout = plan.source
        self.meetings, self.passed_on = meetings(plan), passed_on(plan)
        self.redistributor = Redistributor(rank, metrics, limit)
        self.redistributors = {tuple(range(plan.ranks)): self.redistributor}
        for ranks in self.meetings.values():
            if ranks not in self.redistributors:
                self.redistributors[ranks] = Redistributor(rank, metrics, limit, ranks)
        self.step_columns: StepColumns = {}
        self.assignments: dict[Layout, ShardAssignment] = {}
        """Those that this rank knows."""
        self.informed: dict[Layout, set[int]] = {}
        """The ranks that know a layout's assignment; the same on every rank."""
        self.moved: set[tuple[str, str, Layout]] = set()
        """(producer, column, layout) redistributed in this draw; the same on every rank."""
        self.kept = _ALL
        """Rows that remained, on all ranks and in all draws, after the last task that dropped rows."""
        self.earlier: _Draw | None = None
        self.draws = 0

    def start(self, batch: Batch) -> None:
        """Begin a step with this rank's rows of the dataset."""
        self.draws, self.earlier, self.kept = 0, None, _ALL
        for redistributor in self.redistributors.values():
            redistributor.moved = 0
        self._begin(batch)

    def draw_again(self, batch: Batch) -> None:
        self.earlier = self.step_columns, self.assignments, self.kept
        self._begin(batch)

    def _begin(self, batch: Batch) -> None:
        self.step_columns = {(SOURCE, self.source_layout): batch}
        self.assignments, self.informed = {}, {}
        self.moved = set()
        self.draws += 1
        self._pass_on(SOURCE)

    def put(self, task: Task, columns: dict[str, ColumnData], ids: Tensor) -> None:
        """Keep the columns that a task wrote for the rows `ids` [B], ascending. Where it wrote `keep`, rows leave the
        step, and every rank must call this. Raises `ColumnError` if `keep` is not one bool a row."""
        self.receive([(task, columns, ids)])

    def receive(self, written: Iterable[tuple[Task, dict[str, ColumnData], Tensor]]) -> None:
        """Keep the columns of several tasks, and drop rows only when all of them are there."""
        arrived = list(written)
        for task, columns, ids in arrived:
            self.step_columns[task.node, task.layout] = Batch(ids, columns)
        for task in (task for task, *_ in arrived if KEEP in task.writes):
            self._drop(task)
        for task in (task for task, *_ in arrived if task.draws == 1):  # else once its draws are finished
            self._pass_on(task.node)

    def _pass_on(self, node: str) -> None:
        for task in self.passed_on.get(node, ()):
            for transfer in (transfer for transfer in task.transfers if transfer.kind != "local"):
                self._fetch(transfer, task)

    def try_finish_draw(self, task: Task, prompts: int) -> bool:
        """Finish the draws of `task` if there are `prompts` prompts or it may not draw again; False if it must draw
        again. More prompts than that are cut, latest first. The same on every rank."""
        left = self.kept.ancestors(self.lineage, 0)
        if len(left) < prompts and self.draws < task.draws:
            return False
        if len(left) > prompts:
            self._keep_only(KeptRows(left[:prompts], ()))
        self.metrics.maximum(f"filter/{task.node}/draws", self.draws)
        self.metrics.maximum(f"filter/{task.node}/prompts_short", max(0, prompts - len(left)))
        self._pass_on(task.node)
        return True

    def is_dropped(self, ids: Tensor, fan: Lineage) -> Tensor:
        """Return which of the rows `ids` [rows] that the nodes `fan` repeated have left the step, [rows] bool."""
        return torch.zeros(len(ids), dtype=torch.bool) if self.kept is _ALL else \
            ~self.kept.is_kept(self.lineage, ids, fan)

    def take(self, task: Task) -> Batch:
        """Return the columns that a task reads, in its layout and repeated to its rows. Every rank must call it; one
        that has no part in it does not wait.
        Raises `ColumnError` if a producer has not written all of it, `RankMissing` if a rank ended or timed out."""
        parts = [self._fetch(transfer, task) for transfer in task.transfers]
        lineage = [self.lineage.of(transfer.producer) for transfer in task.transfers]
        finest = max(zip(lineage, parts), key=lambda pair: len(pair[0]), default=None)
        ids = finest[1].ids if finest else torch.empty(0, dtype=torch.int64)
        found: dict[tuple[str, str], ColumnData] = {}
        for part, fan, transfer in zip(parts, lineage, task.transfers):
            aligned = self._align(part, fan, task, ids, transfer)
            found |= {(transfer.producer, name): column for name, column in aligned.columns.items()}
        found |= {(column.producer, ROW): ids for column in task.reads if column.name == ROW}
        return Batch(ids, {column.parameter: found[key] if (key := (column.producer, column.name)) in found
                           else _empty(column.form) for column in task.reads})

    def sample_rows(self, names: Iterable[str], count: int, more: Iterable[str] = ()) -> dict[str, list[Any]]:
        """Return up to `count` of this rank's rows, spread over the step, as Python values by column: of the layout
        with most of the columns `names`, and then with most rows; columns of `more` are added where they are there."""
        names = set(names)
        held = self._held_by_name((*names, *more))
        deepest = max((len(fan) for pairs in held.values() for fan, _ in pairs), default=0)
        best: dict[str, list[Any]] = {}
        for fan, batch in (pair for pairs in held.values() for pair in pairs if len(pair[0]) == deepest):
            ids = batch.ids[:: max(1, len(batch) // max(count, 1))][:count]
            found = {name: to_list(column) for name, column in self._columns_of(held, fan, ids).items()}
            found = {ROW: ids.tolist(), **found} if ROW in held else found
            best = max(best, found, key=lambda columns: (
                len(names & columns.keys()), max(map(len, columns.values()), default=0), len(columns)))
        return best if count else {}

    def all_rows(self, names: Iterable[str]) -> dict[str, dict[str, ColumnData]]:
        """Return this rank's part of all rows of the step by the node that repeated them last ("": none did), of each
        the columns `names` that this rank has of all of these rows, as the last node has written them. A row is on one
        rank: the first one of its share in the layout of that node."""
        fans = {task.out_fan: (task.node, task.layout) for task in reversed(self.lineage.tasks.values())}
        last = {fan: key for fan, key in fans.items() if not any(
            len(other) > len(fan) and other[: len(fan)] == fan for other in fans)}
        held, found = {name: pairs[::-1] for name, pairs in self._held_by_name(names).items()}, {}
        for fan, key in last.items():
            key = key if fan else (SOURCE, self.source_layout)
            batch = self.step_columns.get(key, _NOTHING)
            if key[1].leads(self.rank) and len(batch):
                found[fan[-1] if fan else ""] = {ROW: batch.ids, **self._columns_of(held, fan, batch.ids)}
        return found

    def _held_by_name(self, names: Iterable[str]) -> dict[str, list[tuple[Lineage, Batch]]]:
        return {name: [(self.lineage.of(producer), batch) for (producer, _), batch in self.step_columns.items()
                       if name in batch.columns and len(batch)] for name in names}

    def _columns_of(self, held: dict[str, list[tuple[Lineage, Batch]]], fan: Lineage, ids: Tensor) -> \
            dict[str, ColumnData]:
        return {name: column for name, pairs in held.items()
                if (column := self._column_of(name, pairs, fan, ids)) is not None}

    def _column_of(self, name: str, pairs: list[tuple[Lineage, Batch]], fan: Lineage, ids: Tensor) -> \
            ColumnData | None:
        for shorter, batch in pairs:
            index, lost = _positions(batch.ids, ids // self.lineage.times(fan[len(shorter) :]))
            if not len(lost) and fan[: len(shorter)] == shorter:
                return batch.only([name]).select(index)[name]
        return None

    def _fetch(self, transfer: Transfer, task: Task) -> Batch:
        layout = task.layout
        if transfer.kind != "local":
            new = [name for name in transfer.columns if (transfer.producer, name, layout) not in self.moved]
            if new:
                self._redistribute(transfer.producer, new, task)
        return self._columns_held(transfer.producer, layout, transfer.columns)

    def _columns_held(self, producer: str, layout: Layout, names: Iterable[str]) -> Batch:
        batch = self.step_columns[producer, layout]
        lost = [name for name in names if name not in batch.columns]
        if lost and len(batch):
            raise ColumnError(f"node `{producer}` has {len(batch)} rows on rank {self.rank}, but not their column "
                              f"{', '.join(lost)}; it has {', '.join(batch.columns) or 'none'}")
        return batch.only(name for name in names if name in batch.columns)

    def _redistribute(self, producer: str, names: list[str], task: Task) -> None:
        layout, origin, ranks = task.layout, self._origin(producer), self.meetings[task.node]
        self.moved.update((producer, name, layout) for name in names)
        informed = self.informed.get(layout)
        self.informed[layout] = {*(informed or ()), *ranks}
        if self.rank not in ranks:
            self.step_columns.setdefault((producer, layout), _NOTHING)
            return
        payload = b""
        if informed is None:
            payload = self._count_rows(layout)
        elif not informed.issuperset(ranks) and self.rank == layout.active_ranks[0]:
            payload = self.assignments[layout].to_bytes()
        held = self._columns_held(producer, origin, names) if origin.leads(self.rank) else _NOTHING
        name, redistributor = f"{producer} → {task.node}", self.redistributors[ranks]
        before = redistributor.moved
        try:
            with timeline.current().span(timeline.TRANSFERS, name, columns=names) as facts:
                moved = redistributor.move(
                    held, layout, payload,
                    lambda told: self._assign(layout, told, informed is None, redistributor).destinations(
                        self.lineage, producer, layout), f"{producer}/{task.node}")
                facts["bytes"] = redistributor.moved - before
            self.metrics.maximum("data/bytes_of_busiest_rank", sum(each.moved for each in self.redistributors.values()))
        except RankMissing as error:
            raise RankMissing(f"node `{task.node}` on rank {self.rank} waits for columns {', '.join(names)} of the "
                              f"rows of node `{producer}`, on rank {origin.first} to {origin.last}: {error}",
                              error.ranks) from error
        earlier = self.step_columns.get((producer, layout))
        self.step_columns[producer, layout] = moved if earlier is None else moved.with_columns(earlier.columns)

    def _count_rows(self, layout: Layout) -> bytes:
        counts = RowCounts(self.lineage, layout)
        for (producer, held_in), batch in self.step_columns.items():
            if held_in.leads(self.rank):
                share = layout.share(self.rank) if held_in == layout else None
                counts.add(producer, batch, share, origin=held_in == self._origin(producer))
        return counts.to_bytes()

    def _assign(self, layout: Layout, told: list[bytes], first: bool, redistributor: Redistributor) -> ShardAssignment:
        """Return a layout's assignment, from what the ranks of a move have `told`: their counts at the `first` one to
        it, and later the assignment, by its first rank, if any of them does not know it."""
        if first:
            self.assignments[layout], uneven = RowCounts(self.lineage, layout).assign(
                told, redistributor.host_group.machines, layout.rows)
            if uneven is not None:
                self.metrics.mean("data/imbalance", uneven)
        elif layout not in self.assignments:
            self.assignments[layout] = ShardAssignment.of_bytes(told[layout.active_ranks[0]])
        return self.assignments[layout]

    def _align(self, part: Batch, fan: Lineage, task: Task, ids: Tensor, transfer: Transfer) -> Batch:
        times = self.lineage.times(task.fan[len(fan) :])
        if times == 1 and torch.equal(part.ids, ids):
            return part
        index, lost = _positions(part.ids, ids // times)
        where = f"node `{task.node}` on rank {self.rank}"
        if len(lost):
            raise ColumnError(f"{where} lacks rows {lost[:5].tolist()} of columns {', '.join(transfer.columns)}, which "
                              f"node `{transfer.producer}` has not written")
        extra = part.ids[~torch.isin(part.ids, ids // times)] if len(part) * times != len(ids) else part.ids[:0]
        if len(extra):
            raise ColumnError(f"{where} has rows {extra[:5].tolist()} of columns {', '.join(transfer.columns)} from "
                              f"node `{transfer.producer}`, but its other inputs lack them")
        return part.select(index)

    def _drop(self, task: Task) -> None:
        written = self.step_columns[task.node, task.layout] if task.layout.leads(self.rank) else _NOTHING
        keep = written[KEEP] if len(written) else torch.empty(0, dtype=torch.bool)
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.ndim != 1:
            raise ColumnError(f"node `{task.node}` wrote column `{KEEP}`, which says which rows stay in the step: it "
                              "must be a Tensor of one bool a row")
        self.metrics.add(f"filter/{task.node}/dropped", (~keep).sum())
        self.metrics.add(f"filter/{task.node}/kept", keep.sum())
        gather = self.redistributor.host_group.gather
        nothing_dropped = all(gather(bool(keep.all())))
        if nothing_dropped and task.draws == 1:
            return  # the usual case: no rank has to know which rows there are
        kept = gather(written.ids[keep].numpy().tobytes())
        self.kept = KeptRows(torch.tensor(numpy.frombuffer(b"".join(kept), numpy.int64)), task.out_fan)
        if not nothing_dropped:
            self._keep_only(self.kept)
        if task.draws > 1:
            self._join()

    def _keep_only(self, kept: KeptRows) -> None:
        self.kept = KeptRows(self.kept.ids[kept.is_kept(self.lineage, self.kept.ids, self.kept.fan)], self.kept.fan)
        self.assignments = {layout: kept.of_assignment(self.lineage, assignment, self.lineage.unit(layout))
                            for layout, assignment in self.assignments.items()}
        for (producer, layout), batch in self.step_columns.items():
            batch = kept.of(self.lineage, batch, self.lineage.of(producer))
            # a share may have lost all rows of a prompt
            if layout in self.assignments and layout != self._origin(producer):
                assignment, unit = self.assignments[layout], self.lineage.unit(layout)
                mine = torch.from_numpy(assignment.units[assignment.shares == layout.share(self.rank)])
                batch = KeptRows(mine, unit).of(self.lineage, batch, self.lineage.of(producer))
            self.step_columns[producer, layout] = batch

    def _join(self) -> None:
        if self.earlier is None:
            return
        step_columns, assignments, kept = self.earlier
        self.step_columns = {key: concat_non_empty(step_columns[key], batch)
                             for key, batch in self.step_columns.items()}
        self.assignments = {layout: assignments[layout].joined(later) for layout, later in self.assignments.items()}
        self.kept = KeptRows(torch.cat([kept.ids, self.kept.ids]), kept.fan)
        self.earlier = None

    def _origin(self, producer: str) -> Layout:
        return self.source_layout if producer == SOURCE else self.lineage.tasks[producer].layout


def _positions(ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index in `ids` (ascending) of each of `wanted`, and those of `wanted` that are not there."""
    if not len(ids):
        return torch.zeros(0, dtype=torch.int64), wanted
    index = torch.searchsorted(ids, wanted).clamp(max=len(ids) - 1)
    return index, wanted[ids[index] != wanted]


def _empty(form: str) -> ColumnData:
    if form == _TEXT:
        return encode_text([])
    nothing = torch.empty(0, dtype=torch.int64)
    return Ragged(nothing, nothing.clone()) if form.startswith("Ragged") else torch.empty(0)
