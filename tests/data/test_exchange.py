"""Bytes between real ranks: any sizes, none included, on the whole group and on a part of it."""

import torch
import torch.distributed as dist
from ranks import run_ranks

from distflow.data.exchange import exchange, gather, send_each


def payload(sender: int, receiver: int) -> list[int]:
    return [10 * sender + receiver] * ((3 * sender + receiver) % 5)


def everyone_to_everyone() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    arriving = [len(payload(peer, rank)) for peer in range(ranks)]
    outgoing = [payload(rank, peer) for peer in range(ranks)]
    arrived = torch.empty(sum(arriving), dtype=torch.uint8)
    exchange(torch.tensor(sum(outgoing, []), dtype=torch.uint8), list(map(len, outgoing)), arrived, arriving)
    assert [part.tolist() for part in arrived.split(arriving)] == [payload(peer, rank) for peer in range(ranks)]
    arrived.zero_()
    received = dict(enumerate(arrived.split(arriving)))
    send_each([(peer, torch.tensor(each, dtype=torch.uint8)) for peer, each in enumerate(outgoing) if peer != rank],
              [(peer, each) for peer, each in received.items() if peer != rank])
    assert all(each.tolist() == payload(peer, rank) for peer, each in received.items() if peer != rank)
    exchange(arrived[:0], [0] * ranks, arrived[:0], [0] * ranks)
    assert gather(b"x" * rank) == [b"x" * peer for peer in range(ranks)]
    assert gather(b"") == [b""] * ranks
    assert gather(bytes(range(256))) == [bytes(range(256))] * ranks
    for size in (4087, 4088, 4089, 100_000, 3, 200_000):  # below, at and above the room that a payload has
        assert gather(bytes([rank]) * (size + rank)) == [bytes([peer]) * (size + peer) for peer in range(ranks)]


def within_a_group() -> None:
    everyone_to_everyone()
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    if rank > 0:
        assert gather(bytes([rank]), group) == [b"\x01", b"\x02"]


def test_one_rank():
    run_ranks(1, everyone_to_everyone)


def test_three_ranks_and_a_group_of_two():
    run_ranks(3, within_a_group)
