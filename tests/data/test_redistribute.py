"""Routes: which bytes go where, and whether any leave their machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.data.redistribute import Destination, PoolNotice, Route, agree, announce, read_notice

SHARES, RANKS = 3, 6


def route_of(made: np.random.Generator) -> Route:
    """Rows of six ranks, some of which have none, to some of three shares; rows of `text` may be empty."""
    notices, first = [], 0
    for rows in made.integers(0, 4, RANKS):
        lengths = torch.from_numpy(made.integers(0, 5, rows))
        columns = {"text": Ragged(torch.zeros(int(lengths.sum()), dtype=torch.uint8), lengths)}
        notices.append(read_notice(announce(Batch(torch.arange(first, first + rows), columns), PoolNotice())[0]))
        first += rows
    shares = made.choice([0, 2], first) if made.random() < 0.5 else made.integers(0, SHARES, first)
    return Route(notices, agree(notices), lambda ids: (np.arange(len(ids)), shares), SHARES)


@pytest.mark.parametrize("seed", range(40))
def test_bytes_and_crossings_are_those_of_the_rows_one_by_one(seed):
    made = np.random.default_rng(seed)
    route = route_of(made)
    traffic = np.zeros((RANKS, SHARES), dtype=int)
    for holder, share, size in zip(route.holder, route.share, route.sizes):
        traffic[holder, share] += size
    assert [route.sent(rank).tolist() for rank in range(RANKS)] == traffic.tolist()
    assert [route.received(share, RANKS).tolist() for share in range(SHARES)] == traffic.T.tolist()
    machines = made.integers(0, made.integers(1, 4), RANKS)
    places = [Destination(int(made.integers(SHARES)), rank, None) for rank in range(RANKS)]
    crosses = any(traffic[rank, place.share] and machines[rank] != machines[place.rank]
                  for rank in range(RANKS) for place in places)
    assert route.crosses(machines, places) == crosses


def test_the_cases_have_both_answers():
    """Or the comparison above would show nothing."""
    made = [np.random.default_rng(seed) for seed in range(40)]
    found = {route_of(each).crosses(np.arange(RANKS) // 2, [Destination(share, 2 * share, None)])
             for each in made for share in range(SHARES)}
    assert found == {True, False}


def test_a_notice_is_read_as_it_was_written():
    lengths = torch.tensor([2, 0, 3])
    batch = Batch(torch.tensor([4, 7, 9]), {"a": Ragged(torch.zeros(5), lengths), "b": torch.zeros(3, 2),
                                            "c": Ragged(torch.zeros(5, dtype=torch.int32), lengths)})
    notice = read_notice(announce(batch, PoolNotice())[0])
    assert notice.ids.tolist() == [4, 7, 9]
    assert notice.counts_of("a", 0).tolist() == notice.counts_of("c", 0).tolist() == [2, 0, 3]
    assert notice.counts_of("a", 0) is notice.counts_of("c", 0), "sent once"
    assert notice.counts_of("b", 0).tolist() == [1, 1, 1]
    assert list(notice.forms) == ["a", "b", "c"]
    empty = read_notice(announce(batch.slice(0, 0), PoolNotice())[0])
    assert (len(empty.ids), len(empty.counts_of("a", 0)), empty.forms) == (0, 0, notice.forms)
