"""The dock between the groups of a run: how a rank reaches its shards, and what groups tell each other beside rows.

A row is a sample, by its id in the run. The trainer enqueues a prompt by putting its rows with their ids alone, and so
says how far ahead may be sampled (the bound of staleness: `workers/dock_source.py`). A rollout leases the rows of a
prompt, and puts the columns that it has computed; a rank that only infers leases rows that have these, and adds its
own.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import msgpack
import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.data.crossing import POLICIES
from distflow.data.dataloader import Dataloader
from distflow.dock import DockClient, TimedOut
from distflow.dock.consumers import ORDER, REQUESTS, VALIDATION, at_home, run_consumers
from distflow.dock.directory import ShardDirectory
from distflow.dock.index import Lease
from distflow.dock.process import ShardProcess, start
from distflow.dock.selection import DockLayout
from distflow.errors import EngineError
from distflow.plan import Plan, RowLineage
from distflow.recovery.store import RunStore
from distflow.rpc.connection import Address
from distflow.rpc.host import own_host
from distflow.store.interface import Store, poll_interval
from distflow.telemetry import events
from distflow.weights.puller import Puller
from distflow.weights.shard_slice import Reads

VALIDATING = "validating"  # what the dock is told of a rollout that validates, once it has the weights
_OVER, _FIRST, _CAME, _LEFT, _DOCK = "over", "first step", "came", "left", "dock"
_CLIENT_TIMEOUT = 10.0  # seconds
_SLOT, _SETS = "versions/{}", 4096  # keys of sets of versions: prompts that wait are of a few sets at most
_PUBLISHED = "fingerprints/{}/{}"  # keys of what was published as a version of a role, of as many versions
_PARTS = 1 << 16  # of a validation, at most
_STATUS_POLLS = 4  # at who validates, in the time that a wait for rollouts may take
_LEAVE_TIMEOUT, _POLL_INTERVAL = 10.0, 0.05  # seconds in which all ranks see the run end


class ValidationRequest(NamedTuple):
    """Validation of the weights of `step`, or newer ones than `version`, in as many `parts`."""

    step: int
    version: int
    parts: int


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
    near: int | None = None  # number of this machine's shard
    known_over: bool = False
    look_at: float = 0.0

    def joined(self) -> RolloutChannel:
        """Return the channel of a worker; the shard stays with the supervisor."""
        if self.shard_process is not None:
            self.shard_process.process.stdin.close()  # or it would not see its supervisor end
        return replace(self, shard_process=None)

    def dock(self, who: str, attempt: int = 0) -> DockClient:  # one per thread
        return DockClient(self.addresses, self.token, who, self.timeout, attempt, self.directory, self.near)

    def weights(self, role: str) -> Store:
        return self.store.below(f"weights/{role}")

    def puller(self, role: str, who: str, transport: str, reads: Reads) -> Puller:
        return Puller(self.weights(role), self.token, who, host=self.host, transport=transport, reads=reads)

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

    def add_fingerprint(self, role: str, version: int, fingerprint: int) -> None:
        """Record what is published as a version of a role; earlier attempts of the trainer may have used its number."""
        known = self.fingerprints_of(role, version)
        self.store.put(_PUBLISHED.format(role, version % _SETS), json.dumps([version, [*known, fingerprint]]))

    def fingerprints_of(self, role: str, version: int) -> list[int]:
        found = json.loads(self.store.get(_PUBLISHED.format(role, version % _SETS)) or "[-1, []]")
        return found[1] if found[0] == version else []

    def require_published(self, rows: Batch) -> None:
        """Raise EngineError, with an event, if any row was sampled by weights that were not published as the version
        that it names. Where no rank only samples, nothing is published: ranks sample with the weights that they train.
        """
        if POLICIES not in rows.columns:
            return
        published = self.newest_versions()
        sampled = {(role, *policy) for packed in {bytes(row.numpy()) for row in rows[POLICIES].rows}
                   for role, policies in msgpack.unpackb(packed).items() for policy in policies}
        for role, version, fingerprint in sorted(sampled):
            known = self.fingerprints_of(role, version) if fingerprint and role in published else [fingerprint]
            if fingerprint not in known:
                events.record("policy_refused", role=role, version=version, tensor="", tensors=0)
                raise EngineError(f"rows of role `{role}` were sampled by weights with the fingerprint {fingerprint}, "
                                  f"which were not published as version {version} ({known or 'nothing was'}): they are "
                                  "of another policy and are not trained on. A rollout of another run, or memory that "
                                  "was overwritten, may have sampled them; restart the rollouts")

    def versions_of(self, version_set: int) -> dict[str, int]:
        if self.found[0] != version_set:  # a rollout asks for each prompt of a step
            found = json.loads(self.store.get(_SLOT.format(version_set % _SETS)) or "[0, {}]")
            if found[0] != version_set:
                return {}
            self.found = tuple(found)
        return self.found[1]

    def newest_versions(self) -> dict[str, int]:
        return self.versions_of(self.store.add("version sets", 0))

    def enqueue_validation(self, dock: DockClient, request: ValidationRequest) -> int:
        """Let rollouts answer the parts of a validation; return its number."""
        number = self.store.add("validation requests")
        self.store.put(f"validations/{number}", json.dumps(request))
        self.put_validation(dock, number, request)
        return number

    def put_validation(self, dock: DockClient, number: int, request: ValidationRequest) -> None:
        """Put the parts of a validation into the dock; what is there already stays."""
        ids = self.rows_of(torch.arange(request.parts) + REQUESTS[0] + number * _PARTS)
        dock.put(Batch(ids, {ORDER: torch.zeros(len(ids), dtype=torch.uint8)}), version=request.version)

    def validations(self) -> dict[int, ValidationRequest]:
        """Return each validation that the trainer waits for, by its number."""
        found = self.store.below("validations").list("")
        return {int(number): ValidationRequest(*json.loads(text)) for number, text in found.items()}

    def is_validating(self, dock: DockClient) -> bool:
        """Return whether a rollout validates. One that waits for the weights does not: they may never come."""
        shard = dock.index_status()
        return bool(shard["indexes"].get(VALIDATION, {}).get("leases")) and any(
            activity == VALIDATING for _, activity, _ in shard["clients"])

    def forget_validation(self, number: int) -> None:
        self.store.delete(f"validations/{number}")

    def part_of(self, lease: Lease) -> tuple[int, int]:
        """Return the number of a validation, and which of its parts is leased."""
        return divmod(int(lease.ids[0]) // self.rows - REQUESTS[0], _PARTS)

    def announce_start(self, step: int, mixture: dict[str, Any]) -> None:
        """Announce the step at which the trainer begins, and the state of its training sets."""
        self.store.put(_FIRST, json.dumps([step, mixture]))

    def follow_start(self, loader: Dataloader) -> int:
        """Let a loader find the trainer's records by their positions, and return the step at which the trainer begins;
        waits until that is announced."""
        while not self.store.wait([_FIRST], self.store.deadline.seconds):
            pass
        step, mixture = json.loads(self.store.get(_FIRST) or "")
        loader.records.load_state_dict(mixture)
        return step

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


def open_channel(plan: Plan, prompts: int, store: RunStore, max_bytes: int, in_order: bool = True,
                 silence: float = 0.0, takes: int | None = None) -> RolloutChannel:
    """Start the run's dock, with a storage shard on each machine; where machines come and go, on each that trains. Each
    shard is to store `max_bytes`. `in_order`: the trainer takes the prompts of a step, and not those that are done.
    Where machines come and go: `silence`, seconds after which one counts as lost, and `takes`, the number of the shard
    that this one serves in place of a lost one, with no rows. Collective over all groups."""
    token = store.agreed_token()
    store.store.add(_CAME)
    host, local = own_host(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    keeping = plan.groups[0].ranks if silence else range(plan.ranks)
    number = store.rank // local
    lineage = RowLineage(plan.tasks, plan.source)
    rows = max(lineage.times(lineage.of(move.producer)) for move in plan.groups[0].plan.dock)
    consumers = at_home(run_consumers(plan, rows, prompts, in_order), plan, local)
    layout_at = partial(DockLayout, consumers=tuple(consumers), max_bytes=max_bytes)
    directory = ShardDirectory(store.store, plan.ranks) if silence else None
    started = partial(start, token, host=host, directory=directory)
    keeps = store.rank in keeping and int(os.environ.get("LOCAL_RANK", 0)) == 0
    find = partial(directory.addresses, len(keeping), store.wait_limit) if directory else lambda: []
    before = find()
    taken = directory is not None and takes in directory.known
    if taken and takes is not None:
        shard_process = started(layout=layout_at(tuple(before)), number=takes)
    else:
        shard_process = started(number=number) if keeps else None
        met = store.gather(_DOCK, json.dumps(shard_process.address) if shard_process else "", keeping)
    layout = layout_at(tuple(find() if directory else [tuple(json.loads(text)) for text in met if text]))
    channel = RolloutChannel(store.store, token, [*layout.addresses], host, rows, prompts, plan.ranks, shard_process,
                             layout, directory, max(_CLIENT_TIMEOUT, 3 * silence),
                             near=number if number < len(layout.addresses) else None)
    if store.rank == 0 and not taken:
        with channel.dock("trainer 0") as dock:
            dock.configure(layout.consumers, max_bytes)
    store.broadcast("dock met", "yes")
    return channel
