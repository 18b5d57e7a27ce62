"""The three steps, over real sockets."""

import contextlib
import threading

import numpy
import pytest
import torch
from docks import REWARD, UPDATE, tokens, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch
from distflow.dock import Consumer, DockClient, DockError, TimedOut
from distflow.errors import ColumnError
from distflow.rpc.errors import Unreachable


def scored(ids):
    return Batch(torch.tensor(ids, dtype=torch.int64), {"rewards": torch.tensor(ids, dtype=torch.float32)})


def check(batch):
    for row, held in zip(batch.ids.tolist(), batch["tokens"].rows):
        assert held.tolist() == [row] * (row % 5)


def left(dock):
    return sum(part["rows"] for part in dock.status())


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_go_through_all_states_and_leave(dock, shards):
    at = dock(shards, (REWARD, UPDATE))
    assert at.put(tokens(range(20)), version=4) == 20
    work = at.lease("reward", 20, wait=5)
    assert work.versions.tolist() == [4] * 20
    assert work.tokens.tolist() == [row % 5 for row in work.ids.tolist()]
    check(at.fetch(work))
    at.put(scored(work.ids.tolist()))
    assert at.commit(work)
    assert not at.commit(work)
    shares = [at.lease("update", 20, step=0, share=rank, shares=2, wait=5) for rank in range(2)]
    for share in shares:
        batch = at.fetch(share)
        assert batch["rewards"].tolist() == share.ids.tolist()
        check(batch)
    assert [at.commit(share) for share in shares] == [True, False]
    until(lambda: left(at) == 0)
    assert at.put(tokens([3])) == 0


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_row_arrives_once_and_intact(dock, data):
    """Any interleaving of puts, regenerations, leases, abandoned leases and commits."""
    at = dock(data.draw(st.integers(1, 3)), (Consumer("update", ("tokens", "rewards")),))
    rows = data.draw(st.permutations(range(24)))
    parts = [[row for row in rows if row % 4 == part] for part in range(4)]
    actions = [("tokens", part) for part in parts] + [("rewards", part) for part in parts]
    actions += [(name, part) for name, part in actions if data.draw(st.booleans())]
    got: list[int] = []
    for name, part in data.draw(st.permutations(actions)):
        at.put(tokens(part) if name == "tokens" else scored(part))
        if data.draw(st.booleans()):
            got += take(at, data.draw(st.booleans()))
    while len(got) < 24:
        got += take(at, False, wait=5)
    assert sorted(got) == list(range(24))
    with pytest.raises(TimedOut):
        at.lease("update", 1)
    at.close()


def take(at, abandon, wait=0.0):
    if abandon:
        with DockClient(at.addresses, at.pool.token, "one that dies") as other, contextlib.suppress(TimedOut):
            other.lease("update", 7, least=1)
        return []
    try:
        lease = at.lease("update", 7, least=1, wait=wait)
    except TimedOut:
        return []
    batch = at.fetch(lease)
    check(batch)
    assert batch["rewards"].tolist() == lease.ids.tolist()
    assert at.commit(lease)
    return lease.ids.tolist()


def test_rows_come_in_the_order_in_which_they_are_asked_for(dock):
    at = dock(3)
    at.put(tokens(range(9)))
    for dtype in (torch.int64, torch.int32):
        assert at.fetch(torch.tensor([7, 2, 3, 0], dtype=dtype), ["tokens"]).ids.tolist() == [7, 2, 3, 0]
    assert len(at.fetch(torch.tensor([], dtype=torch.int64), ["tokens"])) == 0
    with pytest.raises(ColumnError, match=r"rows \[8\] in shard 2 have no column `rewards` yet"):
        at.fetch(torch.tensor([8]), ["rewards"])


def test_a_look_shows_what_a_lease_would_have_and_leaves_it(dock):
    at = dock(1, (Consumer("update", ("tokens",)),))
    at.put(tokens([3, 1]))
    with pytest.raises(TimedOut, match="it wants at least 3; 2 are ready"):
        at.peek("update", 4, least=3, step=0)
    at.put(tokens([2]))
    ids, counts = at.peek("update", 4, least=3, step=0, wait=5)
    assert (ids.tolist(), counts.tolist()) == ([1, 2, 3], [1, 2, 3])
    shares = [at.lease("update", 3, step=0, share=rank, shares=2) for rank in range(2)]
    assert sorted(torch.cat([share.ids for share in shares]).tolist()) == [1, 2, 3]
    assert at.peek("update", 4, least=3, step=0)[0].tolist() == [1, 2, 3], "so does one who comes again"
    assert at.commit(shares[0])
    with pytest.raises(DockError, match="step 0 of `update` is committed already"):
        at.peek("update", 4, least=3, step=0, wait=5)


def test_an_empty_share_has_the_columns_too(dock):
    at = dock(2, (Consumer("update", ("tokens",)),))
    at.put(tokens([3]))
    shares = [at.fetch(at.lease("update", 1, step=0, share=rank, shares=2, wait=5)) for rank in range(2)]
    assert sorted(len(share) for share in shares) == [0, 1]
    assert [share["tokens"].values.dtype for share in shares] == [torch.int64] * 2


def test_a_waiting_consumer_wakes_when_rows_come(dock, token):
    at = dock(2, (UPDATE,))
    other = DockClient(at.addresses, token, "producer")
    thread = threading.Thread(target=lambda: (other.put(tokens(range(4))), other.put(scored(range(4)))))
    thread.start()
    assert at.lease("update", 4, wait=10).ids.tolist() == [0, 1, 2, 3]
    thread.join()
    other.close()


def test_a_rank_gets_the_rows_of_its_own_machines_shard_first(dock, token):
    at = dock(2, (Consumer("rollout", ("prompt",), home=1),))
    at.put(Batch(torch.arange(6), {"prompt": torch.zeros(6)}))
    until(lambda: at.index_status()["indexes"]["rollout"]["ready"] == 6)
    with DockClient(at.addresses, token, "one of machine 1", near=1) as near:
        taken = [near.lease("rollout", 1).ids.tolist() for _ in range(4)]
    assert sorted(taken[:3]) == [[1], [3], [5]]
    assert taken[3] == [0], "rather than none"


def test_each_index_is_where_its_consumer_is(dock):
    at = dock(3, (REWARD, Consumer("update", ("tokens", "rewards"), home=2)))
    at.put(tokens(range(9)))
    work = at.lease("reward", 9, wait=5)
    at.put(scored(range(9)))
    assert at.commit(work)
    assert at.commit(at.lease("update", 9, wait=5))
    assert [[*part["indexes"]] for part in at.status()] == [["reward"], [], ["update"]]
    assert {*at.index_status()["indexes"]} == {"reward", "update"}
    until(lambda: left(at) == 0)


def test_a_wait_that_passes_its_limit_names_what_is_missing(dock, token):
    at = dock(2, (REWARD, UPDATE))
    with DockClient(at.addresses, token, "rollout 3") as rollout, DockClient(at.addresses, token, "scorer 7") as scorer:
        rollout.put(tokens([1, 2, 3]))
        scorer.report_activity("waiting for a sandbox")
        scorer.lease("reward", 2, wait=5)
        until(lambda: at.status()[0]["indexes"]["reward"]["known"] == 3)
        with pytest.raises(TimedOut) as caught:
            at.lease("update", 2, wait=0.05)
    words = str(caught.value)
    assert "`update` waited 0.05 s for rows: it wants at least 2; 0 are ready, 3 known, 0 committed" in words
    assert "3 rows lack rewards" in words
    assert "`reward` writes `rewards`: rows [" in words
    assert "are leased by scorer 7 (" in words
    assert "was waiting for a sandbox" in words
    assert "are ready, and no process has leased them" in words
    assert caught.value.report["missing"][0][0] == ["rewards"]


def test_a_wait_names_the_producers_or_the_column_that_has_none(dock, token):
    at = dock(1, (UPDATE,))
    assert at.put(tokens([])) == 0
    with DockClient(at.addresses, token, "rollout 3") as rollout:
        rollout.report_activity("writing turn 2 of prompt 9")
        rollout.status()
        with pytest.raises(TimedOut, match=r"no row has come .*\n    connected: rollout 3 .* was writing turn 2 of"):
            at.lease("update", 1)
    at.put(tokens([1]))
    with pytest.raises(TimedOut, match="no consumer says that it writes `rewards`"):
        at.lease("update", 1)
    with pytest.raises(DockError, match="no consumer `updat` at this dock. Did you mean `update`"):
        at.lease("updat", 1)


def test_a_trajectory_is_continued_by_another(dock, token):
    rollout = Consumer("rollout", ("prompt",), ("tokens",))
    at = dock(2, (rollout,))
    at.put(Batch(torch.arange(4), {"prompt": torch.arange(4)}))
    first = DockClient(at.addresses, token, "rollout 0")
    mine = first.lease("rollout", 4, wait=5)
    assert mine.turns.tolist() == [-1] * 4
    first.put(tokens([1, 2]), turn=0, version=3)
    first.put(tokens([2]), turn=1, version=4)
    first.close()

    def known() -> list[int]:
        with DockClient(at.addresses, token, "rollout 1") as other:
            return other.lease("rollout", 4, wait=5).turns.tolist()

    until(lambda: known() == [-1, 0, 1, -1])  # another shard's news come a moment after the put
    lease = at.lease("rollout", 4, wait=5)
    assert (lease.turns.tolist(), lease.versions.tolist()) == ([-1, 0, 1, -1], [0, 3, 4, 0])
    partial, turns = at.fetch_saved(lease)
    assert (partial.ids.tolist(), turns.tolist()) == ([1, 2], [0, 1])
    check(partial)
    at.put(tokens(range(4)))
    at.commit(lease)
    until(lambda: left(at) == 0)
    assert len(at.fetch_saved(lease)[0]) == 0


def test_an_answer_that_comes_late_is_not_taken_for_another(dock, token):
    at = dock(2)
    at.put(tokens(range(8)))
    with DockClient(at.addresses, token, "impatient", timeout=1.0) as other:
        other.fetch(torch.arange(8), ["tokens"])
        with at.services[0].state.lock, pytest.raises(Unreachable):
            other.fetch(torch.arange(8), ["tokens"])
        for rows in ([5, 1], [2, 6, 4]):
            batch = other.fetch(torch.tensor(rows), ["tokens"])
            assert batch.ids.tolist() == rows
            check(batch)


def test_committed_rows_that_a_shard_lists_leave_it(dock):
    """A new shard lists all its rows when it first reaches an index, which may have said before what is committed."""
    at = dock(1, (UPDATE,))
    at.put(tokens([1, 3, 5]))
    state = at.services[0].state
    with state.lock:
        state.index("update").mark_committed(numpy.array([1, 3]))
        state.apply(state._listing_update("update"))
    until(lambda: left(at) == 1)


def test_a_place_in_the_layout_is_not_changed(dock):
    at = dock(2)
    at.addresses.reverse()
    with pytest.raises(DockError, match="its rows would be looked for elsewhere"):
        at.configure((UPDATE,))
    with pytest.raises(DockError, match="several named update"):
        at.configure((UPDATE, UPDATE))


def test_what_the_indexes_say_is_asked_of_their_process_alone(dock):
    """A look whether enough is sampled costs one message, however many shards there are."""
    at = dock(4)
    at.put(tokens([0, 1, 2, 3, 4, 5, 6, 7]))
    until(lambda: at.index_status()["indexes"]["reward"]["ready"] == 8)
    before = at.status()
    for _ in range(1000):
        at.index_status()
    asked, *others = [now["received"] - then["received"] for now, then in zip(at.status(), before)]
    assert max(others) < asked / 10  # a status each, and now and then a word of another process
