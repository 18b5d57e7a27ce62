"""What a rank's part of publishing costs the store does not grow with the number of ranks."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from stores import CountingStore, StoreProcess, client

from distflow.rpc.connection import Connection, connect
from distflow.weights.publisher import Publisher


def operations(port: int, token: bytes, ranks: int) -> list[tuple[int, int]]:
    """Of each rank's start, and of its part of one version."""
    stores = [CountingStore(port) for _ in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        made = list(threads.map(lambda rank: Publisher(stores[rank].below(f"of {ranks}"), token, rank=rank,
                                                       ranks=ranks), range(ranks)))
        for each in made:
            each.directory.over.set()  # no heartbeats: they are counted by the second
            each.directory.thread.join()
        started = [len(store.operations) for store in stores]
        list(threads.map(lambda each: each.publish(1, {"w": torch.zeros(8)}), made))
    published = [len(store.operations) - before for store, before in zip(stores, started)]
    for each in made:
        each.source.close()
    return list(zip(started, published))


def test_a_ranks_share_of_a_start_and_of_a_version_is_constant(store, token):
    few, many = (operations(store.port, token, ranks) for ranks in (3, 24))
    for part in range(2):
        middle = [sorted(found[part] for found in each)[len(each) // 2] for each in (few, many)]
        assert middle[1] <= middle[0] + 4, (few, many)
    assert max(started for started, _ in many[1:]) <= 16, "rank 0 alone asks who has come"
    assert max(published for _, published in many) <= max(published for _, published in few) + 4, "nor of the last one"


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_that_start_again_begin_another_attempt(store, token, ranks):
    with ThreadPoolExecutor(ranks) as threads:
        def start(rank: int) -> str:
            made = Publisher(store, token, rank=rank, ranks=ranks)
            made.close()
            return made.attempt

        first, second = ({*threads.map(start, range(ranks))} for _ in range(2))
    assert len(first) == len(second) == 1
    assert first != second


def test_a_puller_is_served_without_the_store(token, forked):
    kept = StoreProcess()
    trainer = Publisher(client(kept.port), token, rank=0, ranks=1, transport="tcp")
    try:
        trainer.publish(1, {"w": torch.zeros(8)})
        kept.end()
        key = trainer.held[0].key
        for who in "ab":  # the lease of the first ends with its connection
            with contextlib.closing(connect(trainer.source.address, token, 30)) as puller:
                puller.send({"who": who})
                puller.receive()
                while "busy" in (reply := _asked(puller, {"op": "lease", "key": key})):
                    assert reply == {"busy": "a"}
                assert reply["count"] == 1
    finally:
        trainer.close()
        kept.end()


def _asked(puller: Connection, header: dict) -> dict:
    puller.send(header)
    return puller.receive()[0]
