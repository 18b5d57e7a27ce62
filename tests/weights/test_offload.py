"""Offloaded tensors come back as they were, with all views of their memory."""

import torch

from distflow.weights.offload import HostOffload


def test_views_of_one_storage_leave_once_and_come_back():
    flat = torch.arange(12.0)
    parts, other = [flat[:4].view(2, 2), flat[6:]], torch.ones(3, dtype=torch.bfloat16)
    attic = HostOffload(lambda: [*parts, other])
    attic.offload()
    assert attic.bytes == 12 * 4 + 3 * 2
    assert flat.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    attic.offload()
    assert attic.bytes == 12 * 4 + 3 * 2
    attic.reload()
    attic.wait()
    assert torch.equal(flat, torch.arange(12.0))
    assert torch.equal(parts[1], torch.arange(6.0, 12.0))
    assert torch.equal(other, torch.ones(3, dtype=torch.bfloat16))
    assert attic.bytes == 0


def test_scratch_gives_its_memory_back_and_is_not_stored():
    kept, scratch = torch.ones(3), torch.full((1000,), 7.0)
    attic = HostOffload(lambda: [kept], lambda: [scratch])
    attic.offload()
    assert scratch.untyped_storage().nbytes() == 0
    assert attic.bytes == kept.nbytes
    attic.offload()
    attic.reload()
    attic.wait()
    assert torch.equal(scratch, torch.zeros(1000))
    assert torch.equal(kept, torch.ones(3))


def test_what_is_new_leaves_too_and_what_changed_leaves_as_it_is():
    tensors = [torch.zeros(5)]
    attic = HostOffload(lambda: tensors)
    for turn in range(3):
        attic.offload()
        attic.reload()
        tensors[0] += 1
        tensors.append(torch.full((turn + 1,), 7.0))
    attic.offload()
    assert attic.bytes == sum(4 * size for size in (5, 1, 2, 3))
    attic.reload()
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 5, [7.0], [7.0] * 2, [7.0] * 3]
