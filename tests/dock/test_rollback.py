"""Commits that are rolled back: the same rows come again, and leave once their steps are released."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from docks import until

from distflow.data.batch import Batch
from distflow.dock import Consumer, DockClient, DockError, LeaseLost

ROWS = 4
ORDERS = Consumer("rollout", ("order",), ("tokens",))
TRAINS = Consumer("trainer", ("tokens",), (), step_rows=ROWS, can_roll_back=True)
BOTH = (ORDERS, TRAINS)


def put(at: DockClient, step: int, column: str = "tokens", **more) -> int:
    ids = torch.arange(step * ROWS, (step + 1) * ROWS)
    return at.put(Batch(ids, {column: ids * 10}), **more)


def train(at: DockClient, step: int, wait: float = 5.0) -> list[int]:
    """The values of a step's rows, which are committed."""
    lease = at.lease("trainer", ROWS, step=step, wait=wait)
    assert at.commit(lease)
    return at.fetch(lease)["tokens"].tolist()


def filled(at: DockClient, steps: int, first: int = 0) -> None:
    for step in range(first, steps):
        put(at, step, "order")
        lease = at.lease("rollout", ROWS, wait=5)
        put(at, step)
        at.commit(lease)


def held(at: DockClient) -> int:
    return sum(part["rows"] for part in at.status())


@pytest.mark.parametrize("shards", [1, 3])
def test_the_same_rows_come_again_and_leave_when_they_are_released(dock, shards):
    at = dock(shards, BOTH)
    filled(at, 4)
    seen = [train(at, step) for step in range(4)]
    assert held(at) == 4 * ROWS, "all are retained"
    with pytest.raises(DockError, match="step 2 of `trainer` is committed already"):
        at.lease("trainer", ROWS, step=2)
    at.release_before("trainer", 2)
    until(lambda: held(at) == 2 * ROWS)
    assert at.rollback("trainer", 2) == 2 * ROWS
    assert at.rollback("trainer", 2) == 0
    assert [sorted(train(at, step)) for step in (2, 3)] == [sorted(each) for each in seen[2:]]
    with pytest.raises(DockError, match="step 1 of `trainer` is committed already, and its rows have left"):
        at.rollback("trainer", 1)
    at.release_before("trainer", 5)
    until(lambda: held(at) == 0)
    filled(at, 5, first=4)  # which is released before it is trained on
    at.commit(at.lease("trainer", ROWS, step=4, wait=5))
    until(lambda: held(at) == 0)


def test_an_attempt_that_is_over_cannot_lease_renew_commit_or_release(dock, token):
    """It was cut off while it trained, and comes back when the next attempt has rolled back."""
    at = dock(1, BOTH)
    filled(at, 3)
    done, held = (at.lease("trainer", ROWS, step=step) for step in range(2))
    at.commit(done)
    with DockClient(at.addresses, token, "trainer 0", attempt=1) as new, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(at.lease, "trainer", ROWS, step=9, wait=30)
        until(lambda: at.services[0].state.waiting)
        assert new.rollback("trainer", 0) == ROWS
        with pytest.raises(LeaseLost, match="attempt 1 has begun"):
            waiting.result()
        for request in (lambda: at.commit(held), lambda: at.commit(done), lambda: at.renew(held),
                        lambda: at.lease("trainer", ROWS, step=1), lambda: at.peek("trainer", ROWS, least=1, step=1),
                        lambda: at.rollback("trainer", 0), lambda: at.release_before("trainer", 9)):
            with pytest.raises(LeaseLost, match="this process is of attempt 0 of `trainer`, but attempt 1 has begun"):
                request()
        assert sorted(row for step in range(3) for row in train(new, step)) == list(range(0, 30 * ROWS, 10))


def test_ranks_of_a_new_attempt_wait_for_the_rollback(dock, token):
    at = dock(1, BOTH)
    filled(at, 1)
    train(at, 0)
    with (DockClient(at.addresses, token, "trainer 1", attempt=1) as second, ThreadPoolExecutor(1) as pool,
          DockClient(at.addresses, token, "trainer 0", attempt=1) as first):
        waiting = pool.submit(second.lease, "trainer", ROWS, step=0, share=1, shares=2, wait=30)
        until(lambda: at.services[0].state.waiting)
        assert first.rollback("trainer", 0) == ROWS
        assert len(waiting.result()) == ROWS // 2


@pytest.mark.parametrize("shards", [1, 2])
def test_retained_steps_leave_for_rows_to_come(dock, shards):
    """A rollout that finds no room gets that of retained steps, the oldest first; never that of the newest two."""
    rollout = replace(ORDERS, step_rows=ROWS, row_bytes=16)
    at = dock(shards, (rollout, TRAINS), max_bytes=10 * ROWS * 16 // shards)
    for step in range(6):
        put(at, step, "order")
    for step in range(4):
        at.require("rollout", step)
        lease = at.lease("rollout", ROWS, wait=5)
        put(at, step)
        at.commit(lease)
        train(at, step)
    stored = sum(part["bytes"] for part in at.status())
    with at.services[0].state.lock:
        at.services[0].state.room.limit = stored + ROWS * 16
    for step in (4, 5):
        lease = at.lease("rollout", ROWS, wait=5)
        assert lease.ids.tolist() == list(range(step * ROWS, step * ROWS + ROWS))
    assert at.rollback("trainer", 2) == 2 * ROWS


def test_peers_that_reconnect_do_not_drop_retained_rows(dock, token):
    at = dock(2, BOTH)
    filled(at, 2)
    for step in range(2):
        train(at, step)
    for service in at.services:  # each sends the other its full updates again
        for outbox in service.state.outboxes.values():
            with service.state.lock:
                updates = outbox.full_updates()
            other = at.services[1 - service.state.storage.number].state
            with other.lock:
                for update in updates:
                    other.apply(update)
    assert held(at) == 2 * ROWS
    assert at.rollback("trainer", 0) == 2 * ROWS
