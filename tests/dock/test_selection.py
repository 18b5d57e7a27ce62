"""Which rows a lease gets, what room there is for more, and how they are shared between ranks."""

import math
import random

import pytest

from distflow.dock import Consumer, DockError
from distflow.dock.selection import DockLayout, ReadyRows, Room, RowState, deal

ADDRESSES = (("127.0.0.1", 1), ("127.0.0.1", 2), ("127.0.0.1", 3))


def rows(*meta):
    return [RowState(id, {"tokens"}, **each) for id, each in enumerate(meta)]


def ready(ids, **settings):
    made = ReadyRows(Consumer("update", ("tokens",), **settings))
    for row in ids:
        made.add(RowState(row, {"tokens"}))
    return made


def ids(made, step=None):
    return [[row.id for row in group] for group in made.groups(step)]


def test_rows_come_in_the_order_in_which_they_became_ready():
    made = ready([4, 2, 9])
    made.add(RowState(7, {"tokens"}), first=True)
    assert ids(made) == [[7], [4], [2], [9]]


def test_whole_groups_only():
    made = ready([5, 0, 2, 4, 1], group_size=2)
    assert ids(made) == [[5, 4], [0, 1]]
    assert (made.count(None), len(made), 2 in made) == (4, 5, True)
    made.discard(5)
    assert ids(made) == [[0, 1]]
    made.add(RowState(3, {"tokens"}))
    made.add(RowState(5, {"tokens"}))
    assert ids(made) == [[0, 1], [2, 3], [4, 5]]


def test_a_step_has_its_own_rows_and_the_oldest_comes_first():
    made = ready(range(7, -1, -1), group_size=2, step_rows=4)
    assert ids(made, 1) == [[7, 6], [5, 4]]
    assert ids(made) == [[3, 2], [1, 0], [7, 6], [5, 4]]
    assert (made.count(0), made.count(1), made.count(2), made.count(None)) == (4, 4, 0, 8)


@pytest.mark.parametrize("seed", range(5))
def test_counts_agree_with_the_groups_whatever_comes_and_goes(seed):
    draw, made, there = random.Random(seed), ready([], group_size=3, step_rows=12), set()
    for _ in range(300):
        row = draw.randrange(36)
        if draw.random() < 0.6:
            made.add(RowState(row, {"tokens"}), first=draw.random() < 0.2)
            there.add(row)
        else:
            made.discard(row)
            there.discard(row)
        whole = {group for group in range(12) if {3 * group, 3 * group + 1, 3 * group + 2} <= there}
        for step in (0, 1, 2):
            assert {group[0].id // 3 for group in made.groups(step)} == {each for each in whole if each // 4 == step}
            assert made.count(step) == 3 * sum(group // 4 == step for group in whole)
        assert set(made.rows) == there


def test_rows_under_way_count_with_the_mean_of_those_that_have_come():
    room = Room(limit=1000)
    assert room.fits(2, longest=500)
    assert not room.fits(3, longest=500), "none has come: each may become as long as that"
    room.note(0, 200, 4)
    room.note(1, 0, 0)
    assert room.fits(16, longest=500)
    assert not room.fits(17, longest=500)
    room.note(0, 0, 0)
    assert room.fits(20, longest=500), "they have left, and their mean is still the best estimate"
    assert Room().fits(10**9, longest=10**9)
    assert Room().limit == math.inf


def test_the_rows_of_a_group_live_in_one_shard():
    layout = DockLayout(ADDRESSES, (Consumer("reward", ("tokens",)), Consumer("update", ("tokens",), group_size=4)))
    assert [layout.shard_of(row) for row in range(0, 16, 2)] == [0, 0, 1, 1, 2, 2, 0, 0]
    with pytest.raises(DockError, match="the 4 rows that live together do not divide .* of consumer `odd`, 3"):
        DockLayout(ADDRESSES, (*layout.consumers, Consumer("odd", ("tokens",), group_size=3)))


def test_dealt_by_tokens():
    groups = [[row] for row in rows({"tokens": 9}, {"tokens": 5}, {"tokens": 4}, {"tokens": 1})]
    assert [sum(row.tokens for row in share) for share in deal(groups, 2)] == [10, 9]


def test_the_same_groups_are_dealt_alike_in_whatever_order_they_came():
    groups = [[RowState(2 * number + half, {"x"}, tokens=3) for half in (0, 1)] for number in range(5)]
    first = [sorted(row.id for row in share) for share in deal(groups, 2)]
    for order in ([4, 1, 3, 0, 2], [3, 2, 1, 0, 4]):
        came = [list(reversed(groups[number])) for number in order]
        assert [sorted(row.id for row in share) for share in deal(came, 2)] == first
