"""Copies on their way to another machine's memory: real processes and sockets, and a real store."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import xxhash

from distflow.recovery.peer_replica import PeerReplica, ring
from distflow.recovery.replica_server import ReplicaServer
from distflow.recovery.snapshots import HEAD, Snapshots, StateShard
from distflow.rpc.connection import connect
from distflow.rpc.errors import Refused
from distflow.rpc.messages import frame
from distflow.telemetry import events
from distflow.telemetry.metrics import current

TOKEN, KEY = b"the token of this run", "0/keeper/1"
SIZE = 1 << 22
"""Floats: more than a socket takes without a reader."""


@pytest.mark.parametrize(("training", "local", "blocks", "expected"), [
    (2, 1, 3, {0: 1, 1: 0}),
    (3, 1, 3, {0: 1, 1: 2, 2: 0}),
    (4, 2, 2, {0: 2, 1: 3, 2: 0, 3: 1}),
    (1, 1, 3, {0: 1}),
    (2, 4, 2, {0: 4, 1: 5}),
    (4, 4, 1, {}),
    (3, 2, 3, {}),
], ids=["two", "three", "two of two", "one trains", "a part of one", "one machine", "one and a half"])
def test_who_keeps_whose_copies(training, local, blocks, expected):
    assert ring(training, local, blocks) == expected


@pytest.fixture
def replicas():
    """The other supervisor's memory, which this process can read."""
    return Snapshots(slots=2)


@pytest.fixture
def start(store, replicas):
    """Start the process that writes there, once it listens."""
    servers = []

    def begin() -> ReplicaServer:
        store.delete(KEY)
        servers.append(ReplicaServer(replicas, TOKEN, "127.0.0.1", store, KEY))
        store.wait([KEY], 60.0)
        return servers[-1]

    yield begin
    for replica_server in servers:
        replica_server.end()


@pytest.fixture
def rank(monkeypatch, tmp_path, store):
    """This process is a rank of its own, and tells itself what it reports."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    events.current().open(tmp_path / "events.jsonl", 0)
    yield Rank(PeerReplica(store, KEY, TOKEN))
    events.current().path = None


class Rank:
    def __init__(self, peer_replica: PeerReplica):
        self.peer_replica, self.snapshots = peer_replica, Snapshots()
        self.values: dict[str, float] = {}

    def step(self, step: int, size: int = 1000) -> bool:
        """As a worker does after each; whether its copy was sent."""
        self.peer_replica.report()
        self.values = current().collect(lambda mine: [mine])
        goes_on = self.peer_replica.release(step, self.snapshots)
        self.snapshots.begin(StateShard(0, 0, step, 0, 1), {"weight": torch.full((size,), float(step))}, {"step": step})
        if goes_on:
            self.peer_replica.send(self.snapshots)
        self.snapshots.wait()
        return goes_on

    def arrived(self) -> None:
        wait([self.peer_replica.job], 60)
        assert self.peer_replica.poll()


def steps(memory: Snapshots) -> list[int]:
    return [shard.step for shard in memory.complete()]


def happened(folder: Path) -> list[str]:
    path = folder / "events.jsonl"
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def test_the_last_two_are_there_complete(rank, start, replicas, tmp_path):
    start()
    for step in range(1, 5):
        assert rank.step(step)
        rank.arrived()
        assert steps(replicas) == [each for each in (step - 1, step) if each]
    back = {"weight": torch.zeros(1000)}
    assert replicas.load(replicas.complete()[StateShard(0, 0, 4, 0, 1)], back) == {"step": 4}
    assert (back["weight"] == 4).all()
    assert rank.values["peer_replica/seconds"] > 0
    assert sum(slot.memory() is not None for slot in rank.snapshots.slots) == 2, "that costs no third copy here"
    assert not happened(tmp_path)


def test_no_step_waits_for_one_that_is_slow(rank, start, replicas, tmp_path, capsys):
    """At most one is under way; what has arrived stays here as well, and the newest is the next."""
    replica_server = start()
    assert rank.step(1, SIZE)
    rank.arrived()
    replica_server.process.signal(signal.SIGSTOP)
    assert rank.step(2, SIZE), "the one before has arrived"
    assert [rank.step(step, SIZE) for step in range(3, 8)] == [False] * 5
    assert steps(rank.snapshots) == [1, 2, 6, 7]
    assert steps(replicas) == [1]
    assert rank.peer_replica.sending.shard.step == 2
    assert happened(tmp_path) == ["replica_late"]
    assert "the copy of step 2 has been on its way" in capsys.readouterr().err
    replica_server.process.signal(signal.SIGCONT)
    rank.arrived()
    assert steps(replicas) == [1, 2]
    assert rank.step(8, SIZE)
    assert current().collect(lambda mine: [mine])["peer_replica/steps_behind"] == 6
    rank.arrived()
    assert steps(replicas) == [2, 8]


def test_one_that_is_lost_is_reported_once_and_may_come_back(rank, start, replicas, tmp_path, capsys):
    replica_server = start()
    assert rank.step(1)
    rank.arrived()
    replica_server.process.signal(signal.SIGKILL)
    os.waitid(os.P_PID, replica_server.process.pid, os.WEXITED | os.WNOWAIT)
    for step in (2, 3):
        assert rank.step(step)
        rank.arrived()
    assert capsys.readouterr().err.count("the copy of step 2 has not come into another machine's memory") == 1
    assert happened(tmp_path) == ["replica_lost"]
    start()
    assert rank.step(4)
    rank.arrived()
    assert happened(tmp_path) == ["replica_lost", "replica_reconnected"]
    assert steps(replicas) == [1, 4], "what had arrived from all stays until the next has"


def test_a_server_that_has_ended_is_followed_by_another(rank, start, replicas, store, tmp_path):
    replica_server = start()
    assert rank.step(1)
    rank.arrived()
    store.delete(KEY)
    (first := replica_server.process).signal(signal.SIGKILL)
    until = time.monotonic() + 60
    while replica_server.process in (None, first):
        replica_server.poll()
        assert time.monotonic() < until
    store.wait([KEY], 60.0)
    assert rank.step(2)
    rank.arrived()
    assert steps(replicas) == [1, 2]
    assert not happened(tmp_path)


def restarted(before: Rank, shard: StateShard) -> Rank:
    """The next worker of this supervisor, which goes on from a snapshot."""
    after = Rank(PeerReplica(before.peer_replica.store, KEY, TOKEN))
    after.snapshots = before.snapshots
    after.snapshots.held.clear()
    after.snapshots.newest, after.snapshots.copying = after.snapshots.complete()[shard], None
    after.peer_replica.begin(after.snapshots)
    after.arrived()
    return after


def test_what_it_goes_on_from_is_sent_at_once_if_it_is_not_there(rank, start, replicas):
    start()
    rank.snapshots.begin(StateShard(0, 0, 4, 0, 1), {"weight": torch.ones(1000)}, {"step": 4})
    rank.snapshots.wait()
    after = restarted(rank, StateShard(0, 0, 4, 0, 1))
    assert steps(replicas) == [4]
    assert after.peer_replica.arrived == 4
    for step in (5, 6):
        assert after.step(step)
        after.arrived()
    assert steps(replicas) == [5, 6]
    assert len(after.snapshots.held) == 2, "what it went on from is let go"


@pytest.mark.parametrize(("host", "why"), [(None, "or DISTFLOW_HOST is not set on it"),
                                           ("192.0.2.1", "Is DISTFLOW_HOST an address of that machine?")])
def test_no_server_listens_there(rank, store, replicas, capsys, host, why):
    """192.0.2.1 is no machine's address (RFC 5737)."""
    replica_server = host and ReplicaServer(replicas, TOKEN, host, store, KEY)
    if replica_server:
        store.wait([KEY], 60.0)
    assert rank.step(1)
    rank.arrived()
    assert why in capsys.readouterr().err
    if replica_server:
        replica_server.end()


def test_there_is_no_memory_for_it(rank, start, replicas, capsys):
    replica_server = start()
    resource.prlimit(replica_server.process.pid, resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    assert rank.step(1, SIZE)
    rank.arrived()
    assert "there is no memory for it there: [Errno 27] File too large" in capsys.readouterr().err
    assert rank.step(2)
    rank.arrived()
    assert steps(replicas) == [2]


def test_one_that_is_cut_off_on_the_way_leaves_the_one_before(rank, start, replicas):
    start()
    for step in (1, 2):
        rank.step(step, SIZE)
        rank.arrived()
    host, port = rank.peer_replica._address()
    head, rest = rank.snapshots.newest.content()
    connection = connect((host, port), TOKEN, 30)
    connection.send({"shard": [0, 0, 9, 0, 1], "head": head, "retained": [0, 0, 2, 0, 1]})
    assert connection.receive() == ({}, 0), "the rest is to come"
    connection.sock.sendall(frame({}, len(rest)) + rest[: SIZE // 2])
    until = time.monotonic() + 60
    while steps(replicas) != [2]:
        assert time.monotonic() < until
    connection.close()
    rank.step(3, SIZE)
    rank.arrived()
    assert steps(replicas) == [2, 3]


def head_of(end: int, header: bytes = b"") -> bytes:
    """The first bytes of a slot whose content ends at `end`: a header, and nothing after it."""
    content = header.ljust(end - HEAD, b"\0") if header else b""
    return b"".join([len(header).to_bytes(8, "little"), end.to_bytes(8, "little"),
                     xxhash.xxh3_128_digest(content, seed=len(header))])


@pytest.mark.parametrize(("head", "sent", "why"), [
    (head_of(1 << 62), 0, "there is no memory for it there"),
    (head_of(1 << 20), 100, "fewer bytes than the 1048544 that were announced"),
    (head_of(3), 0, "something that is no head of a shard"),
    (b"short", 0, "something that is no head of a shard"),
], ids=["too long", "cut", "ends before it begins", "short"])
def test_a_length_that_cannot_be_is_refused_and_the_others_stay(rank, start, replicas, head, sent, why):
    start()
    assert rank.step(1)
    rank.arrived()
    with contextlib.closing(connect(rank.peer_replica._address(), TOKEN, 30)) as connection:
        connection.send({"shard": [0, 0, 9, 0, 1], "head": head, "retained": [0, 0, 1, 0, 1]})
        reply, _ = connection.receive()
        if sent:
            connection.send({}, [bytes(sent)])
            reply, _ = connection.receive()
    assert not reply["stored"]
    assert why in reply["why"]
    assert steps(replicas) == [1]
    rank.step(2)
    rank.arrived()
    assert steps(replicas) == [1, 2]


def test_what_comes_with_another_checksum_is_none(rank, start, replicas, capsys):
    start()
    assert rank.step(1)
    rank.arrived()
    rank.snapshots.begin(StateShard(0, 0, 2, 0, 1), {"weight": torch.ones(9)}, {"step": 2})
    rank.snapshots.wait()
    rank.snapshots.newest.memory()[-1] ^= 0xFF
    rank.peer_replica.release(2, rank.snapshots)
    rank.peer_replica.send(rank.snapshots)
    rank.arrived()
    assert steps(replicas) == [1]
    assert "it came there with another checksum" in capsys.readouterr().err


def test_only_who_knows_the_token_is_heard(rank, start, replicas):
    start()
    with pytest.raises(Refused, match="its token is not that of the run"):
        connect(rank.peer_replica._address(), b"a guess of the token", 30)
    assert steps(replicas) == []
