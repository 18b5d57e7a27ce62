"""Rows through shared memory: whole, never overwritten, and only between processes that can prove themselves."""

import socket

import numpy
import pytest
import torch
from docks import until

from distflow.data.batch import Batch, Ragged
from distflow.dock import Consumer, DockClient, DockError
from distflow.dock.process import start
from distflow.errors import ColumnError
from distflow.rpc.connection import Connection
from distflow.rpc.errors import Refused, Unreachable
from distflow.rpc.shared_heap import SharedHeap
from distflow.rpc.shared_payloads import MappedHeap, ServedHeap, heap_name

UPDATE = Consumer("update", ("tokens",))
LONG = 20_000


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
            assert on_wire(dock) < moved / 500
        else:
            assert on_wire(dock) > moved
    child.stop()


def test_rows_are_written_once_and_read_where_they_are(dock):
    """The client writes into the shard's memory, and nothing but what says where rows lie comes back by the socket."""
    at = dock(2, (UPDATE,))
    at.put(tokens(range(8)))
    ids = numpy.arange(0, 8, 2)
    columns, memories = at.services[0].state.storage.read(ids, ["tokens"])
    assert memories[0].nbytes > 4 * LONG * 8
    begin = int(columns["tokens"].begin[-1, 1])
    mapped = at.pool.memory_of(at.addresses[0])
    assert mapped[begin : begin + 16].view(numpy.int64).tolist() == [2, 3]
    with pytest.raises(ValueError, match="read-only"):
        mapped[begin] = 1
    assert right(at.fetch(torch.tensor([5, 2, 7, 0]), ["tokens"]))


def test_rows_that_are_being_read_stay_where_they_are(dock, token):
    """Others commit them and put rows of their own meanwhile; what the reader holds is free when it has read it."""
    at = dock(1, (UPDATE,))
    at.put(tokens(range(4)))
    storage, request = at.services[0].state.storage, {"op": "fetch", "columns": ["tokens"]}
    request |= {"ids": numpy.arange(4).tobytes()}
    with DockClient(at.addresses, token, "reader") as reader, DockClient(at.addresses, token, "dead") as dead:
        for client in (reader, dead):
            assert "in_place" in client.pool.ask(at.addresses[0], request)[0]
        at.commit(at.lease("update", 4))
        assert storage.nbytes == 0
        at.put(tokens(range(8, 12)))
        first = int(storage.read(numpy.arange(8, 12), ["tokens"])[0]["tokens"].begin.min())
        assert first > 4 * LONG * 8, "not in their place"
        assert reader.pool.release(at.addresses)
    until(lambda: not [each for each in at.services[0].server.connections if each.memory.held])
    at.put(tokens(range(12, 16)))
    assert int(storage.read(numpy.arange(12, 16), ["tokens"])[0]["tokens"].begin.min()) < first


def wait_until_nothing_is_held(at):
    """Wait until no shard holds rows for a reader; none is asked for anything else."""
    until(lambda: not [one for each in at.services for one in each.server.connections if one.memory.held])
    storages = [each.state.storage for each in at.services]
    until(lambda: all(0 <= each.heap.taken() - each.nbytes < 64 for each in storages))


def test_what_is_held_for_a_request_is_released_when_another_process_refuses_it(dock):
    at = dock(2, (UPDATE,))
    at.put(tokens(range(0, 8, 2)))
    with pytest.raises(ColumnError, match="shard 1 has never seen rows"):
        at.fetch(torch.arange(8), ["tokens"])
    wait_until_nothing_is_held(at)
    assert [each["heap"] - each["bytes"] < 64 for each in at.status()] == [True, True]
    at.put(tokens(range(1, 8, 2)))
    at.services[1].close()
    at.pool.timeout = 0.2
    with pytest.raises(Unreachable):
        at.fetch(torch.arange(8), ["tokens"])
    wait_until_nothing_is_held(at)


def test_room_that_was_given_is_free_again_when_its_connection_ends(dock, token):
    at = dock(1, (UPDATE,))
    heap = at.services[0].state.storage.heap
    with DockClient(at.addresses, token, "one that dies within a put") as other:
        for _ in range(2):
            assert other.pool.ask(at.addresses[0], {"op": "reserve", "size": 1 << 20})[0]["at"] == 0, "one at a time"
        assert other.pool.ask(at.addresses[0], {"op": "status"})[0]["rows"] == 0
    until(lambda: len(at.services[0].server.connections) == 1)
    assert heap.offset_of(heap.take(1 << 22)) == 0


@pytest.mark.parametrize("size", [-1, 0, 1 << 60])
def test_room_that_no_payload_needs_is_not_given(dock, size):
    at = dock(1, (UPDATE,))
    with pytest.raises(DockError, match=f"a payload of {size} bytes"):
        at.pool.ask(at.addresses[0], {"op": "reserve", "size": size})


def test_a_server_without_room_for_it_says_so(dock, monkeypatch):
    at = dock(1, (UPDATE,))
    at.services[0].state.storage.heap.starts, at.services[0].state.storage.heap.ends = [0], [1 << 20]
    with pytest.raises(DockError, match="bytes are not free in memory of"):
        at.put(tokens(range(40)))
    at.put(tokens([1]))
    assert right(at.fetch(torch.tensor([1]), ["tokens"]))


def offered(token):
    served = ServedHeap(SharedHeap(heap_name(token), 1 << 20))
    return served, served.offer()


def test_only_who_knows_the_token_can_have_made_the_memory(token):
    served, offer = offered(token)
    assert MappedHeap.of_server(offer, token) is not None
    assert MappedHeap.of_server(offer, b"x" * 32) is None


def test_other_files_and_memory_that_is_smaller_than_announced_are_refused(token, forged):
    served, offer = offered(token)
    for address in forged(heap_name(token)):
        assert MappedHeap.of_server(offer | {"address": address}, token) is None


@pytest.mark.parametrize("at", [-1, 1 << 20])
def test_a_client_writes_nothing_outside_of_the_heap(token, at):
    served, offer = offered(token)
    ours, theirs = (Connection(sock, "peer") for sock in socket.socketpair())
    ours.memory = MappedHeap.of_server(offer, token)
    theirs.send({"at": at})
    with pytest.raises(Refused, match="but its memory has 1048576"):
        ours.send({"op": "put"}, [bytes(1 << 19)])
    for connection in (ours, theirs):
        connection.close()
