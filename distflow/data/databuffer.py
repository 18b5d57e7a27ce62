"""What tasks hand to each other within a step (DistFlow §6.2).

Values are kept by producer and layout, so fan-outs, joins and repeated redistributions in one step each find their
own. A task whose layout is the producer's gets its columns by reference. Otherwise the rows move, each once and
directly to the rank that needs it.

Whether a collective runs depends on the plan and on what ran before in the step, never on what a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, Ragged, decode_text, encode_text
from distflow.data.debts import debts
from distflow.data.homes import Census, Homes
from distflow.data.redistribute import Redistributor
from distflow.observe.metrics import Metrics
from distflow.schema.errors import ColumnError, RankMissing
from distflow.schema.plan import ROW, SOURCE, Fan, Fans, Layout, Plan, Task, Transfer

_TEXT = "list[str]"
_NOTHING = Batch(torch.empty(0, dtype=torch.int64))


class Databuffer:
    """One rank's view of the group's buffer.

    A rank outside a layout takes part in its transfers and holds zero rows of it. Of the ranks that share one model
    (tensor parallel), the first puts rows for all of them. Rows stand in the order of their ids. A wait for another
    rank ends after `limit` seconds.
    """

    def __init__(self, plan: Plan, rank: int, metrics: Metrics, group: dist.ProcessGroup | None = None,
                 limit: float = 600.0):
        self.rank, self.metrics = rank, metrics
        self.fans = Fans(plan.tasks, plan.source)
        self.redistributor = Redistributor(rank, metrics, limit, group)
        self.source_layout = plan.source
        self.shelves: dict[tuple[str, Layout], Batch] = {}
        self.homes: dict[Layout, Homes] = {}
        """Per layout: decided by the first transfer to it, kept for the step."""
        self.moved: set[tuple[str, str, Layout]] = set()
        """(producer, column, layout) that were redistributed in this step; the same on every rank."""
        self.drawn: range | None = None

    def start(self, batch: Batch, drawn: range | None = None) -> None:
        """Begin a step with this rank's rows of the dataset; what the last step left is dropped.

        Args:
            drawn: the rows of all shares in this step; messages name those of a rank that does not come.
        """
        self.drawn = drawn
        self.shelves = {(SOURCE, self.source_layout): batch}
        self.homes = {}
        self.moved = set()
        self.redistributor.moved = 0

    def put(self, task: Task, columns: dict[str, ColumnData], ids: Tensor) -> None:
        """Keep what a task wrote for the rows `ids` [B], ascending."""
        self.shelves[task.node, task.layout] = Batch(ids, columns)

    def take(self, task: Task) -> Batch:
        """The columns that a task reads, in its layout and repeated to its rows. Every rank must call it.

        Raises:
            ColumnError: rows or columns that a producer owes are not there.
            RankMissing: a rank that owes rows, or takes some, ended or did not come.
        """
        parts = [self._fetch(transfer, task) for transfer in task.transfers]
        fans = [self.fans.of(transfer.producer) for transfer in task.transfers]
        finest = max(zip(fans, parts), key=lambda pair: len(pair[0]), default=None)
        ids = finest[1].ids if finest else torch.empty(0, dtype=torch.int64)
        found: dict[tuple[str, str], ColumnData] = {}
        for part, fan, transfer in zip(parts, fans, task.transfers):
            aligned = self._align(part, fan, task, ids, transfer)
            found |= {(transfer.producer, name): column for name, column in aligned.columns.items()}
        found |= {(column.producer, ROW): ids for column in task.reads if column.name == ROW}
        return Batch(ids, {column.parameter: found[key] if (key := (column.producer, column.name)) in found
                           else _empty(column.form) for column in task.reads})

    def readable(self, names: Iterable[str], count: int) -> dict[str, list[Any]]:
        """Up to `count` of this rank's rows, spread over the step, with those of the columns that it has for them."""
        held = {name: [(self.fans.of(producer), batch) for (producer, _), batch in self.shelves.items()
                       if name in batch.columns and len(batch)] for name in names}
        finest = max((pair for pairs in held.values() for pair in pairs), key=lambda pair: len(pair[0]), default=None)
        if finest is None or not count:
            return {}
        fan, batch = finest
        ids = batch.ids[:: max(1, len(batch) // count)][:count]
        result = {}
        for name, pairs in held.items():
            for shorter, batch in pairs:
                index, lost = _places(batch.ids, ids // self.fans.times(fan[len(shorter) :]))
                if not len(lost) and fan[: len(shorter)] == shorter:
                    result[name] = _plain(batch.only([name]).select(index)[name])
                    break
        return result

    def _fetch(self, transfer: Transfer, task: Task) -> Batch:
        """The transfer's columns in the task's layout; a rank without rows may lack the columns themselves."""
        layout = task.layout
        if transfer.kind != "local":
            new = [name for name in transfer.columns if (transfer.producer, name, layout) not in self.moved]
            if new:
                self._redistribute(transfer.producer, new, task)
                self.moved.update((transfer.producer, name, layout) for name in new)
        return self._held(transfer.producer, layout, transfer.columns)

    def _held(self, producer: str, layout: Layout, names: Iterable[str]) -> Batch:
        batch = self.shelves[producer, layout]
        lost = [name for name in names if name not in batch.columns]
        if lost and len(batch):
            raise ColumnError(f"node `{producer}` has {len(batch)} rows on rank {self.rank}, but not their column "
                              f"{', '.join(lost)}; it has {', '.join(batch.columns) or 'none'}")
        return batch.only(name for name in names if name in batch.columns)

    def _redistribute(self, producer: str, names: list[str], task: Task) -> None:
        layout, origin = task.layout, self._origin(producer)
        held = self._held(producer, origin, names) if origin.leads(self.rank) else _NOTHING
        try:
            moved = self.redistributor.move(
                held, layout,
                b"" if layout in self.homes else self._census(layout),
                lambda census: self._home(layout, census).destinations(self.fans, producer, layout),
                f"{producer}/{task.node}")
        except RankMissing as error:
            rows = debts(self.fans, producer, origin, self.homes.get(origin), self.drawn, self.rank, error.ranks)
            raise RankMissing(f"node `{task.node}` on rank {self.rank} waits for columns {', '.join(names)} of the "
                              f"rows of node `{producer}`, on rank {origin.first} to {origin.last}: {error}. Of these "
                              f"rows {rows}", error.ranks) from error
        earlier = self.shelves.get((producer, layout))
        self.shelves[producer, layout] = moved if earlier is None else moved.with_columns(earlier.columns)

    def _census(self, layout: Layout) -> bytes:
        census = Census(self.fans, layout)
        for (producer, place), batch in self.shelves.items():
            if place.leads(self.rank):
                share = layout.share(self.rank) if place == layout else None
                census.add(producer, batch, share, origin=place == self._origin(producer))
        return census.to_bytes()

    def _home(self, layout: Layout, census: list[bytes]) -> Homes:
        if layout not in self.homes:
            self.homes[layout], uneven = Census(self.fans, layout).settle(
                census, self.redistributor.neighbours.machines)
            if uneven is not None:
                self.metrics.mean("data/imbalance", uneven)
        return self.homes[layout]

    def _align(self, part: Batch, fan: Fan, task: Task, ids: Tensor, transfer: Transfer) -> Batch:
        """`part` with exactly the rows `ids`: repeated if its rows were repeated later on."""
        times = self.fans.times(task.fan[len(fan) :])
        if times == 1 and torch.equal(part.ids, ids):
            return part
        index, lost = _places(part.ids, ids // times)
        where = f"node `{task.node}` on rank {self.rank}"
        if len(lost):
            raise ColumnError(f"{where} lacks rows {lost[:5].tolist()} of columns {', '.join(transfer.columns)}, which "
                              f"node `{transfer.producer}` owes")
        alone = part.ids[~torch.isin(part.ids, ids // times)] if len(part) * times != len(ids) else ()
        if len(alone):
            raise ColumnError(f"{where} has rows {alone[:5].tolist()} of columns {', '.join(transfer.columns)} from "
                              f"node `{transfer.producer}`, but its other inputs lack them")
        return part.select(index)

    def _origin(self, producer: str) -> Layout:
        return self.source_layout if producer == SOURCE else self.fans.tasks[producer].layout


def _places(ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where each of `wanted` stands in `ids` (ascending), and those of `wanted` that are not there."""
    if not len(ids):
        return torch.zeros(0, dtype=torch.int64), wanted
    index = torch.searchsorted(ids, wanted).clamp(max=len(ids) - 1)
    return index, wanted[ids[index] != wanted]


def _plain(column: ColumnData) -> list[Any]:
    """One Python value a row."""
    if not isinstance(column, Ragged):
        return column.tolist()
    return decode_text(column) if column.values.dtype == torch.uint8 else [row.tolist() for row in column.rows]


def _empty(form: str) -> ColumnData:
    """No rows of a column that this rank has never seen."""
    if form == _TEXT:
        return encode_text([])
    nothing = torch.empty(0, dtype=torch.int64)
    return Ragged(nothing, nothing.clone()) if form.startswith("Ragged") else torch.empty(0)
