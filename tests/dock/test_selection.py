"""Which rows a lease gets, and how they are shared between ranks."""

import pytest

from distflow.dock import Consumer, DockError
from distflow.dock.selection import RowState, choose, deal

ANY = Consumer("update", ("tokens",))
PAIRS = Consumer("update", ("tokens",), group_size=2)


def rows(*meta):
    return [RowState(id, {"tokens"}, **each) for id, each in enumerate(meta)]


def ids(groups):
    return [[row.id for row in group] for group in groups]


def test_rows_come_in_the_order_in_which_they_became_ready():
    assert ids(choose(rows({}, {}, {}), ANY, 2, None)) == [[0], [1]]
    assert choose(rows({}), ANY, 0, None) == []


def test_rows_that_nobody_asks_for_are_not_looked_at():
    looked = []

    def watched():
        for row in rows(*[{}] * 9):
            looked.append(row.id)
            yield row

    choose(watched(), ANY, 2, None)
    assert looked == [0, 1]


def test_whole_groups_only_and_never_split():
    mixed = rows({"group": 1}, {"group": 2}, {"group": 1}, {"group": 3}, {"group": 2}, {"group": -1})
    assert ids(choose(mixed, PAIRS, 9, None)) == [[0, 2], [1, 4], [5]]
    assert ids(choose(mixed, PAIRS, 3, None)) == [[0, 2]]


def test_a_step_has_its_own_rows():
    stepped = Consumer("update", ("tokens",), group_size=2, step_rows=4)
    mixed = rows(*({"group": number // 2} for number in range(8)))
    assert ids(choose(mixed[::-1], stepped, 8, 1)) == [[7, 6], [5, 4]]
    with pytest.raises(DockError, match="takes its rows by step"):
        choose(mixed, stepped, 8, None)


def test_dealt_by_tokens():
    groups = [[row] for row in rows({"tokens": 9}, {"tokens": 5}, {"tokens": 4}, {"tokens": 1})]
    assert [sum(row.tokens for row in share) for share in deal(groups, 2)] == [10, 9]
