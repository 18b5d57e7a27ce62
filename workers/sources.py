"""Prompts and samples of a trainer whose rollouts are other ranks: enqueues prompts ahead, takes their rows from the
dock."""

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


class AsyncSource:
    """Source of the asynchronous modes: prompts of a draw with the rows that rollouts have made of them.

    The `n`-th draw of prompts is enqueued when the weights after `n - staleness` steps are published, so that no token
    of it is older than that. Collective over the trainer. The training loop sets `version_set` when it publishes
    weights; prompts are sampled with these or newer ones.
    """

    def __init__(self, loader: Dataloader, channel: RolloutChannel, plan: Plan, rank: int, staleness: int,
                 draws: int | None, limit: float, colocated: ColocatedSource | None = None,
                 fusion: Fusion | None = None):
        """
        Args:
            draws: number of draws of the whole run; None if it depends on what filters leave.
            limit: seconds to wait for a draw's rows.
            colocated: samples on this rank too, until enough rows of a draw are there.
            fusion: runs nodes on the rows of a draw that have come while others are still sampled.
        """
        self.loader, self.channel, self.plan, self.colocated = loader, channel, plan, colocated
        self.rank, self.staleness, self.draws, self.limit = rank, staleness, draws, limit
        self.dock = channel.dock(f"trainer {rank}")
        self.received, self.fusion = ReceivedColumns(plan, channel.rows), fusion
        self.leases: list[Lease] = []
        """The step's leases, on rank 0, which commits them."""
        self.leased = 0
        """Draws of the step that have been received."""
        self.rows: Batch | None = None
        self.enqueued = self.drawn_before
        """Draws that rollouts may sample."""
        self.version_set = 0
        """Number of the newest published set of weights."""

    @property
    def drawn_before(self) -> int:
        return self.loader.drawn_before

    @property
    def batch(self) -> int:
        return self.loader.batch

    @property
    def epoch(self) -> float:
        return self.loader.epoch

    @property
    def exhausted(self) -> bool:
        """Whether the last draw has been received, so that nothing is sampled any more."""
        return self.drawn_before == self.draws

    @property
    def drawn(self) -> range:
        return self.loader.drawn

    def next(self) -> Batch:
        """Return the prompts of the next draw whose samples are assigned to this rank.

        Raises:
            TimedOut: the samples have not come within the limit.
        """
        number, channel = self.drawn_before, self.channel
        self._enqueue_prompts()
        if self.colocated is not None:
            self.colocated.sample(self.leased)
        self.loader.position += self.loader.batch
        self.dock.report_activity(f"waiting for the samples of step {number}")
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

    def take_results(self) -> Iterator[tuple[Task, dict[str, ColumnData], Tensor]]:
        """Yield what nodes of the rollout group wrote for these prompts, and what was computed while they came."""
        yield from self.received.of(self.rows)
        if self.fusion is not None:
            yield from self.fusion.results()

    def finish(self) -> None:
        """Commit the rows of a step that is trained on. While snapshots of its state are still being copied the dock
        keeps the rows, for a worker that starts from the state before."""
        for lease in self.leases:
            self.dock.commit(lease)
        self.leases, self.leased = [], 0

    def reconcile(self) -> None:
        """Make the dock's commits agree with the state that training goes on from. Rows of earlier steps that a worker
        trained on but did not commit before it died are committed; commits of later steps are rolled back."""
        if self.rank > 0:
            return
        count = self.loader.batch * self.channel.rows
        with contextlib.suppress(DockError):  # it is committed, or this dock never had it
            for number in reversed(range(self.drawn_before)):
                self.dock.commit(self.dock.lease(TRAINER, count, step=number, shares=self.plan.ranks))
        if rows := self.dock.rollback(TRAINER, self.drawn_before):
            events.record("rows taken back", rows=rows, first_draw=self.drawn_before)

    @property
    def busy(self) -> float:
        """Seconds that this rank has computed while it waited for the rows of the last draw."""
        return self.fusion.seconds if self.fusion else 0.0

    @property
    def ready(self) -> int:
        """Rows in the dock that wait for the trainer."""
        found = (each["indexes"].get(TRAINER) for each in self.dock.status())
        return sum(each["ready"] for each in found if each)

    def close(self) -> None:
        self.dock.close()

    def _enqueue_prompts(self) -> None:
        if self.rank > 0:
            return
        last = self.drawn_before + self.staleness + 1
        last = last if self.draws is None else min(last, self.draws)
        if last > self.enqueued:
            size = self.loader.batch
            self.channel.enqueue_prompts(self.dock, self.enqueued * size, last * size - 1, self.version_set, self.limit)
            self.enqueued = last

    def release_before(self, state: dict[str, int]) -> None:
        """Release the rows that were trained on before this state, since no worker goes on from an earlier one."""
        if self.rank == 0:
            self.dock.release_before(TRAINER, state["position"] // self.loader.batch)

    def state_dict(self) -> dict[str, int]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loader.load_state_dict(state)
        self.enqueued = self.drawn_before
