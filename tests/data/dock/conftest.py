"""Docks for tests: services in this process with real sockets, or processes of their own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest

from distflow.data.dock import Consumer, Dock, Service

REWARD = Consumer("reward", ("tokens",), ("rewards",))
UPDATE = Consumer("update", ("tokens", "rewards"))


@pytest.fixture
def token() -> bytes:
    return secrets.token_bytes(32)


@pytest.fixture
def dock(token: bytes) -> Iterator[Callable[..., Dock]]:
    """`dock(warehouses, consumers)`: a client of a new dock; `dock.services` are its parts."""
    opened: list[Service | Dock] = []

    def make(warehouses: int = 1, consumers: tuple[Consumer, ...] = (REWARD, UPDATE), **limits) -> Dock:
        services = [Service(token, **limits) for _ in range(warehouses)]
        opened.extend(services)
        client = Dock([service.start() for service in services], token, "tester", patience=5.0)
        opened.append(client)
        client.meet(consumers)
        client.services = services
        return client

    yield make
    for one in reversed(opened):
        one.close()
