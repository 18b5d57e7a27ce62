"""Slices of training layouts, moved by real ranks, give back the whole state."""

import numpy
import pytest
import torch
from ranks import run_ranks
from stores import client

from distflow.weights.chunk_store import ChunkStore, Weights
from distflow.weights.errors import WeightsError
from distflow.weights.manifest import SUM, RankManifest, place_slices
from distflow.weights.shard_slice import ShardSlice, Split

TOKEN = bytes(range(32))


def layout(kind, model):
    """The model, cut as `kind` says, over all ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks = dist.get_world_size()
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replica", "shard")))
    else:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return dict(model.named_parameters())


def model():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Linear(24, 10), torch.nn.LayerNorm(10))


def move(port: int, kind, dtype):
    """Publish on all ranks, pull on rank 0: (name, tensor) as lists; and the bytes of each rank."""
    import torch.distributed as dist

    from distflow.weights.publisher import Publisher
    from distflow.weights.puller import Puller

    store = client(port)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    publisher = Publisher(store, TOKEN, rank=rank, ranks=ranks)
    publisher.publish(1, layout(kind, model()), dtype, split=Split(3, ("1.weight",)))
    dist.barrier()
    found = None
    if rank == 0:
        puller = Puller(store, TOKEN, "rollout")
        weights = puller.pull()
        found = [(name, tensor.clone()) for name, tensor in weights.tensors()]
        puller.close()
    dist.barrier()
    size = sum(content.slice.nbytes for content in publisher.held[-1].parts[rank].contents)
    publisher.close()
    return found, size


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp x tp", 4)])
def test_whole_tensors(store, kind, ranks):
    results = run_ranks(ranks, move, store.port, kind, None)
    expected = dict(model().named_parameters())
    assert [name for name, _ in results[0][0]] == list(expected)
    for name, tensor in results[0][0]:
        assert torch.equal(tensor, expected[name]), name
    sizes = [size for _, size in results]
    if kind != "fsdp x tp":  # what tp leaves whole is on a mesh of dp alone: FSDP does not know of the other copy
        assert sum(sizes) == sum(tensor.nbytes for tensor in expected.values()), "nothing is published twice"
    assert max(sizes) <= 3 * min(sizes)


@pytest.mark.parametrize("shapes", [[(2, 2), (1, 4)], [(2, 2)]], ids=["unlike", "too few"])
def test_slices_that_make_no_tensor(shapes):
    chunks = ChunkStore(1, "1.a")
    for rank, shape in enumerate(shapes):
        contents, size = place_slices([ShardSlice("w", shape, (0, 0), (1, 2), torch.uint8)], [0])
        chunks.add(rank, RankManifest(size, 64, contents, bytes(SUM)), b"", numpy.zeros(size, numpy.uint8))
    with pytest.raises(WeightsError, match="did all ranks publish the same tensors"):
        dict(Weights(chunks).tensors())
