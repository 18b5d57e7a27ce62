"""Who does not know the token gets nothing, and costs nothing."""

import contextlib
import logging
import socket
import struct
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

from distflow.data.row_copies import ScatteredRuns
from distflow.dock import DockClient, StorageShardServer
from distflow.dock.errors import DockFull
from distflow.rpc import connection as module
from distflow.rpc.connection import Connection, connect
from distflow.rpc.errors import NoThread, Refused, RpcError, Unreachable
from distflow.rpc.messages import MACHINE_MEMORY

LOG = "distflow.dock"


@pytest.fixture
def service(token):
    service = StorageShardServer(token)
    service.start()
    yield service
    service.close()


def logged(caplog, words):
    """The log is written by the service's thread."""
    end = time.monotonic() + 60
    while not any(words in record.getMessage() for record in caplog.records):
        assert time.monotonic() < end, caplog.text
        time.sleep(0.005)


def test_a_wrong_token_is_refused_and_logged(service, caplog):
    with caplog.at_level(logging.WARNING, LOG):
        with pytest.raises(Refused, match="its token is not that of the run"):
            DockClient([service.address], b"x" * 32, "stranger").status()
        logged(caplog, "does not know the token of this run")
    assert "refused 127.0.0.1:" in caplog.text


def test_a_server_that_does_not_know_the_token_is_refused(token):
    """It could answer anything: so it must prove itself too."""
    impostor = StorageShardServer(b"y" * 32)
    impostor.server._handle = lambda sock, peer: (sock.sendall(bytes(32)), sock.recv(64), sock.sendall(bytes(32)))
    impostor.start()
    with pytest.raises(Refused, match="does not know this run's token"):
        connect(impostor.address, token, 5.0)
    impostor.close()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n" * 8, b"", bytes(64)])
def test_noise_is_refused(service, caplog, sent):
    with caplog.at_level(logging.WARNING, LOG):
        with socket.create_connection(service.address) as sock:
            sock.sendall(sent)
            with contextlib.suppress(OSError):  # it may have been hung up on already
                sock.shutdown(socket.SHUT_WR)
            assert len(sock.recv(4096)) == 32, "a challenge, and nothing else"
            with contextlib.suppress(ConnectionResetError):  # what it did not read resets the connection
                assert sock.recv(4096) == b""
        logged(caplog, "refused 127.0.0.1:")


def test_silence_is_hung_up_on(service, monkeypatch, caplog):
    monkeypatch.setattr(module, "HANDSHAKE_LIMIT", 0.05)
    with socket.create_connection(service.address) as sock:
        sock.settimeout(5)
        assert len(sock.recv(32)) == 32
        assert sock.recv(32) == b""


@pytest.mark.parametrize("head", [(b"DFM1", 0xFFFFFFFF, 0), (b"DFM1", 0, 1 << 63), (b"DFM1", 0, MACHINE_MEMORY + 1),
                                  (b"DFD2", 0, 0)])
def test_lengths_are_checked_before_anything_is_allocated(service, token, head):
    connection = connect(service.address, token, 5.0)
    connection.send({"op": "hello", "who": "me", "session": "s"})
    connection.receive()
    connection.sock.sendall(struct.pack("<4sIQ", *head))
    with pytest.raises((module.ConnectionEnded, ConnectionResetError)):
        connection.receive()
    connection.close()


def test_a_payload_is_no_longer_than_what_was_announced():
    ours, theirs = (Connection(sock, "peer") for sock in socket.socketpair())
    for _ in range(2):
        theirs.send({}, [bytes(100)])
    assert ours.receive(most=100) == ({}, 100)
    ours.skip(100)
    with pytest.raises(Refused, match="a payload of 100 bytes, where at most 99 are expected"):
        ours.receive(most=99)


def test_the_first_message_has_no_payload(service, token, caplog):
    connection = connect(service.address, token, 5.0)
    connection.send({"op": "hello", "who": "me", "session": "s"}, [bytes(1)])
    with pytest.raises((module.ConnectionEnded, ConnectionResetError)):
        connection.receive()
    connection.close()
    logged(caplog, "a payload of 1 bytes, where at most 0 are expected")


def test_a_request_that_makes_no_sense_is_answered(service, token):
    connection = connect(service.address, token, 5.0)
    connection.send({"op": "hello", "who": "me", "session": "s"})
    connection.receive()
    for header, buffers in (({"op": "dance"}, [b"x" * 99]), ({}, []), ({"op": "lease", "consumer": 3}, [])):
        connection.send(header, buffers)
        reply, size = connection.receive()
        assert (reply["error"], size) == ("DockError", 0)
    connection.close()


def test_a_token_that_could_be_guessed_is_refused(token):
    for make in (lambda: StorageShardServer(b"secret"), lambda: connect(("127.0.0.1", 1), b"secret", 1.0)):
        with pytest.raises(RpcError, match="at least 16"):
            make()


@pytest.fixture
def no_threads():
    """Thread starts fail, since no address space has room for their stacks; returns the function that ends it."""
    threading.stack_size(1 << 46)
    yield lambda: threading.stack_size(0)
    threading.stack_size(0)


def test_a_server_without_threads_names_the_reason_once_and_serves_when_it_can(service, token, no_threads, caplog):
    client = DockClient([service.address], token, "rollout 0", timeout=0.5)
    with caplog.at_level(logging.WARNING, LOG), pytest.raises(NoThread, match=r"has no thread left .*`ulimit -u`"):
        client.configure([])
    assert sum("has no thread for" in record.getMessage() for record in caplog.records) == 1
    no_threads()
    client.configure([])


def test_a_dock_without_memory_names_the_reason_once(service, token, caplog):
    service.actions["status"] = lambda request: numpy.empty(1 << 60, numpy.uint8)
    client = DockClient([service.address], token, "rollout 0")
    with caplog.at_level(logging.ERROR, LOG):
        for _ in range(3):
            with pytest.raises(DockFull, match=r"no memory left for `status` .* dock_gib"):
                client.pool.ask(service.address, {"op": "status"})
    assert len(caplog.records) == 1


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = sock.getsockname()
    with pytest.raises(Unreachable, match="cannot be reached for 0.1 s"):
        DockClient([address], bytes(32), "me", timeout=0.1).status()


def test_a_port_that_is_taken(service, token):
    with pytest.raises(RpcError, match="cannot listen at 127.0.0.1"):
        StorageShardServer(token, port=service.address[1])


@pytest.mark.parametrize("count", [1, 20])
def test_a_large_buffer_is_not_copied_beside_scattered_runs(count):
    ours, theirs = (Connection(sock, "peer") for sock in socket.socketpair())
    rows = numpy.arange(1 << 16, dtype=numpy.uint8)
    large = numpy.arange(8 << 20, dtype=numpy.uint8)
    parts = [ScatteredRuns(rows, numpy.array([40, 7]), numpy.array([90, 7000]), 1), large.data] * count

    def receive():
        buffer = torch.empty(theirs.receive()[1], dtype=torch.uint8).numpy()  # torch's memory is not traced
        theirs.take(buffer.data)
        return buffer

    with ThreadPoolExecutor(1) as other:
        arrived = other.submit(receive)
        tracemalloc.start()
        ours.send({}, parts)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < len(large) / 8
    expected = numpy.concatenate([rows[40:90], rows[7:7000], large] * count)
    assert numpy.array_equal(arrived.result(), expected)
    assert ours.sent == theirs.received
    for connection in (ours, theirs):
        connection.close()
