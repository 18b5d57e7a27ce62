"""Looks of a process at the addresses of shards: few, whoever asks."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from docks import until
from stores import SECONDS, CountingStore, StoreProcess, client, hosted, store_on

from distflow.data.batch import Batch
from distflow.dock import Consumer, DockClient, StorageShardServer
from distflow.dock.directory import ShardDirectory
from distflow.rpc.errors import Unreachable
from distflow.rpc.shared_payloads import MappedHeap
from distflow.telemetry.processes import stopped

HERE, THERE = ("127.0.0.1", 1), ("127.0.0.1", 2)


def test_clients_of_a_dead_shard_look_at_its_entry_once_in_a_while(token, monkeypatch):
    """They try to connect 20 times a second, in several threads."""
    monkeypatch.setattr("distflow.dock.directory._POLL_INTERVAL", 600.0)
    hosted = store_on("127.0.0.1")
    store, server = CountingStore(hosted.port), StorageShardServer(token)
    directory = ShardDirectory(store)
    directory.take(0, server.start())

    def wait_for_the_dead() -> None:
        with DockClient([server.address], token, "rollout", 1.0, directory=directory) as at, pytest.raises(Unreachable):
            at.status()

    with DockClient([server.address], token, "trainer", directory=directory) as at:
        at.configure((Consumer("trainer", ("order",)),))
        server.close()
        before = len(store.operations)
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(wait_for_the_dead) for _ in range(3)]:
                done.result(SECONDS)
    assert len(store.operations) == before


def test_an_entry_is_read_again_when_that_is_due(monkeypatch):
    hosted = store_on("127.0.0.1")
    store = CountingStore(hosted.port)
    mine, other = ShardDirectory(store), ShardDirectory(client(hosted.port))
    other.take(0, HERE)
    assert mine.locate(0) == HERE
    other.take(0, THERE)
    assert mine.locate(0) == HERE
    mine.look_at[0] = 0.0
    assert (mine.locate(0), mine.locate(1), mine.locate(1)) == (THERE, None, None)
    assert len(store.operations) == 3


def test_one_thread_waits_for_a_store_that_stands_still(forked):
    store = StoreProcess()
    directory = ShardDirectory(client(store.port))
    directory.take(0, HERE)
    store.stop()
    answer = directory.store.get
    looking: list[str] = []

    def get(key: str) -> str | None:
        looking.append(key)
        assert directory.locate(0) == HERE, "as another thread that comes meanwhile"
        return answer(key)

    directory.store.get = get
    assert directory.locate(0) == HERE
    assert directory.locate(0) == HERE
    assert looking == ["0"]
    store.end()


@pytest.mark.parametrize("place", ["reply", "connection", "send"])
def test_a_request_continues_with_the_process_that_has_taken_the_shards_place(children, token, monkeypatch, forked,
                                                                              place):
    """It waits for a reply of the silent one, or to be connected, or for its bytes to be taken."""
    monkeypatch.setattr(MappedHeap, "of_server", lambda offer, token: None)  # all bytes go through the connection
    monkeypatch.setattr("distflow.rpc.pool._CONNECT", 1.0)
    directory = ShardDirectory(hosted())
    first, consumers = children(directory=directory), (Consumer("trainer", ("order",)),)
    with DockClient([first.address], token, "rollout", 300, directory=directory) as at, ThreadPoolExecutor(1) as pool:
        at.configure(consumers)
        layout = at.layout
        first.process.signal(signal.SIGSTOP)  # each connection falls silent, as when a machine loses its power
        until(lambda: stopped(first.process.pid))
        if place == "connection":
            at.pool.close()
        large = torch.ones(2, 1 << 22 if place == "send" else 1)
        asked = pool.submit(at.put, Batch(torch.arange(2), {"order": large}))
        until(lambda: asked.running())
        children(layout=layout, directory=directory)
        assert asked.result(SECONDS) == 2
        assert at.status()[0]["rows"] == 2
        first.kill()
