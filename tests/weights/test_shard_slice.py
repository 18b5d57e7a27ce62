"""Slices of training layouts, moved by real ranks, give back the whole state, and every slice of it."""

import dataclasses

import pytest
import torch
from ranks import run_ranks
from stores import client

from distflow.weights.errors import WeightsError
from distflow.weights.shard_slice import ShardSlice

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


def move(port: int, kind, dtype, wanted):
    """Publish on all ranks, pull on rank 0: (name, tensor) as lists; and the bytes of each rank."""
    import torch.distributed as dist

    from distflow.weights.publisher import Publisher
    from distflow.weights.puller import Puller

    store = client(port)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    publisher = Publisher(store, TOKEN, rank=rank, ranks=ranks)
    publisher.publish(1, layout(kind, model()), dtype)
    dist.barrier()
    found = None
    if rank == 0:
        puller = Puller(store, TOKEN, "rollout")
        weights = puller.pull(wanted=wanted)
        found = [(name, tensor.clone()) for name, tensor in weights.tensors()]
        puller.close()
    dist.barrier()
    size = sum(content.slice.nbytes for content in publisher.held[-1].parts[rank].contents)
    publisher.close()
    return found, size


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp x tp", 4)])
def test_whole_tensors(store, kind, ranks):
    results = run_ranks(ranks, move, store.port, kind, None, None)
    expected = dict(model().named_parameters())
    assert [name for name, _ in results[0][0]] == list(expected)
    for name, tensor in results[0][0]:
        assert torch.equal(tensor, expected[name]), name
    sizes = [size for _, size in results]
    if kind != "fsdp x tp":  # what tp leaves whole is on a mesh of dp alone: FSDP does not know of the other copy
        assert sum(sizes) == sum(tensor.nbytes for tensor in expected.values()), "nothing is published twice"
    assert max(sizes) <= 3 * min(sizes)


def test_slices_for_tensor_parallel_rollouts(store):
    expected = dict(model().named_parameters())
    for part in range(2):
        wanted = {"0.weight": ShardSlice("0.weight", (24, 12), (12 * part, 0), (12, 12), torch.bfloat16),
                  "1.weight": ShardSlice("1.weight", (10, 24), (0, 12 * part), (10, 12), torch.bfloat16)}
        found = dict(run_ranks(4, move, store.port, "fsdp x tp", torch.bfloat16, wanted)[0][0])
        assert torch.equal(found["0.weight"], expected["0.weight"][12 * part : 12 * part + 12].bfloat16())
        assert torch.equal(found["1.weight"], expected["1.weight"][:, 12 * part : 12 * part + 12].bfloat16())
        assert torch.equal(found["2.bias"], expected["2.bias"].bfloat16())


def test_boxes_meet():
    whole = ShardSlice.whole("w", (6, 4), torch.int32)
    part = dataclasses.replace(whole, start=(2, 1), size=(3, 2))
    other = dataclasses.replace(whole, start=(4, 0), size=(2, 4))
    common = part.overlap(other)
    assert (common.start, common.size) == ((4, 1), (1, 2))
    assert part.overlap(dataclasses.replace(whole, start=(0, 0), size=(2, 4))) is None
    values = torch.arange(24, dtype=torch.int32).view(6, 4)
    first, last = common.reach(whole)
    assert values.view(-1)[first // 4 : last // 4].tolist() == values[common.within(whole)].flatten().tolist()
    with pytest.raises(WeightsError, match="both must be the shape"):
        part.overlap(ShardSlice.whole("w", (4, 6), torch.int32))
