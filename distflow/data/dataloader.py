"""Each rank draws its own share of every batch (DistFlow §6.1).

The stream of samples is the dataset shuffled anew each epoch, by (seed, epoch) alone. Step `s` takes the next
`batch` positions of it, over the end of an epoch too, and each share a contiguous part of those, as its layout
says. So the samples of a step do not depend on the number of ranks, and the only state is the position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy
import torch

from distflow.data.batch import Batch, ColumnData
from distflow.data.records import Record, Records
from distflow.schema.plan import Layout

ONE = Layout(1)
Encode = Callable[[list[Record]], dict[str, ColumnData]]


class Dataloader:
    """Yields this share's rows of each step; their ids are positions in the stream, unique over the whole run."""

    def __init__(self, records: Records, encode: Encode, batch: int, seed: int, share: int | None = None,
                 layout: Layout = ONE):
        self.records, self.encode, self.batch, self.seed = records, encode, batch, seed
        self.share, self.layout = share, layout
        self.position = 0

    def next(self) -> Batch:
        """The next step's rows of this share: none for a rank without a share, perhaps none if ranks outnumber rows."""
        start, self.position = self.position, self.position + self.batch
        if self.share is None:
            return Batch(torch.empty(0, dtype=torch.int64))
        mine = self.layout.cut(self.batch, self.share)
        return self.at(torch.arange(mine.start, mine.stop) + start) if mine else \
            Batch(torch.empty(0, dtype=torch.int64))

    def at(self, ids: torch.Tensor) -> Batch:
        """The prompts at these positions of the stream [B], in their order."""
        columns = self.encode(self.records.get([self._index(position) for position in ids.tolist()]))
        return Batch(ids, {**columns, "group": ids})

    def arrivals(self) -> tuple[()]:
        """What others have computed on the last draw's prompts: nothing."""
        return ()

    def finish(self) -> None:
        """The step is done."""

    def settle(self, state: dict[str, int]) -> None:
        """Nobody will go on from a state before this one."""

    def close(self) -> None:
        """The run is over."""

    @property
    def drawn_before(self) -> int:
        """The number of draws so far."""
        return self.position // self.batch

    @property
    def drawn(self) -> range:
        """The rows of the last step, of all shares."""
        return range(self.position - self.batch, self.position)

    @property
    def epoch(self) -> float:
        """Passes over the dataset so far."""
        return self.position / len(self.records)

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.records))
        return int(_shuffled(len(self.records), self.seed, epoch)[offset])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = int(state["position"])


@functools.lru_cache(maxsize=2)
def _shuffled(size: int, seed: int, epoch: int) -> numpy.ndarray:
    return numpy.random.default_rng([seed, epoch]).permutation(size)
