"""Commits that are rolled back: the same rows come again, and leave once their steps are released."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from distflow.data.batch import Batch
from distflow.dock import Consumer, DockClient, DockError, Full, StorageShardServer

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


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


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


def test_an_earlier_lease_cannot_commit_what_was_rolled_back(dock):
    at = dock(1, BOTH)
    filled(at, 1)
    old = at.lease("trainer", ROWS, step=0)
    at.commit(old)
    at.rollback("trainer", 0)
    assert not at.commit(old), "that was its first commit, which does not stand any more"
    assert len(at.lease("trainer", ROWS, step=0)) == ROWS


def test_retained_steps_make_room_for_a_new_one(dock):
    """A producer that waits for room gets that of retained steps, the oldest first; never that of the newest two."""
    at = dock(1, BOTH, max_rows=4 * ROWS)
    filled(at, 4)
    for step in range(3):
        train(at, step)
    put(at, 4, "order", wait=5.0)
    assert held(at) == 4 * ROWS
    with pytest.raises(Full):
        put(at, 5, "order", wait=0.1)
    assert at.rollback("trainer", 1) == 2 * ROWS


def test_eviction_elsewhere_is_requested_once_however_often_a_producer_wakes(dock, monkeypatch):
    at = dock(1, BOTH, max_rows=ROWS)
    put(at, 0, "order")
    state, asked = at.services[0].state, []
    monkeypatch.setattr(state, "evict", lambda: asked.append(time.monotonic()))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(put, at, 1, "order", wait=0.3)
        while not waiting.done():
            with state.changed:
                state.changed.notify_all()
            time.sleep(0.005)
        with pytest.raises(Full):
            waiting.result()
    assert len(asked) == 1


def test_memory_pressure_without_effect_wakes_no_request(dock, monkeypatch):
    at = dock(1, BOTH)
    filled(at, 2)
    for step in range(2):
        train(at, step)
    state, woken = at.services[0].state, []
    with state.changed:
        monkeypatch.setattr(state.changed, "notify_all", lambda: woken.append(True))
        state.apply({"kind": "memory_pressure"})
        assert woken == []
        monkeypatch.undo()


def test_peers_that_reconnect_do_not_drop_retained_rows(dock, token):
    at = dock(2, BOTH)
    filled(at, 2)
    for step in range(2):
        train(at, step)
    for service in at.services:  # each sends the other its full updates again
        for outbox in service.state.outboxes.values():
            with service.state.changed:
                updates = outbox.full_updates()
            other = at.services[1 - service.state.storage.number].state
            with other.changed:
                for update in updates:
                    other.apply(update)
    assert held(at) == 2 * ROWS
    assert at.rollback("trainer", 0) == 2 * ROWS


def test_a_restored_process_knows_what_was_rolled_back(token, tmp_path):
    def start() -> tuple[StorageShardServer, DockClient]:
        snapshot = tmp_path / "warehouse-0.dock" if made else None
        service = StorageShardServer(token, journal=tmp_path / "j", snapshot=snapshot)
        at = DockClient([service.start()], token, "tester")
        at.configure(BOTH)
        made.append(service)
        return service, at

    made: list[StorageShardServer] = []
    service, at = start()
    filled(at, 2)
    at.snapshot(tmp_path)
    for step in range(2):
        train(at, step)
    at.rollback("trainer", 1)
    at.close()
    service.close()
    service, at = start()
    assert len(at.lease("trainer", ROWS, step=1, wait=5)) == ROWS
    with pytest.raises(DockError, match="step 0 of `trainer` is committed already, and its rows have left"):
        at.rollback("trainer", 0)
    at.close()
    service.close()
