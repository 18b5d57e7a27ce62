"""Joins a machine that was started by itself to its run: the machines meet at an etcd, in rounds of membership."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from distflow.config.command_line import span_of
from distflow.config.robust import Robust
from distflow.errors import DistflowError, InvalidInput
from distflow.plan import INFERENCE, Plan
from distflow.recovery.membership import MACHINES, MachineHeartbeat, Membership, MembershipChanged, Rendezvous
from distflow.recovery.peer_replica import PeerReplica, ring
from distflow.recovery.replica_server import ReplicaServer
from distflow.recovery.snapshots import Snapshots
from distflow.recovery.worker_process import WorkerContext
from distflow.rpc.host import HOST
from distflow.rpc.run_token import TOKEN, run_token, token_checksum
from distflow.store.clients import open_store
from distflow.store.interface import ETCD, Store, StoreUnavailable
from distflow.telemetry.ettr import STARTS_AGAIN
from distflow.telemetry.events import Events
from distflow.telemetry.run_folder import agent

ELASTIC_RUN = "elastic"  # the run id in the checksum of the token that the store has: the machines know no other
_STORE_TIMEOUT = 30.0  # seconds within which the store must answer
_LEAVE_TIMEOUT = 5.0  # seconds within which the store must learn that this machine leaves
_WAIT_SLICE = 1.0  # seconds of a wait for this machine's first rank, after which signals are heard again
_POLL = 0.1


class ElasticAgent:
    """Agent of one rank. The first rank of a machine joins the round for the machine, and tells its other ranks.
    `machines` is a number or `least:most`, `plan_for` the plan of so many ranks; `commits` of models and data, which
    all machines must have. Raises InvalidInput: there is no store, it is another run's, or so few machines cannot train
    and sample."""

    def __init__(self, address: str, machines: str, plan_for: Callable[[int], Plan], robust: Robust,
                 commits: Sequence[str] = ()):
        least, most = span_of(machines)
        self.local, self.rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
        plan = plan_for(most * self.local)
        if not plan.groups:  # a run that has lost a machine must not find out then that it cannot go on
            for count in range(least, most):
                plan_for(count * self.local)
        training = len(plan.groups[0].ranks) if plan.groups else plan.ranks
        if any(group.kind == INFERENCE for group in plan.groups):
            raise InvalidInput("groups.inference is for machines that all stay: with --store nothing replaces those "
                               "of its ranks that are on a lost one. Take it out: the ranks that train infer then")
        if plan.groups and not plan.rollouts:
            raise InvalidInput("groups.rollout: 0 is for machines that all stay: with --store some ranks must only "
                               "sample, which replace those that train on a lost machine. Write  groups: {rollout: "
                               f"{self.local}}}  or more")
        vital, enough = -(-training // self.local), training // self.local + 1
        if plan.groups and least < enough:
            raise InvalidInput(f"--machines {machines}: {least} × {self.local} ranks are to be enough, but {training} "
                               f"train, and at least one must sample. Write  --machines {enough}:{max(most, enough)}  "
                               "or have more of them sample:  --set groups.rollout=…")
        _check_rollouts(plan, machines, self.local)
        self.store = join_store(address)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's own, of its processes
        self.membership = Membership(self.store.below(MACHINES), f"{agent()} {start}", self.local, least,
                                     most,
                                     vital, not plan.groups, robust.machine_silence, robust.restarts)
        self.membership.agree(" ".join([plan.digest, *commits]))
        self.joins, self.rendezvous, self.machine_heartbeat = 0, Rendezvous(-1, 0, 0), None
        self.snapshots, self.replicas, self.replica_server = Snapshots(), Snapshots(slots=2), None
        self.training, self.replicas_of = training if plan.groups else None, 0
        self.replicates = robust.replicates

    def join(self) -> Rendezvous | None:
        """Join the present round, and set the environment as torchrun would. Return None if the run is over."""
        key = f"rendezvous/{self.membership.name}/{self.joins}"
        self.joins += 1
        for helper in filter(None, (self.machine_heartbeat, self.replica_server)):
            helper.end()
        self.machine_heartbeat = self.replica_server = None
        self._vacate_block(f"{key}/ended")
        if self.rank == 0:
            self.membership.store.put(key, self._found_rendezvous())
        while not self.membership.store.wait([key], _WAIT_SLICE):
            pass
        found = json.loads(self.membership.store.get(key) or "")
        if "end" in found:
            if found["end"]:
                raise DistflowError(found["end"])
            return None
        self.rendezvous = Rendezvous(**found)
        if self.rank == 0:
            self.machine_heartbeat = MachineHeartbeat(self.membership, self.rendezvous)
        self._set_environment()
        self._serve_replicas()
        return self.rendezvous

    def _vacate_block(self, key: str) -> None:
        """Leave this machine's block to another, if it has taken over one, once all its ranks have ended their workers.
        """
        ended, until = self.membership.store.add(key), time.monotonic() + _LEAVE_TIMEOUT
        if self.rank or not self.membership.is_leaving(self.rendezvous.number, self.rendezvous.block):
            return
        while ended < self.local and time.monotonic() < until:
            time.sleep(_POLL)
            ended = self.membership.store.add(key, 0)
        self.membership.vacate(self.rendezvous.number, self.rendezvous.block)

    def _serve_replicas(self) -> None:
        """Start the replica server if another rank sends its state here. Replicas of earlier rounds may stay."""
        host = os.environ.get(HOST)
        if host and self.global_rank in self.ring.values():
            self.replica_server, self.replicas_of = ReplicaServer(self.replicas, run_token(self.job), host,
                                                                  self.membership.store,
                                                                  self._replica_key(self.global_rank)), self.trains
        elif self.global_rank >= self.trains or self.trains != self.replicas_of:
            self.replicas.clear()

    @property
    def job(self) -> str:
        """A name that this run has on all its machines and that no other run has."""
        return self.store.put_if("job", secrets.token_hex(8), None)

    @property
    def trains(self) -> int:
        """Number of ranks that train in the present round, the first ones."""
        return self.training or self.rendezvous.blocks * self.local

    @property
    def global_rank(self) -> int:
        return self.rendezvous.block * self.local + self.rank

    @property
    def ring(self) -> dict[int, int]:
        """For each rank that trains the one whose supervisor keeps replicas of its state."""
        return ring(self.trains, self.local, self.rendezvous.blocks) if self.replicates else {}

    @property
    def worker_context(self) -> WorkerContext:
        """Context of a worker in this round, with memory that outlives rounds."""
        replica_server = self.ring.get(self.global_rank)
        peer_replica = None if replica_server is None else PeerReplica(self.membership.store,
                                                                       self._replica_key(replica_server),
                                                                       run_token(self.job))
        return WorkerContext(snapshots=self.snapshots, round=self.rendezvous.number, replicas=self.replicas,
                             peer_replica=peer_replica)

    def _replica_key(self, rank: int) -> str:
        return f"{self.rendezvous.number}/replicas/{rank}"

    def announce(self, folder: Path) -> None:
        """Report why this round began, in its first rank's output and as a failure of all ranks in the run's events."""
        if self.rendezvous.why and self.rendezvous.block == self.rank == 0 and folder.is_dir():
            print(f"the machines begin again: {self.rendezvous.why}", flush=True)
            events = Events()
            events.open(folder / "events.jsonl", 0)
            events.record("failure", group="the machines", ranks=[0, self.rendezvous.blocks * self.local - 1],
                          attempt=-1, phase="waiting", failed_step=0, what=self.rendezvous.why, details="",
                          seen_after=self.rendezvous.silent,
                          verdict=STARTS_AGAIN)

    def poll(self) -> None:
        """Restart the replica server if it has ended; raise MembershipChanged in a later round or if replaced."""
        round, block = self.rendezvous.number, self.rendezvous.block
        if self.membership.is_superseded(round) or not self.membership.holds(round, block):
            raise MembershipChanged
        if self.replica_server is not None:
            self.replica_server.poll()

    def wait_for_loss(self) -> None:
        """Wait until it is known whether a failure is due to the loss of a machine; raise MembershipChanged if so."""
        seconds = 1.5 * self.membership.silence
        until = time.monotonic() + seconds
        print(f"rank {os.environ['RANK']} has failed; within {seconds:g} s it shows whether a machine is lost",
              flush=True)
        before = self._trainers()
        while time.monotonic() < until:
            self.poll()
            if self._trainers() != before:  # it has taken the place too late
                self.membership.propose(self.rendezvous.number, "ranks that train failed before another machine took "
                                        "the place of a lost one")
            time.sleep(_POLL)

    def _trainers(self) -> list[str | None]:
        holders = self.membership.holders(self.rendezvous.number)
        return [holders.get(block) for block in range(self.membership.vital)]

    def conclude(self, failure: str = "") -> None:
        """Leave the run, done or failed for good. A rank that trains ends the run of all."""
        first = self.rendezvous.block == self.rank == 0
        with contextlib.suppress(StoreUnavailable), self.store.within(_LEAVE_TIMEOUT):  # without it all end
            if first or (failure and self.rendezvous.block < self.membership.vital):
                self.membership.finish(self.rendezvous.number, failure)
            self.membership.leave(self.rendezvous.number, self.rendezvous.block)

    @property
    def replaces(self) -> bool:
        return self.rendezvous.replaces

    @property
    def takeover(self) -> str:
        """Name of this machine's latest way into the run, the same on all its ranks."""
        return f"{self.membership.name} {self.joins}"

    @property
    def silence(self) -> float:
        return self.membership.silence

    @property
    def takes_shard(self) -> int | None:
        """Number of the dock's shard that this rank serves in place of a lost machine, if it is the first one here."""
        block = self.rendezvous.block
        return block if self.rank == 0 and self.replaces and block < self.membership.vital else None

    @property
    def present(self) -> list[int]:
        """Ranks that a start waits for: those that train, and this machine's. Others that sample may come later."""
        return [rank for rank in range(self.rendezvous.blocks * self.local)
                if rank // self.local < self.membership.vital or rank // self.local == self.rendezvous.block]

    def folder(self) -> Path | None:
        """Return the run folder if an earlier round has made one, or the machine that had this one's ranks."""
        said = [f"{round}/folder" for round in range(self.rendezvous.number + self.replaces)]
        found = [Path(text) for key in said if (text := self.store.get(key))]
        return next((folder for folder in found if (folder / "launch.json").is_file()), None)

    def _found_rendezvous(self) -> str:
        try:
            rendezvous = self.membership.join()
        except StoreUnavailable:
            raise
        except DistflowError as error:
            return json.dumps({"end": str(error)})
        return json.dumps(asdict(rendezvous) if rendezvous else {"end": ""})

    def _set_environment(self) -> None:
        rendezvous, (host, _, port) = self.rendezvous, self.store.address.partition(",")[0].rpartition(":")
        os.environ |= {name: str(value) for name, value in {
            "RANK": self.global_rank, "WORLD_SIZE": rendezvous.blocks * self.local,
            "GROUP_RANK": rendezvous.block, "GROUP_WORLD_SIZE": rendezvous.blocks, "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": rendezvous.number}.items()}


def _check_rollouts(plan: Plan, machines: str, local: int) -> None:
    """Check that no sampling model is split over machines: a machine that leaves would take a part of it along."""
    for group in plan.groups:
        width = max(layout.width for _, samples, layout in group.plan.models if samples)
        for first in range(group.first, group.last + 1, width):
            if first // local < (first + width - 1) // local:
                raise InvalidInput(f"--machines {machines}: ranks {first} to {first + width - 1} sample with one "
                                   f"model, and with {local} on each machine they are on several, of which one may go. "
                                   f"Have {width} divide both the ranks of a machine and those that train")


def join_store(address: str) -> Store:
    """Return a client of the etcd at which machines meet. Raises InvalidInput: none, or the run there is another."""
    if not address.startswith(ETCD):
        raise InvalidInput(f"--store {address}: machines that start apart meet at an etcd. Name its members and the "
                           f"run, as  --store {ETCD}10.0.0.1:2379/grpo-1")
    if not os.environ.get(TOKEN):
        raise InvalidInput(f"the run at {address} asks for its token. Say on each machine, with the same value:  "
                           f"export {TOKEN}=…")
    mine = token_checksum(ELASTIC_RUN)
    try:
        store = open_store(address, _STORE_TIMEOUT)
        theirs = store.put_if("token", mine, None)
    except StoreUnavailable as error:
        raise InvalidInput(f"there is no etcd at {address}, or it cannot be reached: {error}") from None
    if theirs != mine:
        raise InvalidInput(f"the run at {address} has another token than {TOKEN} here: it is another run, or the token "
                           "was copied wrongly")
    return store
