"""Fixtures of docks: servers in this process with real sockets, for tests of the dock and of its connections."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.dock import Consumer, DockClient, StorageShardServer

REWARD = Consumer("reward", ("tokens",), ("rewards",))
UPDATE = Consumer("update", ("tokens", "rewards"))


@pytest.fixture
def token():
    return secrets.token_bytes(32)


@pytest.fixture
def dock(token):
    """`dock(shards, consumers)`: a client of a new dock; `dock.services` are its parts."""
    opened: list[StorageShardServer | DockClient] = []

    def make(shards: int = 1, consumers: tuple[Consumer, ...] = (REWARD, UPDATE),
             max_bytes: int | None = None) -> DockClient:
        services = [StorageShardServer(token) for _ in range(shards)]
        opened.extend(services)
        client = DockClient([service.start() for service in services], token, "tester", timeout=5.0)
        opened.append(client)
        client.configure(consumers, max_bytes)
        client.services = services
        return client

    yield make
    for one in reversed(opened):
        one.close()


def until(condition: Callable[[], object]) -> None:
    """Wait until something holds; fail the test if it does not within half a minute."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def tokens(ids: Iterable[int]) -> Batch:
    """Make rows of which row i has i % 5 tokens, all of them i."""
    ids = list(ids)
    return Batch(torch.tensor(ids, dtype=torch.int64),
                 {"tokens": Ragged.from_rows([torch.full((row % 5,), row) for row in ids])})
