"""Ranks that publish what they do, at a real store."""

import json

import pytest
from stores import hosted

from distflow.recovery.rank_status import COLLECTIVES, RankStatus
from distflow.telemetry.collectives import Collective


@pytest.fixture
def ranks():
    store = hosted()
    return [RankStatus(store, rank, 12) for rank in range(12)]


def test_those_who_are_elsewhere_are_named(ranks):
    for rank in ranks[:11]:
        rank.set("waiting for node `b`" if rank.rank != 3 else "computing node `a`")
    missing = ranks[0].missing()
    assert missing.startswith("rank 3 is computing node `a`, for ")
    assert missing.endswith("; rank 11 has not begun")


def test_all_at_one_point_means_that_one_ended(ranks):
    for rank in ranks:
        rank.set("waiting for node `b`")
    assert all(rank.missing() == "no rank says that it is elsewhere: all had come as far as this one when one ended or "
               "was cut off" for rank in ranks)


def test_ranks_behind_others_go_by_their_numbers_in_the_run():
    """Those of a group that only infers, of which the first is torch's rank 0 and the run's rank 4."""
    store = hosted()
    first, second = (RankStatus(store, rank, 2, first=4) for rank in range(2))
    first.set("computing node `reference`")
    entered = Collective(7, "all_gather", "dp", [4, 5], 0.0)
    store.put(f"{COLLECTIVES}/{first.rank}", json.dumps({"4/dp": entered}))
    assert first.missing().startswith("rank 5 has not begun; rank 5 has not said that it entered all_gather 7 of group")
    second.set("waiting for samples")
    assert first.missing().startswith("rank 5 is waiting for samples, for ")
