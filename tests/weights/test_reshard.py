"""Weights of a model sharded by FSDP2 arrive whole, bit for bit, for any number of ranks and size of bucket."""

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distflow.schema.errors import EngineError
from distflow.weights.reshard import gather_into

BUCKETS = (1, 50, 400, 1 << 20)


class Model(nn.Module):
    """Rows that divide by no number of ranks, fewer rows than ranks, one to three dimensions, half precision."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 4)
        self.inner = nn.Linear(4, 7)
        self.one_row = nn.Parameter(torch.randn(1, 5))
        self.cube = nn.Parameter(torch.randn(5, 2, 3))
        self.scale = nn.Parameter(torch.randn(2))

    def forward(self, tokens):
        return self.inner(self.embedding(tokens))


def sharded(half: bool) -> Model:
    model = Model().to(torch.bfloat16 if half else torch.float32)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model.inner, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gathered(half: bool, target: torch.dtype, bucket_bytes: int) -> None:
    shards = dict(sharded(half).named_parameters())
    assert all(isinstance(shard, DTensor) for shard in shards.values())
    targets = {name: torch.full(shard.shape, torch.nan, dtype=target) for name, shard in shards.items()}
    places = {name: tensor.data_ptr() for name, tensor in targets.items()}
    gather_into(shards, targets, bucket_bytes)
    for name, shard in shards.items():
        assert torch.equal(targets[name], shard.full_tensor().to(target)), name
        assert targets[name].data_ptr() == places[name]


def every_way() -> None:
    for bucket_bytes in BUCKETS:
        gathered(False, torch.float32, bucket_bytes)
    gathered(False, torch.bfloat16, 64)
    gathered(True, torch.float32, 64)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_targets_equal_the_full_tensors(ranks):
    run_ranks(ranks, every_way)


def mixed() -> None:
    """Half of the targets in another type, and one parameter that is not sharded at all."""
    shards = dict(sharded(False).named_parameters())
    shards["plain"] = torch.arange(3.0)
    kinds = {name: torch.bfloat16 if index % 2 else torch.float32 for index, name in enumerate(shards)}
    targets = {name: torch.zeros(shard.shape, dtype=kinds[name]) for name, shard in shards.items()}
    gather_into(shards, targets)
    for name, shard in shards.items():
        whole = shard.full_tensor() if isinstance(shard, DTensor) else shard
        assert torch.equal(targets[name], whole.to(kinds[name])), name


def refused() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    good = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    columns, copies = (distribute_tensor(torch.ones(4, 4), mesh, [place]) for place in (Shard(1), Replicate()))
    plane = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2, 1)), [Shard(0), Replicate()])
    errors = []
    for shards, targets in (({"a": columns}, {"a": torch.zeros(4, 4)}), ({"a": copies}, {"a": torch.zeros(4, 4)}),
                            ({"a": plane}, {"a": torch.zeros(4, 4)}), ({"a": good}, {"b": torch.zeros(4, 4)}),
                            ({"a": good}, {"a": torch.zeros(4, 4), "head": torch.zeros(1)}),
                            ({"a": good}, {"a": torch.zeros(4, 5)})):
        with pytest.raises(EngineError) as error:
            gather_into(shards, targets)
        errors.append(str(error.value))
    return errors


def buckets() -> list[tuple[int, torch.dtype]]:
    """How many elements of what type each gather moved, for buckets of two small parameters."""
    moved, whole = [], torch.distributed.all_gather
    mesh = init_device_mesh("cpu", (2,))
    shards = {name: distribute_tensor(torch.ones(rows, 2), mesh, [Shard(0)])
              for name, rows in (("a", 4), ("b", 4), ("big", 40), ("c", 4), ("half", 4))}
    targets = {name: torch.zeros(shard.shape) for name, shard in shards.items()}
    targets["half"] = targets["half"].bfloat16()
    torch.distributed.all_gather = lambda everyone, mine, **named: moved.append((2 * len(mine), mine.dtype)) or whole(
        everyone, mine, **named)
    try:
        gather_into(shards, targets, bucket_bytes=64)
    finally:
        torch.distributed.all_gather = whole
    return moved


def test_a_bucket_is_no_larger_than_asked_but_for_one_parameter_and_of_one_type():
    expected = [(16, torch.float32), (80, torch.float32), (8, torch.float32), (8, torch.bfloat16)]
    assert run_ranks(2, buckets) == [expected] * 2


def test_types_may_mix():
    run_ranks(2, mixed)


def test_what_cannot_be_gathered_is_refused():
    columns, copies, plane, other, more, shape = run_ranks(2, refused)[0]
    assert "parameter `a` is placed as (Shard(dim=1),)" in columns
    assert "Replicate()" in copies
    assert "a mesh of 2 dimensions" in plane
    assert "only one has ['a', 'b']" in other
    assert "only one has ['head']" in more
    assert "shape [4, 4] in training and [4, 5] in generation" in shape
