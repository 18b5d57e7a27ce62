"""The dock between the groups of a run: the shards, the columns of their rows, and how a rank reaches them.

A row is a sample, by its id in the run. The trainer enqueues a prompt by putting its rows with their ids alone, and so
says how far ahead may be sampled (the bound of staleness: `workers/sources.py`). A rollout leases the rows of a prompt,
and puts the columns that it has computed; a rank that only infers leases rows that have these, and adds its own.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from distflow.data.assignment import assign, assign_near
from distflow.data.batch import Batch, ColumnData, Ragged, from_levels, levels
from distflow.data.databuffer import Databuffer
from distflow.data.dataloader import Dataloader
from distflow.dock import Consumer, DockClient, TimedOut
from distflow.dock.directory import ShardDirectory
from distflow.dock.index import Lease
from distflow.dock.process import ShardProcess, start
from distflow.dock.selection import DockLayout
from distflow.errors import ColumnError, EngineError
from distflow.plan import INFERENCE, ROLLOUT, TRAINER, Group, Plan, RowLineage, Task
from distflow.recovery.store import RunStore
from distflow.rpc.connection import Address
from distflow.rpc.run_token import TOKEN, run_token, token_checksum
from distflow.store.interface import Store, poll_interval
from distflow.telemetry.metrics import Metrics
from distflow.weights.puller import Puller

ORDER, REPORT = "order", "report"  # columns beside those of nodes: a row may be sampled, metrics of its prompt
VALIDATION, ANSWERED = "validation", "validated"  # consumers: rollouts that validate, the trainer that has the results
RESULT = "result"  # column of an answered request to validate
VALIDATING = "validating"  # what the dock is told of a rollout that has a request to validate, and the weights for it
HOST = "DISTFLOW_HOST"
_OVER, _FIRST, _CAME, _LEFT, _DOCK = "over", "first step", "came", "left", "dock"
_CLIENT_TIMEOUT = 10.0  # seconds
_SAMPLES, _REQUESTS = (0, 1 << 48), (1 << 48, 1 << 50)
"""Ids of prompts, and of requests to validate, which are prompts to the dock."""
_SLOT, _SETS = "versions/{}", 4096  # keys of sets of versions: prompts that wait are of a few sets at most
_STATUS_POLLS = 4  # at who validates, in the time that a wait for rollouts may take
_LEAVE_TIMEOUT, _POLL_INTERVAL = 10.0, 0.05  # seconds in which all ranks see the run end


@dataclass
class RolloutChannel:
    """Client side of the run's dock: where its shards are, and what the groups tell each other beside the rows. A
    prompt has `rows` samples, a step `prompts`. `shard_process`: of this machine's storage shard, if this rank starts
    it. Where machines come and go: `directory` of the shards, and `timeout`, seconds for which one may be out of reach.
    """

    store: Store
    token: bytes
    addresses: list[Address]
    host: str
    rows: int
    prompts: int
    ranks: int
    shard_process: ShardProcess | None = None
    layout: DockLayout | None = None
    directory: ShardDirectory | None = None
    timeout: float = 10.0
    version_set: int = 0  # newest set of versions that this process has published
    found: tuple[int, dict[str, int]] = (-1, {})  # set of versions that was read last, and its number
    known_over: bool = False
    look_at: float = 0.0

    def joined(self) -> RolloutChannel:
        """Return the channel of a worker; the shard stays with the supervisor."""
        if self.shard_process is not None:
            self.shard_process.process.stdin.close()  # or it would not see its supervisor end
        return replace(self, shard_process=None)

    def dock(self, who: str, attempt: int = 0) -> DockClient:  # one per thread
        return DockClient(self.addresses, self.token, who, self.timeout, attempt, self.directory)

    def weights(self, role: str) -> Store:
        return self.store.below(f"weights/{role}")

    def puller(self, role: str, who: str, transport: str) -> Puller:
        return Puller(self.weights(role), self.token, who, host=self.host, transport=transport)

    def rows_of(self, prompts: Tensor) -> Tensor:
        return (prompts[:, None] * self.rows + torch.arange(self.rows)).flatten()

    def enqueue_prompts(self, dock: DockClient, prompts: Tensor) -> None:
        """Let prompts be sampled, with weights at least as new as those published last."""
        ids = self.rows_of(prompts)
        rows = Batch(ids, {ORDER: torch.zeros(len(ids), dtype=torch.uint8)})
        dock.put(rows, version=self.version_set)

    def add_version_set(self, versions: dict[str, int]) -> None:
        """Record the published versions of the roles' weights, under a number that no other set has."""
        self.version_set = self.store.add("version sets")
        self.store.put(_SLOT.format(self.version_set % _SETS), json.dumps([self.version_set, versions]))

    def versions_of(self, version_set: int) -> dict[str, int]:
        if self.found[0] != version_set:  # a rollout asks for each prompt of a step
            found = json.loads(self.store.get(_SLOT.format(version_set % _SETS)) or "[0, {}]")
            if found[0] != version_set:
                return {}
            self.found = tuple(found)
        return self.found[1]

    def newest_versions(self) -> dict[str, int]:
        return self.versions_of(self.store.add("version sets", 0))

    def enqueue_validation(self, dock: DockClient, step: int, version: int) -> int:
        """Let a rollout validate weights at least as new as `version`, those of `step`; return the request's number."""
        number = self.store.add("validation requests")
        self.store.put(f"validations/{number}", json.dumps([step, version]))
        self.put_validation(dock, number, version)
        return number

    def put_validation(self, dock: DockClient, number: int, version: int) -> None:
        """Put a request into the dock; one that is there already stays."""
        ids = self.rows_of(torch.tensor([_REQUESTS[0] + number]))
        dock.put(Batch(ids, {ORDER: torch.zeros(len(ids), dtype=torch.uint8)}), version=version)

    def validations(self) -> dict[int, tuple[int, int]]:
        """Return the step and the version of each request that the trainer waits for, by its number."""
        found = self.store.below("validations").list("")
        return {int(number): tuple(json.loads(text)) for number, text in found.items()}

    def is_validating(self, dock: DockClient) -> bool:
        """Return whether a rollout validates. One that waits for the weights does not: they may never come."""
        shard = dock.index_status()
        return bool(shard["indexes"].get(VALIDATION, {}).get("leases")) and any(
            activity == VALIDATING for _, activity, _ in shard["clients"])

    def forget_validation(self, number: int) -> None:
        self.store.delete(f"validations/{number}")

    def validation_of(self, lease: Lease) -> int:
        return int(lease.ids[0]) // self.rows - _REQUESTS[0]

    def announce_start(self, step: int) -> None:
        """Announce the step at which the trainer begins."""
        self.store.put(_FIRST, str(step))

    @property
    def first_step(self) -> int:
        """The step at which the trainer begins; waits until it is announced."""
        while not self.store.wait([_FIRST], self.store.deadline.seconds):
            pass
        return int(self.store.get(_FIRST) or 0)

    def announce_end(self) -> None:
        """Announce that nothing more is to be sampled."""
        self.store.put(_OVER, "")

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be sampled; many ranks look less often than they ask."""
        if (now := time.monotonic()) >= self.look_at and not self.known_over:
            self.known_over, self.look_at = self.store.has(_OVER), now + poll_interval(0.0, self.ranks)
        return self.known_over

    def leave(self) -> None:
        """Announce that this rank needs the dock no more. A rank with a storage shard waits for the others."""
        self.store.add(_LEFT)
        until = time.monotonic() + (_LEAVE_TIMEOUT if self.shard_process is not None else 0.0)
        while self.store.add(_LEFT, 0) < self.store.add(_CAME, 0) and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL)

    def restart_shard(self) -> None:
        """Restart this machine's shard, empty, at its address. The trainer's next attempt enqueues its rows again."""
        if self.shard_process is not None and self.layout is not None:
            self.shard_process.kill()
            host, port = self.shard_process.address
            self.shard_process = start(self.token, host=host, port=port, directory=self.directory, layout=self.layout,
                                       number=self.shard_process.number)

    def close(self) -> None:
        if self.shard_process is not None:
            self.shard_process.stop()


class SampleTimeout:
    """Clock of a wait for rollouts, which stands still while one of them validates: its prompts come later then."""

    def __init__(self, channel: RolloutChannel, dock: DockClient, limit: float):
        self.channel, self.dock, self.limit, self.look_at = channel, dock, limit, 0.0
        self.renew()

    def renew(self) -> None:
        self.since = time.monotonic()

    @property
    def seconds_left(self) -> float:
        return max(self.since + self.limit - time.monotonic(), 0.0)

    @property
    def poll_seconds(self) -> float:
        """Seconds to wait before the next look at who validates."""
        return min(self.seconds_left, self.limit / _STATUS_POLLS)

    def is_over(self) -> bool:
        """Return whether `limit` seconds have passed since anybody was seen to validate."""
        if (now := time.monotonic()) >= self.look_at or not self.seconds_left:  # each look is a message
            self.look_at = now + self.limit / _STATUS_POLLS
            if self.channel.is_validating(self.dock):
                self.renew()
        return not self.seconds_left

    def check(self, error: TimedOut) -> None:
        """Raise the error of a wait if that is over."""
        if self.is_over():
            error.add_note(f"It was the last look in {self.limit:g} s (`wait_limit`), within which all samples of a "
                           "draw must come, unless a rollout validates")
            raise error


class ReceivedColumns:
    """Columns that a plan's tasks receive with rows of the dock from other groups' nodes. `rows`: of a prompt;
    `awaited`: the node of another trainer whose columns these are, where they are not there as the step begins."""

    def __init__(self, plan: Plan, rows: int, awaited: str = ""):
        lineage = RowLineage(plan.tasks, plan.source)
        self.tasks = [(task, rows // lineage.times(task.out_fan)) for task in plan.tasks
                      if task.arrives and not task.layout.early and (task.node if task.awaited else "") == awaited]
        self.columns = [f"{task.node}/{name}" for task, _ in self.tasks for name in task.writes]

    def of(self, rows: Batch) -> Iterator[tuple[Task, dict[str, ColumnData], Tensor]]:
        """Yield what each node wrote. Of rows that a later node repeated, the first of each repetition has it."""
        for task, times in self.tasks:
            ids = rows.ids // times
            part = rows if times == 1 else rows.select(ids.diff(prepend=ids[:1] - 1).nonzero().squeeze(1))
            yield task, {name: part[f"{task.node}/{name}"] for name in task.writes}, part.ids // times


class ArrivedRows:
    """One rank's part of rows that have come, in a databuffer, for tasks that need no whole step: in the trainer, and
    on ranks that infer. `limit`: seconds after which ranks take others for lost."""

    def __init__(self, plan: Plan, rank: int, loader: Dataloader, channel: RolloutChannel, limit: float):
        self.source, self.rank, self.loader, self.channel = plan.source, rank, loader, channel
        self.received = ReceivedColumns(plan, channel.rows)
        self.metrics = Metrics()  # apart from the step's: how evenly a part is spread says nothing about the step
        self.buffer = Databuffer(plan, rank, self.metrics, limit=limit)
        self.mine = torch.empty(0, dtype=torch.int64)  # ids of this rank's rows, those that were dropped too

    def fill(self, dock: DockClient, ids: Tensor, tokens: Tensor) -> None:
        """Begin with these rows [R], of which all ranks of the plan know, and the tokens of each; without those that
        a filter of the plan has dropped."""
        mine, some = self._assigned(ids, tokens)
        self.mine = mine
        rows = dock.fetch(mine if len(mine) else some, self.received.columns).slice(0, len(mine))
        self.buffer.start(self.loader.at(torch.unique(mine // self.channel.rows)))
        self.buffer.receive(self.received.of(rows))

    def _assigned(self, ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's rows, and one row that is there in any case."""
        prompts, index = torch.unique(ids // self.channel.rows, return_inverse=True)
        weights = torch.zeros_like(prompts).index_add(0, index, tokens.clamp(min=1))
        share, parts = self.source.share(self.rank), self.source.proportion
        where = assign_near(weights, [0] * self.source.dp, torch.zeros_like(prompts), parts=parts) if parts else \
            assign(weights, self.source.dp)
        return ids[where[index] == (-1 if share is None else share)], ids[:1]


def rows_for_others(plan: Plan, buffer: Databuffer, rows: int, ids: Tensor) -> Batch:
    """Return the columns that other groups need of the rows `ids` [R], of which a prompt has `rows`."""
    lineage, columns = RowLineage(plan.tasks, plan.source), {}
    for move in plan.dock:
        task = lineage.tasks[move.producer]
        written = buffer.step_columns[task.node, task.layout]
        found = columns_of(task, written, move.columns, ids, rows // lineage.times(task.out_fan), buffer)
        columns |= {f"{task.node}/{name}": column for name, column in found.items()}
    return Batch(ids, columns)


def columns_of(task: Task, written: Batch, names: Iterable[str], ids: Tensor, times: int,
               buffer: Databuffer) -> dict[str, ColumnData]:
    """Return columns that a task has `written` for the rows `ids` [R], ascending, of which `times` stem from each of
    its rows. Rows that `buffer` has dropped get those of another one, which nobody reads: a prompt's rows are put
    together. Raises ColumnError: others are missing."""
    wanted = ids // times
    if torch.equal(written.ids, wanted):
        return {name: written[name] for name in names}
    missing = ~(torch.isin(wanted, written.ids) | buffer.is_dropped(wanted, task.out_fan))
    if missing.any():
        raise ColumnError(f"node `{task.node}` has not written {', '.join(names)} of the rows "
                          f"{torch.unique(wanted[missing])[:5].tolist()}, which other ranks read and no node has "
                          "dropped")
    if not len(written):
        return {name: _blank(written.columns.get(name, torch.zeros(0)), len(ids)) for name in names}
    written = written.select(torch.searchsorted(written.ids, wanted).clamp(max=len(written) - 1))
    return {name: written[name] for name in names}


def _blank(column: ColumnData, rows: int) -> ColumnData:
    """Return so many rows in the form of a column that has none."""
    lengths, values = levels(column)
    blank = torch.zeros(rows, dtype=torch.int64)
    return from_levels([blank, *lengths[1:]], values) if lengths else values.new_zeros((rows, *values.shape[1:]))


def report_column(reports: list[bytes], rows: int) -> Ragged:
    """Return a column with each prompt's metrics in the first of its rows, and nothing in the others."""
    lengths = torch.zeros(len(reports) * rows, dtype=torch.int64)
    lengths[::rows] = torch.tensor([len(report) for report in reports])
    return Ragged(torch.frombuffer(bytearray(b"".join(reports)), dtype=torch.uint8), lengths)


def report_of(group: str) -> str:
    """Return the name of a group's column of reports."""
    return REPORT if group == ROLLOUT else f"{REPORT} {group}"


def reports_of(rows: Batch, column: str = REPORT) -> list[bytes]:
    """Return what `report_column` has made a column of, of each prompt in a batch."""
    reports = rows[column]
    assert isinstance(reports, Ragged)
    return [report.numpy().tobytes() for report in reports.rows if isinstance(report, Tensor) and len(report)]


def open_channel(plan: Plan, prompts: int, store: RunStore, max_bytes: int, in_order: bool = True,
                 silence: float = 0.0, takes: int | None = None) -> RolloutChannel:
    """Start the run's dock, with a storage shard on each machine that trains: there the rows are read. Each shard is to
    store `max_bytes`. `in_order`: the trainer takes the prompts of a step, and not those that are done. Where machines
    come and go: `silence`, seconds after which one counts as lost, and `takes`, the number of the shard that this one
    serves in place of a lost one, with no rows. Collective over all groups."""
    token = agreed_token(store)
    store.store.add(_CAME)
    host, training = own_host(), plan.groups[0].ranks
    lineage = RowLineage(plan.tasks, plan.source)
    rows = max(lineage.times(lineage.of(move.producer)) for move in plan.groups[0].plan.dock)
    layout_at = partial(DockLayout, consumers=tuple(_consumers(plan, rows, prompts, in_order)), max_bytes=max_bytes)
    directory = ShardDirectory(store.store, plan.ranks) if silence else None
    started = partial(start, token, host=host, directory=directory)
    keeps = store.rank in training and int(os.environ.get("LOCAL_RANK", 0)) == 0
    find = partial(directory.addresses, len(training), store.wait_limit) if directory else lambda: []
    before = find()
    taken = directory is not None and takes in directory.known
    if taken and takes is not None:
        shard_process = started(layout=layout_at(tuple(before)), number=takes)
    else:
        shard_process = started(number=store.rank // int(os.environ.get("LOCAL_WORLD_SIZE", 1))) if keeps else None
        met = store.gather(_DOCK, json.dumps(shard_process.address) if shard_process else "", training)
    layout = layout_at(tuple(find() if directory else [tuple(json.loads(text)) for text in met if text]))
    channel = RolloutChannel(store.store, token, [*layout.addresses], host, rows, prompts, plan.ranks, shard_process,
                             layout, directory, max(_CLIENT_TIMEOUT, 3 * silence))
    if store.rank == 0 and not taken:
        with channel.dock("trainer 0") as dock:
            dock.configure(layout.consumers, max_bytes)
    store.broadcast("dock met", "yes")
    return channel


def _consumers(plan: Plan, rows: int, prompts: int, in_order: bool) -> list[Consumer]:
    step_rows, trainer = rows * prompts, plan.groups[0]
    longest = -(-sum(move.bytes_per_step for move in trainer.plan.dock) // step_rows)
    written = {group.name: [f"{move.producer}/{name}" for move in group.plan.dock for name in move.columns
                            if not group.plan.task(move.producer).arrives] for group in plan.groups}
    inference = {group.name: (ReceivedColumns(group.plan, rows).columns, written[group.name])
                 for group in plan.groups if group.kind == INFERENCE}
    consumers = consumers_of(written.get(ROLLOUT, ()), rows, step_rows if in_order else None, longest, inference,
                             written[trainer.name])
    template = next(each for each in consumers if each.name == TRAINER)
    if ROLLOUT not in written:  # mode sync: the first trainer samples, and others take what it has put
        consumers = [each for each in consumers if each.name in inference]
    reports = {group.plan.chain(0)[0].node: report_of(group.name) for group in plan.groups if group.kind == INFERENCE}
    for group in (group for group in plan.groups if group.kind == TRAINER):
        took = template
        if group is not trainer:
            took = replace(took, name=group.name, reads=tuple(ReceivedColumns(group.plan, rows).columns) or took.reads,
                           writes=tuple(written[group.name]))
            consumers.append(took)
        for node, name in awaited_by(group).items():
            reads = (*ReceivedColumns(group.plan, rows, node).columns, *([reports[node]] if node in reports else []))
            consumers.append(replace(took, name=name, reads=reads, writes=()))
    return consumers


def awaited_by(group: Group) -> dict[str, str]:
    """Return the nodes of other groups for whose columns a trainer waits within a step, and by each the consumer as
    which it does."""
    read = {move.producer for task in group.plan.tasks for move in task.transfers}
    return {task.node: f"{group.name}: {task.node}" for task in group.plan.tasks if task.awaited and task.node in read}


def consumers_of(written: Sequence[str], rows: int, step_rows: int | None, longest: int,
                 inference: Mapping[str, tuple[Sequence[str], Sequence[str]]] = MappingProxyType({}),
                 trained: Sequence[str] = ()) -> list[Consumer]:
    """Return the stages of the run: samples have columns `written`; groups of `inference` read and write some, by name;
    the trainer writes `trained`. All take at most `longest` bytes a row: where a prompt may be sampled there is room
    for what others add to it, so that only rollouts wait for room. Without `step_rows` samples are taken as they come.
    """
    written = (*written, REPORT)
    samples, requests = ((first * rows, end * rows) for first, end in (_SAMPLES, _REQUESTS))
    apart = [Consumer(name, tuple(reads) or (ORDER,), (*writes, report_of(name)), rows, step_rows, ids=samples)
             for name, (reads, writes) in inference.items()]
    complete = (*written, *(column for each in apart for column in each.writes))
    return [Consumer(ROLLOUT, (ORDER,), written, rows, step_rows, row_bytes=longest, ids=samples), *apart,
            Consumer(TRAINER, complete, tuple(trained), rows, step_rows, seconds=3600.0, can_roll_back=True,
                     ids=samples),
            Consumer(VALIDATION, (ORDER,), (RESULT,), rows, ids=requests),
            Consumer(ANSWERED, (RESULT,), (), rows, ids=requests)]


def agreed_token(store: RunStore) -> bytes:
    """Return the token of this run, the same on all ranks. Raises Disagreement: their DISTFLOW_TOKEN differs."""
    run = store.store.put_if("token", secrets.token_hex(32), None)
    store.agree(TOKEN, token_checksum(run), f"Export the same {TOKEN} on all machines.")
    return run_token(run)


def own_host(found: str = "127.0.0.1") -> str:
    """Return the address at which the run's other processes reach this machine: DISTFLOW_HOST, or where that is not
    set the one that was `found`. Raises EngineError: that is loopback, and there are several machines."""
    machines, host = int(os.environ.get("GROUP_WORLD_SIZE", 1)), os.environ.get(HOST)
    if machines > 1 and not host and ipaddress.ip_address(found).is_loopback:
        raise EngineError(f"this run has {machines} machines, which talk to each other over the network, and {found} "
                          f"is this machine alone; say on each at which address the others reach it:  export "
                          f"{HOST}=10.0.0.N  (of a private network: what travels there is in the clear)")
    return host or found
