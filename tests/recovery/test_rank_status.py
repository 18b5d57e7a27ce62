"""Ranks that publish what they do, at a real store."""

from __future__ import annotations

import pytest
from stores import hosted

from distflow.recovery.rank_status import RankStatus


@pytest.fixture
def ranks() -> list[RankStatus]:
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


def test_a_long_list_is_cut(ranks):
    ranks[0].set("waiting for node `b`")
    assert ranks[0].missing().endswith("rank 8 has not begun; and 3 more")
