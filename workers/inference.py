"""What a rank has that reads frozen models for others (`groups.inference`): leases of prompts, tasks, and a dock.

    A prompt: sampled → leased by one replica, whose first rank tells the others → computed → in the dock, committed.
    Its lease goes back if this replica ends: another one computes it, or this one when it has started again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import msgpack
import torch
from torch import Tensor

from distflow.data.crossing import ArrivedRows, report_column, report_of, rows_for_others
from distflow.data.databuffer import Databuffer
from distflow.data.dataloader import Dataloader
from distflow.data.exchange import gather
from distflow.dock import DockError, LeaseLost
from distflow.dock.index import Lease
from distflow.plan import Group
from distflow.rpc.errors import RpcError
from distflow.telemetry import events, heartbeat, timeline
from distflow.telemetry.metrics import Metrics, recording
from workers.execution import InferenceExecutor
from workers.rollout_channel import RolloutChannel

_WAIT = 0.5  # seconds of a wait for rows, between two looks whether the run is over


class InferenceContext:
    """Everything that `infer` needs on one rank. Collective over the ranks of a replica."""

    def __init__(self, group: Group, loader: Dataloader, channel: RolloutChannel, executor: InferenceExecutor, who: str,
                 limit: float):
        self.group, self.channel, self.executor, self.who, self.status = group, channel, executor, who, executor.status
        self.plan, self.rank, self.dock = group.plan, executor.rank, channel.dock(who)
        self.chain = self.plan.chain(self.rank)
        self.role = group.role
        self.arrived = ArrivedRows(self.plan, self.rank, loader, channel.rows, limit)
        self.most = max(1, -(-channel.prompts // (2 * group.replicas))) * channel.rows
        """Rows of a lease: half of a fair share of a step, so that replicas end about together."""
        self.waited = 0.0  # seconds since the step began

    def lease(self) -> Lease | None:
        """Return rows that this group may read; None once the run is over. Other ranks than the first learn their ids
        and tokens alone."""
        self.status.set("waiting for the samples of further prompts")
        began, found = time.monotonic(), None
        while found is None:
            mine = self._next() if self.rank == 0 else None
            seen = gather(_packed(mine, self.channel) if self.rank == 0 else b"")[0]
            if seen == b"over":
                return None
            found = mine or (_unpacked(seen) if seen else None)
        step = int(found.ids[0]) // (self.channel.rows * self.channel.prompts)
        if step != self.executor.step:
            self.executor.step, self.waited = step, 0.0
            self.executor.seconds.clear()
        self.waited += time.monotonic() - began
        heartbeat.current().begin(step + 1)
        return found

    def _next(self) -> Lease | None:
        self.dock.report_activity("waiting for samples")
        lease = self.dock.try_lease(self.group.name, self.most, least=self.channel.rows, wait=_WAIT)
        self.dock.report_activity(f"computing {', '.join(task.node for task in self.chain)}")
        return lease

    @contextlib.contextmanager
    def computing(self, lease: Lease) -> Iterator[Databuffer]:
        """Yield a buffer with the leased rows, and hold the lease meanwhile."""
        self.metrics, done = Metrics(), threading.Event()
        renewal = threading.Thread(target=self._renew, args=(lease, done), name="renewal", daemon=True)
        if self.rank == 0:
            renewal.start()
        try:
            with recording(self.metrics):
                self.dock.epochs.clear()
                self.arrived.fill(self.dock, lease.ids, lease.tokens)
                self.epochs = self._agreed_epochs()
                yield self.arrived.buffer
        finally:
            done.set()

    def _renew(self, lease: Lease, done: threading.Event) -> None:
        with self.channel.dock(f"{self.who}, which renews a lease") as dock, \
                contextlib.suppress(DockError, RpcError):  # its commit will say so
            while not done.wait(lease.seconds / 3):
                dock.renew(lease)

    def _agreed_epochs(self) -> dict[int, int]:
        """Return the epochs of the shards that any rank has fetched from, since another rank may put what was computed
        of it; 0, which no process has, of one that was replaced between two fetches. Collective."""
        found: dict[int, int] = {}
        for part in gather(msgpack.packb([*self.dock.epochs.items()]) or b""):
            for shard, epoch in msgpack.unpackb(part):
                found[shard] = epoch if found.get(shard, epoch) == epoch else 0
        return found

    def put(self, lease: Lease, buffer: Databuffer) -> None:
        """Put what others need of the rows into the dock, and give up the lease once all ranks have put theirs. Rows
        that a shard has lost since they were fetched get nothing: they are leased again with other tokens."""
        self.dock.report_activity("putting results")
        self.metrics.maximum(f"waiting/{self.role}", self.waited)
        layout, lost = self.chain[0].layout, b""
        mine = lease.ids if layout.dp == 1 else self.arrived.mine
        if len(mine) and layout.leads(self.rank):
            rows = rows_for_others(self.plan, buffer, self.channel.rows, mine)
            self.metrics.add(f"inference/{self.role}/rows", len(rows))
            reports = [self.metrics.take(), *[b""] * (len(rows) // self.channel.rows - 1)]
            rows = rows.with_columns({report_of(self.group.name): report_column(reports, self.channel.rows)})
            with timeline.current().span(timeline.TRANSFERS, "put results", self.executor.step + 1, rows=len(rows)):
                try:
                    self.dock.put(rows, epochs=self.epochs)
                except LeaseLost as error:
                    lost = str(error).encode()
        lost = next(filter(None, gather(lost)), b"")
        if self.rank == 0:
            try:
                if lost:
                    raise LeaseLost(lost.decode())
                self.dock.commit(lease)
            except LeaseLost as error:  # of a lease that ran out the rows were put: the new holder's are duplicates
                events.record("lease_lost", prompt=int(lease.ids[0]) // self.channel.rows, reason=str(error))
        heartbeat.current().finish()

    def close(self) -> None:
        self.dock.close()


def _packed(lease: Lease | None, channel: RolloutChannel) -> bytes:
    if lease is None:
        return b"over" if channel.is_over else b""
    return msgpack.packb([lease.ids.tolist(), lease.tokens.tolist()]) or b""


def _unpacked(seen: bytes) -> Lease:
    ids, tokens = (torch.tensor(numbers, dtype=torch.int64) for numbers in msgpack.unpackb(seen))
    nothing: Tensor = torch.empty(0, dtype=torch.int64)
    return Lease("", 0, None, 0.0, ids, tokens, nothing, nothing, ids)
