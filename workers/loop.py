"""The training loop of one rank: the trainer of every mode, which in sync mode samples too (DistFlow §5).

    for each step:
        run_chain    source.next gives the prompts: Dataloader (sync) | AsyncSource (async, semi_sync); then each task
                     of the chain takes its inputs, computes and puts its outputs
        record       metrics and samples of the step; detectors look at them
        snapshot     the state after the step, in memory
        publish      the step's rows leave the dock, its weights go to the rollouts
        conclude     validation, and every N steps a checkpoint

A step is recorded and in memory before other groups learn of it: a worker that dies between two of these lines repeats
none of them. The loop of the ranks that only sample is `workers/rollout.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distflow.config.load import Spec
from distflow.config.run import PHASES, Phase
from distflow.contracts.signature import ENGINE_TYPES
from distflow.data.batch import Batch
from distflow.data.databuffer import Databuffer
from distflow.data.dataloader import ONE, Dataloader, WithoutEmpty
from distflow.data.dataset import fields_of, open_records
from distflow.data.exchange import peer_errors
from distflow.errors import RankMissing, StepFailed
from distflow.plan import KEEP, Layout, Plan, Task
from distflow.recovery.detectors import StepMonitor, StepReport
from distflow.recovery.live_config import LiveConfig
from distflow.recovery.rank_status import RankStatus
from distflow.recovery.worker_process import WorkerContext
from distflow.telemetry import events, heartbeat
from distflow.telemetry.metrics import Metrics, current
from distflow.telemetry.trajectories import trajectories
from workers.colocated import ColocatedSource
from workers.encode import encoder, image_encoder_of
from workers.engines.sampling import key_of
from workers.execution import Execution, SampledRows, Written
from workers.fusion import Fusion
from workers.roles import RoleEngines, build_roles
from workers.rollout_channel import RolloutChannel
from workers.sink import Sink
from workers.sources import AsyncSource
from workers.train_state import TrainState
from workers.validation import Validator
from workers.weight_sync import WeightPublication


class TrainLoop:
    """Engines, buffer and prompts of one rank, and the loop that trains with them."""

    def run(self) -> bool:
        """Run the steps that are left. Return False if another worker is to go on with changed settings, on all ranks
        alike."""
        for step in self._steps():
            self.run_chain(step)
            with _Watch(self.status, f"is finishing step {step}", f"at the end of step {step}"), peer_errors():
                self._record(step + 1)
                self._snapshot(step)
                self._publish(step)
                if self._conclude(step):
                    break
                if self.stopping or self.superseded:
                    self._leave(step + 1)
                    return self.stopping
        with _Watch(self.status, "is ending the run", "at the end of the run", "ending"), peer_errors():
            self.train_state.finish()
            self.sink.close(self.trained)
            dist.barrier()  # a rank that leaves early tears the group down under the others
        return True

    def run_chain(self, step: int) -> None:
        """Run the rank's tasks on the prompts of the step. A filter that leaves too few rows draws further prompts, on
        which the tasks up to it are run again."""
        chain = self.chain[len(self.plan.early.chain(self.rank)) if self.plan.early else 0 :]
        self.buffer.start(self._next_prompts(), self.source.drawn)
        self.buffer.receive(self.source.take_results())
        for index, task in enumerate(chain):
            self._run_task(task, step)
            while task.draws > 1 and not self.buffer.full(task, self.source.batch):
                self.buffer.draw_again(self._next_prompts(), self.source.drawn)
                self.buffer.receive(self.source.take_results())
                for earlier in chain[: index + 1]:
                    self._run_task(earlier, step)

    def _run_task(self, task: Task, step: int) -> None:
        with self._watch(task, step), peer_errors():
            inputs = self.buffer.take(task)
            written = self._compute(task, step, inputs)
            if KEEP in task.writes:
                self.status.set(f"is in step {step}, waiting to drop rows after node `{task.node}`")
            self.buffer.put(task, *written)

    def __init__(self, spec: Spec, plan: Plan, functions: dict[str, Callable[..., Any]], device: str,
                 folder: Path, resume: bool, status: RankStatus, writes: bool = True,
                 channel: RolloutChannel | None = None, rollout: Plan | None = None,
                 worker_context: WorkerContext | None = None, live_config: LiveConfig | None = None,
                 known_change: int = 0, devices: int | None = None):
        """
        Args:
            resume: go on from the newest consistent state, if there is one.
            writes: this worker writes to the run folder; without that it cannot `run`.
            channel: to the ranks that sample while this one trains.
            rollout: the plan of those ranks, if this one samples too.
            worker_context: has the memory that outlives this worker; None: no snapshot is taken there.
            live_config: changed settings, for which this worker makes room for another one.
            known_change: the number of the newest change that this worker has.
            devices: ranks of the whole run; None: those of `plan`.
        """
        self.status = status
        self.spec, self.plan, self.rank = spec, plan, dist.get_rank()
        self.chain = plan.chain(self.rank)
        names = {task.role for task in self.chain if task.type in ENGINE_TYPES}
        self.colocated = rollout is not None
        self.cuda_devices = [torch.cuda.current_device()] if device == "cuda" else []
        self.roles = build_roles(spec, plan, names, self._sampling_roles(), device)
        self.execution = Execution(self.chain, functions, self.roles, self.rank)
        self.buffer = Databuffer(plan, self.rank, current(), limit=spec.run.wait_limit)
        self.source = self._dataloader() if channel is None else self._async_source(channel, functions, rollout)
        self.weights = channel and WeightPublication(channel, plan, self.roles, spec.run.transport)
        self.step = 0
        self.trained = {name: role for name, role in self.roles.items() if spec.dag.roles[name].trained}
        if writes:
            events.current().open(folder / "events.jsonl", self.rank)
        self.train_state = TrainState(folder / "checkpoints", spec.run.checkpoint, worker_context, self.trained,
                                      self.source, spec.run.wait_limit)
        self.first_step = self.train_state.restore() if resume else 0
        self.monitor = StepMonitor(spec.run.robust.detectors)
        self.devices_of_run = devices or plan.ranks
        self.live_config, self.known_change, self.superseded, self.stopping = live_config, known_change, False, False
        self.sampled = SampledRows(worker_context and worker_context.rollout_cache, self.first_step if resume else None)
        if writes:
            self._open(folder, self.first_step if resume else None)

    def _open(self, folder: Path, resumed_at: int | None) -> None:
        """Open the files of the run folder. A resumed run drops the lines of the steps that it does again, but for
        trajectories of samples that it still has."""
        written = resumed_at if resumed_at is None or not self.sampled.found else resumed_at + 1
        trajectories().open(folder / f"trajectories/rank{self.rank}.jsonl", self.spec.run.trajectories, written)
        validator = self._validator() if self.spec.run.validation else None
        self.sink = Sink(self.spec, self.plan, folder, resumed_at, self.train_state.from_memory, validator,
                         self.train_state.save, self.devices_of_run)

    def _steps(self) -> Iterator[int]:
        """Yield the steps that are left. The global randomness of each depends on (seed, step) alone, so that no state
        of a generator has to be saved."""
        self.status.set("is validating before the first step", "validating")
        if self.sink.start(self.first_step):
            return
        for step in range(self.first_step, self.spec.run.steps):
            heartbeat.current().begin(step + 1)
            self.step = step
            self.execution.seconds.clear()
            torch.manual_seed(key_of(self.spec.run.seed, step))
            current().step = step
            for role in self.roles.values():
                role.step = step
            if self.weights is not None and step == self.first_step:
                with _Watch(self.status, "is publishing the weights of the start", "before the first step"):
                    self.source.reconcile()
                    self.source.version_set = self.weights.publish()
            yield step

    def _next_prompts(self) -> Batch:
        number = self.source.drawn_before
        for role in self.roles.values():
            role.draw = number
        with _Watch(self.status, f"is waiting for the prompts of draw {number}", f"before draw {number} of prompts"):
            began = time.perf_counter()
            prompts = self.source.next()
        if isinstance(self.source, AsyncSource):
            current().maximum("waiting/samples", time.perf_counter() - began - self.source.busy)
            if self.rank == 0:
                current().add("dock/ready", self.source.ready)
        return prompts

    def _compute(self, task: Task, step: int, inputs: Batch) -> Written:
        if task.type == "MODEL_TRAIN":
            self.train_state.before_update()
        timer = RankTimer(_phase(task), len(inputs))
        self.status.set(f"is in step {step}, computing node `{task.node}`", timer.phase)
        with timer.measured():
            return self.sampled.run(task, step, self.buffer.draws, partial(self.execution.run, task, inputs))

    def _compute_early(self, task: Task, inputs: Batch) -> Written:
        """Compute a task on the prompts that have come while others are still sampled. The random numbers of later
        nodes do not depend on it."""
        with torch.random.fork_rng(self.cuda_devices), self._watch(task, self.step):
            torch.manual_seed(key_of(self.spec.run.seed, self.step, *inputs.ids[:1].tolist()))
            written = self._compute(task, self.step, inputs)
        self.status.set(f"is in step {self.step}, waiting for the samples of further prompts", "waiting")
        return written

    def _record(self, done: int) -> None:
        """Write the metrics of the step, and act on what all ranks alike learn with them: changed settings, a request
        to stop, alerts of detectors.

        Raises:
            StepFailed: a detector wants the step done again.
        """
        if self.live_config is not None:
            current().per_rank("changes", self.live_config.newest(), self.known_change)
        current().per_rank("stop", heartbeat.current().page.stop, 0)
        self.train_state.report()
        values = self.sink.record(done, self.buffer, self.source.epoch)
        changes = [rank["changes"] for rank in current().of_ranks if "changes" in rank]
        self.superseded = any(newest > known for newest, _ in changes for _, known in changes)
        self.stopping = any(rank["stop"][0] for rank in current().of_ranks if "stop" in rank)
        for name, alert in self.monitor.look(_step_report(done, values, current())):
            self.sink.warn(done, name, alert)
            if alert.restart:
                raise StepFailed(f"step {done}: {alert.what} (detector `{name}`, whose `restart` is set)")

    def _snapshot(self, step: int) -> None:
        self.status.set(f"is taking the snapshot of step {step}", "saving")
        self.train_state.snapshot(step + 1)
        self.sampled.clear()

    def _publish(self, step: int) -> None:
        """Release the step's rows and publish its weights, unless no more prompts are sampled."""
        self.status.set(f"is publishing the weights of step {step}", "publishing")
        self.source.finish()
        if self.weights is not None and not self.source.exhausted:
            self.source.version_set = self.weights.publish()

    def _conclude(self, step: int) -> bool:
        """Validate and save if it is time. Return whether this was the last step."""
        self.status.set(f"is validating and saving after step {step}", "validating")
        last = self.sink.conclude(step + 1)
        heartbeat.current().finish()
        return last

    def _leave(self, done: int) -> None:
        """End before the last step: with a checkpoint if the run is to stop, else with the state that the next worker
        starts from."""
        if self.stopping:
            if self.train_state.every and done % self.train_state.every:
                self.train_state.save(done)
        else:
            if not self.train_state.in_memory:
                self.train_state.save(done)
            self.train_state.before_update()  # the copy is complete then
        self.train_state.finish()
        self.sink.flush()
        dist.barrier()  # the supervisor of a rank that has left ends the others
        if self.stopping:
            heartbeat.current().page.stop = heartbeat.STOPPED

    def close(self) -> None:
        """End the processes that engines have started, and the connections to other groups."""
        if self.weights is not None:
            self.weights.close()
        self.source.close()
        for role in self.roles.values():
            if role.rollout is not None:
                role.rollout.close()

    def _watch(self, task: Task, step: int) -> _Watch:
        return _Watch(self.status, f"is in step {step}, waiting for the inputs of node `{task.node}`",
                      f"in node `{task.node}` (function {task.function}), step {step}")

    def _async_source(self, channel: RolloutChannel, functions: dict[str, Callable[..., Any]],
                      rollout: Plan | None) -> AsyncSource:
        spec, colocated = self.spec, None
        if rollout is not None:
            colocated = ColocatedSource.of(spec, rollout, functions, self.roles, self._dataloader(), channel)
        draws = spec.run.steps if all(task.draws == 1 for task in self.plan.tasks) else None
        fusion = Fusion(self.plan, self.rank, self._dataloader(), channel, spec.run.wait_limit,
                        self._compute_early, self.execution.seconds) if self.plan.early else None
        return AsyncSource(self._dataloader(), channel, self.plan, self.rank, spec.run.staleness, draws,
                           spec.run.wait_limit, colocated, fusion)

    def _dataloader(self) -> Dataloader:
        role = self.roles[prompted_role(self.spec, self.chain)]
        return dataloader(self.spec, role, self.plan.source.share(self.rank), self.plan.source)

    def _sampling_roles(self) -> set[str]:
        tasks = self.plan.tasks if self.colocated else self.chain  # no task of the chain samples if only others do
        sampling = {task.role for task in tasks if task.samples}
        return sampling | ({prompted_role(self.spec, self.chain)} if self.spec.run.validation else set())

    def _validator(self) -> Validator:
        name = prompted_role(self.spec, self.chain)
        layout = self.plan.layout_of(name, samples=True)
        ours = [task.layout for task in self.plan.tasks if task.samples and task.role == name and not task.arrives]
        rows = next((each.rows for each in [*ours, self.plan.source] if each.dp == layout.dp), ())
        return Validator(self.spec, self.roles[name], replace(layout, rows=rows))


def dataloader(spec: Spec, role: RoleEngines, share: int | None = None, layout: Layout = ONE) -> Dataloader:
    """Return the training data, encoded for a role."""
    data, path = spec.run.data, spec.data_path(spec.run.data.train)
    records = WithoutEmpty(open_records(path), fields_of(data, data.columns))
    encode = encoder(role.tokenizer, data, image_encoder_of(role, data, path))
    return Dataloader(records, encode, data.batch, spec.run.seed, share, layout)


def prompted_role(spec: Spec, chain: Iterable[Task]) -> str:
    """Return the role whose tokenizer encodes the prompts and whose answers are validated: the first trained one in the
    chain that has a vocabulary, else the chain's first."""
    tasks = [task for task in chain if task.type in ENGINE_TYPES]
    trained = (task.role for task in tasks if task.type == "MODEL_TRAIN" and spec.dag.roles[task.role].head == "lm")
    return next(trained, tasks[0].role)


def _phase(task: Task) -> Phase:
    if task.type == "MODEL_TRAIN":
        return "training"
    return "computing" if task.type == "COMPUTE" else "generating" if task.samples else "inference"


class _Watch:
    """Publishes what this rank does. Adds to an error that passes through where it was raised and which ranks are
    missing."""

    def __init__(self, status: RankStatus, doing: str, where: str, phase: Phase = "waiting"):
        self.status, self.note = status, f"{where}, rank {status.rank}"
        status.set(doing, phase)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(self.note)
        if isinstance(error, RankMissing) and (missing := self.status.missing()):
            error.add_note(f"missing: {missing}")


class RankTimer:
    """Seconds that this rank itself computes for one task, by which the others see who holds them up.

    Where a model computes, ranks wait for each other's weights and gradients again and again; so only the CPU time of
    this thread counts there, since it waits without computing. A GPU computes its collectives too: a slow one shows
    while it samples, and when it trains all ranks look alike. An engine with processes of its own shows nothing.
    """

    def __init__(self, phase: Phase, rows: int):
        self.phase, self.rows, self.began = phase, rows, time.perf_counter()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the task's function. The time since the task began counts in any case."""
        clock = time.perf_counter if self.phase == "computing" else time.thread_time
        before, since = time.perf_counter() - self.began, clock()
        yield
        current().per_rank(self.phase, before + clock() - since, self.rows)


def _step_report(number: int, values: dict[str, float], metrics: Metrics) -> StepReport:
    """Return what detectors see of a step whose `values` were collected from `metrics`. Values that each rank measures
    for itself are left out, so that all ranks agree."""
    phases = [phase for phase in PHASES if any(phase in rank for rank in metrics.of_ranks)]
    values = {name: value for name, value in values.items() if name not in ("seconds", "tokens_per_second")}
    return StepReport(number, values, {phase: [rank.get(phase, (0.0, 0.0)) for rank in metrics.of_ranks]
                                       for phase in phases})
