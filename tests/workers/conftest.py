"""A tiny model, and a process group of this process alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from workers.engines.embedded import build_model


@pytest.fixture
def model():
    return build_model(270, 0, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32)


@pytest.fixture(scope="session")
def mesh():
    """A mesh of one rank; real collectives, over a group of one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
