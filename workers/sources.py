"""Sources of a step's prompts: the dataloader in mode sync, else prompts whose rows rollouts have put into the dock.

The staleness bound: `AsyncSource` enqueues prompts at most `staleness` steps ahead of the trainer, and a rollout
samples a prompt with at least the weights that it was enqueued with (`workers/rollout.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData
from distflow.data.dataloader import SOURCE_WEIGHT, Dataloader
from distflow.dock import DockError, TimedOut
from distflow.dock.index import Lease
from distflow.errors import InvalidInput
from distflow.plan import ROLLOUT, TRAINER, Plan, Task
from distflow.telemetry import events
from distflow.telemetry.metrics import current
from workers.colocated import ColocatedSource
from workers.encode import dataloader
from workers.fusion import Fusion
from workers.rollout_channel import Patience, ReceivedColumns, RolloutChannel, reports_of
from workers.train_context import TrainContext


class AsyncSource(Dataloader):
    """Source of the asynchronous modes: prompts of a draw with the rows that rollouts have made of them. Collective.
    The `n`-th draw is enqueued when the weights after `n - staleness` steps are published, so that no token of it is
    older than that."""

    def __init__(self, loader: Dataloader, channel: RolloutChannel, plan: Plan, rank: int, staleness: int,
                 draws: int | None, limit: float, colocated: ColocatedSource | None = None,
                 fusion: Fusion | None = None, attempt: int = 0):
        """`draws`: of the whole run; None if it depends on what filters leave. `limit`: seconds to wait for a draw's
        rows. `colocated` samples on this rank too, until enough rows are there; `fusion` runs nodes on rows that have
        come. `attempt`: of the trainer."""
        super().__init__(loader.records, loader.encode, loader.batch, loader.seed, loader.share, loader.layout)
        self.channel, self.plan, self.colocated, self.fusion = channel, plan, colocated, fusion
        self.rank, self.staleness, self.draws, self.limit = rank, staleness, draws, limit
        self.dock = channel.dock(f"trainer {rank}", attempt)
        self.received = ReceivedColumns(plan, channel.rows)
        self.leases: list[Lease] = []  # of draws that have been received; rank 0 commits them
        self.rows = Batch(torch.empty(0, dtype=torch.int64))
        self.enqueued = 0  # draws that rollouts may sample

    def next(self) -> Batch:
        """Return the prompts of the next draw whose samples are assigned to this rank; TimedOut if they do not come."""
        began, number = time.perf_counter(), self.drawn_before
        if self.rank == 0:
            self._enqueue_prompts(number)
        if self.colocated is not None:
            self.colocated.sample(len(self.leases))
        self.position += self.batch
        self.dock.report_activity(f"waiting for the samples of step {number}")
        patience = Patience(self.channel, self.dock, self.limit)
        if self.fusion is not None:
            self.fusion.run(self.dock, number, patience)
        lease = self._leased(number, patience)
        self.leases.append(lease)
        self.rows = self.dock.fetch(lease)
        for report in reports_of(self.rows):
            current().add_all(report)
        prompts = self.at(torch.unique(lease.ids // self.channel.rows))
        current().maximum("waiting/samples", time.perf_counter() - began - (self.fusion.seconds if self.fusion else 0))
        if self.rank == 0:
            shards = self.dock.status()
            found = (each["indexes"].get(TRAINER) for each in shards)
            current().add("dock/ready", sum(each["ready"] for each in found if each))
            current().add("dock/bytes", max(each["bytes"] for each in shards))
            current().add("dock/standbys", min(each["standbys"] for each in shards))
        return prompts

    def _enqueue_prompts(self, number: int) -> None:
        """Let rollouts sample draw `number`, and the draws that may follow so soon if the dock has room for them."""
        self.dock.require(ROLLOUT, number)
        first, last = max(self.enqueued, number), number + self.staleness + 1
        last = last if self.draws is None else min(last, self.draws)
        if last > first:
            self.channel.enqueue_prompts(self.dock, first * self.batch, last * self.batch - 1)
            self.enqueued = last

    def _leased(self, number: int, patience: Patience) -> Lease:
        """Return this rank's rows of a step."""
        while True:
            try:
                return self.dock.lease(TRAINER, self.batch * self.channel.rows, wait=patience.wait, step=number,
                                       share=self.rank, shares=self.plan.ranks)
            except TimedOut as error:
                patience.check(error)

    def reweigh(self, reported: Sequence[Mapping[str, tuple[float, float]]]) -> None:
        """Refuse weights of training sets: the prompts of the next steps are being sampled already."""
        if any(name.startswith(SOURCE_WEIGHT) for rank in reported for name in rank):
            raise InvalidInput("a node sets weights of training sets, which needs  mode: sync : in other modes the "
                               "prompts of the next steps are being sampled already")

    def take_results(self) -> Iterator[tuple[Task, Mapping[str, ColumnData], Tensor]]:
        """Yield what nodes of the rollout group wrote for these prompts, and what was computed while they came."""
        yield from self.received.of(self.rows)
        if self.fusion is not None:
            yield from self.fusion.results()

    def finish(self) -> None:
        """Commit the rows of a step that is trained on. While snapshots of its state are still being copied the dock
        keeps the rows, for a worker that starts from the state before."""
        for lease in self.leases if self.rank == 0 else ():
            self.dock.commit(lease)
        self.leases = []

    def reconcile(self) -> None:
        """Make the dock's commits agree with the state that training goes on from: those of later steps are rolled
        back, and with them the leases of the attempt before. Rows of earlier steps that a worker trained on but did not
        commit before it died are committed. The other ranks' leases wait for the rollback."""
        if self.rank > 0:
            return
        if rows := self.dock.rollback(TRAINER, self.drawn_before):
            events.record("rows taken back", rows=rows, first_draw=self.drawn_before)
        count = self.batch * self.channel.rows
        with contextlib.suppress(DockError):  # it is committed
            for number in reversed(range(self.drawn_before)):
                lease = self.dock.try_lease(TRAINER, count, step=number, shares=self.plan.ranks)
                if lease is None:  # this dock never had it
                    break
                self.dock.commit(lease)

    def release_before(self, state: dict[str, Any]) -> None:
        """Release the rows that were trained on before this state, since no worker goes on from an earlier one."""
        if self.rank == 0:
            self.dock.release_before(TRAINER, state["position"] // self.batch)

    def close(self) -> None:
        self.dock.close()


def source_of(ctx: TrainContext) -> Dataloader:
    """Return the source of a rank's prompts, by the run's mode. Collective over the ranks that train."""
    def loader() -> Dataloader:
        return dataloader(ctx.spec, ctx.roles[ctx.prompted], ctx.plan.source.share(ctx.rank), ctx.plan.source,
                          ctx.balance)

    channel, plan, run = ctx.channel, ctx.plan, ctx.spec.run
    if channel is None:
        return loader()
    colocated = ColocatedSource.of(ctx, channel, loader()) if run.mode == "semi_sync" else None
    fusion = Fusion(plan, ctx.rank, loader(), channel, run.wait_limit, ctx.executor) if plan.early else None
    draws = run.steps if all(task.draws == 1 for task in plan.tasks) else None
    return AsyncSource(loader(), channel, plan, ctx.rank, run.staleness, draws, run.wait_limit, colocated, fusion,
                       ctx.attempt)
