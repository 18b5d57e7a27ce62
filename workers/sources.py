"""Sources of a step's prompts: the dataloader in mode sync, else prompts whose rows rollouts have put into the dock.

    AsyncSource        prompts in the order of the data, with the samples of rollouts
    UnorderedSource    prompts whose rows are there first (`on_stale: drop` or `keep`)

The bound of AsyncSource: prompts are enqueued at most `staleness` steps before they are trained on, and each is sampled
with the newest weights of that moment or newer ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, Ragged
from distflow.data.crossing import REPORT, ReceivedColumns, reports_of
from distflow.data.dataloader import REPEATS, SOURCE_WEIGHT, Dataloader
from distflow.data.exchange import gather_values
from distflow.dock import DockError, TimedOut
from distflow.dock.index import Lease
from distflow.errors import InvalidInput
from distflow.plan import ROLLOUT, TRAINER, Plan, Task
from distflow.telemetry import events
from distflow.telemetry.metrics import current
from workers.colocated import ColocatedSource
from workers.encode import dataloader
from workers.fusion import Fusion
from workers.rollout_channel import RolloutChannel, SampleTimeout
from workers.train_context import TrainContext


class AsyncSource(Dataloader):
    """Source of the asynchronous modes: prompts of a draw with the rows that rollouts have made of them. Collective.
    The `n`-th draw is enqueued when the weights after `n - staleness` steps are published, so that no token of it is
    older than that."""

    starts_passes = False

    def __init__(self, loader: Dataloader, ctx: TrainContext, channel: RolloutChannel,
                 colocated: ColocatedSource | None = None, fusion: Fusion | None = None):
        """`colocated` samples on this rank too, until enough rows are there; `fusion` runs nodes on rows that have
        come."""
        super().__init__(loader.records, loader.encode, loader.batch, loader.seed, loader.share, loader.layout,
                         files=loader.files)
        self.channel, self.plan, self.colocated, self.fusion = channel, ctx.plan, colocated, fusion
        run, self.rank = ctx.spec.run, ctx.rank
        self.staleness, self.limit = run.staleness, run.wait_limit
        self.draws = run.steps if all(task.draws == 1 for task in self.plan.tasks) else None
        """Of the whole run; None if it depends on what filters leave."""
        self.dock = channel.dock(f"{TRAINER} {self.rank}", ctx.attempt)
        self.received = ReceivedColumns(self.plan, channel.rows)
        self.leases: list[Lease] = []  # of draws that have been received; rank 0 commits them
        self.rows = Batch(torch.empty(0, dtype=torch.int64))
        self.enqueued = 0  # draws that rollouts may sample

    def next(self) -> Batch:
        """Return the prompts of the next draw whose samples are assigned to this rank; TimedOut if they do not come."""
        began, number = time.perf_counter(), self.drawn_before
        self._enqueue_prompts(number)
        self._sample(number, self.batch)
        self.position += self.batch
        self.dock.report_activity(f"waiting for the samples of step {number}")
        timeout = SampleTimeout(self.channel, self.dock, self.limit)
        if self.fusion is not None:
            self.fusion.run(self.dock, number, timeout)
        self.rows = self._receive(number, timeout)
        _add_reports(self.rows)
        prompts = self.at(torch.unique(self.rows.ids // self.channel.rows))
        current().maximum("waiting/samples", time.perf_counter() - began - (self.fusion.seconds if self.fusion else 0))
        if self.rank == 0:
            shards = self.dock.status()
            found = (each["indexes"].get(TRAINER) for each in shards)
            current().add("dock/ready", sum(each["ready"] for each in found if each))
            current().add("dock/bytes", max(each["bytes"] for each in shards))
        return prompts

    def _sample(self, number: int, prompts: int) -> None:
        """Sample on this rank too, before the trainer leases so many prompts under this number."""
        if self.colocated is not None:
            self.colocated.sample(len(self.leases), partial(self._has, number, prompts * self.channel.rows))

    def _has(self, number: int, rows: int) -> bool:
        return self.dock.try_peek(TRAINER, rows, least=rows, step=number) is not None

    def _enqueue_prompts(self, number: int) -> None:
        """Let rollouts sample draw `number`, and the draws that may follow so soon if the dock has room for them."""
        if self.rank > 0:
            return
        self.dock.require(ROLLOUT, number)
        first, last = max(self.enqueued, number), number + self.staleness + 1
        last = last if self.draws is None else min(last, self.draws)
        if last > first:
            self.channel.enqueue_prompts(self.dock, torch.arange(first * self.batch, last * self.batch))
            self.enqueued = last

    def _receive(self, number: int, timeout: SampleTimeout) -> Batch:
        """Return this rank's rows of draw `number`."""
        return self._lease_batch(number, timeout, self.batch)

    def _lease_batch(self, number: int, timeout: SampleTimeout, prompts: int) -> Batch:
        rows = self.dock.fetch(self._lease(number, timeout, prompts))
        self.channel.require_published(rows)
        return rows

    def _lease(self, number: int, timeout: SampleTimeout, prompts: int) -> Lease:
        """Lease so many prompts under this number, which all ranks name."""
        while True:
            try:
                lease = self.dock.lease(TRAINER, prompts * self.channel.rows, wait=timeout.poll_seconds, step=number,
                                        share=self.rank, shares=self.plan.ranks)
                self.leases.append(lease)
                return lease
            except TimedOut as error:
                timeout.check(error)

    def reweigh(self, reported: Sequence[Mapping[str, tuple[float, float]]]) -> None:
        """Refuse weights of training sets: the prompts of the next steps are being sampled already."""
        if any(name.startswith(SOURCE_WEIGHT) for rank in reported for name in rank):
            raise InvalidInput("a node sets weights of training sets, which needs  mode: sync : in other modes the "
                               "prompts of the next steps are being sampled already")

    def start_at(self, step: int) -> None:
        """Go on at the step after `step` steps: the last draw to enqueue is that of the last step, whatever number it
        has. A resumed run with another `data.batch` numbers its draws by that."""
        if self.draws is not None:
            self.draws += self.drawn_before - step

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

    def _is_full(self) -> bool:
        """Return whether the dock stores more than `dock_gib`; False on other ranks than 0, which do not ask."""
        limit = self.dock.layout.max_bytes if self.rank == 0 else None
        shards = self.dock.status() if limit is not None else []
        return limit is not None and sum(each["bytes"] for each in shards) > limit * len(shards)

    def reconcile(self) -> None:
        """Make the dock's commits agree with the state that training goes on from: those of later steps are rolled
        back, and with them the leases of the attempt before. Rows of earlier steps that a worker trained on but did not
        commit before it died are committed. The other ranks' leases wait for the rollback."""
        if self.rank > 0:
            return
        count = self.batch * self.channel.rows
        if rows := self.dock.rollback(TRAINER, self.drawn_before):
            events.record("rows_rolled_back", rows=rows, first_draw=self.drawn_before)
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; if `data.batch` has changed since, with the next whole draw of that size."""
        super().load_state_dict(state)
        self.position += -self.position % self.batch

    def close(self) -> None:
        self.dock.close()


class UnorderedSource(AsyncSource):
    """Source that takes the prompts that are done first, whichever they are, while the slow ones go on. Collective.

    At most `staleness + 1` steps of prompts are sampled and not trained on yet (AReaL, Fu et al. 2025). `open` has the
    others of those that were enqueued, so that each is trained on once. One that is too old is enqueued again under
    another id (`REPEATS`). A draw is leased under as many numbers as it takes to have enough that may be trained on.
    """

    in_order = False

    def __init__(self, loader: Dataloader, ctx: TrainContext, *given: Any):
        super().__init__(loader, ctx, *given)
        self.drops, self.trained = ctx.spec.run.on_stale == "drop", ctx.trained
        """Whether prompts that are too old are left out, instead of trained on; and the roles that are trained."""
        self.open: dict[int, int] = {}  # how often each prompt was enqueued again, by its position
        self.taken = 0  # leases
        self.ends: list[int] = []  # leases that were taken by the end of each of the last steps
        self.again = True  # this process has not enqueued anything yet
        self.oldest: dict[str, list[int]] = {}  # versions that the last steps began with, by role
        self.columns = [(f"{task.node}/versions", task.role) for task in self.plan.tasks if "versions" in task.writes]

    @property
    def drawn(self) -> None:
        """Nothing: the prompts of a draw are no range."""

    def _enqueue_prompts(self, number: int) -> None:
        for name in {role for _, role in self.columns} & self.trained.keys():
            versions = self.oldest.setdefault(name, [])
            if self.trained[name].version not in versions[-1:]:
                versions.append(self.trained[name].version)
            del versions[: -self.staleness - 1]
        end = (number + self.staleness + 1) * self.batch
        fresh = range(self.enqueued, end if self.draws is None else min(end, self.draws * self.batch))
        self.open |= dict.fromkeys(fresh, 0)
        self.enqueued = max(self.enqueued, fresh.stop)
        self._enqueue(self.open if self.again else fresh)
        self.again = False

    def _enqueue(self, positions: Iterable[int]) -> None:
        prompts = [position + REPEATS * self.open[position] for position in positions]
        if prompts and self.rank == 0:
            self.channel.enqueue_prompts(self.dock, torch.tensor(prompts))

    def finish(self) -> None:
        """Commit the rows of a step. Where the dock is full, release those of trained steps, but never of the newest
        two, since the last state's copies may be incomplete. No rollout asks for that: none waits for room here."""
        super().finish()
        self.ends = [*self.ends[-2:], self.taken]
        if len(self.ends) == 3 and self._is_full():
            self.dock.release_before(TRAINER, self.ends[0])

    def _sample(self, number: int, prompts: int) -> None:
        super()._sample(self.taken, prompts)

    def _receive(self, number: int, timeout: SampleTimeout) -> Batch:
        parts, missing = [], self.batch
        while missing:
            if parts and self.colocated is not None and self.colocated.alone:
                self._sample(number, missing)
            rows = self._lease_batch(self.taken, timeout, missing)
            timeout.renew()  # what is missing now is sampled again from its beginning
            self.taken += 1
            prompts = rows.ids // self.channel.rows
            good = self._take_prompts(prompts, self._are_old(rows))
            missing -= len(good)
            parts.append(rows.select(torch.isin(prompts, torch.tensor(good, dtype=torch.int64)).nonzero().squeeze(1)))
        rows = Batch.concat(parts)
        return rows.select(rows.ids.argsort())

    def _are_old(self, rows: Batch) -> Tensor:
        """Return for each row whether any of its tokens is older than `staleness` steps."""
        old = torch.zeros(len(rows), dtype=torch.bool)
        for column, role in self.columns if self.drops else ():
            bounds = self.oldest.get(role, [])
            if len(bounds) > self.staleness and len(rows):
                versions = rows[column]
                assert isinstance(versions, Ragged)
                first = torch.full((len(rows),), bounds[-1]).scatter_reduce(
                    0, versions.row_of, versions.values.long(), "amin")
                old |= first < bounds[0]
        return old

    def _take_prompts(self, prompts: Tensor, old: Tensor) -> list[int]:
        """Return those of all ranks' prompts to train on, and enqueue again those that are too old. What a worker has
        trained on and not committed before it ended may come again; it is left out."""
        mine = dict.fromkeys(prompts.tolist(), False) | dict.fromkeys(prompts[old].tolist(), True)
        found = gather_values([*mine.items()]) if self.plan.ranks > 1 else [[*mine.items()]]
        good, late = [], []
        for prompt, is_old in sorted(tuple(each) for part in found for each in part):
            times, position = divmod(prompt, REPEATS)
            if position not in self.open:
                continue
            if is_old:
                self.open[position] = max(self.open[position], times) + 1
                late.append(position)
            else:
                del self.open[position]
                good.append(prompt)
        self._enqueue(late)
        if self.rank == 0:
            current().add("staleness/dropped", len(late))
        return good

    def reconcile(self) -> None:
        """Roll back what was taken after the state that training goes on from."""
        if self.rank == 0 and (rows := self.dock.rollback(TRAINER, self.taken)):
            events.record("rows_rolled_back", rows=rows, first_draw=self.drawn_before)

    def release_before(self, state: dict[str, Any]) -> None:
        if self.rank == 0:
            self.dock.release_before(TRAINER, state.get("taken", state["position"] // self.batch))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "open": sorted(map(list, self.open.items())), "enqueued": self.enqueued,
                "taken": self.taken, "oldest": {name: [*versions] for name, versions in self.oldest.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.open = {position: times for position, times in state.get("open", ())}  # noqa: C416
        self.enqueued, self.taken = (int(state.get(name, default)) for name, default in (
            ("enqueued", self.position), ("taken", self.drawn_before)))
        self.oldest = {name: [*versions] for name, versions in state.get("oldest", {}).items()}


def _add_reports(rows: Batch) -> None:
    """Add the metrics that other groups have sent with rows."""
    for column in (name for name in rows.columns if name.startswith(REPORT) and "/" not in name):
        for report in reports_of(rows, column):
            current().add_all(report)


def source_of(ctx: TrainContext) -> Dataloader:
    """Return the source of a rank's prompts, by the run's mode. Collective over the ranks that train."""
    channel, plan, run = ctx.channel, ctx.plan, ctx.spec.run

    def loader(reader: Plan = plan) -> Dataloader:
        return dataloader(ctx.spec, ctx.roles[ctx.prompted], plan.source.share(ctx.rank), plan.source, plan=reader,
                          sampled_elsewhere=channel is not None)

    if channel is None:  # mode sync, or nothing is trained: a checkpoint of another mode is only read
        source = loader()
        source.in_order = run.mode == "sync" or run.on_stale == "wait"
        return source
    colocated = ColocatedSource.of(ctx, channel, loader(ctx.context.plan.groups[1].plan)) \
        if run.mode == "semi_sync" else None
    fusion = Fusion(plan, ctx.rank, loader(), channel, run.wait_limit, ctx.executor) if plan.early else None
    kind = AsyncSource if run.on_stale == "wait" else UnorderedSource
    return kind(loader(), ctx, channel, colocated, fusion)
