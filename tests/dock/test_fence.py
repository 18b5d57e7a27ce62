"""A shard asks the store, before it answers, whether another process has its place; a store that fails decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import pytest
import torch
from docks import until
from stores import StoreProcess, client, hosted

from distflow.data.batch import Batch
from distflow.dock import Consumer, DockClient, StorageShardServer
from distflow.dock.directory import Fence, ShardDirectory
from distflow.dock.replication import Follower, Standby
from distflow.recovery.membership import HEARTBEAT_SECONDS
from distflow.rpc.connection import ConnectionEnded, connect
from distflow.rpc.errors import Unreachable
from distflow.store.interface import StoreUnavailable

CONSUMERS = (Consumer("trainer", ("order",)),)
ELSEWHERE = "127.0.0.1", 1


def rows(ids) -> Batch:
    return Batch(torch.tensor([*ids]), {"order": torch.tensor([*ids])})


@pytest.fixture
def directory(monkeypatch) -> ShardDirectory:
    """One whose fences look only when they are asked to."""
    monkeypatch.setattr("distflow.dock.directory._POLL_INTERVAL", 600.0)
    return ShardDirectory(hosted())


@pytest.fixture
def server(token, directory) -> Iterator[StorageShardServer]:
    made = StorageShardServer(token, directory=directory)
    made.start()
    yield made
    made.close()


@pytest.fixture
def at(server, token) -> Iterator[DockClient]:
    with DockClient([server.address], token, "trainer", 0.5) as made:
        made.configure(CONSUMERS)
        yield made


class Unsteady:
    """A shard's view of the store that fails with each error of `errors` first. They may be set later."""

    def __init__(self, store):
        self.store, self.errors = store, []

    def get(self, key: str) -> str | None:
        if self.errors:
            raise self.errors.pop(0)
        return self.store.get(key)


def test_a_shard_whose_standby_has_gone_asks_the_store_before_it_answers(at, server, token, directory):
    with contextlib.closing(connect(server.address, token, 20)) as standby:
        standby.ask({"op": "hello", "who": "standby", "session": ""})
        standby.send({"op": "follow"})
        until(lambda: at.status()[0]["rows"] == 0 and server.state.followers)
        directory.take(0, ELSEWHERE)
    until(lambda: not server.state.followers)
    with pytest.raises(Unreachable):
        at.put(rows(range(4)))


def test_a_put_that_a_standby_has_not_confirmed_asks_the_store(at, server, token, directory):
    """The standby has not all rows yet, and may serve the shard without these."""
    with contextlib.closing(connect(server.address, token, 20)) as standby:
        standby.ask({"op": "hello", "who": "standby", "session": ""})
        standby.send({"op": "follow"})
        standby.receive()  # and answers nothing
        directory.take(0, ELSEWHERE)
        with pytest.raises(Unreachable):
            at.put(rows(range(4)))


@pytest.mark.parametrize("posted", [True, False])
def test_a_standby_that_ends_has_confirmed_nothing(posted):
    """It ends when it is asked to take a row, or while the row is on its way."""

    class Ending:
        def ask(self, header, buffers):
            if header.get("complete"):
                return {}
            raise ConnectionEnded

    follower = Follower(Ending(), ())
    copied = [follower.post(({"op": "put"}, [])) for _ in range(posted)]
    with pytest.raises(ConnectionEnded):
        follower.stream()
    copied = copied or [follower.post(({"op": "put"}, []))]
    follower.end()
    assert copied[0].is_set()
    assert follower.wait(copied[0]) is False


def test_a_standby_that_takes_over_while_it_looks_does_not_follow_itself(directory, monkeypatch):
    """It would tell its own shard that another process has its place."""
    standby, followed = Standby(directory, bytes(16), 0, 1, 1), []

    def locate(number: int) -> tuple[str, int]:
        standby.stop()
        return ELSEWHERE

    monkeypatch.setattr(directory, "locate", locate)
    monkeypatch.setattr(standby, "_follow", followed.append)
    standby.run()
    assert followed == []


def test_a_store_that_stands_still_holds_up_no_put(token, monkeypatch):
    """Nothing is decided meanwhile, and the last look is never so old that a put waits for the next."""
    store = StoreProcess()
    server = StorageShardServer(token, directory=ShardDirectory(client(store.port), silence=3.0))
    with DockClient([server.start()], token, "trainer") as at:
        at.configure(CONSUMERS)
        is_fresh, note, found, looks = server.fence._is_fresh, server.fence._note, [], []
        monkeypatch.setattr(server.fence, "_is_fresh", lambda: found.append(is_fresh()) or found[-1])
        monkeypatch.setattr(server.fence, "_note", lambda *given: looks.append(given) or note(*given))
        store.stop()
        longest, before = 0.0, len(looks)
        while len(looks) < before + 4:
            began = time.monotonic()
            at.put(rows(range(4)))
            longest = max(longest, time.monotonic() - began)
        assert found.count(False) <= 1, "a crowded machine may be late once"
        assert longest < server.fence.fresh
        server.fence.recheck()
        assert at.put(rows(range(4, 8))) == 4
    server.close()
    store.end()


@pytest.mark.parametrize("silence", [3.0, 5.0, 30.0])
def test_a_shard_counts_on_its_entry_for_less_than_a_machine_may_be_silent(silence):
    directory = ShardDirectory(hosted(), silence=silence)
    fence = Fence(directory, 0, directory.take(0, ELSEWHERE), lambda: None)
    assert fence.pause + fence.store.deadline.seconds < fence.fresh < silence - HEARTBEAT_SECONDS


@pytest.mark.parametrize("text", ["no entry", "[1]", ""])
def test_an_entry_that_cannot_be_read_decides_nothing(at, server, directory, caplog, text):
    """As one that is missing."""
    directory.store.put("0", text) if text else directory.store.delete("0")
    with caplog.at_level(logging.WARNING, "distflow.dock"):
        for row in range(3):
            server.fence.recheck()
            assert at.put(rows([row])) == 1
    assert caplog.text.count("shard 0 of the dock cannot look") == bool(text)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fence_that_ends_holds_up_no_reply(at, server, monkeypatch):
    def end():
        raise SystemExit

    monkeypatch.setattr(server.fence, "_look", end)
    server.fence.recheck()
    assert at.put(rows([0])) == 1


def test_a_shard_whose_connection_to_the_store_has_ended_looks_by_another_one(at, server, directory):
    """It was stopped, or cut off, while another process took its place."""
    gone = StoreUnavailable("store", 0.0, "reset", gone=True)
    server.fence.store = store = Unsteady(server.fence.store)
    store.errors[:] = gone, gone
    server.fence.recheck()
    assert at.put(rows([0])) == 1, "nothing is decided"
    directory.take(0, ELSEWHERE)
    store.errors[:] = [gone]
    server.fence.recheck()
    with pytest.raises(Unreachable):
        at.put(rows([1]))


def test_the_fence_ends_with_its_server(server):
    server.close()
    until(lambda: not server.fence.is_alive())
