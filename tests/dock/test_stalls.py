"""Slow, stopped or too many clients do not hold up others, and what they leased comes back."""

import contextlib
import errno
import logging
import socket
import time

import pytest
import torch
from docks import until

from distflow.data.batch import Batch
from distflow.dock import Consumer, DockClient, DockError, StorageShardServer, TimedOut
from distflow.rpc import connection as rpc
from distflow.rpc import server
from distflow.rpc.connection import connect
from distflow.rpc.errors import Refused
from distflow.rpc.messages import frame

UPDATE = Consumer("update", ("tokens",))


def tokens(ids, width=1):
    ids = torch.tensor(list(ids), dtype=torch.int64)
    return Batch(ids, {"tokens": ids[:, None].expand(-1, width).contiguous()})


def raw(dock, token, session="raw"):
    """A connection that sends what the test wants."""
    connection = connect(dock.addresses[0], token, 5.0)
    connection.send({"op": "hello", "who": session, "session": session})
    connection.receive()
    return connection


def test_a_slow_stranger_has_a_limit_for_all_of_its_proof(dock, monkeypatch):
    monkeypatch.setattr(rpc, "HANDSHAKE_LIMIT", 0.3)
    at, began = dock(), time.monotonic()
    with socket.create_connection(at.addresses[0]) as stranger, contextlib.suppress(ConnectionError):
        for _ in range(600):
            stranger.send(b"x")
            time.sleep(0.05)
    assert time.monotonic() - began < 20


def test_strangers_are_few_and_keep_nobody_out(dock, token, monkeypatch):
    monkeypatch.setattr(server, "MOST", 4)
    monkeypatch.setattr(server, "GRACE", 0.05)
    at = dock()
    strangers = [socket.create_connection(at.addresses[0]) for _ in range(12)]
    with DockClient(at.addresses, token, "late") as late:
        assert late.status()[0]["rows"] == 0
    assert len(at.services[0].server.handshakes.pending) <= 4
    strangers[0].settimeout(20)
    strangers[0].recv(32)
    with pytest.raises(ConnectionResetError):
        strangers[0].recv(32)
    at.services[0].close()
    until(lambda: not at.services[0].server.handshakes.pending)
    for stranger in strangers:
        stranger.close()


def test_a_connection_that_cannot_be_taken_is_not_the_last(token, caplog):
    class Scarce:
        """A listening socket that once finds no file descriptor."""

        def __init__(self, sock):
            self.sock, self.left = sock, 1

        def accept(self):
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.EMFILE, "too many open files")
            return self.sock.accept()

        def __getattr__(self, name):
            return getattr(self.sock, name)

    service = StorageShardServer(token)
    service.server.socket = Scarce(service.server.socket)
    with (caplog.at_level(logging.WARNING, "distflow.dock"), DockClient([service.start()], token, "one") as client,
          pytest.raises(DockError, match="no place in a dock yet")):
        client.layout  # noqa: B018 - asks
    assert "cannot take a connection: [Errno 24] too many open files" in caplog.text
    service.close()


def test_a_client_that_takes_no_byte_is_hung_up_on_and_its_lease_is_given_to_others(dock, token, monkeypatch, caplog):
    monkeypatch.setattr(rpc, "STALL_LIMIT", 0.3)
    at = dock(1, (UPDATE,))
    at.put(tokens(range(4), 1 << 20))
    stuck = raw(at, token, "stuck")
    stuck.send({"op": "lease", "consumer": "update", "count": 4, "least": 4, "wait": 1, "step": None, "share": 0,
                "shares": 1, "request": 1, "attempt": 0})
    stuck.skip(stuck.receive()[1])
    stuck.send({"op": "fetch", "ids": torch.arange(4).numpy().tobytes(), "columns": ["tokens"]})
    assert at.lease("update", 4, wait=10).ids.tolist() == [0, 1, 2, 3]
    assert "hung up on stuck" in caplog.text
    stuck.close()


def test_a_client_that_stops_within_a_put_has_put_nothing(dock, token, monkeypatch, caplog):
    monkeypatch.setattr(rpc, "STALL_LIMIT", 0.3)
    at = dock(1, (UPDATE,))
    stuck = raw(at, token, "stuck")
    message = {"op": "put", "ids": torch.arange(4).numpy().tobytes(), "columns": [], "turn": None, "versions": b""}
    stuck.sock.sendall(frame(message, 1000) + bytes(500))
    until(lambda: "hung up on stuck" in caplog.text)
    assert at.put(tokens(range(4))) == 4
    stuck.close()


def test_an_answer_that_was_not_waited_for_is_not_taken_for_another(dock, token):
    """The second of two processes refuses; the late reply of the first one must be discarded."""
    at = dock(2, (UPDATE,))
    at.put(tokens(range(8)))
    at.services[1].close()
    impostor = StorageShardServer(bytes(32), port=at.addresses[1][1])
    impostor.start()
    with DockClient(at.addresses, token, "one") as other:
        other.fetch(torch.tensor([0]), ["tokens"])
        with pytest.raises(Refused):
            other.fetch(torch.arange(2), ["tokens"])
        assert other.fetch(torch.tensor([6, 2]), ["tokens"]).ids.tolist() == [6, 2]
    impostor.close()


def test_a_list_that_was_long_on_its_way_opens_nothing_again(dock):
    """A shard listed its rows for a new connection; their rewards came before the list arrived."""
    at = dock(1, (Consumer("reward", ("tokens",), ("rewards",)), Consumer("update", ("tokens", "rewards"))))
    state = at.services[0].state
    at.put(tokens(range(2)))
    with state.lock:
        late = state._listing_update("reward")
    lease = at.lease("reward", 2)
    at.put(Batch(lease.ids, {"rewards": lease.ids.float()}))
    assert at.commit(lease)
    with state.lock:
        state.apply(late)
    with pytest.raises(TimedOut):
        at.lease("reward", 1, wait=0.1)
