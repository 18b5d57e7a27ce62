"""The trainer's source where others sample: the prompts of a step, and what the rollouts have made of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, Ragged
from distflow.data.dataloader import Dataloader
from distflow.dock import DockError
from distflow.dock.index import Lease
from distflow.plan import TRAINER, Plan, Task
from distflow.telemetry import events
from distflow.telemetry.metrics import current
from workers.colocated import ColocatedSource
from workers.fusion import Fusion
from workers.rollout_channel import REPORT, ReceivedColumns, RolloutChannel
from workers.weight_sync import WeightPublication


class AsyncSource:
    """Takes each draw's rows from the dock, and orders those that may be sampled ahead.

    The `n`-th draw of prompts is ordered when the weights after `n - staleness` steps are published, so that no token
    of it is older than that. Every rank of the trainer has one and calls it alike.
    """

    def __init__(self, loader: Dataloader, channel: RolloutChannel, plan: Plan, rank: int, staleness: int,
                 draws: int | None,
                 limit: float, publish: WeightPublication, hybrid: ColocatedSource | None = None,
                 fusion: Fusion | None = None):
        """
        Args:
            draws: of the whole run; None if that depends on what filters leave.
            limit: seconds to wait for a draw's rows.
            publish: makes the newest weights known to the rollouts.
            hybrid: samples on this rank too, until enough of a draw is there.
            fusion: computes what it can of a draw's rows while others are still to come.
        """
        self.loader, self.channel, self.plan, self.publish = loader, channel, plan, publish
        self.hybrid, self.rank, self.staleness, self.draws, self.limit = hybrid, rank, staleness, draws, limit
        self.dock = channel.dock(f"trainer {rank}")
        self.brought, self.fusion = ReceivedColumns(plan, channel.rows), fusion
        self.leases: list[Lease] = []
        """Of the step, on the rank that commits them."""
        self.leased = 0
        """Draws of the step that have come."""
        self.rows: Batch | None = None
        self.ordered = self.drawn_before
        """Draws that rollouts may sample."""
        self.begun = False

    @property
    def drawn_before(self) -> int:
        return self.loader.drawn_before

    @property
    def batch(self) -> int:
        return self.loader.batch

    @property
    def epoch(self) -> float:
        """Passes over the dataset so far."""
        return self.loader.epoch

    @property
    def drawn(self) -> range:
        return self.loader.drawn

    def next(self) -> Batch:
        """This rank's prompts of the next draw: those whose samples it was dealt."""
        number, channel = self.drawn_before, self.channel
        if not self.begun:
            self._reconcile()
            self.publish()
            self.begun = True
        self._order()
        if self.hybrid is not None:
            self.hybrid.sample(self.leased)
        self.loader.position += self.loader.batch
        self.dock.doing(f"waiting for the samples of step {number}")
        until = time.monotonic() + self.limit
        if self.fusion is not None:
            self.fusion.run(self.dock, number, until)
        lease = self.dock.lease(TRAINER, self.loader.batch * channel.rows, wait=max(until - time.monotonic(), 0.0),
                                step=number, share=self.rank, shares=self.plan.ranks)
        self.leased += 1
        self.rows = self.dock.fetch(lease)
        if self.rank == 0:
            self.leases.append(lease)
        reports: Ragged = self.rows[REPORT]
        for report in reports.rows:
            if len(report):
                current().add_all(report.numpy().tobytes())
        return self.loader.at(torch.unique(lease.ids // channel.rows))

    def arrivals(self) -> Iterator[tuple[Task, dict[str, ColumnData], Tensor]]:
        """What each node of the other group wrote for these prompts, and what was computed while they came."""
        yield from self.brought.of(self.rows)
        if self.fusion is not None:
            yield from self.fusion.results()

    def finish(self) -> None:
        """The step is trained on: its rows are consumed, and its weights go out. While copies of its state are still
        under way the dock keeps the rows, for a worker that starts from the state before."""
        for lease in self.leases:
            self.dock.commit(lease)
        self.leases, self.leased = [], 0
        if self.drawn_before != self.draws:  # nobody samples after the last draw
            self.publish()

    def _reconcile(self) -> None:
        """Make the dock's commits those of the state from which the trainer goes on. What it remembers and died before
        it could say so is committed: nobody will ask for those rows again. What came after that state is taken back."""
        if self.rank > 0:
            return
        count = self.loader.batch * self.channel.rows
        with contextlib.suppress(DockError):  # it is committed, or this dock never had it
            for number in reversed(range(self.drawn_before)):
                self.dock.commit(self.dock.lease(TRAINER, count, step=number, shares=self.plan.ranks))
        if rows := self.dock.take_back(TRAINER, self.drawn_before):
            events.record("rows taken back", rows=rows, first_draw=self.drawn_before)

    @property
    def busy(self) -> float:
        """Seconds that this rank has computed while it waited for the last draw's rows."""
        return self.fusion.seconds if self.fusion else 0.0

    @property
    def ready(self) -> int:
        """Rows in the dock that wait for the trainer."""
        found = (each["controllers"].get(TRAINER) for each in self.dock.status())
        return sum(each["ready"] for each in found if each)

    def close(self) -> None:
        self.publish.close()
        self.dock.close()

    def _order(self) -> None:
        if self.rank > 0:
            return
        last = self.drawn_before + self.staleness + 1
        last = last if self.draws is None else min(last, self.draws)
        if last > self.ordered:
            size = self.loader.batch
            self.channel.order(self.dock, self.ordered * size, last * size - 1, self.publish.issue, self.limit)
            self.ordered = last

    def settle(self, state: dict[str, int]) -> None:
        """Nobody will go on from a state before this one: the dock need not keep what was trained on until then."""
        if self.rank == 0:
            self.dock.settle(TRAINER, state["position"] // self.loader.batch)

    def state_dict(self) -> dict[str, int]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loader.load_state_dict(state)
        self.ordered = self.drawn_before
