"""What tasks hand to each other within a step (DistFlow §6.2).

Values are kept by producer and layout, so fan-outs, joins and repeated redistributions in one step each find their
own. A task whose layout is the producer's gets its columns by reference. Otherwise the rows move, each once and
directly to the rank that needs it, in one all-to-all; all rows that stem from one prompt stay together.

Whether a collective runs depends on the plan and on what ran before in the step, never on what a rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.data.balance import assign, imbalance
from distflow.data.batch import Batch, ColumnData, Ragged, decode_text, encode_text
from distflow.data.exchange import exchange, gather
from distflow.data.wire import from_wire, to_wire
from distflow.observe.metrics import Metrics
from distflow.schema.errors import ColumnError
from distflow.schema.plan import ROW, SOURCE, Layout, Plan, Task, Transfer

_TEXT = "list[str]"


class Databuffer:
    """One rank's view of the group's buffer.

    A rank outside a layout takes part in its transfers and holds zero rows of it. Rows stand in the order of their ids.
    """

    def __init__(self, plan: Plan, rank: int, metrics: Metrics, group: dist.ProcessGroup | None = None):
        self.rank, self.group, self.metrics = rank, group, metrics
        self.source_layout = plan.source
        self.tasks = {task.node: task for task in plan.tasks}
        self.shelves: dict[tuple[str, Layout], Batch] = {}
        self.homes: dict[Layout, tuple[Tensor, Tensor]] = {}
        """Per layout: prompt ids, ascending, and the share that holds each one's rows in this step."""
        self.moved: set[tuple[str, str, Layout]] = set()
        """(producer, column, layout) that were redistributed in this step; the same on every rank."""

    def start(self, batch: Batch) -> None:
        """Begin a step with this rank's rows of the dataset; what the last step left is dropped."""
        self.shelves = {(SOURCE, self.source_layout): batch}
        self.homes = {}
        self.moved = set()

    def put(self, task: Task, columns: dict[str, ColumnData], ids: Tensor) -> None:
        """Keep what a task wrote for the rows `ids` [B], ascending."""
        self.shelves[task.node, task.layout] = Batch(ids, columns)

    def take(self, task: Task) -> Batch:
        """The columns that a task reads, in its layout and repeated to its rows. Every rank must call it.

        Raises:
            ColumnError: rows or columns that a producer owes are not there.
        """
        parts = [self._fetch(transfer, task.layout) for transfer in task.transfers]
        fans = [self._fan(transfer.producer) for transfer in task.transfers]
        finest = max(zip(fans, parts), key=lambda pair: len(pair[0]), default=None)
        ids = finest[1].ids if finest else torch.empty(0, dtype=torch.int64)
        found: dict[tuple[str, str], ColumnData] = {}
        for part, fan, transfer in zip(parts, fans, task.transfers):
            aligned = self._align(part, fan, task, ids, transfer)
            found |= {(transfer.producer, name): column for name, column in aligned.columns.items()}
        found |= {(column.producer, ROW): ids for column in task.reads if column.name == ROW}
        return Batch(ids, {column.parameter: found.get((column.producer, column.name), _empty(column.form))
                           for column in task.reads})

    def readable(self, names: Iterable[str], count: int) -> dict[str, list[Any]]:
        """Up to `count` of this rank's rows, spread over the step, with those of the columns that it has for them."""
        held = {name: [(self._fan(producer), batch) for (producer, _), batch in self.shelves.items()
                       if name in batch.columns and len(batch)] for name in names}
        finest = max((pair for pairs in held.values() for pair in pairs), key=lambda pair: len(pair[0]), default=None)
        if finest is None or not count:
            return {}
        fan, batch = finest
        ids = batch.ids[:: max(1, len(batch) // count)][:count]
        result = {}
        for name, pairs in held.items():
            for shorter, batch in pairs:
                index, lost = _places(batch.ids, ids // self._times(fan[len(shorter) :]))
                if not len(lost) and fan[: len(shorter)] == shorter:
                    result[name] = _plain(batch.only([name]).select(index)[name])
                    break
        return result

    def _fetch(self, transfer: Transfer, layout: Layout) -> Batch:
        """The transfer's columns in `layout`; a rank without rows may lack the columns themselves."""
        if transfer.kind != "local":
            new = [name for name in transfer.columns if (transfer.producer, name, layout) not in self.moved]
            if new:
                self._redistribute(transfer.producer, new, layout)
                self.moved.update((transfer.producer, name, layout) for name in new)
        return self._held(transfer.producer, layout, transfer.columns)

    def _held(self, producer: str, layout: Layout, names: Iterable[str]) -> Batch:
        batch = self.shelves[producer, layout]
        lost = [name for name in names if name not in batch.columns]
        if lost and len(batch):
            raise ColumnError(f"node `{producer}` has {len(batch)} rows on rank {self.rank}, but not their column "
                              f"{', '.join(lost)}; it has {', '.join(batch.columns) or 'none'}")
        return batch.only(name for name in names if name in batch.columns)

    def _redistribute(self, producer: str, names: list[str], layout: Layout) -> None:
        held = self._held(producer, self._origin(producer), names)
        units, shares = self._home(layout)
        outgoing = list(self._outgoing(held, held.ids // self._repeats(producer), units, shares, layout))
        self.metrics.add("data/bytes_sent", sum(len(part) for peer, part in enumerate(outgoing) if peer != self.rank))
        arrived = [from_wire(wire) for wire in exchange(outgoing, self.group) if len(wire)]
        moved = _ordered(Batch.concat(arrived)) if arrived else Batch(torch.empty(0, dtype=torch.int64))
        earlier = self.shelves.get((producer, layout))
        self.shelves[producer, layout] = moved.with_columns(earlier.columns) if earlier else moved

    def _outgoing(self, held: Batch, roots: Tensor, units: Tensor, shares: Tensor, layout: Layout) -> Iterator[Tensor]:
        """For each rank, the rows that go there. One that gets none learns the columns' types from one other."""
        place, lost = _places(units, roots)
        if len(lost):
            raise ColumnError(f"rank {self.rank} has rows of the prompts {lost[:5].tolist()}, which no rank had before")
        share_of_row = shares[place]
        filled = set(shares.tolist())
        tells_types = len(held) > 0 and bool((roots == units[0]).any())
        for rank in range(dist.get_world_size(self.group)):
            share = layout.share(rank)
            if share in filled:
                index = (share_of_row == share).nonzero().squeeze(1)
                yield to_wire(held.select(index)) if len(index) else torch.empty(0, dtype=torch.uint8)
            else:
                yield to_wire(held.slice(0, 0)) if tells_types else torch.empty(0, dtype=torch.uint8)

    def _home(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Where each prompt's rows live in `layout`: decided by the first transfer to it, kept for the step."""
        if layout not in self.homes:
            pieces = gather(self._known(layout).numpy().tobytes(), self.group)
            tables = [torch.frombuffer(bytearray(raw), dtype=torch.int64).view(3, -1) for raw in pieces if raw]
            roots, tokens, owners = torch.cat(tables, 1) if tables else torch.empty(3, 0, dtype=torch.int64)
            units, weights, settled = _merged(roots, tokens, owners)
            shares = assign(weights, layout.dp, settled)
            self.homes[layout] = units, shares
            if bool((settled < 0).any()):
                self.metrics.mean("data/imbalance", imbalance(weights, shares, layout.dp))
        return self.homes[layout]

    def _known(self, layout: Layout) -> Tensor:
        """[3, prompts of this rank]: id, tokens that tasks of `layout` will read, its share of `layout` or -1.

        A prompt whose rows are in `layout` already keeps its share there: later columns must join them.
        """
        counted = self._counted(layout)
        roots, tokens, owners = [], [], []
        for (producer, place), batch in self.shelves.items():
            roots.append(batch.ids // self._repeats(producer))
            share = layout.share(self.rank) if place == layout else None
            owners.append(torch.full_like(batch.ids, -1 if share is None else share))
            weight = torch.zeros_like(batch.ids)
            if place == self._origin(producer):  # rows that were moved elsewhere count once
                weight += 1
                for name, column in batch.columns.items():
                    if (producer, name) in counted and isinstance(column, Ragged):
                        weight += column.lengths
            tokens.append(weight)
        return torch.stack(_merged(torch.cat(roots), torch.cat(tokens), torch.cat(owners)))

    def _counted(self, layout: Layout) -> set[tuple[str, str]]:
        """The (producer, column) whose lengths say how much work a row is: tokens, or text where no tokens are read."""
        reads = [column for task in self.tasks.values() if task.layout == layout for column in task.reads]
        tokens = {(column.producer, column.name) for column in reads if "Ragged" in column.form}
        return tokens or {(column.producer, column.name) for column in reads if column.form == _TEXT}

    def _align(self, part: Batch, fan: tuple[str, ...], task: Task, ids: Tensor, transfer: Transfer) -> Batch:
        """`part` with exactly the rows `ids`: repeated if its rows were repeated later on."""
        times = self._times(task.fan[len(fan) :])
        if times == 1 and torch.equal(part.ids, ids):
            return part
        index, lost = _places(part.ids, ids // times)
        where = f"node `{task.node}` on rank {self.rank}"
        if len(lost):
            raise ColumnError(f"{where} lacks rows {lost[:5].tolist()} of columns {', '.join(transfer.columns)}, which "
                              f"node `{transfer.producer}` owes")
        if len(part) * times != len(ids):
            alone = part.ids[~torch.isin(part.ids, ids // times)]
            raise ColumnError(f"{where} has rows {alone[:5].tolist()} of columns {', '.join(transfer.columns)} from "
                              f"node `{transfer.producer}`, but its other inputs lack them")
        return part.select(index)

    def _origin(self, producer: str) -> Layout:
        return self.source_layout if producer == SOURCE else self.tasks[producer].layout

    def _fan(self, producer: str) -> tuple[str, ...]:
        return () if producer == SOURCE else self.tasks[producer].out_fan

    def _repeats(self, producer: str) -> int:
        """How many rows of this producer stem from one prompt."""
        return self._times(self._fan(producer))

    def _times(self, fan: Iterable[str]) -> int:
        return math.prod(self.tasks[node].repeats for node in fan)


def _places(ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where each of `wanted` stands in `ids` (ascending), and those of `wanted` that are not there."""
    if not len(ids):
        return torch.zeros(0, dtype=torch.int64), wanted
    index = torch.searchsorted(ids, wanted).clamp(max=len(ids) - 1)
    return index, wanted[ids[index] != wanted]


def _merged(roots: Tensor, tokens: Tensor, owners: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each prompt once, ascending, with its tokens in all and the share that any of its rows has."""
    units, inverse = torch.unique(roots, return_inverse=True)
    weights = torch.zeros_like(units).index_add_(0, inverse, tokens)
    settled = torch.full_like(units, -1).scatter_reduce_(0, inverse, owners, "amax")
    return units, weights, settled


def _ordered(batch: Batch) -> Batch:
    steps = batch.ids.diff()
    if bool((steps > 0).all()):
        return batch
    batch = batch.select(torch.argsort(batch.ids))
    twice = batch.ids[1:][batch.ids.diff() == 0]
    if len(twice):
        raise ColumnError(f"rows {twice[:5].tolist()} of columns {', '.join(batch.columns)} arrived twice")
    return batch


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
