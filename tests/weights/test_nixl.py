"""The puller reads a source's memory by NIXL; one that dies or stands still in the middle leaves no agent behind."""

import importlib.util
import os
import signal
import socket
import sys
from multiprocessing import Pipe
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
from fork_server import fork_process
from weights.test_transports import sockets

from distflow.rpc.connection import Connection, ConnectionEnded
from distflow.rpc.shared_memory import SharedMemoryPool
from distflow.weights.errors import NoTransport
from distflow.weights.transport import transports
from distflow.weights.transport.nixl import Nixl, NixlPuller

NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")
SIZE = 48 << 20


def give(sock: socket.socket, line: Any) -> None:
    """Be a source: send the same memory with other contents at each request, until the puller hangs up."""
    os.environ["UCX_TLS"] = "tcp"
    connection, memory = Connection(sock, "puller"), numpy.zeros(SIZE, numpy.uint8)
    end = Nixl().source_end({})
    line.send(sockets())
    try:
        while True:
            connection.receive()
            memory += 1
            end.send(connection, {}, memory, lambda _: None)
    except (OSError, ConnectionEnded) as error:
        end.close()
        line.send((type(error).__name__, sockets()))


class Source:
    """A process that gives, and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.line, line = Pipe()
        self.process = fork_process(give, theirs, line, daemon=True)
        theirs.close()
        line.close()
        self.idle = self.line.recv()
        self.connection = Connection(ours, "source")

    def pull(self, puller: NixlPuller, into: numpy.ndarray, moved: Any) -> None:
        self.connection.send({})
        header, size = self.connection.receive()
        puller.on_reply(header)
        puller.take(self.connection, size, 0, slice(0, SIZE), into, moved)


@pytest.fixture
def source(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    source = Source()
    yield source
    source.process.kill()
    source.process.join()


@NIXL
def test_it_reads_what_the_memory_has_now_in_counted_pieces(source):
    puller, into, counted = Nixl().puller_end({}, 10.0), numpy.zeros(SIZE, numpy.uint8), []
    for turn in (1, 2, 3):
        source.pull(puller, into, counted.append)
        assert (into == turn).all()
        assert sum(counted) == turn * SIZE
        assert max(counted) <= 2 << 20
    puller.close()
    source.connection.close()
    assert source.line.recv()[0] == "ConnectionEnded"


@NIXL
@pytest.mark.parametrize(("signal_sent", "error", "timeout"), [
    (signal.SIGKILL, "ConnectionError", 30.0), (signal.SIGSTOP, "TimeoutError", 3.0)])
def test_a_source_that_dies_or_stands_still_ends_the_read_and_its_agent(source, signal_sent, error, timeout):
    """An agent that is left writes the bytes of a late source into memory that has another use by then."""
    before = sockets()
    puller, into, counted = Nixl().puller_end({}, timeout), numpy.zeros(SIZE, numpy.uint8), []

    def moved(count: int) -> None:
        if not counted:
            os.kill(source.process.pid, signal_sent)
        counted.append(count)

    with pytest.raises(OSError, match="NIXL|nothing moved for 3 s") as failed:
        source.pull(puller, into, moved)
    puller.close()  # with the error's traceback alive
    assert failed.typename == error
    assert sockets() == before
    assert 0 < sum(counted) < SIZE
    assert (into[: sum(counted)] == 1).all()


@NIXL
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_the_next_source_goes_on_where_one_ended_in_the_middle(mover, events, sent):
    settings = {"transport": "nixl", "environ": {"UCX_TLS": "tcp"}}
    trainer, relay = mover("publisher", rank=0, ranks=1, **settings), mover("puller", who="relay", **settings)
    trainer.ask("publish", version=1, mib=64)
    relay.ask("pull", mib=64)
    relay.ask("end_while_read", number=sent)
    assert mover("puller", who="a", **settings).ask("pull", mib=64) == {"version": 1, "right": True}
    lost, pulled = events("weights_source_lost")[-1], events("weights_pulled")[-1]
    assert lost["source"] == "relay"
    assert lost["have"] > 0
    assert pulled["transports"] == ["nixl"]
    assert pulled["bytes"] < 72 << 20, "what had come did not come again"


@NIXL
def test_a_puller_that_hangs_up_in_the_middle_frees_the_source(source):
    puller, into = Nixl().puller_end({}, 10.0), numpy.zeros(SIZE, numpy.uint8)

    def leave(_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        source.pull(puller, into, leave)
    puller.close()
    source.connection.close()
    error, left = source.line.recv()
    assert error == "ConnectionResetError"
    assert len(left) < len(source.idle), "only the sockets of its agent went"


def test_one_whose_agent_cannot_be_made_is_no_transport(monkeypatch):
    broken = Mock(nixl_agent=Mock(side_effect=RuntimeError("no plugins")))
    monkeypatch.setattr("distflow.weights.transport.nixl._library", lambda: (broken, ()))
    monkeypatch.setenv("NIXL_PLUGIN_DIR", "/nowhere")
    with pytest.raises(NoTransport, match="no plugins.*NIXL_PLUGIN_DIR=/nowhere"):
        Nixl(wished=True)


def test_it_refuses_to_be_loaded_beside_ortools(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", sys)
    with pytest.raises(NoTransport, match="in a process of its own, or set  transport: tcp"):
        Nixl(wished=True)


@NIXL
def test_one_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "no_such_way")
    with pytest.raises(NoTransport, match="cannot start: .*UCX_TLS=no_such_way. Correct them, or set  transport: tcp"):
        transports("nixl", SharedMemoryPool("weights"))


@NIXL
def test_auto_leaves_it_out():
    assert list(transports("auto", SharedMemoryPool("weights")))[-1] == "tcp"
