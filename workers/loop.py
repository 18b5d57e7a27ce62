"""The loops of a run, in its three modes: what every rank does from step to step (DistFlow §5, RobustRL §2).

A run has a trainer and any number of ranks that only sample or only read models. Mode sync has none of them.

    mode         where a step's prompts come from                    after the step
    sync         the dataset (Dataloader); the chain samples them    every rank has the new weights
    async        the dock, with the samples that rollout ranks       the new weights are published; rollout ranks pull
                 have put there (DockSource)                         them while they sample
    semi_sync    as async, but the trainer's ranks sample first,     as async; nothing is published where no rank
                 until enough is in the dock (ColocatedSampling)     only samples

    loop         runs on                                             one turn
    train        ranks that train, in mode sync all                  next_prompts → run_chain, or a training client's
                                                                     calls (mode sync) → the end of the step
    rollout      ranks that sample for others                        lease → load newer weights → run_chain → put
    infer        ranks that only read a model for others             lease → run_chain → put

`run_chain` is the only place where a task runs: take its inputs, compute, put its outputs. The end of a step records it
and begins its snapshot before it publishes the step to other groups: a worker that dies between two of these lines
repeats one finished step at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from distflow.data.databuffer import Databuffer
from distflow.dock import DockClient
from distflow.plan import Task
from workers.engines.shared_engine import SharedEngine
from workers.execution import Executor
from workers.inference import InferenceContext
from workers.rollout import Prompt, RolloutContext
from workers.train_context import TrainContext
from workers.training_api.calls import TrainingCalls


def train(ctx: TrainContext, calls: TrainingCalls | None = None) -> bool:
    """Run the steps that are left. Return False, on all ranks alike, if another worker goes on with new settings. The
    work of a step is the DAG's chain, or the `calls` of a training client until one changes the weights."""
    for step in ctx.steps():
        if calls is None:
            ctx.next_prompts()
            run_chain(ctx.chain, ctx.buffer, ctx.executor, ctx.draw_more)
        elif not calls.until_update(step):
            return ctx.leave(step - 1)
        with ctx.finishing():
            ctx.record(step)  # metrics and samples; detectors look at them
            ctx.follow(step)  # roles that follow a trained one
            ctx.snapshot(step)  # the state after the step, in memory
            ctx.publish(step)  # the step's rows leave the dock, its weights go to the rollouts
            ended = ctx.conclude(step)  # validation, and every N steps a checkpoint
        if calls is not None:
            calls.confirm(step)  # a client that has this answer may rely on the step
        if ended:
            break
        if ctx.leaves_early:
            return ctx.leave(step)
    return ctx.finish()


def rollout(ctx: RolloutContext, engines: Mapping[str, SharedEngine], over: Callable[[DockClient], bool]) -> None:
    """Sample the prompts that the trainer has enqueued until `over`: until the run ends, or where a trainer samples
    until there is enough to train on. What is under way then is left to other ranks. The calling thread drives the
    engine, which loads newer weights between two tokens."""

    def lease_prompts() -> None:
        with ctx.leasing() as dock:
            while (prompt := ctx.lease(dock, over)) is not None:
                ctx.start(sample, prompt)  # a thread each, so that the engine's slots are never empty

    def sample(prompt: Prompt) -> None:
        with ctx.sampling(prompt):  # once the engine has the weights that the prompt is owed
            run_chain(ctx.head, prompt.buffer, ctx.executor(prompt.step, prompt.partial))

    def finish_prompts() -> None:
        with ctx.putting() as dock:
            for prompts in ctx.sampled():
                with ctx.finishing(prompts) as buffer:
                    run_chain(ctx.tail, buffer, ctx.executor(prompts[0].step))
                ctx.put(dock, prompts, buffer)

    ctx.run(engines, lease_prompts, finish_prompts)


def infer(ctx: InferenceContext) -> None:
    """Compute what frozen models say of the prompts that rollouts have sampled, until the run ends."""
    while (lease := ctx.lease()) is not None:
        with ctx.computing(lease) as buffer:
            run_chain(ctx.chain, buffer, ctx.executor)
        ctx.put(lease, buffer)


def run_chain(chain: Sequence[Task], buffer: Databuffer, executor: Executor,
              draw_more: Callable[[Task], bool] = lambda task: False) -> None:
    """Run the tasks in order: each takes its inputs, computes and puts its outputs. `draw_more` draws further prompts
    after a filter that has left too few rows; the tasks up to it run on these too."""
    for index, task in enumerate(chain):
        _run_task(task, buffer, executor)
        while task.draws > 1 and draw_more(task):
            for earlier in chain[: index + 1]:
                _run_task(earlier, buffer, executor)


def _run_task(task: Task, buffer: Databuffer, executor: Executor) -> None:
    with executor.watch(task):
        inputs = buffer.take(task)
        buffer.put(task, *executor.run(task, inputs))
