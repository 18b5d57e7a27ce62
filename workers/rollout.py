"""Samples for other groups: leases prompts, samples them by an engine that many threads share, puts rows into the dock.

    RolloutContext    leases, threads and buffers of `workers.loop.rollout`, and the two parts of its chain, below
    RolloutExecutor   executor of one of its threads
    PartialRollouts   rows that one rank has begun and another completes, so that no token is sampled twice
    TurnWriter        puts conversations into the dock, turn by turn, for whoever has to go on with them

    head     the chain up to its last sampling node: a thread for each prompt, so that the engine always has work
    tail     the nodes after it, in one thread, on all finished prompts of a step: rewards, and frozen roles with
             groups: {inference: {ROLE: rollout}}, whose nodes have a model and get one prompt at a time

    A prompt: leased → sampling (`under_way`) → sampled → in the dock, committed. Its lease goes back if this rank ends.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgpack
import torch

from distflow.contracts.forms import ENGINE_TYPES
from distflow.data.batch import Batch, Ragged
from distflow.data.crossing import POLICIES, REPORT, report_column, rows_for_others
from distflow.data.databuffer import Databuffer, StepColumns
from distflow.data.dataloader import REPEATS, Dataloader
from distflow.data.row_filter import concat_non_empty
from distflow.dock import DockClient, DockError, LeaseLost
from distflow.dock.consumers import RESULT, VALIDATION
from distflow.dock.index import Lease
from distflow.errors import DistflowError
from distflow.plan import KEEP, ROLLOUT, TRAINER, Plan, RowLineage, Task
from distflow.rpc.errors import RpcError
from distflow.store.interface import StoreUnavailable, poll_interval
from distflow.telemetry import events, heartbeat, timeline
from distflow.telemetry.metrics import Metrics, current, recording
from workers.context import RankContext
from workers.engines.role_engines import RoleEngines
from workers.engines.rollout import (
    EVENTS,
    FINISHED,
    LOGPROBS,
    TOKENS,
    VERSIONS,
    Rollout,
    SampledRow,
    Sampler,
    Samples,
    Session,
    TurnLog,
)
from workers.engines.sampling import TokenLimits, key_of
from workers.engines.shared_engine import EngineStopped, SharedEngine
from workers.execution import Executor, Written
from workers.rollout_channel import VALIDATING, RolloutChannel
from workers.validation import Validator
from workers.validation_requests import validated_elsewhere


class PartialRollouts(Sampler, TurnLog):
    """Sampler of one prompt's rows in one node: goes on with what other ranks have begun."""

    def __init__(self, engine: SharedEngine | Rollout, saved: Batch,
                 keep: Callable[[Batch], None] = lambda rows: None):
        """`saved`: rows that other ranks have begun; `keep`: puts conversations into the dock."""
        self.engine, self.generation, self.end_tokens = engine, engine.generation, engine.end_tokens
        self.saved, self.keep = saved, keep
        self.rows_under_way: list[SampledRow] = []

    def session(self, key: int, temperature: float | None = None, keep_cache: bool = False,
                limits: TokenLimits | None = None) -> Session:
        session = self.engine.session(key, temperature, keep_cache, limits)
        session.turn_log = self
        return session

    def recorded(self) -> Batch:
        return self.saved if EVENTS in self.saved.columns else self.saved.slice(0, 0)

    def save(self, rows: Batch) -> None:
        self.keep(rows)

    def take_over(self, rows: list[SampledRow]) -> None:
        self.rows_under_way = rows
        if not len(self.saved):
            return
        found = dict(zip(self.saved.ids.tolist(), range(len(self.saved))))
        saved: dict[str, Any] = self.saved.columns
        columns = [saved[name].rows for name in (TOKENS, LOGPROBS, VERSIONS)]
        for row in (row for row in rows if row.id in found):
            tokens, logprobs, versions = (column[found[row.id]] for column in columns)
            row.resume(tokens, logprobs, versions, bool(saved[FINISHED][found[row.id]]))
            current().add("response/continued", len(tokens))

    def partial_rows(self) -> Batch:
        """Return the rows that have tokens, once nothing is sampled any more."""
        if self.under_way is not None:
            return self.under_way()
        rows = [row for row in self.rows_under_way if len(row.tokens)]
        samples = Samples.of(rows)
        return Batch(torch.tensor([row.id for row in rows], dtype=torch.int64), {
            TOKENS: samples.tokens, LOGPROBS: samples.logprobs, VERSIONS: samples.versions,
            FINISHED: samples.finished})


class TurnWriter:
    """Puts conversations into the dock whenever a turn is over, from a thread of its own: no sampling waits for the
    network, and what comes meanwhile goes in one put. Each put has a higher number than those that it replaces."""

    def __init__(self) -> None:
        self.rows: queue.SimpleQueue[tuple[Batch, int] | None] = queue.SimpleQueue()
        self.number = 0

    @contextlib.contextmanager
    def writing(self, connect: Callable[[], DockClient]) -> Iterator[None]:
        """Surround sampling; at the end all that was saved is in the dock, or was reported as lost."""
        with ThreadPoolExecutor(1, "turns") as thread:
            writes = thread.submit(self._write, connect)
            try:
                yield
            finally:
                self.rows.put(None)
            writes.result()

    def save(self, rows: Batch, turn: int) -> None:
        """Put these rows soon, under `turn` or a later number."""
        self.rows.put((rows, turn))

    def _write(self, connect: Callable[[], DockClient]) -> None:
        going_on = True
        with connect() as dock:
            while going_on:
                found = [self.rows.get()]
                with contextlib.suppress(queue.Empty):
                    while True:
                        found.append(self.rows.get_nowait())
                going_on = None not in found
                if waiting := [each for each in found if each is not None]:
                    self.put(dock, _newest([rows for rows, _ in waiting]), max(turn for _, turn in waiting))

    def put(self, dock: DockClient, rows: Batch, turn: int) -> None:
        self.number = max(self.number + 1, turn)
        try:
            dock.put(rows, turn=self.number)
        except (DockError, RpcError) as error:  # others sample again what is not there
            events.record("partial_rollouts_lost", rows=len(rows), reason=str(error))


def _newest(batches: list[Batch]) -> Batch:
    """Return all rows; of one that is there several times the last."""
    rows = Batch.concat(batches)
    places = {row: place for place, row in enumerate(rows.ids.tolist())}
    return rows if len(places) == len(rows) else rows.select(torch.tensor(sorted(places.values())))


_NOTHING = Batch(torch.empty(0, dtype=torch.int64))
_STEPS = 64  # whose seconds are kept: more than may be under way
_POLL_INTERVAL = 0.2  # seconds that a thread waits for work before it checks whether the run is over
_REQUEST_INTERVAL = 0.5  # seconds between two looks whether a request is still open for whose weights a rollout waits
_COLOCATED_INTERVAL = 0.05  # the same of a few loops that train afterwards; of many, more: all ask one process


@dataclass
class Prompt:
    """Leased prompt, from its sampling to the put of its rows."""

    lease: Lease
    step: int
    buffer: Databuffer
    metrics: Metrics
    partial: PartialRollouts
    turn: int  # number under which its rows are saved if the loop ends before they are complete
    versions: dict[str, int]  # the least of each role's weights with which it may be sampled
    policies: bytes = b""  # what has sampled it: see `POLICIES`


class RolloutContext:
    """Context of `rollout`, which runs the rollout group's chain (`plan`) on the prompts that the trainer has enqueued.
    A `dedicated` one is on a rank that only samples, and shows its progress as that rank's steps. It also answers
    parts of validations of the role `validated`, one at a time, beside the prompts."""

    def __init__(self, context: RankContext, plan: Plan, functions: Mapping[str, Callable[..., Any]],
                 roles: dict[str, RoleEngines], loader: Dataloader, channel: RolloutChannel):
        self.spec, self.plan, self.roles, self.loader, self.channel = context.spec, plan, roles, loader, channel
        self.functions, self.dedicated = functions, plan is context.own
        self.validated = validated_elsewhere(self.spec, context.plan) if self.dedicated else None
        self.who = f"rollout {context.store.rank}" if self.dedicated else f"trainer {context.store.rank}, which samples"
        samplers = (ROLLOUT, TRAINER) if self.spec.run.trainer_samples else (ROLLOUT,)
        n_loops = sum(len(group.ranks) for group in context.plan.groups if group.kind in samplers) // plan.ranks
        n_finish = context.plan.rollouts if self.dedicated else n_loops if self.spec.run.trainer_samples_alone else 0
        # loops that take over the prompts that others leave or that are left over; 0: not this one
        self.poll = _POLL_INTERVAL if self.dedicated else poll_interval(_COLOCATED_INTERVAL, n_loops)
        last = max(index for index, task in enumerate(plan.tasks) if task.samples)
        # The trainer drops rows, as in other modes, so that they are counted once.
        chain = [replace(task, writes=tuple(name for name in task.writes if name != KEEP)) for task in plan.tasks]
        self.head, self.tail = chain[: last + 1], chain[last + 1 :]
        self.sampling_roles = {name: role for name, role in roles.items() if role.rollout is not None and any(
            task.samples and task.role == name for task in plan.tasks)}
        fitting = min(role.settings.generation.batch_rows for role in self.sampling_roles.values()) // channel.rows
        older = -(-channel.prompts * self.spec.run.staleness // n_finish) if n_finish else 0
        self.max_prompts = max(1, min(fitting, -(-channel.prompts // n_loops) + older))
        """Prompts sampled at a time: a fair part of a draw; loops that finish what is left also take earlier draws'."""
        self.lineage = RowLineage(plan.tasks, plan.source)
        samples = self.lineage.times(self.head[-1].out_fan)
        self.saves_partial = samples == channel.rows
        """Whether other loops can continue with this one's partial rows: if these are the dock's."""
        self.computing = threading.Lock()  # functions that do not sample need not be thread-safe
        self.doing = self.activity = ""  # now; what the dock was told last
        self.seconds: dict[int, defaultdict[str, float]] = {}  # of nodes that do not sample, by step
        self.awaited: dict[tuple[str, int], tuple[str, int]] = {}  # by lease: role and version that it waits for
        self.part: Lease | None = None  # of a validation, while it is answered
        self.all_put = threading.Event()  # all sampled prompts are in the dock

    def run(self, engines: Mapping[str, SharedEngine], lease_prompts: Callable[[], None],
            finish_prompts: Callable[[], None]) -> None:
        """Run both functions in threads, and the engines, of which this thread drives the first, until no prompts are
        leased. Prompts under way are given back then, with the rows that they have; complete ones go into the dock."""
        self.engines, self.room = engines, threading.Semaphore(self.max_prompts)
        self.failure: BaseException | None = None
        self.leases: dict[tuple[str, int], tuple[Lease, float]] = {}  # by consumer and number; when last renewed
        self.under_way: dict[int, Prompt] = {}  # by the number of its lease
        self.complete: queue.SimpleQueue[Prompt | None] = queue.SimpleQueue()  # None comes last
        self.ended = self.stopped = False  # no more is sampled; and that is because `over` returned true
        self.all_put.clear()
        self.turns = TurnWriter()
        for name, engine in engines.items():
            self.roles[name].shared_engine = engine
        first, *others = (partial(engine.drive, lambda: self.over, lambda: self.failure is not None)
                          for engine in engines.values())
        works = [lease_prompts, finish_prompts, *others]
        with ThreadPoolExecutor(len(works), "rollout loop") as threads:
            under_way = [threads.submit(work) for work in works]
            for work in under_way:
                work.add_done_callback(self._notice)
            try:
                first()
            finally:
                self.ended = True
            while wait(under_way, _POLL_INTERVAL).not_done:
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
        """End the loop for an error in any thread; a dedicated loop may find the dock gone when the run is over."""
        error, over = job.exception(), self.stopped
        may_pass = self.dedicated and isinstance(error, DistflowError)
        if may_pass and not over:
            with contextlib.suppress(StoreUnavailable):  # then it is not known to be over
                over = self.channel.is_over
        if may_pass and over:
            self.ended = True
        elif error is not None and not isinstance(error, EngineStopped):
            self.failure = self.failure or error

    @contextlib.contextmanager
    def leasing(self) -> Iterator[DockClient]:
        """Connect to the dock to lease prompts; at the end wait until those that were sampled are in the dock."""
        try:
            with self.channel.dock(self.who) as dock:
                with self.turns.writing(lambda: self.channel.dock(f"{self.who}, which saves turns")), \
                        ThreadPoolExecutor(self.max_prompts + 1, "prompt") as self.pool:  # one may validate
                    try:
                        yield dock
                    finally:
                        self.ended = True  # prompts under way do not outlast a dock that fails
                self._save_partial(dock)
                self.complete.put(None)
                while not self.all_put.wait(_POLL_INTERVAL) and self.failure is None and not self.channel.is_over:
                    self._renew_leases(dock)
        finally:
            self.complete.put(None)
        # The dock gives back the leases of a closed connection: others take those prompts at once.

    def lease(self, dock: DockClient, over: Callable[[DockClient], bool]) -> Prompt | None:
        """Return the next prompt, once there are one and room for it; None if no more is sampled."""
        while not self.over:
            self.stopped = over(dock)
            if self.stopped:
                break
            self._renew_leases(dock)
            self._validate(dock)
            if self.room.acquire(timeout=self.poll):
                if lease := dock.try_lease(ROLLOUT, self.channel.rows, wait=self.poll):
                    return self._prompt(dock, lease)
                self.room.release()
        return None

    def _validate(self, dock: DockClient) -> None:
        """Begin to answer a part of a validation, if there is one, beside the prompts."""
        if self.validated and not self.part and (part := dock.try_lease(VALIDATION, self.channel.rows)):
            self.part, self.leases[VALIDATION, part.number] = part, (part, time.monotonic())
            self.awaited[VALIDATION, part.number] = self.validated, int(part.versions[0])
            self.pool.submit(self._answer, part, self.engines[self.validated]).add_done_callback(self._notice)

    @functools.cached_property
    def validators(self) -> Callable[[int, int], Validator]:
        return Validator.of_parts(self.spec, self.roles[self.validated or ""])

    def _answer(self, part: Lease, engine: SharedEngine) -> None:
        """Answer a part by weights that stay the same, and put the report into the dock. Give it up once nobody waits
        for it any more: the trainer may have restarted from a step before, and only it had these weights."""
        (number, index), version = self.channel.part_of(part), int(part.versions[0])
        look = poll_interval(_REQUEST_INTERVAL, self.channel.ranks)
        with recording(Metrics()), self.channel.dock(f"{self.who}, which validates") as dock:
            engine.hold(version)
            while (request := self.channel.validations().get(number)) and not engine.wait(version, look):
                pass
            self.awaited.pop((VALIDATION, part.number))
            validator = self.validators(request.parts, index) if request else None
            samples = validator.sample() if validator else {}
            engine.hold(None)
            if validator:
                report = report_column([validator.report(samples, version)], self.channel.rows)
                dock.put(Batch(part.ids, {RESULT: report}))
            with contextlib.suppress(LeaseLost):  # of two reports the dock keeps the first
                dock.commit(part)
        self.leases.pop((VALIDATION, part.number), None)
        self.part = None

    def _prompt(self, dock: DockClient, lease: Lease) -> Prompt:
        self.leases[ROLLOUT, lease.number] = (lease, time.monotonic())
        begun = self.saves_partial and bool((lease.turns >= 0).any())
        turn = int(lease.turns.max()) + 1
        metrics = Metrics()
        with recording(metrics):
            batch = self.loader.at(lease.ids[:1] // self.channel.rows)
        metrics.step = int(batch.ids) % REPEATS // self.channel.prompts
        buffer = self._buffer(metrics)
        buffer.start(batch)
        rollouts = PartialRollouts(
            self.engines[self.head[-1].role], dock.fetch_saved(lease)[0] if begun else _NOTHING,
            partial(self.turns.save, turn=turn) if self.saves_partial else lambda rows: None)
        return Prompt(lease, metrics.step, buffer, metrics, rollouts, turn,
                      self.channel.versions_of(int(lease.versions[0])))

    def start(self, sample: Callable[[Prompt], None], prompt: Prompt) -> None:
        """Sample a prompt in a thread of its own."""
        self.pool.submit(sample, prompt).add_done_callback(self._notice)

    def _save_partial(self, dock: DockClient) -> None:
        if self.saves_partial and not self.dedicated and self.failure is None:
            for prompt in self.under_way.values():
                self.turns.put(dock, prompt.partial.partial_rows(), prompt.turn)

    def _renew_leases(self, dock: DockClient) -> None:
        waiting = [f"waiting for version {version} of the weights of `{name}` (why: `weights_late` in events.jsonl)"
                   for name, version in list(self.awaited.values())]
        validates = (part := self.part) is not None and (VALIDATION, part.number) not in self.awaited
        before, self.activity = self.activity, VALIDATING if validates else next(iter(waiting), self.doing)
        dock.report_activity(self.activity)
        for number, (lease, since) in list(self.leases.items()):
            news = number[0] == VALIDATION and self.activity != before  # which the trainer's patience depends on
            if news or time.monotonic() - since > lease.seconds / 3:
                with contextlib.suppress(LeaseLost):  # its commit will say so
                    dock.renew(lease)
                with contextlib.suppress(KeyError):  # committed meanwhile
                    self.leases.pop(number)
                    self.leases[number] = (lease, time.monotonic())

    @contextlib.contextmanager
    def sampling(self, prompt: Prompt) -> Iterator[None]:
        """Wait for the weights with which the prompt may be sampled; afterwards it is complete."""
        number, began = prompt.lease.number, timeline.now()
        if self.dedicated:
            heartbeat.current().begin(prompt.step + 1)
        try:
            for name, version in prompt.versions.items():
                self.awaited[ROLLOUT, number] = name, version
                self.engines[name].wait(version)
            self.awaited.pop((ROLLOUT, number), None)
            self.under_way[number] = prompt
            before = {name: len(engine.rollout.proved) for name, engine in self.engines.items()}
            with recording(prompt.metrics):
                yield
            prompt.policies = msgpack.packb({name: self.engines[name].rollout.proved[count - 1 :]
                                             for name, count in before.items()}) or b""
            del self.under_way[number]
            timeline.current().add(timeline.PROMPTS, f"prompt {int(prompt.lease.ids[0]) // self.channel.rows}", began,
                                   prompt.step + 1, rows=self.channel.rows)
        finally:
            self.room.release()
        self.complete.put(prompt)

    @contextlib.contextmanager
    def putting(self) -> Iterator[DockClient]:
        """Connect to the dock to put rows; at the end all are there."""
        with self.channel.dock(f"{self.who}, which puts") as dock:
            yield dock
        self.all_put.set()

    def sampled(self) -> Iterator[list[Prompt]]:
        """Yield the prompts whose samples are complete, as they come: all those of a step together."""
        going_on = True
        while going_on and self.failure is None:
            found: dict[int, list[Prompt]] = {}
            with contextlib.suppress(queue.Empty):
                prompt = self.complete.get(timeout=_POLL_INTERVAL)
                while prompt is not None:
                    found.setdefault(prompt.step, []).append(prompt)
                    prompt = self.complete.get_nowait()
                going_on = False
            for _, some in sorted(found.items()):
                yield sorted(some, key=lambda prompt: int(prompt.lease.ids[0]))

    @contextlib.contextmanager
    def finishing(self, prompts: list[Prompt]) -> Iterator[Databuffer]:
        """Yield a buffer with the rows of prompts of one step. The metrics count for the first of them."""
        metrics = Metrics()
        metrics.step = prompts[0].step
        with recording(metrics):
            buffer = self._buffer(metrics)
            buffer.step_columns = functools.reduce(_joined, (prompt.buffer.step_columns for prompt in prompts))
            yield buffer
        prompts[0].metrics.add_all(metrics.take())

    def put(self, dock: DockClient, prompts: list[Prompt], buffer: Databuffer) -> None:
        """Put what the trainer needs of the prompts into the dock, and give up their leases."""
        reports = report_column([prompt.metrics.take() for prompt in prompts], self.channel.rows)
        dock.report_activity(f"putting samples of step {prompts[0].step}")
        ids = torch.cat([prompt.lease.ids for prompt in prompts])
        policies = Ragged.from_rows([torch.frombuffer(bytearray(prompt.policies), dtype=torch.uint8)
                                     for prompt in prompts for _ in range(self.channel.rows)])
        rows = rows_for_others(self.plan, buffer, self.channel.rows, ids).with_columns(
            {REPORT: reports, POLICIES: policies})
        with timeline.current().span(timeline.TRANSFERS, "put samples", prompts[0].step + 1, rows=len(rows)):
            dock.put(rows)
        for lease in (prompt.lease for prompt in prompts):
            self.leases.pop((ROLLOUT, lease.number), None)
            try:
                dock.commit(lease)
                if self.dedicated:
                    heartbeat.current().finish()
            except LeaseLost as error:  # the rows are there all the same: the new holder's are duplicates
                events.record("lease_lost", prompt=int(lease.ids[0]) // self.channel.rows, reason=str(error))

    def seconds_of(self, step: int) -> defaultdict[str, float]:
        """Return the seconds of this rank's nodes in a step so far, of a few steps at a time."""
        for old in sorted(self.seconds)[:-_STEPS]:
            del self.seconds[old]
        return self.seconds.setdefault(step, defaultdict(float))

    def executor(self, step: int, rollouts: PartialRollouts | None = None) -> RolloutExecutor:
        """Return the executor of a thread. `rollouts`: samples the last node of `head`."""
        return RolloutExecutor(self, step, rollouts)

    def _buffer(self, metrics: Metrics) -> Databuffer:
        return Databuffer(self.plan, 0, metrics, limit=self.spec.run.wait_limit)


class RolloutExecutor(Executor):
    """Executor of one thread of the rollout loop."""

    def __init__(self, ctx: RolloutContext, step: int, rollouts: PartialRollouts | None):
        self.ctx, self.step, self.rollouts = ctx, step, rollouts
        super().__init__(ctx.plan.tasks, ctx.functions,
                         {name: role.of_draw(step) for name, role in ctx.roles.items()}, rank=0)
        self.tasks = {task.node: task for task in ctx.plan.tasks}  # with all that their functions return, `keep` too
        if rollouts is None:  # of all prompts of a step; those of sampling overlap
            self.seconds = ctx.seconds_of(step)

    def run(self, task: Task, inputs: Batch) -> Written:
        ctx = self.ctx
        if self.rollouts and task is ctx.head[-1]:
            self.roles[task.role].shared_engine = self.rollouts
        if task.samples:
            return super().run(self.tasks[task.node], inputs)
        with ctx.computing:
            ctx.doing = f"computing node `{task.node}` of step {self.step}"
            written = self._inferred(task, inputs) if task.type in ENGINE_TYPES else self._computed(task, inputs)
            ctx.doing = "sampling"
            return written

    def _computed(self, task: Task, inputs: Batch) -> Written:
        torch.manual_seed(key_of(self.ctx.spec.run.seed, self.step, int(inputs.ids[0])))
        return super().run(self.tasks[task.node], inputs)

    def _inferred(self, task: Task, inputs: Batch) -> Written:
        """Run a node with a model on each prompt alone: beside others it would round a row otherwise."""
        _, counts = (inputs.ids // self.ctx.lineage.times(task.fan)).unique_consecutive(return_counts=True)
        ends = counts.cumsum(0).tolist()
        for engine in self.ctx.engines.values():
            engine.idle_phase = "inference"
            if engine.gpu is not None:
                torch.cuda.set_device(engine.gpu)  # each thread begins with the first GPU
        parts = [self._computed(task, inputs.slice(start, end)) for start, end in zip([0, *ends], ends)]
        for engine in self.ctx.engines.values():
            engine.idle_phase = "waiting"
        written = Batch.concat([Batch(ids, columns) for columns, ids in parts])
        return written.columns, written.ids


def _joined(first: StepColumns, second: StepColumns) -> StepColumns:
    return {key: concat_non_empty(first[key], batch) for key, batch in second.items()}
