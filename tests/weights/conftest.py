"""A store, processes that exchange weights by it, and the addresses of `forged.py`."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
from forged import forged
from weights.movers import Mover

__all__ = ["forged"]


@pytest.fixture
def token():
    return secrets.token_bytes(32)


@pytest.fixture
def events(tmp_path):
    """`events(kind)`: those that the processes of this test have recorded."""
    path = tmp_path / "events.jsonl"

    def read(kind: str = "") -> list[dict[str, Any]]:
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if kind in ("", event["event"])]

    read.path = str(path)
    return read


@pytest.fixture
def mover(store, token, events):
    """`mover("puller", who="a", …)`: a process of its own, gone at the end; a publisher is alone unless it is told."""
    made: list[Mover] = []

    def make(kind: str, token: bytes = token, **settings: Any) -> Mover:
        alone = {"rank": 0, "ranks": 1} if kind == "publisher" else {}
        made.append(Mover(kind, store.port, token, events=events.path, **{**alone, **settings}))
        return made[-1]

    yield make
    for one in made:
        if one.process.is_alive():
            one.go_on()
            one.kill()
