"""Bytes between real ranks: any sizes, none included, on the whole group and on a part of it."""

import torch
import torch.distributed as dist
from ranks import run_ranks

from distflow.data.exchange import exchange, gather


def payload(sender: int, receiver: int) -> list[int]:
    return [10 * sender + receiver] * ((3 * sender + receiver) % 5)


def everyone_to_everyone() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    arrived = exchange([torch.tensor(payload(rank, peer), dtype=torch.uint8) for peer in range(ranks)])
    assert [part.tolist() for part in arrived] == [payload(peer, rank) for peer in range(ranks)]
    nothing = exchange([torch.empty(0, dtype=torch.uint8)] * ranks)
    assert [len(part) for part in nothing] == [0] * ranks
    assert gather(b"x" * rank) == [b"x" * peer for peer in range(ranks)]
    assert gather(b"") == [b""] * ranks
    assert gather(bytes(range(256))) == [bytes(range(256))] * ranks


def within_a_group() -> None:
    everyone_to_everyone()
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    if rank > 0:
        arrived = exchange([torch.tensor([rank, peer], dtype=torch.uint8) for peer in (1, 2)], group)
        assert [part.tolist() for part in arrived] == [[1, rank], [2, rank]]
        assert gather(bytes([rank]), group) == [b"\x01", b"\x02"]


def test_one_rank():
    run_ranks(1, everyone_to_everyone)


def test_three_ranks_and_a_group_of_two():
    run_ranks(3, within_a_group)
