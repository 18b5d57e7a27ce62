"""A machine that was started by itself, and meets the others of its run on a board."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from distflow.config.run import Robust
from distflow.errors import DistflowError, InvalidInput
from distflow.plan import ROLLOUT, Plan
from distflow.recovery.membership import MACHINES, MachineHeartbeat, Membership, MembershipChanged, Rendezvous
from distflow.recovery.peer_replica import PeerReplica, ring
from distflow.recovery.replica_server import ReplicaServer
from distflow.recovery.snapshots import Snapshots
from distflow.recovery.worker_process import WorkerContext
from distflow.telemetry.ettr import STARTS_AGAIN
from distflow.telemetry.events import Events
from distflow.telemetry.run_folder import agent
from workers.rollout_channel import HOST

TOKEN = "DISTFLOW_TOKEN"
_REACHED = datetime.timedelta(seconds=30)
_LOOK, _PORTS = 0.1, 1 << 16


class ElasticAgent:
    """One rank's part. Of a machine's ranks the first one finds the machine's place, and tells the others.

    Args:
        board: HOST:PORT.
        machines: how many, or `least:most`.
        plan_for: the plan of so many ranks.

    Raises:
        InvalidInput: there is no board, it is another run's, or so few machines cannot train and sample.
    """

    def __init__(self, board: str, machines: str, plan_for: Callable[[int], Plan], robust: Robust):
        self.host, self.port = _address(board)
        least, most = _span(machines)
        self.local, self.rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
        plan = plan_for(most * self.local)
        if not plan.groups:  # a run that has lost a machine must not find out then that it cannot go on
            for count in range(least, most):
                plan_for(count * self.local)
        training = len(plan.groups[0].ranks) if plan.groups else plan.ranks
        vital, enough = -(-training // self.local), training // self.local + 1
        if plan.groups and least < enough:
            raise InvalidInput(f"--machines {machines}: {least} × {self.local} ranks are to be enough, but {training} "
                               f"train, and at least one must sample. Write  --machines {enough}:{max(most, enough)}  "
                               "or have more of them sample:  --set groups.rollout=…")
        _check_rollouts(plan, machines, self.local)
        self.store = _store(self.host, self.port)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's own, of its processes
        self.machines = Membership(dist.PrefixStore(MACHINES, self.store), f"{agent()} {start}", self.local, least,
                                   most,
                                   vital, not plan.groups, robust.machine_silence, robust.restarts)
        self.machines.agree(plan.digest)
        self.joins, self.era, self.watchman = 0, Rendezvous(-1, 0, 0), None
        self.snapshots, self.kept, self.keeper = Snapshots(), Snapshots(slots=2), None
        self.training, self.kept_for = training if plan.groups else None, 0
        self.neighbourly = robust.snapshots and robust.neighbour

    def join(self) -> Rendezvous | None:
        """Take this rank's place in the present era, as torchrun would have given it; None if the run is over."""
        key = f"place/{self.machines.me}/{self.joins}"
        self.joins += 1
        for beside in filter(None, (self.watchman, self.keeper)):
            beside.end()
        self.watchman = self.keeper = None
        try:
            if self.rank == 0:
                self.machines.store.set(key, self._found())
            while not self.machines.store.check([key]):
                time.sleep(_LOOK)
            found = json.loads(self.machines.store.get(key))
        except dist.DistError as error:
            raise DistflowError(f"the board at {self.host}:{self.port} does not answer any more; `distflow board`, "
                                f"which keeps it, or its machine may have ended: {error}") from None
        if "end" in found:
            if found["end"]:
                raise DistflowError(found["end"])
            return None
        self.era = Rendezvous(**found)
        if self.rank == 0:
            self.watchman = MachineHeartbeat(self.machines, self.era)
        self._show()
        self._keep()
        return self.era

    def _keep(self) -> None:
        """Take copies, if this seat is to. What it has from before stays while it may be of use in this era."""
        host = os.environ.get(HOST)
        if host and self.era_rank in self.ring.values():
            self.keeper, self.kept_for = ReplicaServer(self.kept, self.secret, host, self.machines.store,
                                                       self._keeper(self.era_rank)), self.trains
        elif self.era_rank >= self.trains or self.trains != self.kept_for:
            self.kept.clear()

    @property
    def job(self) -> str:
        """A name that this run has on all its machines and that no other run has."""
        return self.store.compare_set("job", "", secrets.token_hex(8)).decode()

    @property
    def trains(self) -> int:
        """How many ranks train in the present era, the first ones."""
        return self.training or self.era.blocks * self.local

    @property
    def era_rank(self) -> int:
        """Of the run, in the present era."""
        return self.era.block * self.local + self.rank

    @property
    def ring(self) -> dict[int, int]:
        """For each rank that trains the one whose seat keeps copies of its state."""
        return ring(self.trains, self.local, self.era.blocks) if self.neighbourly else {}

    @property
    def berth(self) -> WorkerContext:
        """What a worker finds in this era, with memory that was there before."""
        keeper = self.ring.get(self.era_rank)
        neighbour = None if keeper is None else PeerReplica(self.machines.store, self._keeper(keeper), self.secret)
        return WorkerContext(snapshots=self.snapshots, era=self.era.number, kept=self.kept, neighbour=neighbour)

    @property
    def secret(self) -> bytes:
        """By which its machines know each other."""
        return hmac.digest(os.environ[TOKEN].encode(), b"distflow neighbour", "sha256")

    def _keeper(self, rank: int) -> str:
        """Where on the board a rank's seat says where copies are taken."""
        return f"{self.era.number}/keeper/{rank}"

    def announce(self, folder: Path) -> None:
        """Say why this era began, in its first rank's output and in the run's events, as a failure of all ranks."""
        if self.era.why and self.era.block == self.rank == 0 and folder.is_dir():
            print(f"the machines begin anew: {self.era.why}", flush=True)
            events = Events()
            events.open(folder / "events.jsonl", 0)
            events.record("failure", unit="the machines", ranks=[0, self.era.blocks * self.local - 1], life=-1,
                          phase="waiting", failed_step=0, what=self.era.why, details="", seen_after=self.era.silent,
                          verdict=STARTS_AGAIN)

    def look(self) -> None:
        """See to the process that takes copies. Raises BegunAnew: there is a later era, or another machine has taken
        this one's place."""
        if self.machines.begun_anew(self.era.number) or not self.machines.holds(self.era.number, self.era.block):
            raise MembershipChanged
        if self.keeper is not None:
            self.keeper.look()

    def reprieve(self) -> None:
        """What has failed may have failed because a machine is lost, which is known after a while.

        Raises:
            BegunAnew: it was so.
        """
        seconds = 1.5 * self.machines.silence
        until = time.monotonic() + seconds
        print(f"rank {os.environ['RANK']} has failed; within {seconds:g} s it shows whether a machine is lost",
              flush=True)
        while time.monotonic() < until:
            self.look()
            time.sleep(_LOOK)

    def conclude(self, failure: str = "") -> None:
        """This rank has done its work, or failed for good. Where it trains, that is so for all."""
        first = self.era.block == self.rank == 0
        with contextlib.suppress(dist.DistError):  # without the board all end anyway
            if first or (failure and self.era.block < self.machines.vital):
                self.machines.end(self.era.number, failure)
            self.machines.leave(self.era.number, self.era.block)

    @property
    def replaces(self) -> bool:
        """Whether this machine has the place of another."""
        return self.era.replaces

    @property
    def present(self) -> list[int]:
        """The ranks without which nothing begins, and this machine's: others that sample may come later."""
        return [rank for rank in range(self.era.blocks * self.local)
                if rank // self.local < self.machines.vital or rank // self.local == self.era.block]

    def folder(self) -> Path | None:
        """That of the run, if an earlier era has made one."""
        said = [f"{era}/folder" for era in range(self.era.number)]
        found = [Path(self.store.get(key).decode()) for key in said if self.store.check([key])]
        return next((folder for folder in found if (folder / "launch.json").is_file()), None)

    def _found(self) -> str:
        try:
            era = self.machines.join()
        except DistflowError as error:
            return json.dumps({"end": str(error)})
        return json.dumps(asdict(era) if era else {"end": ""})

    def _show(self) -> None:
        era = self.era
        os.environ |= {name: str(value) for name, value in {
            "RANK": self.era_rank, "WORLD_SIZE": era.blocks * self.local,
            "GROUP_RANK": era.block, "GROUP_WORLD_SIZE": era.blocks, "MASTER_ADDR": self.host, "MASTER_PORT": self.port,
            "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": era.number}.items()}


def _address(board: str) -> tuple[str, int]:
    host, _, port = board.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < _PORTS:
        raise InvalidInput(f"--board {board}: say where the board is, as  --board 10.0.0.1:29400")
    return host, int(port)


def _check_rollouts(plan: Plan, machines: str, local: int) -> None:
    """That no model with which ranks sample is split over machines: one that goes would take a part of it along.

    Raises:
        InvalidInput: one is.
    """
    for group in plan.groups:
        width = group.plan.ranks if group.name == ROLLOUT else max(
            (layout.width for _, layout in group.plan.samplers), default=1)
        for first in range(group.first, group.last + 1, width):
            if first // local < (first + width - 1) // local:
                raise InvalidInput(f"--machines {machines}: ranks {first} to {first + width - 1} sample with one "
                                   f"model, and with {local} on each machine they are on several, of which one may go. "
                                   f"Have {width} divide both the ranks of a machine and those that train")


def _span(machines: str) -> tuple[int, int]:
    least, _, most = machines.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal() and 0 < int(least) <= int(most or least)):
        raise InvalidInput(f"--machines {machines}: say how many there are, as  --machines 4  , or how many are enough "
                           "and how many there may be, as  --machines 3:4")
    return int(least), int(most or least)


def _store(host: str, port: int) -> dist.Store:
    where = f"there is no board at {host}:{port}"
    token = os.environ.get(TOKEN)
    if not token:
        raise InvalidInput(f"the board at {host}:{port} asks for the run's token. Say on each machine, as `distflow "
                           f"board` has printed:  export {TOKEN}=…")
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=_REACHED)
        asked = store.get("token").decode()
    except dist.DistError as error:
        raise InvalidInput(f"{where}, or it cannot be reached: {str(error).splitlines()[0]}. Keep one with  distflow "
                           f"board --host {host} --port {port}") from None
    if asked != digest(token):
        raise InvalidInput(f"the board at {host}:{port} has another token than {TOKEN} here: it belongs to another "
                           "run, or the token was copied wrongly")
    return store


def digest(token: str) -> str:
    """What a board says of its token."""
    return hashlib.sha256(token.encode()).hexdigest()
