"""The dock of `docks.py`, and its processes."""

import pytest
from docks import dock, token

from distflow.dock.process import ShardProcess, start

__all__ = ["children", "dock", "token"]


@pytest.fixture
def children(token):
    """`children(**arguments)` starts a process of the dock; all end with the test."""
    started: list[ShardProcess] = []

    def make(**arguments) -> ShardProcess:
        started.append(start(token, **arguments))
        return started[-1]

    yield make
    for child in started:
        if child.process.stdin.closed:
            continue
        child.stop()
        assert child.process.status is not None
