"""What a rank that trains has: engines, buffer, source of prompts, state and files; and the parts of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from distflow.config.robust import PHASES, Phase
from distflow.contracts.forms import ENGINE_TYPES
from distflow.data.batch import Batch
from distflow.data.databuffer import Databuffer
from distflow.data.exchange import peer_errors
from distflow.errors import StepFailed
from distflow.plan import ROLLOUT, Task
from distflow.recovery.detectors import StepMonitor, StepReport
from distflow.recovery.rank_status import RankStatus
from distflow.recovery.worker_process import WorkerContext
from distflow.telemetry import events, heartbeat, timeline
from distflow.telemetry.metrics import Metrics, current
from distflow.telemetry.run_reader import RunReader
from distflow.telemetry.trajectories import trajectories
from planners.check import prompted_role
from workers.context import RankContext
from workers.dock_source import DockSource, Source
from workers.encode import dataloader
from workers.engines.sampling import key_of
from workers.execution import SampledRows, TrainExecutor, Watch
from workers.preflight.model import ModelProofs
from workers.profiler import StepProfiler
from workers.roles import build_roles, follow
from workers.rollout_channel import RolloutChannel
from workers.sink import Sink
from workers.train_state import TrainState
from workers.validation import Validator
from workers.validation_requests import ValidationRequests, validated_elsewhere
from workers.weight_sync import WeightPublication

_VERSION = "version of {}"  # metric of each rank: of the weights of a role


class TrainContext:
    """Everything that `train` needs on one rank. Collective over the ranks that train. Without a supervisor's `worker`
    no snapshot outlives this process, and settings do not change. Without `writes`, to the run folder, it cannot
    `train`."""

    def __init__(self, context: RankContext, worker: WorkerContext, status: RankStatus,
                 functions: Mapping[str, Callable[..., Any]], writes: bool = True,
                 channel: RolloutChannel | None = None):
        self.context, self.status, self.channel = context, status, channel
        self.spec, self.plan, self.rank = context.spec, context.own, dist.get_rank()
        run, self.known_change, self.attempt = self.spec.run, worker.config_change, worker.attempt.number
        chain = self.plan.chain(self.rank)
        self.chain = chain[len(self.plan.early.chain(self.rank)) if self.plan.early else 0 :]
        self.prompted = prompted_role(self.spec, chain)
        self.proofs = ModelProofs(self.spec, bool(context.resume), context.device) \
            if run.preflight and writes and worker.first and not self.attempt else None
        self.roles = build_roles(self.spec, self.plan, {task.role for task in chain if task.type in ENGINE_TYPES},
                                 self._sampling_roles(), context.device, look=self.proofs and self.proofs.look)
        self.trained = {name: role for name, role in self.roles.items() if self.spec.dag.roles[name].trained}
        following = {name: role for name, role in self.roles.items() if self.spec.dag.roles[name].follow}
        self.changing = {**self.trained, **following}
        self.elsewhere = {name: role for name, role in self.changing.items()
                          if len(self.plan.layout_of(name, samples=False).active_ranks) < self.plan.ranks}
        """Roles of which some ranks have no model that trains."""
        self.buffer = Databuffer(self.plan, self.rank, current(), run.wait_limit)
        self.executor = TrainExecutor(self.plan, functions, self.roles, self.rank, status, run.seed)
        self.loader = dataloader(self.spec, self.roles[self.prompted], self.plan.source.share(self.rank),
                                 self.plan.source)
        self.source: Source = DockSource(self.loader, self.plan, channel, run, self.trained, self.rank,
                                         self.attempt) if channel else self.loader
        self.weights = WeightPublication(channel, self.plan, self.roles, run.transport, max(
            group.plan.ranks for group in self.context.plan.groups if group.kind == ROLLOUT)) \
            if channel and self.context.plan.rollouts else None
        if writes:
            events.current().open(context.path / "events.jsonl", context.store.rank)
        self.supervised = worker.supervisor_pid > 0
        in_memory = worker if self.supervised and run.robust.snapshots else None
        resumed_at = self._restore(worker, in_memory, writes)
        self.first_step = resumed_at or 0
        if writes:
            self.source.start_at(self.first_step)
        self.executor.before_update = self.state.before_update
        self.executor.sampled = SampledRows(in_memory and in_memory.rollout_cache, resumed_at)
        self.monitor = StepMonitor(run.robust.detectors)
        self.profiler = StepProfiler(run.profile, context.path, context.store.rank)
        self.superseded = self.stopping = False
        self.learnt = True  # whether the step has trained a role, and not loaded weights
        if writes:
            self.sink = self._open_files(resumed_at)

    def _restore(self, worker: WorkerContext, in_memory: WorkerContext | None, writes: bool) -> int | None:
        """Load the newest state; return how many steps are done, None in a new run."""
        context, run = self.context, self.spec.run
        self.state = TrainState(context.path / "checkpoints", run.checkpoint, in_memory, self.changing, self.source,
                                run.wait_limit,
                                [name for name, role in self.spec.dag.roles.items()
                                 if not (role.trained or role.follow)])
        if writes:
            self.state.checkpoints.claim(context.job, worker.round, self.attempt)
        if not context.resume and not self.attempt:
            return None
        return self.state.restore()

    def _open_files(self, resumed_at: int | None) -> Sink:
        """Open the files of the run folder. A resumed run drops the lines of the steps that it does again, but for
        trajectories of samples that it still has."""
        sampled, run = self.executor.sampled, self.spec.run
        written = resumed_at if resumed_at is None or not (sampled.found or sampled.turns) else resumed_at + 1
        if self.channel and self.attempt:  # the dock has what this rank has sampled
            written = None
        trajectories().open(self.context.path / f"trajectories/rank{self.rank}.jsonl", run.shown_conversations, written)
        validator = self._validator(resumed_at) if run.validation else None
        return Sink(self.context, resumed_at, validator, self.state, self.trained)

    def _validator(self, resumed_at: int | None) -> Validator | ValidationRequests:
        run = self.spec.run
        if not (self.channel and validated_elsewhere(self.spec, self.context.plan)):
            return Validator.of(self.spec, self.plan, self.prompted, self.roles)
        return ValidationRequests(self.channel, self.roles[self.prompted], self.context.plan.rollouts,
                                  run.shown_samples, RunReader(self.context.path), run.wait_limit, resumed_at)

    def _sampling_roles(self) -> set[str]:
        tasks = self.plan.tasks if self.spec.run.trainer_samples else self.plan.chain(self.rank)
        elsewhere = not self.spec.run.validation or (self.channel and validated_elsewhere(self.spec, self.context.plan))
        return {task.role for task in tasks if task.samples} | (set() if elsewhere else {self.prompted})

    def steps(self) -> Iterator[int]:
        """Yield the steps left. Global randomness depends on (seed, step) alone: no generator's state is saved."""
        self.status.set("validating before the first step", "validating")
        if self.sink.start(self.first_step):
            return
        for step in range(self.first_step, self.spec.run.steps):
            heartbeat.current().begin(step + 1)
            self.begin(step)
            if self.channel is not None and step == self.first_step:
                with Watch(self.status, "publishing the weights of the start", "before the first step"):
                    self.source.reconcile()
                    if self.weights is not None:
                        self.weights.publish()
            with self.profiler.watch(step + 1):
                yield step

    def begin(self, step: int) -> None:
        self.executor.step = step
        self.executor.seconds.clear()
        torch.manual_seed(key_of(self.spec.run.seed, step))
        current().step = step
        for role in self.roles.values():
            role.step = step

    def next_prompts(self) -> None:
        """Fill the buffer with the prompts of the step, and with what other ranks have computed on them."""
        self._draw(self.buffer.start)

    def draw_more(self, task: Task) -> bool:
        """Draw further prompts if the filter `task` has left too few. Return whether it was so."""
        if self.buffer.try_finish_draw(task, self.loader.batch):
            return False
        self._draw(self.buffer.draw_again)
        return True

    def _draw(self, fill: Callable[[Batch], None]) -> None:
        number = self.loader.drawn_before
        for role in self.roles.values():
            role.draw = number
        with Watch(self.status, "waiting for prompts", f"before draw {number} of prompts"):
            prompts = self.source.next()
        fill(prompts)
        self.buffer.receive(self.source.take_results())

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        with Watch(self.status, timeline.FINISHING, "at the end of the step"), peer_errors():
            yield

    def record(self, step: int) -> None:
        """Write the metrics of the step, and act on what all ranks learn alike: changed settings, a request to stop,
        alerts. Raises StepFailed: a detector wants the step done again."""
        done, metrics = step + 1, current()
        if self.supervised:
            metrics.per_rank("changes", self.context.live_config.newest(), self.known_change)
        metrics.per_rank("stop", heartbeat.current().page.stop, 0)
        for name, role in self.elsewhere.items():
            metrics.per_rank(_VERSION.format(name), role.version if role.has_engine else -1, 0)
        self.state.report()
        values = self.sink.record(done, self.buffer, self.loader.epoch)
        self._learn_versions()
        self.source.reweigh(metrics.of_ranks)
        changes = [rank["changes"] for rank in metrics.of_ranks if "changes" in rank]
        self.superseded = any(newest > known for newest, _ in changes for _, known in changes)
        self.stopping = any(rank["stop"][0] for rank in metrics.of_ranks if "stop" in rank)
        for name, alert in self.monitor.look(_step_report(done, values, metrics)):
            self.sink.warn(done, name, alert)
            if alert.restart:
                raise StepFailed(f"step {done}: {alert.what} (detector `{name}`, whose `restart` is set)")

    def _learn_versions(self) -> None:
        """Note on ranks without a model of a role which version of its weights the others have now."""
        for name, role in self.elsewhere.items():
            role.version = int(max(rank[_VERSION.format(name)][0] for rank in current().of_ranks))

    def follow(self, step: int) -> None:
        """Move the roles that follow a trained one. Snapshots of the step before are complete: weights have changed."""
        if self.learnt:
            follow(self.spec, self.roles, step + 1)

    def snapshot(self, step: int) -> None:
        """Begin to copy the state after the step to memory that outlives this worker."""
        self.status.set("taking the snapshot", "saving")
        self.state.snapshot(step + 1)
        self.executor.sampled.clear()

    def publish(self, step: int) -> None:
        """Release the step's rows and publish its weights, unless nothing more is sampled."""
        self.status.set("publishing the weights", "publishing")
        self.source.finish()
        if self.weights is not None and (step + 1 < self.spec.run.steps or self.sink.requests):
            self.weights.publish()

    def conclude(self, step: int) -> bool:
        """Validate and save if it is time. Return whether this was the last step."""
        self.status.set("validating and saving", "validating")
        if self.proofs and step == self.first_step:
            self.proofs.after_update(self.trained)
        last = self.sink.conclude(step + 1)
        heartbeat.current().finish()
        return last

    @property
    def leaves_early(self) -> bool:
        """Whether this worker ends before the last step, on all ranks alike."""
        return self.stopping or self.superseded

    def leave(self, step: int) -> bool:
        """End before the last step, with a checkpoint or the next worker's state. Return whether the run is to stop."""
        done = step + 1
        heartbeat.current().begin(done)
        if self.stopping:
            if self.state.every and done % self.state.every:
                self.state.save(done)
        else:
            if not self.state.in_memory:
                self.state.save(done)
            self.state.before_update()  # the copy is complete then
        self.state.finish()
        self.state.stop_uploads()
        self.sink.flush()
        dist.barrier()  # the supervisor of a rank that has left ends the others
        if self.stopping:
            heartbeat.current().page.stop = heartbeat.STOPPED
        return self.stopping

    def finish(self) -> bool:
        """End the run after its last step and the validations under way, and write the models. Return True."""
        with Watch(self.status, "waiting for the last validation", "at the end of the run"), peer_errors():
            if self.weights is not None and not self.weights.published and self.sink.requests:
                self.weights.publish()  # it was done before this worker
            self.sink.settle()
        with Watch(self.status, "ending the run", "at the end of the run", "ending"), peer_errors():
            self.state.finish()
            self.sink.close()
            self.state.settle_uploads()
            dist.barrier()  # a rank that leaves early tears the group down under the others
        return True

    def close(self) -> None:
        """End the processes that engines have started, and the connections to other groups."""
        if self.weights is not None:
            self.weights.close()
        self.source.close()
        for role in self.roles.values():
            if role.rollout is not None:
                role.rollout.close()


def _step_report(number: int, values: dict[str, float], metrics: Metrics) -> StepReport:
    """Return what detectors see of a step, without what each rank measures for itself, so that all ranks agree."""
    values = {name: value for name, value in values.items() if name != "seconds" and "tokens_per_second" not in name}
    computed: dict[Phase, list[tuple[float, float]]] = {
        phase: [rank.get(phase, (0.0, 0.0)) for rank in metrics.of_ranks]
        for phase in PHASES if any(phase in rank for rank in metrics.of_ranks)}
    return StepReport(number, values, computed)
