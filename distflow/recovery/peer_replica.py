"""Peer replicas: copies of a rank's shards in the memory of another machine, which outlive its own (RobustRL §2.3).

A thread sends a snapshot to the supervisor that `ring` names, where `replica_server.py` receives it. No step waits for
that. All ranks send shards of one state; when all have arrived, they go on with the newest state by then. So each shard
of the last state that has arrived from all ranks stays in both memories until all of another one have arrived.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from distflow.recovery.snapshots import Slot, Snapshots, StateShard
from distflow.rpc.connection import connect
from distflow.rpc.errors import RpcError, Unreachable
from distflow.store.interface import Store, StoreUnavailable
from distflow.telemetry.events import record
from distflow.telemetry.metrics import current

_READ_TIMEOUT = 30.0  # seconds without a byte after which the other machine counts as unreachable
_LATE = 3  # steps after which a copy that is still under way is late


def ring(training: int, local: int, blocks: int) -> dict[int, int]:
    """Return for each rank that trains the rank whose supervisor keeps its copies: the one with the same local rank on
    the next machine, in a ring of the machines that train; if only one does, on a machine that samples. Empty where
    that is not possible. `training`: number of ranks that train, the first ones; `local`: ranks of each machine."""
    machines = max(2, training // local)
    if machines > blocks or (training > local and training % local):
        return {}
    return {rank: (rank + local) % (machines * local) for rank in range(training)}


class PeerReplica:
    """Client of the replica server that keeps a rank's copies. It opens nothing before it is used, so that a supervisor
    can make it for its workers. `store` has the server's address at `key`."""

    def __init__(self, store: Store, key: str, token: bytes):
        self.store, self.key, self.token = store, key, token
        self.job: Future[float] | None = None
        self.sending: Slot | None = None
        self.retained: Slot | None = None  # the newest slot of a state that has arrived from all ranks
        self.arrived = -1  # the step of this rank's newest copy; -1 if there is none, or it cannot be reached
        self.arrived_from_all = -1  # the step from which another machine can go on
        self.seconds, self.late, self.error_text = 0.0, 0, ""

    def begin(self, snapshots: Snapshots) -> None:
        """Send the snapshot that the worker goes on from: it may have no copy. One that is there costs no time."""
        if snapshots.newest is not None:
            self.retained = snapshots.newest
            snapshots.held.append(self.retained)
        self.send(snapshots)

    def report(self) -> None:
        """Report to all ranks, with the metrics of a step, whether a copy is under way and which has arrived."""
        idle = self.poll()
        current().per_rank("peer_replica", idle, self.arrived)
        if idle and self.sending is not None:
            current().maximum("peer_replica/seconds", self.seconds)
        self.late = 0 if idle else self.late + 1
        if self.late == _LATE:
            self._warn("replica_late", f"the copy of step {_step_of(self.sending)} has been on its way to another "
                       f"machine's memory for {_LATE} steps")

    def poll(self) -> bool:
        """Return whether no copy is under way; record what has become of the last one."""
        if self.job is None or not self.job.done():
            return self.job is None
        job, self.job = self.job, None
        step, before = _step_of(self.sending), self.error_text
        self.error_text = "" if (error := job.exception()) is None else _reason(error)
        self.arrived = -1 if self.error_text else step
        if not self.error_text:
            self.seconds = job.result()
        if self.error_text and not before:
            self._warn("replica_lost", f"the copy of step {step} has not come into another machine's memory: "
                       f"{self.error_text}")
        elif before and not self.error_text:
            record("replica_reconnected", of_step=step)
        return True

    def release(self, step: int, snapshots: Snapshots) -> bool:
        """Release the slot that is not needed any more after `step` steps; return, alike on all ranks, whether the next
        may be sent. All ranks must have called `report`."""
        reported = [entry for rank in current().of_ranks if (entry := rank.get("peer_replica")) is not None]
        if len(reported) < len(current().of_ranks):
            return False
        self.arrived_from_all = min(there for _, there in reported)
        if self.arrived_from_all >= 0:
            current().maximum("peer_replica/steps_behind", step - self.arrived_from_all)
        if not all(idle for idle, _ in reported):
            return False
        if self.sending is not None:
            if all(there == _step_of(self.sending) for _, there in reported):
                self.sending, self.retained = self.retained, self.sending
            if self.sending is not None:
                snapshots.held.remove(self.sending)
            self.sending = None
        return True

    def send(self, snapshots: Snapshots) -> None:
        """Begin to send the newest snapshot, once it is complete."""
        if snapshots.newest is None:
            return
        self.sending = snapshots.newest
        snapshots.held.append(self.sending)
        thread = ThreadPoolExecutor(1, "peer_replica")
        retained = None if self.retained is None else self.retained.shard
        self.job = thread.submit(self._send, snapshots.copying, self.sending, retained)
        thread.shutdown(wait=False)

    def _send(self, copying: Future[None] | None, slot: Slot, retained: StateShard | None) -> float:
        if copying is not None:
            copying.result()
        began = time.monotonic()
        with contextlib.closing(connect(self._address(), self.token, _READ_TIMEOUT)) as connection:
            head, rest = slot.content()
            connection.send({"shard": slot.shard, "head": head, "retained": retained})
            reply, _ = connection.receive()
            if not reply:
                connection.send({}, [rest])
                reply, _ = connection.receive()
        if not reply["stored"]:
            raise RpcError(reply["why"])
        return time.monotonic() - began

    def _address(self) -> tuple[str, int]:
        if (found := self.store.get(self.key)) is None:
            raise Unreachable("no supervisor has said where it takes it. The machine that is to keep it is not there, "
                              "or DISTFLOW_HOST is not set on it: write  export DISTFLOW_HOST=…  with its own address")
        address = json.loads(found)
        if isinstance(address, str):
            raise Unreachable(address)
        return tuple(address)

    def _warn(self, event: str, what: str) -> None:
        record(event, what=what)
        print(f"warning: rank {dist.get_rank()}: {what}\nThe run goes on; should its machine be lost, it goes on from "
              "an older state.", file=sys.stderr, flush=True)


def _step_of(slot: Slot | None) -> int:
    return -1 if slot is None or slot.shard is None else slot.shard.step


def _reason(error: BaseException) -> str:
    known = isinstance(error, (OSError, RpcError, StoreUnavailable)) and str(error)
    return known or f"{type(error).__name__} {error}".strip()
