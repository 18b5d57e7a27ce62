"""A rank's part of a run, which its seat prepares once for all its workers."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from distflow.config.load import Spec, reload
from distflow.contracts.decorators import load_module
from distflow.data.exchange import gather
from distflow.errors import Disagreement, EngineError
from distflow.plan import ROLLOUT, TRAINER, Group, Plan
from distflow.plan_file import digest
from distflow.recovery.autoscaler import RolloutScale
from distflow.recovery.hooks import HookContext, When, call
from distflow.recovery.live_config import LiveConfig
from distflow.recovery.restarts import Attempt, RestartGroup
from distflow.recovery.store import Store
from distflow.telemetry.run_folder import agent
from distflow.telemetry.run_lock import RunLock
from workers.elastic import ElasticAgent
from workers.rollout_channel import RolloutChannel, open_channel

_UNKNOWN = 255
_LEFT_OUT = "left out/{}"
"""Key on the board: a rollout is not started again."""


@dataclass(frozen=True)
class RankContext:
    """A rank's part of a run: what its seat knows, and all its workers alike."""

    spec: Spec
    plan: Plan
    board: Store
    path: Path
    """Of the run's folder."""
    device: str
    resume: bool
    """Whether the run goes on from its newest checkpoint."""
    channel: RolloutChannel | None
    agent: str
    """What has started this run's processes, and will start them again."""
    known: int
    """The number of the newest change of settings that `spec` has in it."""
    apart: ElasticAgent | None = None
    """The machines of the run, if they start apart."""
    lock: RunLock | None = None
    """Of the run's folder, on rank 0."""

    @property
    def group(self) -> Group | None:
        """This rank's; None in mode sync."""
        return self.plan.group_of(self.board.rank)[0]

    @property
    def own(self) -> Plan:
        """The plan of the ranks that compute together with this one."""
        return self.group.plan if self.group else self.plan

    @property
    def unit(self) -> RestartGroup:
        """The ranks that compute together with this one."""
        group, replica = self.plan.group_of(self.board.rank)
        if group is None:
            return RestartGroup("the run", range(self.board.ranks), "ranks")
        first = group.first + replica * group.plan.ranks
        name = group.name if group.name != ROLLOUT else f"{ROLLOUT} {replica}"
        return RestartGroup(name, range(first, first + group.plan.ranks), group.name)

    def call(self, when: When, life: Attempt) -> None:
        """The hooks of the DAG's modules."""
        for module in self.spec.dag.imports:
            load_module(module)
        failure = life.failures[-1] if life.failures else None
        call(when, self.role, HookContext(self.unit.name, self.board.rank, life.number, failure))

    def wanted(self) -> bool:
        """Whether this rank should work now: rollouts may be told to rest."""
        return self.scale is None or self.scale.wanted()

    def needless(self) -> bool:
        """Whether this rank samples for a trainer that has done its last step."""
        return bool(self.group and self.group.name == ROLLOUT and self.channel and self.channel.over)

    def leave_out(self) -> bool:
        """Leave this rank's rollout out of the run, for it is not started again: whether another one is left. Of two
        that ask at once, at least one sees that the other has gone."""
        group, replica = self.plan.group_of(self.board.rank)
        if group is None or group.name != ROLLOUT:
            return False
        self.board.store.set(_LEFT_OUT.format(replica), "")
        return len(self._left_out()) < group.replicas

    def _left_out(self) -> list[int]:
        """The rollouts that are not started again."""
        group, _ = self.plan.group_of(self.board.rank)
        return [each for each in range(group.replicas) if self.board.store.check([_LEFT_OUT.format(each)])]

    @property
    def role(self) -> str:
        """TRAINER or ROLLOUT; in mode sync all ranks are the trainer's."""
        return ROLLOUT if self.group and self.group.name == ROLLOUT else TRAINER

    @functools.cached_property
    def changes(self) -> LiveConfig:
        """Of the settings of this rank's group."""
        return LiveConfig(self.path, self.role)

    def renewed(self, number: int) -> RankContext:
        """The same with the settings that are in force since a change of this number."""
        return self if number <= self.known else self._reread()

    def agreed(self, number: int) -> RankContext:
        """What `renewed` has made, once all ranks of the unit have the same: each reads by itself, and the settings may
        change in between.

        Raises:
            Disagreement: on every rank; they still read unlike settings after the wait limit.
        """
        place, read, end = self, number > self.known, time.monotonic() + self.spec.run.wait_limit
        while True:
            mine = digest(place.spec.run.model_dump(mode="json")) if read else "those of the job's beginning"
            told = [json.loads(each) for each in gather(json.dumps([mine, time.monotonic() > end]).encode())]
            if len({settings for settings, _ in told}) == 1:
                return place
            if any(late for _, late in told):
                raise Disagreement(f"the ranks of {self.unit.name} read unlike settings in {self.path}. The folder "
                                   "must be on a file system that all machines share")
            place, read = place._reread(), True

    def _reread(self) -> RankContext:
        return replace(self, spec=replace(self.spec, run=reload(self.path).run))

    @functools.cached_property
    def scale(self) -> RolloutScale | None:
        group, replica = self.plan.group_of(self.board.rank)
        return RolloutScale(self.path, replica, self._left_out) if group is not None and group.name == ROLLOUT else None

    @property
    def companions(self) -> dict[int, str]:
        """Processes without which there is no run: a descriptor of each, and what its end means."""
        child = self.channel and self.channel.child
        return {child.process.stdout.fileno(): "the process of this machine's samples has ended; another one takes its "
                "place, and what it held is sampled again"} if child else {}

    def renew_companions(self) -> dict[int, str]:
        """Start those processes again, after one of them has ended on any of the ranks.

        Raises:
            DockError: one does not come up.
        """
        if self.channel:
            self.channel.begin_anew()
        return self.companions

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What other ranks need of this one is there."""
        try:
            yield
        finally:
            if self.channel:
                self.channel.close()
            if self.lock:
                self.lock.release()

    def part(self) -> None:
        """The work is done; wait until nobody needs this rank any more."""
        if self.channel:
            self.channel.part()


def settle(spec: Spec, plan: Plan, folder: Path | None, resume: bool, alone: bool = False,
           apart: ElasticAgent | None = None) -> RankContext:
    """Meet the others, and make sure that all have the same plan.

    Args:
        folder: of the run, and
        resume: whether it goes on; on rank 0 only, the others learn it from the board.
        alone: nothing will be trained, so that groups need no dock.
        apart: the machines of the run, if they start apart.

    Raises:
        Disagreement: a rank has another plan, or did not come.
        InvalidInput: another job has the run that is to go on.
    """
    board = Store(spec.run.wait_limit, apart.look, apart.present) if apart else Store(spec.run.wait_limit)
    board.agree("plan", plan.digest, "Its DAG or run file, its model folder or its version of distflow differs.")
    path = Path(board.tell("folder", str(folder)))
    if apart:
        apart.announce(path)
    resume = bool(board.tell("resume", "yes" if resume else ""))
    lock = RunLock(path, apart.job if apart else "") if board.rank == 0 and not alone else None
    if lock and resume:
        lock.hold()
    device = _device(board)
    channel = open_channel(plan, spec.run.data.batch, board) if plan.groups and not alone else None
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))  # then `spec` is that of the job's beginning
    known = 0 if again else max(LiveConfig(path, group).newest() for group in (TRAINER, ROLLOUT))
    return RankContext(spec, plan, board, path, device, resume, channel, agent(), known, apart, lock)


def _device(board: Store) -> str:
    """cuda if each rank of this machine has a GPU of its own, else cpu; the same on all ranks."""
    gpus, here = _gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = "cuda" if gpus >= here else "cpu"
    board.agree("device", device, "Some machines have fewer GPUs than ranks.")
    if gpus and device == "cpu" and board.rank == 0:
        print(f"{here} ranks on {gpus} GPU: everything computes on the CPU. Start {gpus} to use it.", flush=True)
    return device


def _gpus() -> int:
    """Counted in a process of its own: where NVML does not say it, CUDA is asked, and a process that has asked CUDA
    cannot be forked into workers that use it."""
    counting = os.fork()
    if not counting:
        count = _UNKNOWN
        try:
            count = torch.cuda.device_count()
        finally:
            os._exit(count)
    count = os.waitstatus_to_exitcode(os.waitpid(counting, 0)[1])
    if not 0 <= count < _UNKNOWN:
        raise EngineError("the GPUs of this machine could not be counted; the output above says why. "
                          "CUDA_VISIBLE_DEVICES= computes on the CPU")
    return count
