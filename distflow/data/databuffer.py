"""What tasks hand to each other within a step (DistFlow §6.2).

Values are kept by producer and layout, so fan-outs, joins and repeated redistributions in one step each find their
own. A task whose layout is the producer's gets its columns by reference. Otherwise the rows move, each once and
directly to the rank that needs it, in one all-to-all; all rows that stem from one prompt stay together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.data.balance import assign, imbalance
from distflow.data.batch import Batch, ColumnData, Ragged, decode_text, encode_text
from distflow.data.exchange import exchange, gather
from distflow.observe.metrics import Metrics
from distflow.schema.errors import ColumnError
from distflow.schema.plan import ROW, SOURCE, Layout, Plan, Task, Transfer


class Databuffer:
    """One rank's view of the group's buffer.

    A rank outside a layout takes part in its transfers and holds zero rows of it.
    """

    def __init__(self, plan: Plan, rank: int, metrics: Metrics, group: dist.ProcessGroup | None = None):
        self.rank, self.group, self.metrics = rank, group, metrics
        self.source_layout = plan.source
        self.tasks = {task.node: task for task in plan.tasks}
        self.shelves: dict[tuple[str, Layout], Batch] = {}
        self.homes: dict[Layout, tuple[Tensor, Tensor]] = {}
        """Per layout: prompt ids, sorted, and the share that holds each one's rows in this step."""
        self.moved: set[tuple[str, str, Layout]] = set()
        """(producer, column, layout) that were redistributed in this step; the same on every rank."""

    def start(self, batch: Batch) -> None:
        """Begin a step with this rank's rows of the dataset; what the last step left is dropped."""
        self.shelves = {(SOURCE, self.source_layout): batch}
        self.homes = {}
        self.moved = set()

    def put(self, task: Task, columns: dict[str, ColumnData], ids: Tensor) -> None:
        """Keep what a task wrote for the rows `ids` [B]."""
        self.shelves[task.node, task.layout] = Batch(ids, columns)

    def take(self, task: Task) -> Batch:
        """The columns that a task reads, in its layout and repeated to its rows. Every rank must call it."""
        parts = [self._fetch(transfer, task.layout) for transfer in task.transfers]
        fans = [self._fan(transfer.producer) for transfer in task.transfers]
        finest = max(range(len(parts)), key=lambda index: len(fans[index]), default=None)
        if finest is None:
            return Batch(torch.empty(0, dtype=torch.int64))
        ids = parts[finest].ids
        columns: dict[str, ColumnData] = {ROW: ids}
        for part, fan, transfer in zip(parts, fans, task.transfers):
            columns.update(self._align(part, fan, task, ids, transfer).columns)
        return Batch(ids, {column.parameter: columns[column.name] if column.name in columns else _empty(column.form)
                           for column in task.reads})

    def readable(self, names: Iterable[str], count: int) -> dict[str, list[Any]]:
        """Up to `count` of this rank's rows, spread over the step, with those of the columns that they have."""
        held = {name: (batch, self._repeats(producer)) for (producer, _), batch in self.shelves.items()
                for name in names if name in batch.columns}
        if not held or not count:
            return {}
        finest, most = max(held.values(), key=lambda item: item[1])
        ids = finest.ids[:: max(1, len(finest) // count)][:count]
        result = {}
        for name, (batch, repeats) in held.items():
            index = torch.searchsorted(batch.ids, ids // (most // repeats)).clamp(max=max(len(batch) - 1, 0))
            if len(batch) and torch.equal(batch.ids[index], ids // (most // repeats)):
                column = batch.select(index)[name]
                result[name] = decode_text(column) if isinstance(column, Ragged) else column.tolist()
        return result

    def _fetch(self, transfer: Transfer, layout: Layout) -> Batch:
        """The transfer's columns in `layout`; a rank without rows may lack the columns themselves."""
        if transfer.kind != "local":
            new = [name for name in transfer.columns if (transfer.producer, name, layout) not in self.moved]
            if new:
                self._redistribute(transfer.producer, new, layout)
                self.moved.update((transfer.producer, name, layout) for name in new)
        held = self.shelves[transfer.producer, layout]
        return held.only(name for name in transfer.columns if len(held) or name in held.columns)

    def _redistribute(self, producer: str, names: list[str], layout: Layout) -> None:
        origin = self.source_layout if producer == SOURCE else self.tasks[producer].layout
        held = self.shelves[producer, origin]
        held = held.only(name for name in names if len(held) or name in held.columns)
        roots = held.ids // self._repeats(producer)
        units, shares = self._home(layout, held, roots)
        share_of_row = shares[torch.searchsorted(units, roots)]
        outgoing = []
        for rank in range(dist.get_world_size(self.group)):
            index = (share_of_row == layout.share(rank)).nonzero().squeeze(1) if layout.share(rank) is not None else []
            outgoing.append(held.select(index).to_wire() if len(index) else torch.empty(0, dtype=torch.uint8))
        self.metrics.add("data/bytes_sent", sum(len(part) for peer, part in enumerate(outgoing) if peer != self.rank))
        arrived = [Batch.from_wire(wire) for wire in exchange(outgoing, self.group) if len(wire)]
        moved = Batch.concat(arrived) if arrived else Batch(torch.empty(0, dtype=torch.int64))
        moved = moved.select(torch.argsort(moved.ids))
        earlier = self.shelves.get((producer, layout))
        self.shelves[producer, layout] = moved.with_columns(earlier.columns) if earlier else moved

    def _home(self, layout: Layout, held: Batch, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Where each prompt's rows live in `layout`: decided by the first transfer to it, kept for the step."""
        if layout not in self.homes:
            tokens = torch.ones(len(held), dtype=torch.int64)
            for column in held.columns.values():
                tokens += column.lengths if isinstance(column, Ragged) else 1
            mine = torch.cat([torch.tensor([len(roots)]), roots, tokens, self._settled(layout)])
            pieces = gather(mine.numpy().tobytes(), self.group)
            self.homes[layout] = self._decide(layout, [torch.frombuffer(bytearray(raw), dtype=torch.int64) for raw in pieces])
        return self.homes[layout]

    def _settled(self, layout: Layout) -> Tensor:
        """Ids of the prompts whose rows this rank holds in `layout` already; later columns must join them."""
        held = [batch.ids // self._repeats(producer) for (producer, place), batch in self.shelves.items() if place == layout]
        return torch.unique(torch.cat(held)) if held else torch.empty(0, dtype=torch.int64)

    def _decide(self, layout: Layout, pieces: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The same answer on every rank from the same pieces: rows' prompts, rows' tokens, prompts settled there."""
        counts = [int(piece[0]) for piece in pieces]
        settled = [piece[1 + 2 * rows :] for piece, rows in zip(pieces, counts)]
        if any(len(units) for units in settled):
            units = torch.cat(settled)
            owners = torch.cat([torch.full_like(part, layout.share(rank) or 0) for rank, part in enumerate(settled)])
            order = torch.argsort(units)
            return units[order], owners[order]
        roots = torch.cat([piece[1 : 1 + rows] for piece, rows in zip(pieces, counts)])
        tokens = torch.cat([piece[1 + rows : 1 + 2 * rows] for piece, rows in zip(pieces, counts)])
        units, inverse = torch.unique(roots, return_inverse=True)
        weights = torch.zeros(len(units), dtype=torch.int64).index_add_(0, inverse, tokens)
        shares = assign(weights, layout.dp)
        self.metrics.mean("data/imbalance", imbalance(weights, shares, layout.dp))
        return units, shares

    def _align(self, part: Batch, fan: tuple[str, ...], task: Task, ids: Tensor, transfer: Transfer) -> Batch:
        """`part` with exactly the rows `ids`: repeated if its rows were repeated later on."""
        times = 1
        for node in task.fan[len(fan) :]:
            times *= self.tasks[node].repeats
        if times == 1 and torch.equal(part.ids, ids):
            return part
        wanted = ids // times
        index = torch.searchsorted(part.ids, wanted).clamp(max=max(len(part) - 1, 0))
        if len(wanted) and (len(part) == 0 or not torch.equal(part.ids[index], wanted)):
            lost = wanted[part.ids[index] != wanted] if len(part) else wanted
            raise ColumnError(f"node `{task.node}` on rank {self.rank} lacks rows {lost[:5].tolist()} of columns "
                              f"{', '.join(transfer.columns)}, which node `{transfer.producer}` owes")
        return part.select(index)

    def _fan(self, producer: str) -> tuple[str, ...]:
        return () if producer == SOURCE else self.tasks[producer].out_fan

    def _repeats(self, producer: str) -> int:
        """How many rows of this producer stem from one prompt."""
        times = 1
        for node in self._fan(producer):
            times *= self.tasks[node].repeats
        return times


def _empty(form: str) -> ColumnData:
    if form == "list[str]":
        return encode_text([])
    nothing = torch.empty(0, dtype=torch.int64)
    return Ragged(nothing, nothing.clone()) if form.startswith("Ragged") else torch.empty(0)
