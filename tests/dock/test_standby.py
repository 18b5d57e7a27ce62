"""A shard's process is killed, and the standby on another machine takes its place with all rows."""

from __future__ import annotations

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from docks import until
from stores import StoreProcess, client, hosted

from distflow.data.batch import Batch
from distflow.dock import Consumer, DockClient, DockError, LeaseLost, process
from distflow.dock.directory import ShardDirectory
from distflow.dock.process import ShardProcess
from distflow.dock.selection import DockLayout
from distflow.rpc.connection import ConnectionEnded, connect
from distflow.rpc.errors import Unreachable
from distflow.rpc.shared_payloads import MappedHeap
from distflow.telemetry.processes import stopped
from workers.rollout_channel import RolloutChannel, take_over_shard

ROWS = 4
CONSUMERS = (Consumer("rollout", ("order",), ("tokens",), group_size=2, step_rows=ROWS),
             Consumer("trainer", ("tokens",), (), group_size=2, step_rows=ROWS, can_roll_back=True))


def rows(ids, column: str, value: int = 1) -> Batch:
    return Batch(torch.tensor([*ids]), {column: torch.tensor([*ids]) * value})


@pytest.fixture
def directory() -> ShardDirectory:
    return ShardDirectory(hosted())


def stop(child: ShardProcess) -> None:
    """Stop a process, so that its end of each connection falls silent, as when its machine loses its power."""
    child.process.signal(signal.SIGSTOP)
    until(lambda: stopped(child.process.pid))


def lose(first: ShardProcess, second: ShardProcess) -> None:
    first.kill()
    second.take_over()


def test_it_has_all_rows_and_holders_keep_their_leases(children, token, directory):
    """Rows that came before the standby and after it, a saved turn, what has left, and prompts under way."""
    first = children(directory=directory)

    def connected(who: str, attempt: int = 0) -> DockClient:
        return DockClient([first.address], token, who, 20, attempt, directory)

    with (connected("trainer") as at, connected("rollout 0") as mine, connected("rollout 1") as other,
          connected("new", 1) as new):
        at.configure(CONSUMERS)
        at.put(rows(range(12), "order"), version=5)
        for _ in range(2):
            lease = mine.lease("rollout", 2)
            mine.put(rows(lease.ids.tolist(), "tokens", 10))
            mine.commit(lease)
        second = children(layout=at.layout, directory=directory, standby=True)
        until(lambda: at.status()[0]["standbys"])
        at.commit(at.lease("trainer", ROWS, step=0))
        at.release_before("trainer", 1)
        done, under_way, theirs = mine.lease("rollout", 2), mine.lease("rollout", 2), other.lease("rollout", 2)
        mine.put(rows(done.ids.tolist(), "tokens", 10))  # not committed
        other.put(rows(theirs.ids.tolist()[:1], "tokens", 7), turn=3)
        mine.held, other.held = lambda: [done, under_way], lambda: [theirs]
        lose(first, second)

        assert mine.status()[0]["indexes"]["rollout"]["leases"] == 1
        assert other.try_lease("rollout", 2, wait=5).ids.tolist() == [10, 11], "all others are made or leased"
        assert mine.commit(under_way)
        with pytest.raises(LeaseLost, match="of an earlier process"):
            mine.commit(done)
        saved, turns = other.fetch_saved(theirs)
        assert (saved.ids.tolist(), turns.tolist()) == (theirs.ids.tolist()[:1], [3])
        mine.put(rows(under_way.ids.tolist(), "tokens", 10))
        assert new.rollback("trainer", 1) == 0
        lease = new.lease("trainer", ROWS, step=1, wait=5)
        assert lease.versions.tolist() == [5] * ROWS
        assert new.fetch(lease)["tokens"].tolist() == [40, 50, 60, 70]
        assert new.commit(lease)
        with pytest.raises(LeaseLost, match="attempt 1 has begun"):
            at.lease("trainer", ROWS, step=2)
        assert at.put(rows(range(4), "order")) == 4, "a trainer may begin with an older step"


def test_leases_of_rows_on_shards_that_survive_are_kept(children, token, directory):
    """Their holder, which asks for nothing, renews them before the shard has told the new index of its rows."""
    first, other = (children(directory=directory, number=number) for number in range(2))

    def connected(who: str) -> DockClient:
        return DockClient([first.address, other.address], token, who, 60, directory=directory)

    with connected("trainer") as at, connected("rollout 0") as mine, connected("rollout 1") as late:
        at.configure(CONSUMERS)
        at.put(rows(range(8), "order"))
        second = children(layout=at.layout, directory=directory, standby=True)
        until(lambda: at.status()[0]["standbys"] and at.status()[0]["indexes"]["rollout"]["ready"] == 8)
        leases = [mine.lease("rollout", 2) for _ in range(3)]
        mine.held = lambda: leases
        stop(other)
        lose(first, second)
        until(lambda: mine.renew_moved_leases() or directory.known[0].generation == 2)
        other.process.signal(signal.SIGCONT)
        left = late.lease("rollout", 2, wait=30)
        assert {*range(8)} - {row for lease in leases for row in lease.ids.tolist()} == {*left.ids.tolist()}
        until(lambda: late.status()[0]["indexes"]["rollout"]["known"] == 8)
        assert late.try_lease("rollout", 2) is None
        assert all(mine.commit(lease) for lease in leases)


def test_a_put_is_acknowledged_when_the_standby_has_it(children, token, directory):
    """The shard is killed right after each answer, and no row is missing."""
    with DockClient([children().address], token, "trainer") as at:
        at.configure(CONSUMERS)
        layout = at.layout
    first = children(layout=layout, directory=directory)
    for last in range(1, 4):
        with DockClient([first.address], token, "rollout", 20, directory=directory) as at:
            second = children(layout=layout, directory=directory, standby=True)
            until(lambda at=at: at.status()[0]["standbys"])
            at.put(Batch(torch.arange(last * 2, last * 2 + 2), {"tokens": torch.ones(2, 1 << 18)}))
            lose(first, second)
            assert at.status()[0]["rows"] == 2 * last
            first = second


def test_a_standby_counts_once_it_has_all_rows(dock, token):
    at = dock(1, CONSUMERS)
    at.put(rows(range(4), "order"))
    with contextlib.closing(connect(at.addresses[0], token, 20)) as standby:
        standby.ask({"op": "hello", "who": "standby", "session": ""})
        standby.send({"op": "follow"})
        header: dict = {}
        while not header.get("complete"):
            header, size = standby.receive()
            standby.payload(size)
            assert at.status()[0]["standbys"] == 0
            standby.send({})
        until(lambda: at.status()[0]["standbys"] == 1)


def test_a_shard_that_lives_when_another_takes_its_place_serves_no_more(children, token, directory):
    """Its machine was cut off from the store, and not from those that sample."""
    first = children(directory=directory)
    with DockClient([first.address], token, "rollout", 20, directory=directory) as at:
        at.configure(CONSUMERS)
        second = children(layout=at.layout, directory=directory, standby=True)
        until(lambda: at.status()[0]["standbys"])
        second.take_over()
        until(lambda: not at.status()[0]["standbys"])
        with pytest.raises(Unreachable), DockClient([first.address], token, "late", 0.2) as late:
            late.status()
        assert at.put(rows(range(4), "order")) == 4


def test_a_shard_that_was_stopped_while_another_took_its_place_answers_nothing(children, token, directory):
    """Its standby has hung up meanwhile, so that nothing but the store tells it."""
    first = children(directory=directory)
    with contextlib.closing(connect(first.address, token, 60)) as late:
        with DockClient([first.address], token, "trainer") as at:
            at.configure(CONSUMERS)
        late.ask({"op": "hello", "who": "late", "session": "late"})
        stop(first)
        directory.take(0, ("127.0.0.1", 1))
        late.send({"op": "status"})
        asleep = time.monotonic() + 3.0
        until(lambda: time.monotonic() > asleep)
        first.process.signal(signal.SIGCONT)
        with pytest.raises((ConnectionEnded, ConnectionError)):
            late.receive()


def test_a_standby_that_stands_still_holds_up_no_put_for_long(dock, children, directory, monkeypatch):
    monkeypatch.setattr("distflow.dock.replication.PATIENCE", 0.2)
    at = dock(1, CONSUMERS)
    directory.take(0, at.addresses[0])
    second = children(layout=at.layout, directory=directory, standby=True)
    until(lambda: at.status()[0]["standbys"])
    stop(second)
    assert at.put(rows(range(4), "order")) == 4
    until(lambda: not at.status()[0]["standbys"])
    second.kill()


@pytest.mark.parametrize("place", ["reply", "connection", "send"])
def test_a_request_goes_on_with_the_process_that_has_taken_the_shards_place(children, token, directory, monkeypatch,
                                                                            place):
    """It waits for a reply of the silent one, or to be connected, or for its bytes to be taken."""
    monkeypatch.setattr(MappedHeap, "of_server", lambda offer, token: None)  # all bytes go through the connection
    first = children(directory=directory)
    with DockClient([first.address], token, "rollout", 300, directory=directory) as at, ThreadPoolExecutor(1) as pool:
        at.configure(CONSUMERS)
        second = children(layout=at.layout, directory=directory, standby=True)
        until(lambda: at.status()[0]["standbys"])
        stop(first)
        if place == "connection":
            at.pool.close()
        large = Batch(torch.arange(2), {"tokens": torch.ones(2, 1 << 22)})
        asked = pool.submit(at.put, large if place == "send" else rows(range(2), "order"))
        until(lambda: asked.running())
        second.take_over()
        assert asked.result(60) == 2
        assert at.status()[0]["rows"] == 2
        first.kill()


def test_a_standby_follows_its_shard_to_another_address(children, token, directory):
    """It was started before the shard's first process was known to be lost."""
    first = children(directory=directory)
    with DockClient([first.address], token, "trainer", 60, directory=directory) as at:
        at.configure(CONSUMERS)
        layout = at.layout
        first.kill()
        standby = children(layout=layout, directory=directory, standby=True)
        assert standby.address
        children(layout=layout, directory=directory)
        until(lambda: at.status()[0]["standbys"])


def test_a_standby_that_is_stopped_holds_up_no_supervisor(children, directory, monkeypatch):
    monkeypatch.setattr(process, "_ANSWER", 0.2)
    standby = children(layout=DockLayout((("127.0.0.1", 1),), CONSUMERS), directory=directory, standby=True)
    assert standby.address
    stop(standby)
    with pytest.raises(DockError, match=r"has not answered for \d+\.\d s. It may have been stopped"):
        standby.take_over()
    standby.stop()
    assert standby.process.status == -signal.SIGKILL


def test_a_standby_that_waits_for_the_store_is_waited_for(children, monkeypatch):
    """It may have the only copy of the rows."""
    monkeypatch.setattr(process, "_ANSWER", 0.2)
    store = StoreProcess()
    directory = ShardDirectory(client(store.port))
    standby = children(layout=DockLayout((("127.0.0.1", 1),), CONSUMERS), directory=directory, standby=True)
    assert standby.address
    store.stop()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(standby.take_over)
        try:
            with pytest.raises(TimeoutError):
                taken.result(1.0)
        finally:
            store.go_on()
        taken.result(60)
    assert directory.find(0).address == (standby.address[0], directory.known[0].port)
    store.end()


def test_a_shard_whose_standby_has_ended_begins_with_no_rows(children, token, directory, capfd):
    layout = DockLayout((("127.0.0.1", 1),), CONSUMERS)
    lost = children(layout=layout, directory=directory, standby=True)
    assert lost.address
    lost.process.signal(signal.SIGKILL)
    served = take_over_shard(lost, lambda: children(layout=layout, directory=directory, standby=True))
    with DockClient([served.address], token, "trainer", directory=directory) as at:
        assert at.status()[0]["rows"] == 0
    assert "begins with no rows: the process of shard 0 of the dock has ended" in capfd.readouterr().err


def test_a_standby_that_has_ended_is_started_again(children, token, directory, capfd):
    first = children(directory=directory)
    with DockClient([first.address], token, "trainer") as at:
        at.configure(CONSUMERS)
        at.put(rows(range(8), "order"))
        channel = RolloutChannel(directory.store, token, at.addresses, "127.0.0.1", 2, 2, 1, layout=at.layout,
                                 directory=directory)
        channel.start_standby(0)
        before = channel.standbys[0]
        until(lambda: at.status()[0]["standbys"])
        channel.restart_standbys()
        assert channel.standbys[0] is before
        before.process.signal(signal.SIGKILL)
        until(lambda: before.process.poll() is not None)
        channel.restart_standbys()
        assert "copy of shard 0 of the dock has ended (exit status -9); another one is made" in capfd.readouterr().err
        at.put(rows(range(8, 10), "order"))  # and so it shows that the first one has gone
        until(lambda: at.status()[0]["standbys"])
        first.kill()
        channel.serve_shard(0)
        assert channel.dock("rollout").status()[0]["rows"] == 10
        channel.standbys[0].stop()
