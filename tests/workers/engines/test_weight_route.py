"""Weights on their way to ranks that only sample, by buckets, on real ranks."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from ranks import run_ranks

from workers.engines.weight_route import WeightRoute

SHAPES = {"first": (3, 5), "wide": (40,), "none": (0, 4), "scalar": (), "last": (7,)}


def weights_of(version: int):
    """Whole weights as an engine exports them: in memory that the next one overwrites."""
    memory = torch.empty(64)
    for number, (name, shape) in enumerate(SHAPES.items()):
        tensor = memory[: torch.Size(shape).numel()].view(shape)
        tensor.copy_(torch.full(shape, 10.0 * version + number))
        yield name, tensor.bfloat16() if name == "last" else tensor


def brought() -> list[dict[str, tuple[str, list[float]]]]:
    """What this rank has of two versions."""
    route, found = WeightRoute([1], [0, 1, 2]), []
    with mock.patch("workers.engines.weight_route.BUCKET_BYTES", 100):
        for version in range(2):
            weights = route.send_and_yield(weights_of(version)) if dist.get_rank() == 1 else \
                route.receive(torch.device("cpu"))
            found.append({name: (str(tensor.dtype), tensor.flatten().tolist()) for name, tensor in weights})
    return found


def test_whole_weights_come_to_all_ranks_that_sample():
    want = [{name: (str(tensor.dtype), tensor.flatten().tolist()) for name, tensor in weights_of(version)}
            for version in range(2)]
    assert run_ranks(3, brought) == [want] * 3
