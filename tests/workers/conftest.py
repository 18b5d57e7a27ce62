"""A tiny model, a mesh of this process alone, and the events that a test records."""

import json

import pytest
from torch.distributed.device_mesh import init_device_mesh

from distflow.telemetry import events
from workers.engines.embedded import build_model


@pytest.fixture
def model():
    return build_model(270, 0, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32)


@pytest.fixture(scope="module")
def mesh(alone):
    """A mesh of one rank."""
    return init_device_mesh("cpu", (1,))


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """`recorded(kind)`: the events that this test has recorded, by rank 3 in step 7."""
    monkeypatch.setattr(events, "_current", events.Events())
    events.current().open(path := tmp_path / "events.jsonl", 3)
    events.current().step = 7
    return lambda kind: [event for event in map(json.loads, path.read_text().splitlines()) if event["event"] == kind]
