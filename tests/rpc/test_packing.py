"""Tensors of any type and shape lie one after the other in one buffer, and none touches its neighbours."""

import torch

from distflow.rpc.packing import aligned, tensor_at

TENSORS = [torch.arange(5, dtype=torch.uint8), torch.tensor(2.5), torch.empty(0, 3, dtype=torch.int64),
           torch.arange(66, dtype=torch.float64).reshape(2, 33), torch.arange(32, dtype=torch.bfloat16)]


def test_what_is_put_in_comes_out():
    buffer, starts = torch.zeros(sum(aligned(each.nbytes) for each in TENSORS), dtype=torch.uint8), [0]
    for tensor in TENSORS:
        tensor_at(buffer, starts[-1], tensor.shape, tensor.dtype).copy_(tensor)
        starts.append(starts[-1] + aligned(tensor.nbytes))
    assert starts == [0, 64, 128, 128, 128 + 576, len(buffer)]
    for start, tensor in zip(starts, TENSORS):
        found = tensor_at(buffer, start, tensor.shape, tensor.dtype)
        assert torch.equal(found, tensor)
        assert found.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), "it is no copy"
