"""Rows through shared memory: whole, never overwritten, and only between processes that can prove themselves."""

import os

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.dock import Consumer, DockClient
from distflow.dock.process import start
from distflow.rpc import shared_payloads
from distflow.rpc.errors import Refused
from distflow.rpc.shared_memory import SharedMemoryPool, memory_name
from distflow.rpc.shared_payloads import MappedSegments, Segments

UPDATE = Consumer("update", ("tokens",))
LONG = 20_000
REFUSED = "not its shared memory|not as large as it says"


def tokens(ids):
    return Batch(torch.tensor(list(ids)), {"tokens": Ragged.from_rows([torch.arange(LONG) + row for row in ids])})


def right(batch):
    return all(torch.equal(row, torch.arange(LONG) + number)
               for number, row in zip(batch.ids.tolist(), batch["tokens"].rows, strict=True))


def on_wire(dock):
    """Return the bytes that the kernel counted on a client's sockets: headers, and payloads that were not in memory."""
    total = 0
    for connection in dock.pool.connections.values():
        info = connection.sock.getsockopt(6, 11, 232)  # TCP_INFO: bytes acked and received, at 120 and 128
        total += int.from_bytes(info[120:128], "little") + int.from_bytes(info[128:136], "little")
    return total


@pytest.mark.parametrize("shared", [True, False])
def test_rows_between_processes(token, monkeypatch, shared):
    """Through memory on one machine, over the socket where the machines have different names; the same rows."""
    child = start(token)
    if not shared:
        monkeypatch.setenv("DISTFLOW_MACHINE", "another")
    with DockClient([child.address], token, "test") as dock:
        dock.configure((UPDATE,))
        kept = []
        for first in range(0, 20, 4):
            dock.put(tokens(range(first, first + 4)))
            lease = dock.lease("update", 4, wait=5)
            kept.append(dock.fetch(lease))
            dock.commit(lease)
        assert all(right(batch) for batch in kept), "a later answer has not been written over an earlier one"
        moved = 2 * 20 * LONG * 8
        status = dock.status()[0]
        assert status["sent"] + status["received"] > moved, "all bytes are counted, however they went"
        if shared:
            assert on_wire(dock) < moved / 5, "the first answer shows how large the next may be"
        else:
            assert on_wire(dock) > moved
    child.stop()


def test_memory_is_used_again_when_the_rows_are_gone(dock):
    at = dock(1, (UPDATE,))
    at.put(tokens(range(4)))
    for _ in range(6):
        assert right(at.fetch(torch.arange(4), ["tokens"]))
    connection, = at.pool.connections.values()
    assert len(connection.memory.pool.spare) + len(connection.memory.pool.used) <= 5


def test_rows_of_two_shards_come_in_memory_that_was_used_before(dock):
    at, kept = dock(2, (UPDATE,)), []
    at.put(tokens(range(8)))
    for _ in range(4):
        kept = [*kept[-1:], at.fetch(torch.tensor([5, 2, 7, 0]), ["tokens"])]
        assert all(right(batch) for batch in kept)
    used = [address for connection in at.pool.connections.values() for address in connection.memory.pool.used]
    assert kept[-1]["tokens"].values.data_ptr() in used


def test_an_answer_that_does_not_fit_comes_over_the_socket(dock):
    at = dock(1, (UPDATE,))
    at.put(tokens(range(40)))
    for rows in (1, 40, 2, 40, 39):
        assert right(at.fetch(torch.arange(rows), ["tokens"]))


def offered(token):
    segments = Segments(token)
    return segments, segments.offer()


def test_only_who_knows_the_token_can_have_made_the_memory(token):
    segments, offer = offered(token)
    assert MappedSegments.of_client(offer, token) is not None
    assert MappedSegments.of_client(offer, b"x" * 32) is None


@pytest.mark.parametrize("change", [{"machine": "another"}, {"address": [2**22, 3, 1, 1 << 20]},
                                    {"address": [os.getpid(), 10**6, 1, 1 << 20]}])
def test_who_is_elsewhere_shares_nothing(token, change):
    segments, offer = offered(token)
    assert MappedSegments.of_client(offer | change, token) is None


def test_other_files_and_memory_that_is_smaller_than_announced_are_refused(token, forged):
    _, offer = offered(token)
    mapped = MappedSegments.of_client(offer, token)
    for address in forged(memory_name("dock", token)):
        assert MappedSegments.of_client(offer | {"address": address}, token) is None
        with pytest.raises(ConnectionError, match=REFUSED):
            mapped.locate({"payload_at": address, "payload_size": 10}, 0)
        mapped.locate({"reply_at": address}, 0)
        with pytest.raises(ConnectionError, match=REFUSED):
            mapped.write({}, [bytes(1 << 19)], 1 << 19)
    with pytest.raises(Refused, match="does not fit"):
        mapped.locate({"payload_at": offer["address"], "payload_size": 1 << 40}, 0)


@pytest.mark.parametrize("size", [-1, 5000])
def test_lengths_that_do_not_fit_the_memory_are_refused_at_both_ends(token, size):
    segments, offer = offered(token)
    mapped = MappedSegments.of_client(offer, token)
    pool = SharedMemoryPool(memory_name("dock", token))
    small = pool.add(4096)
    with pytest.raises(Refused, match="does not fit"):
        mapped.locate({"payload_at": small, "payload_size": size}, 0)
    segments.offered = segments.pool.take(4096)
    with pytest.raises(Refused, match="does not fit into the 4096 that were offered"):
        segments.locate({"payload_size": size}, 0)


def test_a_machine_that_shares_nothing_claims_nothing(token, monkeypatch):
    monkeypatch.setattr(shared_payloads, "machine_name", lambda: "")
    assert Segments(token).offer() is None
    assert MappedSegments.of_client(None, token) is None
