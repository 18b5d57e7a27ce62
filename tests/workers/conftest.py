"""A tiny model, and a mesh of this process alone."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

from workers.engines.embedded import build_model


@pytest.fixture
def model():
    return build_model(270, 0, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32)


@pytest.fixture(scope="module")
def mesh(alone):
    """A mesh of one rank."""
    return init_device_mesh("cpu", (1,))
