"""One rank: initialise, then run the chain step after step (DistFlow §5)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distflow.config.load import Spec
from distflow.config.run import Phase
from distflow.contracts.signature import ENGINE_TYPES
from distflow.data.batch import Batch
from distflow.data.databuffer import Databuffer
from distflow.data.dataloader import ONE, Dataloader, WithoutEmpty
from distflow.data.dataset import fields_of, open_records
from distflow.data.exchange import attended
from distflow.errors import RankMissing, StepFailed
from distflow.plan import KEEP, Layout, Plan, Task
from distflow.recovery.detectors import StepMonitor
from distflow.recovery.live_config import LiveConfig
from distflow.recovery.rank_status import RankStatus
from distflow.recovery.worker_process import WorkerContext
from distflow.telemetry import events, heartbeat
from distflow.telemetry.metrics import current
from distflow.telemetry.trajectories import trajectories
from workers.colocated import ColocatedSource
from workers.encode import encoder, image_encoder_of
from workers.engines.sampling import key_of
from workers.execution import Execution
from workers.fusion import Fusion
from workers.rank_timer import RankTimer, step_of
from workers.roles import RoleEngines, build_roles
from workers.rollout_cache import SampledRows, Written
from workers.rollout_channel import RolloutChannel
from workers.sink import Sink
from workers.sources import AsyncSource
from workers.train_state import TrainState
from workers.validation import Validator
from workers.weight_sync import WeightPublication


class TrainLoop:
    """Holds a rank's engines, buffer and loader, and runs its chain."""

    def __init__(self, spec: Spec, plan: Plan, functions: dict[str, Callable[..., Any]], device: str,
                 folder: Path, resume: bool, presence: RankStatus, writes: bool = True,
                 channel: RolloutChannel | None = None,
                 rollout: Plan | None = None, berth: WorkerContext | None = None, changes: LiveConfig | None = None,
                 known: int = 0, devices: int | None = None):
        """
        Args:
            resume: go on from the newest state that is whole, if there is one.
            writes: the run folder is this worker's to write to; without that it cannot `run`.
            channel: to those that sample while this rank trains.
            rollout: their plan, if this rank samples too.
            berth: with the memory that outlives this worker; None: nothing is kept there.
            changes: of settings, for which it gives way to another worker; it knows those up to number `known`.
            devices: ranks of the whole run; None: those of `plan`.
        """
        self.presence = presence
        self.spec, self.plan, self.rank = spec, plan, dist.get_rank()
        self.chain = plan.chain(self.rank)
        names = {task.role for task in self.chain if task.type in ENGINE_TYPES}
        self.hybrid = rollout is not None
        self.devices = [torch.cuda.current_device()] if device == "cuda" else []
        """Whose random numbers are drawn here beside the CPU's."""
        self.roles = build_roles(spec, plan, names, self._sampling_roles(), device)
        self.execution = Execution(self.chain, functions, self.roles, self.rank)
        self.buffer = Databuffer(plan, self.rank, current(), limit=spec.run.wait_limit)
        self.source = self._dataloader() if channel is None else self._arrivals(channel, functions, rollout)
        self.step = 0
        self.trained = {name: role for name, role in self.roles.items() if spec.dag.roles[name].trained}
        if writes:
            events.current().open(folder / "events.jsonl", self.rank)
        self.standing = TrainState(folder / "checkpoints", spec.run.checkpoint, berth, self.trained, self.source,
                                   spec.run.wait_limit)
        self.first = self.standing.restore() if resume else 0
        self.judges = StepMonitor(spec.run.robust.detectors)
        self.devices_of_run = devices or plan.ranks
        self.changes, self.known, self.stale, self.stopping = changes, known, False, False
        self.sampled = SampledRows(berth and berth.rows, self.first if resume else None)
        if writes:
            self._open(folder, self.first if resume else None)

    def _open(self, folder: Path, resumed_at: int | None) -> None:
        """Lines of steps that a resumed run does again are dropped; what was sampled is not sampled again."""
        written = resumed_at if resumed_at is None or not self.sampled.found else resumed_at + 1
        trajectories().open(folder / f"trajectories/rank{self.rank}.jsonl", self.spec.run.trajectories, written)
        validator = self._validator() if self.spec.run.validation else None
        self.sink = Sink(self.spec, self.plan, folder, resumed_at, self.standing.from_memory, validator,
                         self.standing.save, self.devices_of_run)

    def run(self) -> bool:
        """All steps, from the first or from where the checkpoint stands; False if it gives way after one of them, all
        ranks alike."""
        for step in self.steps():
            for task in self.tasks():
                with self._watch(task, step), attended():
                    inputs = self.buffer.take(task)
                    written = self._compute(task, step, inputs)
                    if KEEP in task.writes:
                        self.presence.now(f"is in step {step}, waiting to drop rows after node `{task.node}`")
                    self.buffer.put(task, *written)
            with _Watch(self.presence, f"is finishing step {step}", f"at the end of step {step}"), attended():
                if self._finish(step):
                    break
                if self.stopping:
                    self._stop(step + 1)
                    return True
                if self.stale:
                    self._leave(step + 1)
                    return False
        with _Watch(self.presence, "is ending the run", "at the end of the run", "ending"), attended():
            self.standing.finish()
            self.sink.close(self.trained)
            dist.barrier()  # a rank that leaves early tears the group down under the others
        return True

    def _leave(self, done: int) -> None:
        """Before another worker goes on after `done` steps."""
        if not self.standing.remembers:
            self.standing.save(done)
        self.standing.before_update()  # what is copied is whole then
        self.standing.finish()
        self.sink.flush()
        dist.barrier()  # the seat of one that has left ends the others

    def _stop(self, done: int) -> None:
        """Write a checkpoint of `done` steps, if the run writes any, and end before the last step."""
        if self.standing.every and done % self.standing.every:
            self.standing.save(done)
        self.standing.finish()
        self.sink.flush()
        dist.barrier()
        heartbeat.current().page.stop = heartbeat.STOPPED

    def _compute(self, task: Task, step: int, inputs: Batch) -> Written:
        if task.type == "MODEL_TRAIN":
            self.standing.before_update()
        pace = RankTimer(_phase(task), len(inputs))
        self.presence.now(f"is in step {step}, computing node `{task.node}`", pace.phase)
        with pace.measured():
            return self.sampled.run(task, step, self.buffer.draws, partial(self.execution.run, task, inputs))

    def _compute_early(self, task: Task, inputs: Batch) -> Written:
        """On prompts that are there while others are still sampled. What later nodes draw does not depend on that."""
        with torch.random.fork_rng(self.devices), self._watch(task, self.step):
            torch.manual_seed(key_of(self.spec.run.seed, self.step, *inputs.ids[:1].tolist()))
            written = self._compute(task, self.step, inputs)
        self.presence.now(f"is in step {self.step}, waiting for the samples of further prompts", "waiting")
        return written

    def _finish(self, step: int) -> bool:
        """What is done is first written down and remembered, and only then told to others: a worker that dies between
        two of these lines does none of it twice. True after the last step."""
        if self.changes is not None:
            current().apart("changes", self.changes.newest(), self.known)
        current().apart("stop", heartbeat.current().page.stop, 0)
        self.standing.report()
        self._judge(step + 1, self.sink.record(step + 1, self.buffer, self.source.epoch))
        self.presence.now(f"is remembering step {step}", "saving")
        self.standing.remember(step + 1)
        self.sampled.clear()
        self.presence.now(f"is publishing the weights of step {step}", "publishing")
        self.source.finish()
        self.presence.now(f"is validating and saving after step {step}", "validating")
        last = self.sink.conclude(step + 1)
        heartbeat.current().finish()
        return last

    def _judge(self, done: int, values: dict[str, float]) -> None:
        """What all ranks alike now know: whether settings have changed, whether one of them has been told to end, and
        what detectors say of the step.

        Raises:
            StepFailed: a detector wants it done again.
        """
        told = [rank["changes"] for rank in current().of_ranks if "changes" in rank]
        self.stale = any(newest > known for newest, _ in told for _, known in told)
        self.stopping = any(rank["stop"][0] for rank in current().of_ranks if "stop" in rank)
        for name, alarm in self.judges.look(step_of(done, values, current())):
            self.sink.warn(done, name, alarm)
            if alarm.restart:
                raise StepFailed(f"step {done}: {alarm.what} (detector `{name}`, whose `restart` is set)")

    def close(self) -> None:
        """End what engines have started beside this process, and the ways to other groups."""
        self.source.close()
        for role in self.roles.values():
            if role.rollout is not None:
                role.rollout.close()

    def _watch(self, task: Task, step: int) -> _Watch:
        return _Watch(self.presence, f"is in step {step}, waiting for the inputs of node `{task.node}`",
                      f"in node `{task.node}` (function {task.function}), step {step}")

    def steps(self) -> Iterator[int]:
        """Step numbers. Each step's global randomness depends on (seed, step) alone, so that none has to be saved."""
        self.presence.now("is validating before the first step", "validating")
        if self.sink.start(self.first):
            return
        for step in range(self.first, self.spec.run.steps):
            heartbeat.current().begin(step + 1)
            self.step = step
            self.execution.seconds.clear()
            torch.manual_seed(key_of(self.spec.run.seed, step))
            current().step = step
            for role in self.roles.values():
                role.step = step
            yield step

    def tasks(self) -> Iterator[Task]:
        """The chain over the step's prompts; its beginning over further ones while a filter leaves too few."""
        self.buffer.start(self._next(), self.source.drawn)
        self._receive()
        chain = self.chain[len(self.plan.early.chain(self.rank)) if self.plan.early else 0 :]
        for index, task in enumerate(chain):
            yield task
            while task.draws > 1 and not self.buffer.full(task, self.source.batch):
                self.buffer.draw_again(self._next(), self.source.drawn)
                self._receive()
                yield from chain[: index + 1]

    def _next(self) -> Batch:
        """The prompts of the next draw."""
        number = self.source.drawn_before
        for role in self.roles.values():
            role.draw = number
        with _Watch(self.presence, f"is waiting for the prompts of draw {number}", f"before draw {number} of prompts"):
            began = time.perf_counter()
            prompts = self.source.next()
        if isinstance(self.source, AsyncSource):
            current().maximum("waiting/samples", time.perf_counter() - began - self.source.busy)
            if self.rank == 0:
                current().add("dock/ready", self.source.ready)
        return prompts

    def _receive(self) -> None:
        """What another group has computed on the prompts of a draw."""
        self.buffer.receive(self.source.arrivals())

    def _arrivals(self, channel: RolloutChannel, functions: dict[str, Callable[..., Any]],
                  rollout: Plan | None) -> AsyncSource:
        spec, hybrid = self.spec, None
        if rollout is not None:
            hybrid = ColocatedSource.of(spec, rollout, functions, self.roles, self._dataloader(), channel)
        draws = spec.run.steps if all(task.draws == 1 for task in self.plan.tasks) else None
        fusion = Fusion(self.plan, self.rank, self._dataloader(), channel, spec.run.wait_limit,
                        self._compute_early, self.execution.seconds) if self.plan.early else None
        return AsyncSource(self._dataloader(), channel, self.plan, self.rank, spec.run.staleness, draws,
                           spec.run.wait_limit, WeightPublication(channel, self.plan, self.roles, spec.run.transport),
                           hybrid,
                           fusion)

    def _dataloader(self) -> Dataloader:
        role = self.roles[prompted_role(self.spec, self.chain)]
        return dataloader(self.spec, role, self.plan.source.share(self.rank), self.plan.source)

    def _sampling_roles(self) -> set[str]:
        tasks = self.plan.tasks if self.hybrid else self.chain  # of which none samples where only others do
        sampling = {task.role for task in tasks if task.samples}
        return sampling | ({prompted_role(self.spec, self.chain)} if self.spec.run.validation else set())

    def _validator(self) -> Validator:
        name = prompted_role(self.spec, self.chain)
        layout = self.plan.layout_of(name, samples=True)
        ours = [task.layout for task in self.plan.tasks if task.samples and task.role == name and not task.arrives]
        rows = next((each.rows for each in [*ours, self.plan.source] if each.dp == layout.dp), ())
        return Validator(self.spec, self.roles[name], replace(layout, rows=rows))


def dataloader(spec: Spec, role: RoleEngines, share: int | None = None, layout: Layout = ONE) -> Dataloader:
    """The training data, encoded for a role."""
    data, path = spec.run.data, spec.data_path(spec.run.data.train)
    records = WithoutEmpty(open_records(path), fields_of(data, data.columns))
    encode = encoder(role.tokenizer, data, image_encoder_of(role, data, path))
    return Dataloader(records, encode, data.batch, spec.run.seed, share, layout)


def prompted_role(spec: Spec, chain: Iterable[Task]) -> str:
    """The role for whose tokenizer the prompts are made, and whose answers are validated: the first trained one in the
    chain that has a vocabulary, else the chain's first."""
    tasks = [task for task in chain if task.type in ENGINE_TYPES]
    trained = (task.role for task in tasks if task.type == "MODEL_TRAIN" and spec.dag.roles[task.role].head == "lm")
    return next(trained, tasks[0].role)


def _phase(task: Task) -> Phase:
    """What a node's function does, as seats distinguish it."""
    if task.type == "MODEL_TRAIN":
        return "training"
    return "computing" if task.type == "COMPUTE" else "generating" if task.samples else "inference"


class _Watch:
    """Tells the others what this rank does; adds to an error that passes through where it comes from and who is
    missing."""

    def __init__(self, presence: RankStatus, doing: str, where: str, phase: Phase = "waiting"):
        self.presence, self.note = presence, f"{where}, rank {presence.rank}"
        presence.now(doing, phase)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(self.note)
        if isinstance(error, RankMissing) and (missing := self.presence.missing()):
            error.add_note(f"missing: {missing}")
