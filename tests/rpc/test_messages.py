"""What is no message is refused."""

import pytest

from distflow.rpc import messages
from distflow.rpc.errors import RpcError
from distflow.rpc.messages import frame, read_lengths


def test_a_header_that_no_message_has_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="not a message of distflow"):
        read_lengths(b"GET / HTTP/1.1\r\n")
    monkeypatch.setattr(messages, "_MAX_HEADER", 5)
    with pytest.raises(RpcError, match="too long"):
        frame({"many": "rows"})
