"""A rank that only samples, with weights that it pulls; and those that help it, where a model is split over several.

Rows that one rank has begun and another goes on with, so that no token is sampled twice.

Threads that take prompts from the dock, many at a time, and put back what they made of them.

Each prompt has a thread that runs the chain up to its last sampling node; all of them sample from one engine, whose
slots are never empty while there is work. What has no model, such as rewards, is computed of all prompts that have come
so far, while others are still sampled.
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
from distflow.data.databuffer import Databuffer, Shelves
from distflow.data.dataloader import Dataloader
from distflow.data.row_filter import joined
from distflow.dock import DockClient, DockError, LeaseLost, TimedOut
from distflow.dock.index import Lease
from distflow.errors import DistflowError
from distflow.plan import KEEP, ROLLOUT, Plan, RowLineage, Task
from distflow.telemetry import events, heartbeat
from distflow.telemetry.metrics import Metrics, current, recording
from distflow.weights.puller import Puller
from workers.engines.rollout import Rollout, SampledRow, Sampler, Samples, Session
from workers.engines.sampling import key_of
from workers.engines.shared_engine import EngineStopped, SharedEngine
from workers.engines.tp_leader import TPFollowerEngine, TPLeader
from workers.engines.weight_updates import WeightUpdates
from workers.execution import Execution
from workers.roles import RoleEngines
from workers.rollout_channel import REPORT, RolloutChannel, crossing, reported

TOKENS, LOGPROBS, VERSIONS, FINISHED = (f"begun/{name}" for name in ("tokens", "logprobs", "versions", "finished"))


class PartialRollouts(Sampler):
    """A stream's rows of one prompt in one node: what others have sampled of them is not sampled again, and what is
    left unfinished can be given to others. Conversations begin anew, since their environments do not move."""

    def __init__(self, stream: SharedEngine | Rollout, saved: Batch, restart: bool):
        """
        Args:
            saved: rows that others have begun, in the columns that `begun` has.
            restart: not those that other weights have begun.
        """
        self.stream, self.generation, self.end_tokens = stream, stream.generation, stream.end_tokens
        self.saved, self.restart = saved, restart
        self.rows_begun: list[SampledRow] = []

    def session(self, key: int, temperature: float | None = None, keeps: bool = False) -> Session:
        return self.stream.session(key, temperature, keeps)

    def take_over(self, rows: list[SampledRow]) -> None:
        self.rows_begun = rows
        if not len(self.saved):
            return
        found = dict(zip(self.saved.ids.tolist(), range(len(self.saved))))
        columns = [self.saved[name].rows for name in (TOKENS, LOGPROBS, VERSIONS)]
        for row in (row for row in rows if row.id in found):
            tokens, logprobs, versions = (column[found[row.id]] for column in columns)
            if not (self.restart and bool((versions != self.stream.version).any())):
                row.resume(tokens, logprobs, versions, bool(self.saved[FINISHED][found[row.id]]))
                current().add("response/continued", len(tokens))

    def begun(self) -> Batch:
        """The rows that have tokens, once nothing is sampled any more."""
        rows = [row for row in self.rows_begun if len(row.tokens)]
        samples = Samples.of(rows)
        return Batch(torch.tensor([row.id for row in rows], dtype=torch.int64), {
            TOKENS: samples.tokens, LOGPROBS: samples.logprobs, VERSIONS: samples.versions,
            FINISHED: samples.finished})


_NOTHING = Batch(torch.empty(0, dtype=torch.int64))
_MOMENT = 0.2
"""Seconds that a thread waits for work before it looks whether the run is over."""


@dataclass
class _Sampled:
    """A prompt whose samples are there."""

    lease: Lease
    step: int
    shelves: Shelves
    metrics: Metrics


class RolloutLoop:
    """Runs the rollout group's chain on prompts that were ordered, as long as it is told to."""

    def __init__(self, spec: Spec, plan: Plan, functions: Mapping[str, Callable[..., Any]],
                 roles: dict[str, RoleEngines],
                 loader: Dataloader, channel: RolloutChannel, who: str, shares: int, alone: int = 0):
        """
        Args:
            shares: how many such crews the run has.
            alone: how many of them have a rank that does nothing else, if this is one. The steps of its prompts are
                then those of its rank, and what others leave is left to it.
        """
        self.spec, self.plan, self.roles, self.loader, self.channel = spec, plan, roles, loader, channel
        self.functions, self.who, self.leads = functions, who, alone > 0
        last = max(place for place, task in enumerate(plan.tasks) if task.samples)
        self.head, self.tail = plan.tasks[: last + 1], plan.tasks[last + 1 :]
        self.sampling = {name: role for name, role in roles.items() if role.rollout is not None and any(
            task.samples and task.role == name for task in plan.tasks)}
        fitting = min(role.rollout.generation.batch_rows for role in self.sampling.values()) // channel.rows
        older = -(-channel.prompts * spec.run.staleness // alone) if alone else 0
        self.most = max(1, min(fitting, -(-channel.prompts // shares) + older))
        """Prompts that are sampled at a time: a fair part of a draw; those of the draws before it are left to ranks
        that do nothing else."""
        self.streams: Mapping[str, SharedEngine] = {}
        self.held: dict[int, tuple[Lease, float]] = {}
        """Leases by number, and when each was last renewed."""
        self.sampled: queue.SimpleQueue[_Sampled | None] = queue.SimpleQueue()
        """None comes last."""
        self.unfinished: dict[int, tuple[PartialRollouts, int]] = {}
        """By lease, the rows that are sampled, and the turn as which they are saved if they are left so."""
        samples = RowLineage(plan.tasks, plan.source).times(self.head[-1].out_fan)
        self.shared = spec.run.mode == "semi_sync" and samples == channel.rows
        """Whether some crews end while others go on, which get what is begun by then: rows, as the dock knows them."""
        self.computing = threading.Lock()
        """Functions without a model are called one at a time: users need not think of threads."""
        self.doing = ""
        self.awaited: dict[int, tuple[str, int]] = {}
        """By lease, the role and the version of its weights for which a prompt waits."""
        self.failure: BaseException | None = None
        self.ended = self.told = False
        """Whether no more is sampled; and whether that is because `over` said so."""
        self.put = threading.Event()
        """All prompts that were sampled are in the dock."""

    def work(self, streams: Mapping[str, SharedEngine], over: Callable[[DockClient], bool]) -> None:
        """Take prompts and sample until `over`, which is asked now and then. Prompts under way are given back then,
        with what there is of them, and those that are sampled are put into the dock."""
        self.streams, self.failure, self.held, self.unfinished = streams, None, {}, {}
        self.ended = self.told = False
        self.sampled = queue.SimpleQueue()
        self.put.clear()
        for name, stream in streams.items():
            self.roles[name].many = stream
        first, *others = (partial(stream.drive, lambda: self.over, lambda: self.failure is not None)
                          for stream in streams.values())
        works = [partial(self._take_prompts, over), self._finish_prompts, *others]
        with ThreadPoolExecutor(len(works), "crew") as threads:
            under_way = [threads.submit(work) for work in works]
            for work in under_way:
                work.add_done_callback(self._notice)
            try:
                first()
            finally:
                self.ended = True
            while wait(under_way, _MOMENT).not_done:
                for stream in streams.values():
                    stream.rollout.candidates("")  # ranks that follow hear that this one is there
        for name in streams:
            self.roles[name].many = None
        if self.failure is not None:
            raise self.failure

    @property
    def over(self) -> bool:
        return self.ended or self.failure is not None

    def _notice(self, job: Future[None]) -> None:
        """An error in any thread ends the worker; unless the run is over, when the dock has gone. Where this rank only
        goes over to training, it is not."""
        error = job.exception()
        if isinstance(error, DistflowError) and self.leads and (self.told or self.channel.over):
            self.ended = True
        elif error is not None and not isinstance(error, EngineStopped):
            self.failure = self.failure or error

    def _take_prompts(self, over: Callable[[DockClient], bool]) -> None:
        """Lease prompts as long as there is room, and see those that were sampled into the dock."""
        try:
            with self.channel.dock(self.who) as dock:
                self._lease_prompts(dock, over)
                self._hand_over(dock)
                self.sampled.put(None)
                while not self.put.wait(_MOMENT) and self.failure is None and not self.channel.over:
                    self._renew_leases(dock)
        finally:
            self.sampled.put(None)
        # With the connection go the leases of prompts that were under way: others take them at once.

    def _lease_prompts(self, dock: DockClient, over: Callable[[DockClient], bool]) -> None:
        """Give each prompt to a thread."""
        room = threading.Semaphore(self.most)
        with ThreadPoolExecutor(self.most, "prompt") as pool:
            try:
                while not self.over:
                    self.told = over(dock)
                    if self.told:
                        break
                    self._renew_leases(dock)
                    if room.acquire(timeout=_MOMENT) and not self._begin_one(dock, pool, room):
                        room.release()
            finally:
                self.ended = True  # prompts under way do not outlast a dock that fails

    def _begin_one(self, dock: DockClient, pool: ThreadPoolExecutor, room: threading.Semaphore) -> bool:
        """Whether there was a prompt."""
        try:
            lease = dock.lease(ROLLOUT, self.channel.rows, wait=_MOMENT)
        except TimedOut:
            return False
        self.held[lease.number] = (lease, time.monotonic())
        saved = dock.saved(lease) if self.shared else (_NOTHING, lease.turns[:0])
        metrics = Metrics()
        with recording(metrics):
            prompt = self.loader.at(lease.ids[:1] // self.channel.rows)
        pool.submit(self._sample, lease, prompt, metrics, *saved, room).add_done_callback(self._notice)
        return True

    def _hand_over(self, dock: DockClient) -> None:
        """Save what there is of prompts under way, for those who go on."""
        if self.shared and not self.leads and self.failure is None:
            for rows, turn in self.unfinished.values():
                begun = rows.begun()
                try:
                    dock.put(begun, turn=turn)
                except DockError as error:  # others sample these from their beginning
                    events.record("begun rows lost", rows=len(begun), reason=str(error))

    def _renew_leases(self, dock: DockClient) -> None:
        waiting = [f"waiting for version {version} of the weights of `{name}` (why: `weights_late` in events.jsonl)"
                   for name, version in list(self.awaited.values())]
        dock.doing(waiting[0] if waiting else self.doing)
        for number, (lease, since) in list(self.held.items()):
            if time.monotonic() - since > lease.seconds / 3:
                with contextlib.suppress(LeaseLost):  # its commit will say so
                    dock.renew(lease)
                with contextlib.suppress(KeyError):  # committed meanwhile
                    self.held.pop(number)
                    self.held[number] = (lease, time.monotonic())

    def _sample(self, lease: Lease, prompt: Batch, metrics: Metrics, saved: Batch, turns: Tensor,
                room: threading.Semaphore) -> None:
        """One prompt up to the last node that samples, of which others may have saved some turns."""
        step = int(prompt.ids) // self.channel.prompts
        metrics.step = step
        if self.leads:
            heartbeat.current().begin(step + 1)
        try:
            for name, version in self.channel.versions_of(int(lease.versions[0])).items():
                self.awaited[lease.number] = name, version
                self.streams[name].wait(version)
            self.awaited.pop(lease.number, None)
            with recording(metrics):
                buffer = self._buffer(metrics)
                buffer.start(prompt)
                rows = PartialRollouts(self.streams[self.head[-1].role], saved,
                                       self.spec.run.on_new_weights == "restart")
                self.unfinished[lease.number] = rows, int(turns.max()) + 1 if len(turns) else 0
                self._run(self.head, buffer, step, rows)
                del self.unfinished[lease.number]
        finally:
            room.release()
        self.sampled.put(_Sampled(lease, step, buffer.shelves, metrics))

    def _finish_prompts(self) -> None:
        """Compute what is left, of all prompts of a step that have come, and put it into the dock."""
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
        self.put.set()

    def _finish(self, dock: DockClient, step: int, some: list[_Sampled]) -> None:
        metrics = Metrics()
        metrics.step = step
        with recording(metrics):
            buffer = self._buffer(metrics)
            buffer.shelves = functools.reduce(_joined, (each.shelves for each in some))
            self._run(self.tail, buffer, step)
        some[0].metrics.add_all(metrics.take())
        reports = reported([each.metrics.take() for each in some], self.channel.rows)
        dock.doing(f"putting samples of step {step}")
        rows = crossing(self.plan, buffer).with_columns({REPORT: reports})
        # With their groups: a dock that was lost meanwhile does not know any more what was ordered.
        dock.put(rows, group=rows.ids // self.channel.rows, wait=self.spec.run.wait_limit)
        for each in some:
            self.held.pop(each.lease.number, None)
            try:
                dock.commit(each.lease)
                if self.leads:
                    heartbeat.current().finish()
            except LeaseLost as error:  # the rows are there all the same; who has them now finds that they came before
                events.record("lease lost", prompt=int(each.lease.ids[0]) // self.channel.rows, reason=str(error))

    def _run(self, tasks: tuple[Task, ...], buffer: Databuffer, step: int,
             begun: PartialRollouts | None = None) -> None:
        roles = {name: role.of_draw(step) for name, role in self.roles.items()}
        execution = Execution(self.plan.tasks, self.functions, roles, rank=0)
        for task in tasks:
            inputs = buffer.take(task)
            if begun and task is self.head[-1]:
                roles[task.role].many = begun
            if task.type in ENGINE_TYPES:
                written, ids = execution.run(task, inputs)
            else:
                with self.computing:
                    self.doing = f"computing node `{task.node}` of step {step}"
                    torch.manual_seed(key_of(self.spec.run.seed, step, int(inputs.ids[0])))
                    written, ids = execution.run(task, inputs)
                    self.doing = "sampling"
            # Rows that are to be dropped leave in the trainer, as in other modes: they are counted once.
            buffer.put(replace(task, writes=tuple(name for name in task.writes if name != KEEP)), written, ids)

    def _buffer(self, metrics: Metrics) -> Databuffer:
        return Databuffer(self.plan, 0, metrics, limit=self.spec.run.wait_limit)


def _joined(first: Shelves, second: Shelves) -> Shelves:
    return {key: joined(first[key], batch) for key, batch in second.items()}


class RolloutWorker:
    """Holds a rank's sampling engines, and keeps a crew at work until the trainer says that it is over."""

    def __init__(self, spec: Spec, plan: Plan, functions: Mapping[str, Callable[..., Any]],
                 roles: dict[str, RoleEngines],
                 loader: Dataloader, channel: RolloutChannel, who: str, shares: int, alone: int):
        """`shares`: how many crews the run has; `alone`: those whose ranks do nothing else."""
        self.channel = channel
        self.crew = RolloutLoop(spec, plan, functions, roles, loader, channel, who, shares, alone)
        self.updates = _updates(spec, self.crew.sampling, channel, who)
        self.streams = {name: SharedEngine(role.rollout if plan.ranks == 1 else TPLeader(role.rollout),
                                           partial(_renew, self.updates.get(name), spec.run.on_new_weights))
                        for name, role in self.crew.sampling.items()}

    def run(self) -> None:
        """Until the trainer says that it is over."""
        self.crew.work(self.streams, lambda dock: self.channel.over)
        for stream in self.streams.values():
            stream.rollout.part()

    def close(self) -> None:
        for updates in self.updates.values():
            updates.close()
        for stream in self.streams.values():
            stream.rollout.close()


class TPFollower:
    """One of the ranks over which a rollout's model is split, but for the first: it takes no prompts of its own."""

    def __init__(self, spec: Spec, roles: dict[str, RoleEngines], channel: RolloutChannel, who: str):
        (name, role), = roles.items()
        self.rollout, self.updates = role.rollout, _updates(spec, roles, channel, who)
        self.following = TPFollowerEngine(role.rollout, self.updates.get(name))

    def run(self) -> None:
        """Until the first rank says that it is over."""
        self.following.run()

    def close(self) -> None:
        for updates in self.updates.values():
            updates.close()
        self.rollout.close()


def _updates(spec: Spec, sampling: Mapping[str, RoleEngines], channel: RolloutChannel, who: str) -> dict[str,
                                                                                                         WeightUpdates]:
    """Of the roles that are trained elsewhere."""
    return {name: WeightUpdates(Puller(channel.weights(name), channel.token, who, host=channel.host,
                                       transport=spec.run.transport), role.rollout.version)
            for name, role in sampling.items() if spec.dag.roles[name].trained}


def _renew(updates: WeightUpdates | None, on_new_weights: str, stream: SharedEngine) -> None:
    """Take new weights once all ranks of the engine have them. Where two have unlike ones, all pull the newest."""
    weights = updates.arrived() if updates else None
    found = stream.rollout.candidates(weights.key if weights else "")
    if weights is None:
        return
    if found == {weights.key}:
        stream.rollout.load(weights.tensors(), weights.version)
        if on_new_weights == "restart":
            stream.restart()
        updates.loaded()
    elif len(found - {""}) > 1:
        updates.drop()
