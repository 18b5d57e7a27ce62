"""Sealed messages are read back up to the first that is torn."""

import pytest

from distflow.rpc import messages
from distflow.rpc.errors import RpcError
from distflow.rpc.messages import frame, read_lengths, read_sealed, sealed

MESSAGES = [({"step": 1}, [b"abc", memoryview(b"defg")]), ({}, []), ({2: "two"}, [bytes(99)])]


def test_they_come_back_as_they_were():
    whole = b"".join(part for header, buffers in MESSAGES for part in sealed(header, buffers))
    found = list(read_sealed(whole))
    assert [(header, bytes(payload)) for header, payload, _ in found] == \
        [(header, b"".join(buffers)) for header, buffers in MESSAGES]
    assert found[-1][2] == len(whole)


def test_torn_ones_are_left_out():
    first, second = (b"".join(sealed(*message)) for message in MESSAGES[::2])
    for size in range(len(second)):
        assert len(list(read_sealed(first + second[:size]))) == 1
        torn = bytearray(first + second)
        torn[len(first) + size] ^= 1
        assert len(list(read_sealed(torn))) == 1


def test_a_header_that_no_message_has_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="not a message of distflow"):
        read_lengths(b"GET / HTTP/1.1\r\n")
    monkeypatch.setattr(messages, "_MAX_HEADER", 5)
    with pytest.raises(RpcError, match="too long"):
        frame({"many": "rows"})
