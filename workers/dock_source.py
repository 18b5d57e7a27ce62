"""Source of a step's prompts where ranks sample for the trainer: enqueues prompts, and takes them with their samples.

    on_stale        a step trains on                              samples that are too old
    wait            the next prompts of the data, in order        none, by the bound below
    drop, keep      the prompts whose rows are there first        drop: sampled again; keep: trained on

The bound of `wait`: prompts are enqueued at most `staleness` steps before they are trained on, and each is sampled with
the newest weights of that moment or newer ones. Of `drop` and `keep`: at most `staleness + 1` steps of prompts are
sampled and not trained on yet (AReaL, Fu et al. 2025).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distflow.config.run import Run
from distflow.data.batch import Batch, ColumnData, Ragged
from distflow.data.crossing import REPORT, ReceivedColumns, reports_of
from distflow.data.dataloader import REPEATS, SOURCE_WEIGHT, Dataloader
from distflow.data.exchange import gather_values
from distflow.dock import DockClient, DockError, TimedOut
from distflow.dock.index import Lease
from distflow.errors import InvalidInput
from distflow.plan import ROLLOUT, TRAINER, Plan, Task
from distflow.telemetry import events
from distflow.telemetry.metrics import current
from workers.engines.role_engines import RoleEngines
from workers.rollout_channel import RolloutChannel, SampleTimeout

Results = Iterable[tuple[Task, dict[str, ColumnData], Tensor]]


class DockSource:
    """Prompts of a draw with the rows that rollouts have made of them. Collective over the trainer.

    In order, draw `n` is leased under the number `n`. Else a draw takes as many leases as it needs to have enough
    prompts that may be trained on, and `open` has the other prompts that were enqueued, so that each is trained on
    once. One that is too old is enqueued again under another id (`REPEATS`).
    """

    def __init__(self, loader: Dataloader, plan: Plan, channel: RolloutChannel, run: Run,
                 trained: Mapping[str, RoleEngines], rank: int, attempt: int = 0):
        self.loader, self.plan, self.channel, self.run, self.trained, self.rank = \
            loader, plan, channel, run, trained, rank
        self.in_order = run.on_stale == "wait"
        self.draws = run.steps if all(task.draws == 1 for task in plan.tasks) else None
        """Of the whole run; None if it depends on what filters leave."""
        self.dock = channel.dock(f"{TRAINER} {rank}", attempt)
        self.received = ReceivedColumns(plan, channel.rows)
        self.columns = [(f"{task.node}/versions", task.role) for task in plan.tasks if "versions" in task.writes]
        self.rows = Batch(torch.empty(0, dtype=torch.int64))
        self.leases: list[Lease] = []  # of draws that have been received; rank 0 commits them
        self.enqueued = self.taken = 0  # prompts that rollouts may sample; leases
        self.ends: list[int] = []  # leases that were taken by the end of each of the last steps
        self.open: dict[int, int] = {}  # how often each prompt was enqueued again, by its position
        self.again = True  # this process has not enqueued anything yet
        self.oldest: dict[str, list[int]] = {}  # versions that the last steps began with, by role
        self.sample: Callable[[int, Callable[[], bool]], None] = lambda draws, complete: None
        """Samples on this rank until there is enough to train on (`ColocatedSampling`)."""
        self.compute: Callable[[DockClient, int, SampleTimeout], tuple[float, Results]] = lambda *_: (0.0, ())
        """Runs nodes on rows while others are still sampled; returns seconds and results (`Fusion`)."""

    def next(self) -> Batch:
        """Return the prompts of the next draw whose samples are assigned to this rank; TimedOut if they do not come."""
        began, number, batch = time.perf_counter(), self.loader.drawn_before, self.loader.batch
        self._enqueue_prompts(number)
        self._sample(batch)
        self.loader.position += batch
        self.dock.report_activity(f"waiting for the samples of step {number}")
        timeout = SampleTimeout(self.channel, self.dock, self.run.wait_limit)
        seconds, self.computed = self.compute(self.dock, number, timeout)
        self.rows = self._receive(timeout)
        _add_reports(self.rows)
        prompts = self.loader.at(torch.unique(self.rows.ids // self.channel.rows))
        current().maximum("waiting/samples", time.perf_counter() - began - seconds)
        if self.rank == 0:
            shards = self.dock.status()
            found = (each["indexes"].get(TRAINER) for each in shards)
            current().add("dock/ready", sum(each["ready"] for each in found if each))
            current().add("dock/bytes", max(each["bytes"] for each in shards))
        return prompts

    def _enqueue_prompts(self, number: int) -> None:
        """Let rollouts sample the prompts of draw `number`, and those of the draws that may follow so soon."""
        if self.rank == 0:
            self.dock.require(ROLLOUT, number)
        last = number + self.run.staleness + 1
        end = self.loader.batch * (last if self.draws is None else min(last, self.draws))
        fresh = range(self.enqueued, end)
        self.enqueued = max(self.enqueued, end)
        if self.in_order:
            self._enqueue(fresh)
            return
        for name in {role for _, role in self.columns} & self.trained.keys():
            versions = self.oldest.setdefault(name, [])
            if self.trained[name].version not in versions[-1:]:
                versions.append(self.trained[name].version)
            del versions[: -self.run.staleness - 1]
        self.open |= dict.fromkeys(fresh, 0)
        self._enqueue(self.open if self.again else fresh)
        self.again = False

    def _enqueue(self, positions: Iterable[int]) -> None:
        prompts = [position + REPEATS * self.open.get(position, 0) for position in positions]
        if prompts and self.rank == 0:
            self.channel.enqueue_prompts(self.dock, torch.tensor(prompts))

    def _sample(self, prompts: int) -> None:
        """Sample on this rank too, until the rows of so many prompts are there for the next lease."""
        rows, number = prompts * self.channel.rows, self.taken
        self.sample(len(self.leases),
                    lambda: self.dock.try_peek(TRAINER, rows, least=rows, step=number) is not None)

    def _receive(self, timeout: SampleTimeout) -> Batch:
        """Return this rank's rows of the draw."""
        parts, missing = [], self.loader.batch
        while missing:
            if parts and self.run.trainer_samples_alone:
                self._sample(missing)
            rows = self._lease_rows(timeout, missing)
            if self.in_order:
                return rows
            timeout.renew()  # what is missing now is sampled again from its beginning
            prompts = rows.ids // self.channel.rows
            good = self._take_prompts(prompts, self._are_old(rows))
            missing -= len(good)
            parts.append(rows.select(torch.isin(prompts, torch.tensor(good, dtype=torch.int64)).nonzero().squeeze(1)))
        rows = Batch.concat(parts)
        return rows.select(rows.ids.argsort())

    def _lease_rows(self, timeout: SampleTimeout, prompts: int) -> Batch:
        """Lease so many prompts under the next number, which all ranks name; return this rank's rows."""
        while True:
            try:
                lease = self.dock.lease(TRAINER, prompts * self.channel.rows, wait=timeout.poll_seconds,
                                        step=self.taken, share=self.rank, shares=self.plan.ranks)
                break
            except TimedOut as error:
                timeout.check(error)
        self.leases.append(lease)
        self.taken += 1
        rows = self.dock.fetch(lease)
        self.channel.require_published(rows)
        return rows

    def _are_old(self, rows: Batch) -> Tensor:
        """Return for each row whether any of its tokens is older than `staleness` steps, and is to be dropped."""
        old = torch.zeros(len(rows), dtype=torch.bool)
        for column, role in self.columns if self.run.on_stale == "drop" else ():
            bounds = self.oldest.get(role, [])
            if len(bounds) > self.run.staleness and len(rows):
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

    def take_results(self) -> Results:
        """Yield what nodes of the rollout group wrote for these prompts, and what was computed while they came."""
        yield from self.received.of(self.rows)
        yield from self.computed

    def reweigh(self, reported: Sequence[Mapping[str, tuple[float, float]]]) -> None:
        """Refuse weights of training sets: the prompts of the next steps are being sampled already."""
        if any(name.startswith(SOURCE_WEIGHT) for rank in reported for name in rank):
            raise InvalidInput("a node sets weights of training sets, which needs  mode: sync : in other modes the "
                               "prompts of the next steps are being sampled already")

    def finish(self) -> None:
        """Commit the rows of a step that is trained on. While snapshots of its state are still being copied, the dock
        keeps the rows, for a worker that starts from the state before. Where rollouts take prompts as they come, none
        waits for room: a full dock releases those of trained steps here, but never of the newest two, since the last
        state's copies may be incomplete."""
        self.ends = [*self.ends[-2:], self.taken]
        if self.rank == 0:
            for lease in self.leases:
                self.dock.commit(lease)
            if not self.in_order and len(self.ends) == 3 and self._is_full():
                self.dock.release_before(TRAINER, self.ends[0])
        self.leases = []

    def _is_full(self) -> bool:
        """Return whether the dock stores more than `dock_gib`."""
        limit = self.dock.layout.max_bytes
        shards = self.dock.status() if limit is not None else []
        return limit is not None and sum(each["bytes"] for each in shards) > limit * len(shards)

    def release_before(self, state: dict[str, Any]) -> None:
        """Release the rows that were trained on before this state, since no worker goes on from an earlier one."""
        if self.rank == 0:
            draws = state["position"] // self.loader.batch
            self.dock.release_before(TRAINER, draws if self.in_order else state.get("taken", draws))

    def start_at(self, step: int) -> None:
        """Begin to train after `step` steps: the last draw to enqueue is that of the last step, whatever number it has.
        A resumed run with another `data.batch` numbers its draws by that. Raises InvalidInput as `Dataloader` does."""
        if self.in_order:
            self.loader.start_at(step)
        if self.draws is not None:
            self.draws += self.loader.drawn_before - step

    def reconcile(self) -> None:
        """Make the dock's commits agree with the state that training goes on from: those of later steps are rolled
        back, and with them the leases of the attempt before. Draws in order that a worker trained on but did not commit
        before it died are committed. The other ranks' leases wait for the rollback."""
        if self.rank > 0:
            return
        if rows := self.dock.rollback(TRAINER, self.taken):
            events.record("rows_rolled_back", rows=rows, first_draw=self.loader.drawn_before)
        count = self.loader.batch * self.channel.rows
        with contextlib.suppress(DockError):  # it is committed
            for number in reversed(range(self.taken if self.in_order else 0)):
                lease = self.dock.try_lease(TRAINER, count, step=number, shares=self.plan.ranks)
                if lease is None:  # this dock never had it
                    break
                self.dock.commit(lease)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state; in order nothing else is needed, so that a run may go on in mode sync."""
        state = self.loader.state_dict()
        return state if self.in_order else {
            **state, "open": sorted(map(list, self.open.items())), "enqueued": self.enqueued, "taken": self.taken,
            "oldest": {name: [*versions] for name, versions in self.oldest.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of any mode. If `data.batch` has changed since, the next whole draw of that size is the next."""
        self.loader.load_state_dict(state, ahead=True)
        self.loader.position += -self.loader.position % self.loader.batch
        kept = {} if self.in_order else state
        self.enqueued, self.taken = kept.get("enqueued", self.loader.position), \
            kept.get("taken", self.loader.drawn_before)
        self.open = dict(kept.get("open", ()))
        self.oldest = {name: [*versions] for name, versions in kept.get("oldest", {}).items()}

    def close(self) -> None:
        self.dock.close()


Source = Dataloader | DockSource


def _add_reports(rows: Batch) -> None:
    """Add the metrics that other groups have sent with rows."""
    for column in (name for name in rows.columns if name.startswith(REPORT) and "/" not in name):
        for report in reports_of(rows, column):
            current().add_all(report)
