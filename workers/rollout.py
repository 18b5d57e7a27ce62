"""The rollout loop: threads lease prompts from the dock, sample them with one engine and put back the rows.

    RolloutWorker     a rank that only samples: pulls weights, runs the loop until the trainer has ended
    TPFollower        another rank of the same model: computes what the first one of them does
    RolloutLoop       leases prompts; each has a thread that runs the chain up to its last sampling node, so that the
                      slots of the engine are never empty while there is work; nodes without a model, such as rewards,
                      then run on all prompts that have come so far
    PartialRollouts   rows that one rank has begun and another completes, so that no token is sampled twice
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distflow.config.load import Spec
from distflow.contracts.signature import ENGINE_TYPES
from distflow.data.batch import Batch
from distflow.data.databuffer import Databuffer, StepColumns
from distflow.data.dataloader import Dataloader
from distflow.data.row_filter import joined
from distflow.dock import DockClient, DockError, LeaseLost, TimedOut
from distflow.dock.index import Lease
from distflow.errors import DistflowError
from distflow.plan import KEEP, ROLLOUT, Plan, RowLineage, Task
from distflow.rpc.errors import RpcError
from distflow.telemetry import events, heartbeat
from distflow.telemetry.metrics import Metrics, current, recording
from workers.engines.rollout import Rollout, SampledRow, Sampler, Samples, Session
from workers.engines.sampling import key_of
from workers.engines.shared_engine import EngineStopped, SharedEngine
from workers.engines.tp_leader import TPFollowerEngine, TPLeader
from workers.execution import Execution
from workers.roles import RoleEngines
from workers.rollout_channel import REPORT, RolloutChannel, report_column, rows_for_trainer
from workers.weight_sync import load_if_newer, weight_updates

TOKENS, LOGPROBS, VERSIONS, FINISHED = (f"partial/{name}" for name in ("tokens", "logprobs", "versions", "finished"))


class PartialRollouts(Sampler):
    """Sampler of the rows of one prompt in one node that continues what other ranks have sampled of them. Conversations
    start again, since their environments do not move."""

    def __init__(self, engine: SharedEngine | Rollout, saved: Batch, restart: bool):
        """
        Args:
            saved: rows that other ranks have begun, with the columns of `partial_rows`.
            restart: sample rows again that were begun with other weights.
        """
        self.engine, self.generation, self.end_tokens = engine, engine.generation, engine.end_tokens
        self.saved, self.restart = saved, restart
        self.rows_under_way: list[SampledRow] = []

    def session(self, key: int, temperature: float | None = None, keep_cache: bool = False) -> Session:
        return self.engine.session(key, temperature, keep_cache)

    def take_over(self, rows: list[SampledRow]) -> None:
        self.rows_under_way = rows
        if not len(self.saved):
            return
        found = dict(zip(self.saved.ids.tolist(), range(len(self.saved))))
        columns = [self.saved[name].rows for name in (TOKENS, LOGPROBS, VERSIONS)]
        for row in (row for row in rows if row.id in found):
            tokens, logprobs, versions = (column[found[row.id]] for column in columns)
            if not (self.restart and bool((versions != self.engine.version).any())):
                row.resume(tokens, logprobs, versions, bool(self.saved[FINISHED][found[row.id]]))
                current().add("response/continued", len(tokens))

    def partial_rows(self) -> Batch:
        """Return the rows that have tokens, once nothing is sampled any more."""
        rows = [row for row in self.rows_under_way if len(row.tokens)]
        samples = Samples.of(rows)
        return Batch(torch.tensor([row.id for row in rows], dtype=torch.int64), {
            TOKENS: samples.tokens, LOGPROBS: samples.logprobs, VERSIONS: samples.versions,
            FINISHED: samples.finished})


_NOTHING = Batch(torch.empty(0, dtype=torch.int64))
_MOMENT = 0.2
"""Seconds that a thread waits for work before it checks whether the run is over."""


@dataclass
class _Sampled:
    """A prompt whose samples are complete."""

    lease: Lease
    step: int
    step_columns: StepColumns
    metrics: Metrics


class RolloutLoop:
    """Runs the rollout group's chain on the prompts that the trainer has enqueued.

    Args:
        n_loops: how many such loops the run has.
        n_dedicated: how many of them are on ranks that only sample, if this one is; else 0. A dedicated loop shows its
            progress as the steps of its rank, and takes over the prompts that other loops leave.
    """

    def __init__(self, spec: Spec, plan: Plan, functions: Mapping[str, Callable[..., Any]],
                 roles: dict[str, RoleEngines], loader: Dataloader, channel: RolloutChannel, who: str, n_loops: int,
                 n_dedicated: int = 0):
        self.spec, self.plan, self.roles, self.loader, self.channel = spec, plan, roles, loader, channel
        self.functions, self.who, self.dedicated = functions, who, n_dedicated > 0
        last = max(index for index, task in enumerate(plan.tasks) if task.samples)
        self.head, self.tail = plan.tasks[: last + 1], plan.tasks[last + 1 :]
        self.sampling = {name: role for name, role in roles.items() if role.rollout is not None and any(
            task.samples and task.role == name for task in plan.tasks)}
        fitting = min(role.rollout.generation.batch_rows for role in self.sampling.values()) // channel.rows
        older = -(-channel.prompts * spec.run.staleness // n_dedicated) if n_dedicated else 0
        self.max_prompts = max(1, min(fitting, -(-channel.prompts // n_loops) + older))
        """Prompts that are sampled at a time: a fair part of a draw; dedicated loops also take those of the draws
        before it."""
        self.engines: Mapping[str, SharedEngine] = {}
        self.leases: dict[int, tuple[Lease, float]] = {}
        """Leases by number, and when each was last renewed."""
        self.sampled: queue.SimpleQueue[_Sampled | None] = queue.SimpleQueue()
        """None comes last."""
        self.under_way: dict[int, tuple[PartialRollouts, int]] = {}
        """By lease, the rows that are being sampled, and the turn as which they are saved if the loop ends before."""
        samples = RowLineage(plan.tasks, plan.source).times(self.head[-1].out_fan)
        self.saves_partial = spec.run.mode == "semi_sync" and samples == channel.rows
        """Whether some loops end while others continue with their partial rows; possible if these are the dock's."""
        self.computing = threading.Lock()
        """Functions without a model are called one at a time: users need not think of threads."""
        self.doing = ""
        self.awaited: dict[int, tuple[str, int]] = {}
        """By lease, the role and the version of its weights for which a prompt waits."""
        self.failure: BaseException | None = None
        self.ended = self.stopped = False
        """Whether no more is sampled; and whether that is because `over` returned true."""
        self.all_put = threading.Event()
        """Set once all prompts that were sampled are in the dock."""

    def work(self, engines: Mapping[str, SharedEngine], over: Callable[[DockClient], bool]) -> None:
        """Lease prompts and sample until `over`, which is called now and then. The leases of prompts under way are
        given back then, with the rows that they have so far; prompts that are complete are put into the dock."""
        self.engines, self.failure, self.leases, self.under_way = engines, None, {}, {}
        self.ended = self.stopped = False
        self.sampled = queue.SimpleQueue()
        self.all_put.clear()
        for name, engine in engines.items():
            self.roles[name].shared_engine = engine
        first, *others = (partial(engine.drive, lambda: self.over, lambda: self.failure is not None)
                          for engine in engines.values())
        works = [partial(self._take_prompts, over), self._finish_prompts, *others]
        with ThreadPoolExecutor(len(works), "rollout loop") as threads:
            under_way = [threads.submit(work) for work in works]
            for work in under_way:
                work.add_done_callback(self._notice)
            try:
                first()
            finally:
                self.ended = True
            while wait(under_way, _MOMENT).not_done:
                for engine in engines.values():
                    engine.rollout.candidates("")  # followers see that this rank is alive
        for name in engines:
            self.roles[name].shared_engine = None
        if self.failure is not None:
            raise self.failure

    @property
    def over(self) -> bool:
        return self.ended or self.failure is not None

    def _notice(self, job: Future[None]) -> None:
        """End the loop for an error in any thread. A dedicated loop may find the dock gone when the run is over; one
        whose rank goes on to train may not."""
        error = job.exception()
        if isinstance(error, DistflowError) and self.dedicated and (self.stopped or self.channel.over):
            self.ended = True
        elif error is not None and not isinstance(error, EngineStopped):
            self.failure = self.failure or error

    def _take_prompts(self, over: Callable[[DockClient], bool]) -> None:
        """Lease prompts as long as there is room, then wait until those that were sampled are in the dock."""
        try:
            with self.channel.dock(self.who) as dock:
                self._lease_prompts(dock, over)
                self._save_partial(dock)
                self.sampled.put(None)
                while not self.all_put.wait(_MOMENT) and self.failure is None and not self.channel.over:
                    self._renew_leases(dock)
        finally:
            self.sampled.put(None)
        # The dock gives back the leases of a closed connection: others take those prompts at once.

    def _lease_prompts(self, dock: DockClient, over: Callable[[DockClient], bool]) -> None:
        room = threading.Semaphore(self.max_prompts)
        with ThreadPoolExecutor(self.max_prompts, "prompt") as pool:
            try:
                while not self.over:
                    self.stopped = over(dock)
                    if self.stopped:
                        break
                    self._renew_leases(dock)
                    if room.acquire(timeout=_MOMENT) and not self._lease_one(dock, pool, room):
                        room.release()
            finally:
                self.ended = True  # prompts under way do not outlast a dock that fails

    def _lease_one(self, dock: DockClient, pool: ThreadPoolExecutor, room: threading.Semaphore) -> bool:
        """Return whether there was a prompt."""
        try:
            lease = dock.lease(ROLLOUT, self.channel.rows, wait=_MOMENT)
        except TimedOut:
            return False
        self.leases[lease.number] = (lease, time.monotonic())
        saved = dock.saved(lease) if self.saves_partial else (_NOTHING, lease.turns[:0])
        metrics = Metrics()
        with recording(metrics):
            prompt = self.loader.at(lease.ids[:1] // self.channel.rows)
        pool.submit(self._sample, lease, prompt, metrics, *saved, room).add_done_callback(self._notice)
        return True

    def _save_partial(self, dock: DockClient) -> None:
        """Save the partial rows of prompts under way, for the loops that continue them."""
        if self.saves_partial and not self.dedicated and self.failure is None:
            for rollouts, turn in self.under_way.values():
                rows = rollouts.partial_rows()
                try:
                    dock.put(rows, turn=turn)
                except (DockError, RpcError) as error:  # others sample these from their beginning
                    events.record("begun rows lost", rows=len(rows), reason=str(error))

    def _renew_leases(self, dock: DockClient) -> None:
        waiting = [f"waiting for version {version} of the weights of `{name}` (why: `weights_late` in events.jsonl)"
                   for name, version in list(self.awaited.values())]
        dock.report_activity(waiting[0] if waiting else self.doing)
        for number, (lease, since) in list(self.leases.items()):
            if time.monotonic() - since > lease.seconds / 3:
                with contextlib.suppress(LeaseLost):  # its commit will say so
                    dock.renew(lease)
                with contextlib.suppress(KeyError):  # committed meanwhile
                    self.leases.pop(number)
                    self.leases[number] = (lease, time.monotonic())

    def _sample(self, lease: Lease, prompt: Batch, metrics: Metrics, saved: Batch, turns: Tensor,
                room: threading.Semaphore) -> None:
        """Run one prompt up to the last node that samples. `turns`: those that other loops have saved of its rows."""
        step = int(prompt.ids) // self.channel.prompts
        metrics.step = step
        if self.dedicated:
            heartbeat.current().begin(step + 1)
        try:
            for name, version in self.channel.versions_of(int(lease.versions[0])).items():
                self.awaited[lease.number] = name, version
                self.engines[name].wait(version)
            self.awaited.pop(lease.number, None)
            with recording(metrics):
                buffer = self._buffer(metrics)
                buffer.start(prompt)
                rows = PartialRollouts(self.engines[self.head[-1].role], saved,
                                       self.spec.run.on_new_weights == "restart")
                self.under_way[lease.number] = rows, int(turns.max()) + 1 if len(turns) else 0
                self._run(self.head, buffer, step, rows)
                del self.under_way[lease.number]
        finally:
            room.release()
        self.sampled.put(_Sampled(lease, step, buffer.step_columns, metrics))

    def _finish_prompts(self) -> None:
        """Run the remaining nodes on all prompts of a step that have come, and put the rows into the dock."""
        with self.channel.dock(f"{self.who}, which puts") as dock:
            going_on = True
            while going_on and self.failure is None:
                found: dict[int, list[_Sampled]] = {}
                with contextlib.suppress(queue.Empty):
                    each = self.sampled.get(timeout=_MOMENT)
                    while each is not None:
                        found.setdefault(each.step, []).append(each)
                        each = self.sampled.get_nowait()
                    going_on = False
                for step, some in sorted(found.items()):
                    self._finish(dock, step, sorted(some, key=lambda each: int(each.lease.ids[0])))
        self.all_put.set()

    def _finish(self, dock: DockClient, step: int, some: list[_Sampled]) -> None:
        metrics = Metrics()
        metrics.step = step
        with recording(metrics):
            buffer = self._buffer(metrics)
            buffer.step_columns = functools.reduce(_joined, (each.step_columns for each in some))
            self._run(self.tail, buffer, step)
        some[0].metrics.add_all(metrics.take())
        reports = report_column([each.metrics.take() for each in some], self.channel.rows)
        dock.report_activity(f"putting samples of step {step}")
        rows = rows_for_trainer(self.plan, buffer).with_columns({REPORT: reports})
        # With their groups: a shard that was restarted meanwhile does not know which prompts were enqueued.
        dock.put(rows, group=rows.ids // self.channel.rows, wait=self.spec.run.wait_limit)
        for each in some:
            self.leases.pop(each.lease.number, None)
            try:
                dock.commit(each.lease)
                if self.dedicated:
                    heartbeat.current().finish()
            except LeaseLost as error:  # the rows are there all the same: the new holder's are duplicates
                events.record("lease lost", prompt=int(each.lease.ids[0]) // self.channel.rows, reason=str(error))

    def _run(self, tasks: tuple[Task, ...], buffer: Databuffer, step: int,
             rollouts: PartialRollouts | None = None) -> None:
        roles = {name: role.of_draw(step) for name, role in self.roles.items()}
        execution = Execution(self.plan.tasks, self.functions, roles, rank=0)
        for task in tasks:
            inputs = buffer.take(task)
            if rollouts and task is self.head[-1]:
                roles[task.role].shared_engine = rollouts
            if task.type in ENGINE_TYPES:
                written, ids = execution.run(task, inputs)
            else:
                with self.computing:
                    self.doing = f"computing node `{task.node}` of step {step}"
                    torch.manual_seed(key_of(self.spec.run.seed, step, int(inputs.ids[0])))
                    written, ids = execution.run(task, inputs)
                    self.doing = "sampling"
            # The trainer drops rows, as in other modes, so that they are counted once.
            buffer.put(replace(task, writes=tuple(name for name in task.writes if name != KEEP)), written, ids)

    def _buffer(self, metrics: Metrics) -> Databuffer:
        return Databuffer(self.plan, 0, metrics, limit=self.spec.run.wait_limit)


def _joined(first: StepColumns, second: StepColumns) -> StepColumns:
    return {key: joined(first[key], batch) for key, batch in second.items()}


class RolloutWorker:
    """Sampling engines of a rank, with a rollout loop that runs until the trainer has ended. For `n_loops` and
    `n_dedicated` see `RolloutLoop`."""

    def __init__(self, spec: Spec, plan: Plan, functions: Mapping[str, Callable[..., Any]],
                 roles: dict[str, RoleEngines], loader: Dataloader, channel: RolloutChannel, who: str, n_loops: int,
                 n_dedicated: int):
        self.channel = channel
        self.loop = RolloutLoop(spec, plan, functions, roles, loader, channel, who, n_loops, n_dedicated)
        self.updates = weight_updates(spec, self.loop.sampling, channel, who)
        self.engines = {name: SharedEngine(role.rollout if plan.ranks == 1 else TPLeader(role.rollout),
                                           partial(load_if_newer, self.updates.get(name), spec.run.on_new_weights))
                        for name, role in self.loop.sampling.items()}

    def run(self) -> None:
        self.loop.work(self.engines, lambda dock: self.channel.over)
        for engine in self.engines.values():
            engine.rollout.release_followers()

    def close(self) -> None:
        for updates in self.updates.values():
            updates.close()
        for engine in self.engines.values():
            engine.rollout.close()


class TPFollower:
    """A rank of a split rollout model other than the first: it takes no prompts of its own."""

    def __init__(self, spec: Spec, roles: dict[str, RoleEngines], channel: RolloutChannel, who: str):
        (name, role), = roles.items()
        self.rollout, self.updates = role.rollout, weight_updates(spec, roles, channel, who)
        self.engine = TPFollowerEngine(role.rollout, self.updates.get(name))

    def run(self) -> None:
        self.engine.run()

    def close(self) -> None:
        for updates in self.updates.values():
            updates.close()
        self.rollout.close()
