"""A worker process from fork to exit: joins its restart group, builds engines, runs the training or rollout loop."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from distflow.config.load import reload
from distflow.config.run import RoleRun
from distflow.config.spec import Spec
from distflow.contracts.decorators import load_module
from distflow.contracts.forms import ENGINE_TYPES
from distflow.contracts.functions import load_function
from distflow.errors import RankMissing
from distflow.plan import ROLLOUT, TRAINER, Plan
from distflow.recovery import hooks
from distflow.recovery.fault_injection import FaultInjector
from distflow.recovery.rank_status import COLLECTIVES, RankStatus
from distflow.recovery.stopped import continue_stopped
from distflow.recovery.worker_process import WorkerContext
from distflow.rpc.host import HOST, own_host
from distflow.store.interface import Store, StoreUnavailable
from distflow.store.tcp import store_on
from distflow.telemetry import events, heartbeat, timeline
from distflow.telemetry.collectives import CollectiveMonitor
from distflow.telemetry.files import wait_until_writable
from distflow.telemetry.run_folder import RunFolder
from distflow.telemetry.run_reader import RunReader, changed_settings
from distflow.telemetry.trajectories import trajectories
from planners.check import prompted_role
from workers.context import RankContext
from workers.dock_source import DockSource
from workers.encode import data_file, dataloader, image_encoder_of
from workers.engines.collectives import torch_name
from workers.engines.devices import choose
from workers.engines.role_engines import RoleEngines
from workers.engines.shared_engine import SharedEngine
from workers.engines.tp_leader import TPFollowerEngine, TPLeader
from workers.engines.trainer import schedule_notes
from workers.engines.weight_updates import WeightUpdates
from workers.execution import InferenceExecutor
from workers.inference import InferenceContext
from workers.isolation import scoring
from workers.loop import infer, rollout, train
from workers.overlap import ColocatedSampling, Fusion
from workers.preflight import prove_with_tokenizer
from workers.preflight.proofs import Preflight
from workers.roles import build_roles, tokenizer_of
from workers.rollout import RolloutContext
from workers.rollout_channel import RolloutChannel
from workers.sink import write_models
from workers.train_context import TrainContext
from workers.training_api.calls import TrainingCalls
from workers.weight_sync import load_if_newer, reads_here

_STOPPED = 60.0  # seconds that a process without a health monitor may be stopped, unless detector `frozen` has others
_INIT_ADDRESS = "process group"  # key in the store: address at which the ranks of an attempt initialise theirs
_EXIT_TIMEOUT = 1.0  # seconds that a process has to end by itself after SIGTERM


def work(context: RankContext, worker_context: WorkerContext, export: Path | None = None) -> bool:
    """Run a worker. Return False if another worker is to go on with changed settings. `export`: where a resumed run
    writes its models instead of going on, and nothing else: the run may be going on elsewhere."""
    began, attempt, own_heartbeat = time.monotonic(), worker_context.attempt, worker_context.heartbeat
    if worker_context.supervisor_pid:
        frozen = context.spec.run.robust.detectors.get("frozen")
        limit = frozen.get("seconds", _STOPPED) if isinstance(frozen, dict) else _STOPPED
        continue_stopped(worker_context.supervisor_pid, limit)
    heartbeat.set_current(own_heartbeat)
    own_heartbeat.start()
    timeline.current().begin(role=context.role, attempt=attempt.number)
    if attempt.number:
        wait_until_writable(context.path, context.spec.run.wait_limit)
    context = context.reload(worker_context.config_change)
    if attempt.number:
        context.call("before_restart", attempt)
    store = context.store.store.below(f"{context.restart_group.name}/{attempt.number}")
    if context.spec.run.faults:
        ranks = context.group.ranks if context.group else range(context.store.ranks)
        own_heartbeat.on_phase = FaultInjector(context.spec.run, context.role, context.store.rank, ranks, context.path,
                                               worker_context.snapshots, elastic=context.elastic is not None)
    server = _init_process_group(context, store)
    context = context.agree_on_settings(worker_context.config_change)
    channel = context.channel and context.channel.joined()
    connected = time.monotonic()

    def ready() -> None:
        worker_context.ready(connect=connected - began, load=time.monotonic() - connected)
        context.call("after_restart" if attempt.number else "on_join", attempt)

    done = True
    with contextlib.closing(timeline.current()), _monitored_collectives(context, store):
        if context.role == TRAINER:
            done = _train(context, worker_context, store, channel, ready, export)
        elif channel:  # else there is no trainer to sample for
            (_sample if context.role == ROLLOUT else _infer)(context, worker_context, channel, store, ready)
    dist.destroy_process_group()  # not after an error: it would wait for the others before the error is shown
    del server
    return done


def _init_process_group(context: RankContext, store: Store) -> TCPStore:
    """Have the ranks of this attempt meet. Return their TCPStore; it must be kept while they work."""
    choose(context.device, context.device_index)
    if context.device == "cuda":
        heartbeat.current().set_gpu(f"GPU-{torch.cuda.get_device_properties().uuid}")
    ranks, wait_limit = context.restart_group.ranks, context.spec.run.wait_limit
    server = _meet(store, context.store.rank, ranks.start, wait_limit)
    # Without it each rank connects to all others at its start. Where ranks differ in it, gloo ends by SIGSEGV.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    dist.init_process_group(torch_name(context.backend, context.device), world_size=len(ranks),
                            rank=context.store.rank - ranks.start, store=server,
                            timeout=datetime.timedelta(seconds=wait_limit))
    return server


def _meet(store: Store, rank: int, first: int, wait_limit: float) -> TCPStore:
    """Return the TCPStore of the first rank's worker, whose address the run's store has. Raises RankMissing: the first
    rank does not come, or is not reached."""
    if rank == first:
        server = store_on(own_host(store.own_host))
        store.put(_INIT_ADDRESS, json.dumps([server.host, server.port]))
        return server
    if not store.wait([_INIT_ADDRESS], wait_limit):
        raise RankMissing(f"rank {first} has not come within {wait_limit:g} s", [first])
    host, port = json.loads(store.get(_INIT_ADDRESS) or "")
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False,
                        timeout=datetime.timedelta(seconds=wait_limit))
    except dist.DistNetworkError as error:
        raise RankMissing(f"rank {first} is not reached at {host}:{port} within {wait_limit:g} s. It may have ended; "
                          "or other machines do not reach its machine there: write on it  export "
                          f"{HOST}=10.0.0.N", [first]) from error


def _monitored_collectives(context: RankContext, store: Store) -> contextlib.AbstractContextManager[None]:
    """Publish the collectives that this rank stands in, for the messages of timeouts and `distflow why`."""
    ranks, rank = context.restart_group.ranks, context.store.rank

    def publish(text: str) -> None:
        timeline.current().collectives = text
        with contextlib.suppress(StoreUnavailable):
            store.post(f"{COLLECTIVES}/{rank}", text)

    return CollectiveMonitor(publish, ranks.start, context.spec.run.wait_limit) if len(ranks) > 1 else \
        contextlib.nullcontext()


def _train(context: RankContext, worker_context: WorkerContext, store: Store, channel: RolloutChannel | None,
           ready: Callable[[], None], export: Path | None) -> bool:
    ctx, done = _train_context(context, worker_context, store, channel, writes=not export), True
    ready()
    if export:
        write_models(ctx.trained, export)
    else:
        leads = ctx.rank == 0
        if leads and context.resume and worker_context.first:
            _describe_resumed(context, ctx.first_step + 1)
        if channel and leads:
            channel.announce_start(ctx.first_step, ctx.loader.records.state_dict())
        done = train(ctx, TrainingCalls(ctx) if ctx.spec.run.training_api else None)
        if channel and done:
            channel.announce_end()
    ctx.close()
    return done


def _describe_resumed(context: RankContext, step: int) -> None:
    """Write the settings under which a run goes on from `step`, and record those that are not as they were."""
    reader = RunReader(context.path)
    before, spec_before, spec = reader.settings(), reload(context.path), context.spec
    for name in (name for name, role in spec.dag.roles.items() if role.trained):
        old, new = spec_before.settings_of(name) or RoleRun(), spec.settings_of(name) or RoleRun()
        for note in schedule_notes(name, old, new, step - 1, (spec_before.run.steps, spec.run.steps)):
            events.show(f"note: {note}")
    if (seed := spec_before.run.seed) != spec.run.seed:
        events.show(f"note: the seed was {seed} and is {spec.run.seed}: this pass over the data goes on in another "
                    "order, in which some of its records come again and others do not come")
    RunFolder.describe(context.path, context.spec, context.plan)
    if changed := changed_settings(before, reader.settings()):
        events.current().step = step
        events.record("settings_changed", group=context.restart_group.name, attempt=0, settings=changed)


def _train_context(context: RankContext, worker_context: WorkerContext, store: Store,
                   channel: RolloutChannel | None, writes: bool) -> TrainContext:
    """Return the training loop's context once all ranks have theirs; a start that fails leaves no new run folder."""
    functions = _load_functions(context.spec, context.own)
    rank, again = dist.get_rank(), worker_context.attempt.number > 0
    with contextlib.ExitStack() as starting:
        makes = rank == 0 and not context.resume
        if makes and not (again and RunFolder.is_made(context.path)):
            # From here on the others notice at once that a rank has failed.
            undo = starting.enter_context(_ending_on_sigterm())
            search = [folder for folder in sys.path if folder]
            if again:
                RunFolder.remove_unfinished(context.path, context.agent)
            created = RunFolder.created(context.path, context.spec, context.plan, search, context.agent)
            undo.append(starting.enter_context(created))
        status = RankStatus(store, rank, dist.get_world_size(), context.restart_group.ranks.start)
        ctx = TrainContext(context, worker_context, status, functions, writes, channel)
        if isinstance(ctx.source, DockSource):
            _connect_calls(ctx, ctx.source)
        if ctx.proofs:
            ctx.proofs.at_start(ctx.roles, context.preflight or Preflight())
        for role in ctx.roles.values():
            role.release()
        if context.preflight and worker_context.first and not again:
            _end_preflight(context.preflight, context.spec, ctx.roles[ctx.prompted])
        dist.all_reduce(torch.zeros(1))  # all are ready; on the CPU, where one that died is noticed
    if writes:
        _open_timeline(context)
    if writes and context.lock and not worker_context.supervisor_pid:  # else the supervisor takes it
        context.lock.hold()
    return ctx


def _connect_calls(ctx: TrainContext, source: DockSource) -> None:
    """Give the source what this rank does before and while samples come."""
    if ctx.spec.run.trainer_samples:
        functions = _load_functions(ctx.spec, ctx.context.plan.groups[1].plan)
        source.sample = ColocatedSampling.of(ctx, source.channel, functions).run
    if ctx.plan.early:
        source.compute = Fusion(ctx, source.channel).run


def _end_preflight(account: Preflight, spec: Spec, role: RoleEngines) -> None:
    """Prove tokens too, and record what has been proved. Raises InvalidInput: a proof has failed."""
    if spec.run.preflight:
        images = image_encoder_of(role, spec.run.data, data_file(spec, next(iter(spec.run.data.train))))
        prove_with_tokenizer(account, spec, role.tokenizer, role.vocabulary, role.known_ends, images)
    account.require()
    account.record()


def _open_timeline(context: RankContext) -> None:
    rank = context.store.rank
    timeline.current().open(context.path / timeline.FOLDER / f"rank{rank}.jsonl", rank, context.plan.ranks)


def _sample(context: RankContext, worker_context: WorkerContext, channel: RolloutChannel, _: Store,
            ready: Callable[[], None]) -> None:
    """Run the rollout loop of this rank, or follow the rank that does for a model that is split over ranks."""
    spec, plan = context.spec, context.own
    events.current().open(context.path / "events.jsonl", context.store.rank)
    sampling = {task.role for task in plan.tasks if task.samples}
    names = {task.role for task in plan.tasks if task.type in ENGINE_TYPES}
    roles, who = build_roles(spec, plan, names, sampling, context.device, training=False), \
        f"rollout {context.store.rank}"
    rollouts = {name: roles[name].sampler for name in sorted(sampling)}
    updates = {name: WeightUpdates(channel.puller(name, who, spec.run.transport, reads_here(engine)), engine.version,
                                   name)
               for name, engine in rollouts.items() if spec.dag.roles[name].trained}
    try:
        if dist.get_rank() == 0:
            ctx = _rollout_context(context, worker_context, channel, roles, who)
            ready()
            _open_timeline(context)
            engines = {name: SharedEngine(engine if plan.ranks == 1 else TPLeader(engine),
                                          partial(load_if_newer, updates.get(name)))
                       for name, engine in rollouts.items()}
            rollout(ctx, engines, lambda dock: channel.is_over)
            for engine in engines.values():
                engine.rollout.release_followers()
        else:
            ready()
            (name, engine), = rollouts.items()
            TPFollowerEngine(engine, updates.get(name)).run()
    finally:
        for each in (*updates.values(), *rollouts.values()):
            each.close()


def _infer(context: RankContext, _: WorkerContext, channel: RolloutChannel, store: Store,
           ready: Callable[[], None]) -> None:
    """Run the inference loop of this rank."""
    spec, group, rank, ranks = context.spec, context.group, context.store.rank, context.restart_group.ranks
    assert group is not None
    events.current().open(context.path / "events.jsonl", rank)
    names = {task.role for task in group.plan.chain(0)}
    roles = build_roles(spec, group.plan, names, set(), context.device)
    role, prompted = roles[min(names)], prompted_role(spec, context.plan.groups[0].plan.chain(0))
    tokenizer = tokenizer_of(spec, prompted, role)
    executor = InferenceExecutor(group.plan, _load_functions(spec, group.plan), roles, dist.get_rank(),
                                 RankStatus(store, dist.get_rank(), len(ranks), ranks.start), spec.run.seed)
    loader = dataloader(spec, role, group.plan.source.share(dist.get_rank()), group.plan.source, tokenizer)
    ctx = InferenceContext(group, loader, channel, executor, f"{group.name} {rank}", spec.run.wait_limit)
    ready()
    executor.status.set("waiting for the trainer to begin")
    channel.follow_start(loader)
    _open_timeline(context)
    infer(ctx)
    ctx.close()


def _rollout_context(context: RankContext, worker_context: WorkerContext, channel: RolloutChannel,
                     roles: dict[str, RoleEngines], who: str) -> RolloutContext:
    spec, plan = context.spec, context.own
    loader = dataloader(spec, roles[prompted_role(spec, [task for task in plan.tasks if task.samples])])
    first = channel.follow_start(loader)
    trajectories().open(context.path / f"trajectories/rank{context.store.rank}.jsonl",
                        spec.run.shown_conversations, first if worker_context.first else None)
    return RolloutContext(context, plan, _load_functions(spec, plan), roles, loader, channel)


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[list[Callable[[], None]]]:
    """End on SIGTERM, by which supervisors and torchrun end the other ranks when one has failed, by way of every
    `finally`. If this thread does not react, since it is in a call that waits for the failed rank, another thread calls
    the functions of the list and ends the process."""
    undo: list[Callable[[], None]] = []
    over = threading.Event()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would interrupt the exit
        sys.exit(128 + signal.SIGTERM)

    def end() -> None:
        while signals := os.read(read_end, 1):
            if signals[0] == signal.SIGTERM and not over.wait(_EXIT_TIMEOUT):
                for each in undo:
                    each()
                os._exit(128 + signal.SIGTERM)

    before, former = signal.signal(signal.SIGTERM, leave), signal.set_wakeup_fd(write_end)
    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    try:
        yield undo
    finally:
        over.set()
        signal.set_wakeup_fd(former)
        signal.signal(signal.SIGTERM, before)
        os.close(write_end)
        thread.join()
        os.close(read_end)


def _load_functions(spec: Spec, plan: Plan) -> dict[str, Callable[..., Any]]:
    """Return the function of each node. Importing the DAG's modules also registers their rewards."""
    scoring.CONTRACTS.update(spec.rewards)
    for module in spec.dag.imports:
        load_module(module)
    heartbeat.current().page.hooks = hooks.registered_mask()
    return {task.node: load_function(task.function) for task in plan.tasks}
