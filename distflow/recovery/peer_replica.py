"""Copies of a rank's pieces in the memory of another machine's seat, which outlive its own machine (RobustRL §2.3).

From its own seat's memory a piece goes on in a thread, to the seat that `ring` names, where `keeper.py` takes it. No
step waits for it. All ranks send pieces of one state; when each has said that it is done, they begin with the newest by
then. So of the last state that has arrived from all, each rank's piece stays in both memories until another has.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from distflow.dock.errors import DockError, Unreachable
from distflow.recovery.snapshots import Piece, Slot, Snapshots
from distflow.rpc.connection import connect
from distflow.telemetry.events import record
from distflow.telemetry.metrics import current

_PATIENCE = 30.0
"""Seconds without a byte after which the other machine counts as lost."""
_LATE = 3
"""Steps after which one that is still under way is late."""


def ring(training: int, local: int, blocks: int) -> dict[int, int]:
    """For each rank that trains the one in whose seat its copies are kept: that of the same place on the next machine,
    in a ring of those that train; where only one does, on one that samples. Empty where that is not possible.

    Args:
        training: ranks that train, the first ones.
        local: ranks of each machine, of which there are `blocks`.
    """
    machines = max(2, training // local)
    if machines > blocks or (training > local and training % local):
        return {}
    return {rank: (rank + local) % (machines * local) for rank in range(training)}


class PeerReplica:
    """A rank's way to the seat that keeps its copies. Before it is used nothing is opened: a seat can make it for its
    workers.

    Args:
        store: where the other seat has said at `key` where it listens.
        token: the run's.
    """

    def __init__(self, store: dist.Store, key: str, token: bytes):
        self.store, self.key, self.token = store, key, token
        self.job: Future[float] | None = None
        self.sending: Slot | None = None
        self.stays: Slot | None = None
        """The newest that has arrived, as those of all ranks have."""
        self.arrived = -1
        """The step of this rank's newest that has; -1 if there is none, or what there is cannot be reached."""
        self.seconds, self.late, self.trouble = 0.0, 0, ""

    def begin(self, copies: Snapshots) -> None:
        """The worker goes on from the newest copy, and no other machine may have it any more: it is sent at once,
        which takes no time if it is there from before."""
        self.stays = copies.newest
        copies.held.append(self.stays)
        self.send(copies)

    def report(self) -> None:
        """Tell all ranks, with the metrics of a step, whether this one's is under way, and which has arrived."""
        idle = self.look()
        current().apart("neighbour", idle, self.arrived)
        if idle and self.sending is not None:
            current().maximum("neighbour/seconds", self.seconds)
        self.late = 0 if idle else self.late + 1
        if self.late == _LATE:
            self._warn("neighbour late", f"the copy of step {self.sending.piece.step} has been on its way to another "
                       f"machine's memory for {_LATE} steps")

    def look(self) -> bool:
        """Whether none is under way. What has become of the last one is told."""
        if self.job is None or not self.job.done():
            return self.job is None
        job, self.job = self.job, None
        step, before = self.sending.piece.step, self.trouble
        self.trouble = "" if (error := job.exception()) is None else _why(error)
        self.arrived = -1 if self.trouble else step
        if not self.trouble:
            self.seconds = job.result()
        if self.trouble and not before:
            self._warn("neighbour lost", f"the copy of step {step} has not come into another machine's memory: "
                       f"{self.trouble}")
        elif before and not self.trouble:
            record("neighbour back", of_step=step)
        return True

    def settle(self, step: int, copies: Snapshots) -> bool:
        """When `step` steps are done and all have told: whether the next may be sent, on all ranks alike. What need not
        stay any more is let go."""
        told = [rank.get("neighbour") for rank in current().of_ranks]
        if None in told:
            return False
        if (arrived := min(there for _, there in told)) >= 0:
            current().maximum("neighbour/steps_behind", step - arrived)
        if not all(idle for idle, _ in told):
            return False
        if self.sending is not None:
            if all(there == self.sending.piece.step for _, there in told):
                self.sending, self.stays = self.stays, self.sending
            if self.sending is not None:
                copies.held.remove(self.sending)
            self.sending = None
        return True

    def send(self, copies: Snapshots) -> None:
        """Begin to send the newest, which may still be copied itself."""
        self.sending = copies.newest
        copies.held.append(self.sending)
        thread = ThreadPoolExecutor(1, "neighbour")
        stays = None if self.stays is None else self.stays.piece
        self.job = thread.submit(self._send, copies.copying, self.sending, stays)
        thread.shutdown(wait=False)

    def _send(self, copying: Future[None] | None, slot: Slot, stays: Piece | None) -> float:
        """Returns the seconds that it took."""
        if copying is not None:
            copying.result()
        began = time.monotonic()
        with contextlib.closing(connect(self._address(), self.token, _PATIENCE)) as line:
            head, rest = slot.image()
            line.send({"piece": slot.piece, "head": head, "stays": stays})
            reply, _ = line.receive()
            if not reply:
                line.send({}, [rest])
                reply, _ = line.receive()
        if not reply["whole"]:
            raise DockError(reply["why"])
        return time.monotonic() - began

    def _address(self) -> tuple[str, int]:
        board = self.store.clone()
        if not board.check([self.key]):
            raise Unreachable("no seat has said where it takes it. The machine that is to keep it is not there, or "
                              "DISTFLOW_HOST is not set on it: write  export DISTFLOW_HOST=…  with its own address")
        said = json.loads(board.get(self.key))
        if isinstance(said, str):
            raise Unreachable(said)
        return tuple(said)

    def _warn(self, event: str, what: str) -> None:
        record(event, what=what)
        print(f"warning: rank {dist.get_rank()}: {what}\nThe run goes on; should its machine be lost, it goes on from "
              "an older state.", file=sys.stderr, flush=True)


def _why(error: BaseException) -> str:
    known = isinstance(error, (OSError, DockError, dist.DistError)) and str(error)
    return known or f"{type(error).__name__} {error}".strip()
