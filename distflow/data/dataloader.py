"""Dataloader: each rank loads its own share of every batch (DistFlow §6.1).

The stream of samples is the dataset shuffled again each epoch, by (seed, epoch) alone; several datasets take turns in
it. Step `s` takes the next `batch` positions of it, over the end of an epoch too, and each share a contiguous part of
those, as its layout says. So the samples of a step do not depend on the number of ranks, and the only state is the
position, and the pace of the ranks where shares follow it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from distflow.data.batch import Batch, ColumnData
from distflow.data.dataset import Fields, Record, Records
from distflow.data.load_balance import LoadBalance
from distflow.errors import Diagnostic, InvalidInput, Location
from distflow.plan import Layout
from distflow.telemetry import events
from distflow.telemetry.metrics import current

ONE = Layout(1)
REPEATS = 1 << 30
"""Prompts that are sampled again have other ids: their position plus so much for each time."""
Encode = Callable[[list[Record]], dict[str, ColumnData]]


class WithoutEmpty:
    """Records in which each with an empty field is replaced by the next without; no index, so that opening is quick."""

    def __init__(self, records: Records, fields: Fields):
        self.records, self.fields = records, fields
        self.known: set[int] = set()

    def __len__(self) -> int:
        return len(self.records)

    def where(self, index: int) -> Location:
        return self.records.where(index)

    def get(self, indices: Sequence[int]) -> list[Record]:
        return [self._instead(index) if self.fields.empty(record) else record
                for index, record in zip(indices, self.records.get(indices))]

    def _instead(self, index: int) -> Record:
        for number in range(index, index + len(self.records)):
            record = self.records.get([number % len(self.records)])[0]
            if not self.fields.empty(record):
                return record
            self._record_skipped(number % len(self.records), record)
        raise InvalidInput(Diagnostic(f"field `{self.fields.empty(record)}` of every record is empty",
                                      self.records.where(index)))

    def _record_skipped(self, index: int, record: Record) -> None:
        current().add("data/records_skipped", 1)
        if index not in self.known:
            self.known.add(index)
            events.record("record skipped", field=self.fields.empty(record), where=str(self.records.where(index)))


class Mixture:
    """Several datasets as one, from which a stream takes in proportion to their turns. Each round has its
    own order, by (seed, round) alone; each dataset is shuffled again when it is through."""

    def __init__(self, sets: Sequence[Records], turns: Sequence[int]):
        """`turns`: of each dataset in a round."""
        self.sets, self.turns = sets, tuple(turns)
        self.starts = [0, *itertools.accumulate(map(len, sets))]

    def __len__(self) -> int:
        return self.starts[-1]

    def where(self, index: int) -> Location:
        number = bisect.bisect_right(self.starts, index) - 1
        return self.sets[number].where(index - self.starts[number])

    def get(self, indices: Sequence[int]) -> list[Record]:
        numbers = [bisect.bisect_right(self.starts, index) - 1 for index in indices]
        return [self.sets[number].get([index - self.starts[number]])[0] for number, index in zip(numbers, indices)]

    def index(self, position: int, seed: int) -> int:
        """Return which record the stream has at a position."""
        round_, turn = divmod(position, sum(self.turns))
        order = _order_of_turns(self.turns, seed, round_)
        number = int(order[turn])
        taken = round_ * self.turns[number] + int((order[:turn] == number).sum())
        return self.starts[number] + _shuffled_index(len(self.sets[number]), seed, taken, number)


class Dataloader:
    """Loads this share's rows of each step; their ids are positions in the stream, unique over the whole run."""

    def __init__(self, records: Records, encode: Encode, batch: int, seed: int, share: int | None = None,
                 layout: Layout = ONE, balance: LoadBalance | None = None):
        self.records, self.encode, self.batch, self.seed = records, encode, batch, seed
        self.share, self.layout, self.balance = share, layout, balance
        self.position = 0

    def next(self) -> Batch:
        """Return the next step's rows of this share: none without a share, or perhaps if ranks outnumber rows."""
        start, self.position = self.position, self.position + self.batch
        if self.share is None:
            return Batch(torch.empty(0, dtype=torch.int64))
        layout = self.balance.current(self.layout) if self.balance else self.layout
        mine = layout.cut(self.batch, self.share)
        return self.at(torch.arange(mine.start, mine.stop) + start) if mine else \
            Batch(torch.empty(0, dtype=torch.int64))

    def at(self, ids: torch.Tensor) -> Batch:
        """Return the prompts with these ids [B], in their order."""
        columns = self.encode(self.records.get([self._index(prompt % REPEATS) for prompt in ids.tolist()]))
        return Batch(ids, {**columns, "group": ids})

    def take_results(self) -> tuple[()]:
        return ()

    def reconcile(self) -> None:
        """Make what other groups hold agree with this state: nothing."""

    def finish(self) -> None:
        """End the step."""

    def release_before(self, state: dict[str, Any]) -> None:
        """Release what only states before this one need: nothing."""

    def close(self) -> None:
        """End the run."""

    @property
    def drawn_before(self) -> int:
        return self.position // self.batch

    @property
    def drawn(self) -> range | None:
        """Rows of the last step, of all shares; None if they are no range."""
        return range(self.position - self.batch, self.position)

    @property
    def epoch(self) -> float:
        return self.position / len(self.records)

    def _index(self, position: int) -> int:
        if isinstance(self.records, Mixture):
            return self.records.index(position, self.seed)
        return _shuffled_index(len(self.records), self.seed, position)

    def state_dict(self) -> dict[str, Any]:
        shares = {"balance": self.balance.state_dict()} if self.balance and self.balance.layouts else {}
        return {"position": self.position, **shares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])
        if self.balance and "balance" in state:
            self.balance.load_state_dict(state["balance"])


def _shuffled_index(size: int, seed: int, taken: int, number: int = 0) -> int:
    """Return the next record of a dataset after so many that were taken of it."""
    epoch, offset = divmod(taken, size)
    return int(_shuffles(number)(size, (seed, epoch, number) if number else (seed, epoch))[offset])


@functools.cache
def _shuffles(number: int) -> Callable[[int, Sequence[int]], numpy.ndarray]:
    """Return what shuffles a dataset, and keeps its last two orders."""
    return functools.lru_cache(maxsize=2)(lambda size, seed: numpy.random.default_rng(seed).permutation(size))


@functools.lru_cache(maxsize=2)
def _order_of_turns(turns: tuple[int, ...], seed: int, round_: int) -> numpy.ndarray:
    order = numpy.repeat(numpy.arange(len(turns)), turns)
    return numpy.random.default_rng([seed, round_, len(turns)]).permutation(order)
