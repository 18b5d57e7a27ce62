"""The newest state of which every shard is somewhere, on real ranks; complete runs are in tests/test_machines.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distflow.recovery.restore import ConsistentState, consistent_states, fetch_shard
from distflow.recovery.snapshots import Snapshots, StateShard

OLD, NEW = (0, 0), (1, 0)
"""States of two attempts."""


def shards(attempt: tuple[int, int], rank: int, *steps: int, ranks: int = 2) -> list[StateShard]:
    return [StateShard(*attempt, step, rank, ranks) for step in steps]


@pytest.mark.parametrize(("reported", "expected"), [
    ([shards(OLD, 0, 3, 4), shards(OLD, 1, 4, 5)], [((0, 0, 4), (0, 1))]),
    ([shards(OLD, 0, 3, 4), shards(OLD, 1, 3, 4)], [((0, 0, 4), (0, 1)), ((0, 0, 3), (0, 1))]),
    ([[], shards(OLD, 1, 4, 5) + shards(OLD, 0, 4)], [((0, 0, 4), (1, 1))]),
    ([shards(OLD, 1, 4) + shards(OLD, 0, 4), []], [((0, 0, 4), (0, 0))]),
    ([shards(OLD, 1, 4), shards(OLD, 0, 4)], [((0, 0, 4), (1, 0))]),
    ([shards(OLD, 0, 4), shards(OLD, 1, 4) + shards(OLD, 0, 4)], [((0, 0, 4), (0, 1))]),
    ([shards(OLD, 0, 5), shards(NEW, 1, 5)], []),
    ([shards(OLD, 0, 9) + shards(NEW, 0, 5), shards(OLD, 1, 9) + shards(NEW, 1, 5)],
     [((1, 0, 5), (0, 1)), ((0, 0, 9), (0, 1))]),
    ([shards(OLD, 0, 4, ranks=3), shards(OLD, 1, 4, ranks=3) + shards(OLD, 2, 4, ranks=3)], []),
    ([shards(OLD, 0, 4), []], []),
    ([shards(OLD, 0, 4), shards(OLD, 7, 4)], []),
    ([[], []], []),
], ids=["what both have", "newest first", "lost", "lost and the ranks moved", "they changed places", "rather its own",
        "of two lives", "the later life first", "of other ranks", "one is missing", "of no rank", "nothing"])
def test_which_states_are_consistent(reported, expected):
    assert consistent_states(reported) == [ConsistentState(*each) for each in expected]


def value(shard: StateShard) -> float:
    return shard.step + shard.rank / 10


def put(memory: Snapshots, *some: StateShard) -> None:
    for shard in some:
        memory.begin(shard, {"weight": torch.full((1000 * (shard.rank + 1),), value(shard))}, {"step": shard.step})
        memory.wait()


def survivors() -> tuple[Snapshots, Snapshots]:
    """Of two ranks the first is on a new machine; the second keeps copies for the one that was there before, the older
    of which it still holds on to."""
    own, replicas = Snapshots(), Snapshots(slots=2)
    if dist.get_rank() == 1:
        put(own, *shards(OLD, 1, 4))
        own.held.append(own.newest)
        put(own, *shards(OLD, 1, 5, 6))
        put(replicas, *shards(OLD, 0, 4, 5))
    return own, replicas


def moved() -> tuple[Snapshots, Snapshots]:
    """The first was the second before, and keeps copies of the first that was lost; the second is a new one."""
    own, replicas = Snapshots(slots=2), Snapshots(slots=2)
    if dist.get_rank() == 0:
        put(own, *shards(OLD, 1, 5, 6))
        put(replicas, *shards(OLD, 0, 4, 5))
    return own, replicas


def torn() -> tuple[Snapshots, Snapshots]:
    own, replicas = survivors()
    replicas.corrupt()
    return own, replicas


def all_torn() -> tuple[Snapshots, Snapshots]:
    own, replicas = torn()
    replicas.corrupt()
    return own, replicas


def restarted() -> tuple[Snapshots, Snapshots]:
    """No machine was lost; one copy of the newest is torn, and another machine has it."""
    own, replicas, rank = Snapshots(), Snapshots(slots=2), dist.get_rank()
    put(own, *shards(OLD, rank, 5, 6))
    put(replicas, *shards(OLD, 1 - rank, 5, 6))
    if rank == 0:
        own.corrupt()
    return own, replicas


def brought(memory: Callable[[], tuple[Snapshots, Snapshots]], least: int) -> tuple[int, str, int] | None:
    """What this rank gets, and what stands in its own memory then."""
    own, replicas = memory()
    found = fetch_shard(own, replicas, least)
    if found is None:
        return None
    rank, step = dist.get_rank(), found.slot.shard.step
    back = {"weight": torch.zeros(1000 * (rank + 1))}
    assert own.load(found.slot, back) == {"step": step}
    assert (back["weight"] == value(StateShard(0, 0, step, rank, 2))).all()
    put(own, *shards(NEW, rank, step + 1))
    assert {found.slot.shard.state_id, (*NEW, step + 1)} <= {shard.state_id for shard in own.complete()}
    return step, found.source, found.holder


@pytest.mark.parametrize(("memory", "least", "expected"), [
    (survivors, -1, [(5, "peer replica", 1), (5, "own memory", 1)]),
    (survivors, 5, [(5, "peer replica", 1), (5, "own memory", 1)]),
    (survivors, 6, [None, None]),
    (moved, -1, [(5, "peer replica", 0), (5, "peer replica", 0)]),
    (torn, -1, [(4, "peer replica", 1), (4, "own memory", 1)]),
    (all_torn, -1, [None, None]),
    (restarted, -1, [(6, "peer replica", 1), (6, "own memory", 1)]),
], ids=["lost", "as new as the disk", "the disk is newer", "moved", "torn", "all torn", "only a copy is torn"])
def test_each_rank_gets_its_shard(memory, least, expected):
    assert run_ranks(2, brought, memory, least) == expected


def spoilt_on_the_way(holder: int) -> tuple[int, str, int] | None:
    """The other rank's copy changes after it was reported complete."""
    own, replicas = survivors()
    if dist.get_rank() == holder:
        newest = max(replicas.complete().items())[1]
        image = newest.content

        def spoilt() -> tuple[bytes, memoryview]:
            newest.memory()[-1] ^= 0xFF
            return image()

        newest.content = spoilt
    return (found := fetch_shard(own, replicas, -1)) and (found.slot.shard.step, found.source, found.holder)


def test_what_comes_torn_counts_for_nothing():
    assert run_ranks(2, spoilt_on_the_way, 1) == [(4, "peer replica", 1), (4, "own memory", 1)]
