"""Copies on their way to another machine's memory: real processes and sockets, and a real store."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distflow.dock.errors import DockError
from distflow.recovery.peer_replica import PeerReplica, ring
from distflow.recovery.replica_server import ReplicaServer
from distflow.recovery.snapshots import Piece, Slot, Snapshots
from distflow.recovery.store import store_on
from distflow.recovery.worker_process import do_beside
from distflow.rpc.connection import _HEAD, _MAGIC, connect
from distflow.telemetry import events
from distflow.telemetry.metrics import current

TOKEN, KEY = b"the token of this run", "0/keeper/1"
SIZE = 1 << 22
"""Floats: more than a socket takes that nobody reads."""


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
def board():
    return store_on("127.0.0.1")


@pytest.fixture
def kept() -> Snapshots:
    """The other seat's memory, which this process can look into."""
    return Snapshots(slots=2)


@pytest.fixture
def start(board, kept) -> Iterator[Callable[[], ReplicaServer]]:
    """Start the process that writes there, once it listens."""
    keepers = []

    def begin() -> ReplicaServer:
        board.delete_key(KEY)
        keepers.append(ReplicaServer(kept, TOKEN, "127.0.0.1", board, KEY))
        board.wait([KEY])
        return keepers[-1]

    yield begin
    for keeper in keepers:
        keeper.end()


@pytest.fixture
def rank(monkeypatch, tmp_path, board):
    """This process is a rank of its own, and tells itself what it reports."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    events.current().open(tmp_path / "events.jsonl", 0)
    yield Rank(PeerReplica(board, KEY, TOKEN))
    events.current().path = None


class Rank:
    def __init__(self, neighbour: PeerReplica):
        self.neighbour, self.copies = neighbour, Snapshots()
        self.values: dict[str, float] = {}

    def step(self, step: int, size: int = 1000) -> bool:
        """As a worker does after each; whether its copy was sent."""
        self.neighbour.report()
        self.values = current().collect(lambda mine: [mine])
        goes_on = self.neighbour.settle(step, self.copies)
        self.copies.begin(Piece(0, 0, step, 0, 1), {"weight": torch.full((size,), float(step))}, {"step": step})
        if goes_on:
            self.neighbour.send(self.copies)
        self.copies.wait()
        return goes_on

    def arrived(self) -> None:
        wait([self.neighbour.job], 60)
        assert self.neighbour.look()


def steps(memory: Snapshots) -> list[int]:
    return [piece.step for piece in memory.whole()]


def happened(folder: Path) -> list[str]:
    path = folder / "events.jsonl"
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def test_the_last_two_are_there_whole(rank, start, kept, tmp_path):
    start()
    for step in range(1, 5):
        assert rank.step(step)
        rank.arrived()
        assert steps(kept) == [each for each in (step - 1, step) if each]
    back = {"weight": torch.zeros(1000)}
    assert kept.load(kept.whole()[Piece(0, 0, 4, 0, 1)], back) == {"step": 4}
    assert (back["weight"] == 4).all()
    assert rank.values["neighbour/seconds"] > 0
    assert sum(slot.memory() is not None for slot in rank.copies.slots) == 2, "that costs no third copy here"
    assert not happened(tmp_path)


def test_no_step_waits_for_one_that_is_slow(rank, start, kept, tmp_path, capsys):
    """At most one is under way; what has arrived stays here as well, and the newest is the next."""
    keeper = start()
    assert rank.step(1, SIZE)
    rank.arrived()
    os.kill(keeper.process, signal.SIGSTOP)
    assert rank.step(2, SIZE), "the one before has arrived"
    assert [rank.step(step, SIZE) for step in range(3, 8)] == [False] * 5
    assert steps(rank.copies) == [1, 2, 6, 7]
    assert steps(kept) == [1]
    assert rank.neighbour.sending.piece.step == 2
    assert happened(tmp_path) == ["neighbour late"]
    assert "the copy of step 2 has been on its way" in capsys.readouterr().err
    os.kill(keeper.process, signal.SIGCONT)
    rank.arrived()
    assert steps(kept) == [1, 2]
    assert rank.step(8, SIZE)
    assert current().collect(lambda mine: [mine])["neighbour/steps_behind"] == 6
    rank.arrived()
    assert steps(kept) == [2, 8]


def test_one_that_is_lost_is_told_once_and_may_come_back(rank, start, kept, tmp_path, capsys):
    keeper = start()
    assert rank.step(1)
    rank.arrived()
    os.kill(keeper.process, signal.SIGKILL)
    os.waitid(os.P_PID, keeper.process, os.WEXITED | os.WNOWAIT)
    for step in (2, 3):
        assert rank.step(step)
        rank.arrived()
    assert capsys.readouterr().err.count("the copy of step 2 has not come into another machine's memory") == 1
    assert happened(tmp_path) == ["neighbour lost"]
    start()
    assert rank.step(4)
    rank.arrived()
    assert happened(tmp_path) == ["neighbour lost", "neighbour back"]
    assert steps(kept) == [1, 4], "what had arrived from all stays until the next has"


def test_a_keeper_that_has_ended_is_followed_by_another(rank, start, kept, board, tmp_path):
    keeper = start()
    assert rank.step(1)
    rank.arrived()
    board.delete_key(KEY)
    os.kill(first := keeper.process, signal.SIGKILL)
    until = time.monotonic() + 60
    while not keeper.process or keeper.process == first:
        keeper.look()
        assert time.monotonic() < until
    board.wait([KEY])
    assert rank.step(2)
    rank.arrived()
    assert steps(kept) == [1, 2]
    assert not happened(tmp_path)


def test_in_a_worker_nobody_looks_after_the_keeper(start):
    keeper = start()
    assert do_beside(keeper.look, 60) == 0
    keeper.look()
    assert keeper.process


def restarted(before: Rank, piece: Piece) -> Rank:
    """The next worker of this seat, which goes on from a copy that it has."""
    after = Rank(PeerReplica(before.neighbour.store, KEY, TOKEN))
    after.copies = before.copies
    after.copies.held.clear()
    after.copies.newest, after.copies.copying = after.copies.whole()[piece], None
    after.neighbour.begin(after.copies)
    after.arrived()
    return after


def test_what_it_goes_on_from_is_sent_at_once_if_it_is_not_there(rank, start, kept):
    start()
    rank.copies.begin(Piece(0, 0, 4, 0, 1), {"weight": torch.ones(1000)}, {"step": 4})
    rank.copies.wait()
    after = restarted(rank, Piece(0, 0, 4, 0, 1))
    assert steps(kept) == [4]
    assert after.neighbour.arrived == 4
    for step in (5, 6):
        assert after.step(step)
        after.arrived()
    assert steps(kept) == [5, 6]
    assert len(after.copies.held) == 2, "what it went on from is let go"


def test_what_it_goes_on_from_is_not_sent_again(rank, start, kept):
    start()
    for step in (1, 2):
        rank.step(step)
        rank.arrived()
    restarted(rank, Piece(0, 0, 1, 0, 1))
    assert steps(kept) == [1, 2], "it would have come where the other is"


@pytest.mark.parametrize(("host", "why"), [(None, "or DISTFLOW_HOST is not set on it"),
                                           ("192.0.2.1", "Is DISTFLOW_HOST an address of that machine?")])
def test_nobody_listens_there(rank, board, kept, capsys, host, why):
    """192.0.2.1 is no machine's address (RFC 5737)."""
    keeper = host and ReplicaServer(kept, TOKEN, host, board, KEY)
    if keeper:
        board.wait([KEY])
    assert rank.step(1)
    rank.arrived()
    assert why in capsys.readouterr().err
    if keeper:
        keeper.end()


def test_there_is_no_memory_for_it(rank, start, kept, capsys):
    keeper = start()
    resource.prlimit(keeper.process, resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    assert rank.step(1, SIZE)
    rank.arrived()
    assert "there is no memory for it there: [Errno 27] File too large" in capsys.readouterr().err
    assert rank.step(2)
    rank.arrived()
    assert steps(kept) == [2]


def test_a_mistake_is_told(rank, start, kept, capsys, monkeypatch):
    start()
    monkeypatch.setattr(Slot, "image", lambda slot: {}["image"])
    assert rank.step(1)
    rank.arrived()
    assert "KeyError 'image'" in capsys.readouterr().err
    assert rank.neighbour.arrived == -1


def test_one_that_is_cut_off_on_the_way_leaves_the_one_before(rank, start, kept):
    start()
    for step in (1, 2):
        rank.step(step, SIZE)
        rank.arrived()
    host, port = rank.neighbour._address()
    head, rest = rank.copies.newest.image()
    line = connect((host, port), TOKEN, 30)
    line.send({"piece": [0, 0, 9, 0, 1], "head": head, "stays": [0, 0, 2, 0, 1]})
    assert line.receive() == ({}, 0), "the rest is to come"
    line.sock.sendall(_HEAD.pack(_MAGIC, 1, len(rest)) + b"\x80" + rest[: SIZE // 2])  # an empty header
    until = time.monotonic() + 60
    while steps(kept) != [2]:
        assert time.monotonic() < until
    line.close()
    rank.step(3, SIZE)
    rank.arrived()
    assert steps(kept) == [2, 3]


def test_what_comes_with_another_checksum_is_none(rank, start, kept, capsys):
    start()
    assert rank.step(1)
    rank.arrived()
    rank.copies.begin(Piece(0, 0, 2, 0, 1), {"weight": torch.ones(9)}, {"step": 2})
    rank.copies.wait()
    rank.copies.newest.memory()[-1] ^= 0xFF
    rank.neighbour.settle(2, rank.copies)
    rank.neighbour.send(rank.copies)
    rank.arrived()
    assert steps(kept) == [1]
    assert "it came there with another checksum" in capsys.readouterr().err


def test_only_who_knows_the_token_is_heard(rank, start, kept):
    start()
    with pytest.raises(DockError, match="its token is not that of the run"):
        connect(rank.neighbour._address(), b"a guess of the token", 30)
    assert steps(kept) == []
