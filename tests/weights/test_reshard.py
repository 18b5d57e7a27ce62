"""Weights of a model sharded by FSDP2 arrive whole, bit for bit, for any number of ranks and size of bucket."""

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from benchmarks.group import peak_over
from distflow.errors import EngineError
from distflow.weights.reshard import gather_tensors

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


def fill(shards, targets, **options) -> None:
    for name, whole in gather_tensors(shards, into=targets, **options):
        if whole.data_ptr() != targets[name].data_ptr():
            targets[name].copy_(whole)


def every_bit(half: bool, target: torch.dtype, bucket_bytes: int) -> None:
    shards = dict(sharded(half).named_parameters())
    assert all(isinstance(shard, DTensor) for shard in shards.values())
    targets = {name: torch.full(shard.shape, torch.nan, dtype=target) for name, shard in shards.items()}
    fill(shards, targets, dtype=target, bucket_bytes=bucket_bytes)
    for name, shard in shards.items():
        assert torch.equal(targets[name], shard.full_tensor().to(target)), name


def every_way() -> None:
    for bucket_bytes in BUCKETS:
        every_bit(False, torch.float32, bucket_bytes)
    every_bit(False, torch.bfloat16, 64)
    every_bit(True, torch.float32, 64)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_targets_equal_the_full_tensors(ranks):
    run_ranks(ranks, every_way)


def mesh_of(*sizes: int):
    return init_device_mesh("cpu", sizes)


def placed() -> None:
    """Columns, copies, planes that tensor parallelism and FSDP cut both, and a tensor that is whole; alone and in
    buckets."""
    line, plane, whole = mesh_of(4), mesh_of(2, 2), torch.randn(12, 10, generator=torch.Generator().manual_seed(0))
    big = torch.randn(1024, 520, generator=torch.Generator().manual_seed(1))
    shards = {"plain": torch.arange(3.0)}
    for number, (mesh, *cuts) in enumerate([(line, Shard(1)), (line, Replicate()), (plane, Replicate(), Shard(0)),
                                            (plane, Shard(0), Shard(1)), (plane, Shard(1), Replicate())]):
        shards |= {f"small{number}": distribute_tensor(whole, mesh, cuts),
                   f"big{number}": distribute_tensor(big, mesh, cuts)}
    # FSDP cuts what tensor parallelism has left: a placement of its own kind
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = nn.Linear(10, 12, bias=False)
    both.weight.data.copy_(whole)
    parallelize_module(both, named["tp"], ColwiseParallel())
    shards["strided"] = fully_shard(both, mesh=named["dp"]).weight
    for bucket_bytes in BUCKETS:
        for name, tensor in gather_tensors(shards, bucket_bytes=bucket_bytes):
            expected = big if name.startswith("big") else shards["plain"] if name == "plain" else whole
            assert torch.equal(tensor, expected), name


def test_any_cut_of_any_mesh_arrives_whole():
    run_ranks(4, placed)


def refused() -> None:
    mesh = mesh_of(2)
    partial = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
    with pytest.raises(EngineError, match="`odd` is placed as"):
        list(gather_tensors({"odd": partial}))
    plane = mesh_of(2, 1)
    with pytest.raises(EngineError, match="cut twice along dimension 0"):
        list(gather_tensors({"odd": distribute_tensor(torch.ones(4, 4), plane, [Shard(0), Shard(0)])}))
    good = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with pytest.raises(EngineError, match=r"`a` has shape \[4, 4\] in training and \[4, 5\] in generation"):
        list(gather_tensors({"a": good}, into={"a": torch.zeros(4, 5)}))


def refused_on_a_plane() -> None:
    """Uneven tensor parallelism behind FSDP: nothing says any more which rows a rank has."""
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(EngineError, match="cut 2 ways along dimension 1, which they do not divide"):
        list(gather_tensors({"odd": distribute_tensor(torch.ones(4, 5), named, [Shard(0), Shard(1)])}))
    odd = nn.Linear(10, 5, bias=False)
    parallelize_module(odd, named["tp"], ColwiseParallel())
    with pytest.raises(EngineError, match="Leave it whole in the tensor-parallel plan"):
        list(gather_tensors({"odd": fully_shard(odd, mesh=named["dp"]).weight}))


def test_what_cannot_be_gathered_is_refused():
    run_ranks(2, refused)
    run_ranks(4, refused_on_a_plane)


def straight() -> None:
    """A large tensor is gathered where it is wanted, by rows and by columns."""
    source = torch.arange(1024.0 * 512).view(1024, 512)
    for dim in (0, 1):
        place = torch.zeros(1024, 512)
        (_, whole), = gather_tensors({"a": distribute_tensor(source, mesh_of(2), [Shard(dim)])}, into={"a": place})
        assert whole is place
        assert torch.equal(place, source)


def test_a_large_tensor_is_not_copied_twice():
    run_ranks(2, straight)


def by_columns() -> int:
    """The bytes by which a rank's memory grows at most while 32 MiB that are cut by columns are gathered to a target,
    once the allocator has settled."""
    place = torch.full((4096, 2048), torch.nan)
    shards = {"a": distribute_tensor(torch.ones(4096, 2048), mesh_of(2), [Shard(1)])}
    grown = min(peak_over(lambda: list(gather_tensors(shards, into={"a": place}))) for _ in range(4))
    assert bool((place == 1).all())
    return grown


def test_columns_are_gathered_a_few_rows_at_a_time():
    assert max(run_ranks(2, by_columns)) < 16 * 2**20
