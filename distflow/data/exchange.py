"""Bytes between the ranks of a group: every rank to every rank, and all to all alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(outgoing: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Send `outgoing[i]` ([bytes] uint8) to rank `i` and return what each rank sent here.

    Two collectives: the sizes, then all bytes in one `all_to_all_single`. Every rank of the group must call it.
    """
    sizes = torch.tensor([len(part) for part in outgoing])
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes, group=group)
    received = torch.empty(int(arriving.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(outgoing), arriving.tolist(), sizes.tolist(), group=group)
    return list(received.split(arriving.tolist()))


def gather(payload: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's payload on every rank, in rank order. For metadata: small, and of any length on each rank."""
    ranks = dist.get_world_size(group)
    sizes = torch.zeros(ranks, dtype=torch.int64)
    sizes[dist.get_rank(group)] = len(payload)
    dist.all_reduce(sizes, group=group)
    longest = max(int(sizes.max()), 1)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(payload)] = torch.frombuffer(bytearray(payload) or bytearray(1), dtype=torch.uint8)[: len(payload)]
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(everyone, mine, group=group)
    return [part[:size].numpy().tobytes() for part, size in zip(everyone, sizes.tolist())]
