"""Which rows a lease gets, what room there is for more, and how they are shared between ranks."""

import math
import random

import numpy
import pytest

from distflow.dock import Consumer, DockError
from distflow.dock.selection import DockLayout, ReadyRows, StorageBudget, split_groups

ADDRESSES = (("127.0.0.1", 1), ("127.0.0.1", 2), ("127.0.0.1", 3))


def ready(ids, **settings):
    """Rows that come one by one."""
    made = ReadyRows(Consumer("update", ("tokens",), **settings))
    for row in ids:
        made.add(numpy.array([row]))
    return made


def groups(made, step=None):
    return [group for each in made.steps(step) for group in made.first_groups(each, made.counts[each]).tolist()]


def test_rows_come_in_the_order_in_which_they_became_ready():
    made = ready([4, 2, 9])
    made.add(numpy.array([7, 1]), first=True)
    made.add(numpy.array([5, 3]))
    assert groups(made) == [7, 1, 4, 2, 9, 5, 3]
    made.pop(0, 4)
    assert made.first_groups(0, 2).tolist() == [9, 5]
    assert len(made) == made.count(None) == 3


def test_a_step_has_its_own_rows_and_the_oldest_comes_first():
    made = ready(range(7, -1, -1), group_size=2, step_rows=4)
    assert groups(made, 1) == [3, 2]
    assert groups(made) == [1, 0, 3, 2]
    assert (made.count(0), made.count(1), made.count(2), made.count(None)) == (4, 4, 0, 8)
    made = ready([], group_size=2, step_rows=4)
    made.add(numpy.arange(12))
    assert [groups(made, step) for step in range(3)] == [[0, 1], [2, 3], [4, 5]], "rows of several steps in one put"


@pytest.mark.parametrize("seed", range(5))
def test_counts_agree_with_the_groups_whatever_comes_and_goes(seed):
    draw, made, there = random.Random(seed), ready([], group_size=3, step_rows=12), set()
    for _ in range(300):
        some = draw.sample(range(36), draw.randrange(1, 5))
        new, gone = [row for row in some if row not in there], [row for row in some if row in there]
        if draw.random() < 0.6:
            made.add(numpy.array(new, numpy.int64), first=draw.random() < 0.2)
            there.update(new)
        elif draw.random() < 0.8:
            made.discard(numpy.array(gone, numpy.int64))
            there.difference_update(gone)
        elif step := made.steps(None)[:1]:
            there.difference_update(made.rows_of(made.first_groups(step[0], 2)).tolist())
            made.pop(step[0], min(2, made.counts[step[0]]))
        whole = {group for group in range(12) if {3 * group, 3 * group + 1, 3 * group + 2} <= there}
        for step in (0, 1, 2):
            assert sorted(groups(made, step)) == sorted(each for each in whole if each // 4 == step)
            assert made.count(step) == 3 * sum(group // 4 == step for group in whole)
        assert len(made) == len(there)


def test_groups_of_ones_own_shard_are_leased_first_and_then_those_of_others():
    made = ready(range(12), group_size=2, step_rows=8)
    made.bring_forward(0, lambda rows: rows // 2 % 2 == 1)
    assert (groups(made, 0), groups(made, 1)) == ([1, 3, 0, 2], [4, 5])
    made.bring_forward(0, lambda rows: rows < 0)
    made.pop(0, 1)
    assert groups(made, 0) == [3, 0, 2]


def test_rows_under_way_count_with_the_mean_of_those_that_have_come():
    room = StorageBudget(limit=1000)
    assert room.rows_that_fit(longest=500) == 2, "none has come: each may become as long as that"
    room.record(0, 200, 4)
    room.record(1, 0, 0)
    assert room.rows_that_fit(longest=500) == 16
    room.record(0, 0, 0)
    assert room.rows_that_fit(longest=500) == 20, "they have left, and their mean is still the best estimate"
    assert StorageBudget().rows_that_fit(longest=10**9) == math.inf
    assert StorageBudget().limit == math.inf


def test_the_rows_of_a_group_live_in_one_shard():
    layout = DockLayout(ADDRESSES, (Consumer("reward", ("tokens",)), Consumer("update", ("tokens",), group_size=4)))
    assert [layout.shard_of(row) for row in range(0, 16, 2)] == [0, 0, 1, 1, 2, 2, 0, 0]
    with pytest.raises(DockError, match="the 4 rows that live together do not divide .* of consumer `odd`, 3"):
        DockLayout(ADDRESSES, (*layout.consumers, Consumer("odd", ("tokens",), group_size=3)))


def test_groups_are_dealt_whole_by_tokens():
    shares = split_groups(numpy.arange(10), numpy.full(10, 3), 2, 2)
    assert all(row ^ 1 in share for share in shares for row in share.tolist())
    assert sorted(numpy.concatenate(shares).tolist()) == [*range(10)]
    uneven = [9, 5, 4, 1]
    shares = split_groups(numpy.arange(4), numpy.array(uneven), 1, 2)
    assert [sum(uneven[row] for row in share.tolist()) for share in shares] == [10, 9]
