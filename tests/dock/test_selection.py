"""Rules are plain functions; each is tried on rows that are written down here."""

import pytest

from distflow.dock import Consumer, DockError, selection
from distflow.dock.selection import DEALS, RULES, LeaseRequest, RowState, choose


def rows(*meta):
    return [RowState(id, {"tokens"}, **each) for id, each in enumerate(meta)]


def ids(groups):
    return [[row.id for row in group] for group in groups]


def test_first_come():
    assert ids(choose(rows({}, {}, {}), {}, LeaseRequest(2))) == [[0], [1]]
    assert ids(choose(rows({}, {}, {}), {"first_come": {}}, LeaseRequest(2))) == [[0], [1]]
    assert choose(rows({}), {}, LeaseRequest(0)) == []


def test_rows_that_nobody_asks_for_are_not_looked_at():
    looked = []

    def watched():
        for row in rows(*[{}] * 9):
            looked.append(row.id)
            yield row

    choose(watched(), {"fresh": {"bound": 0}}, LeaseRequest(2, version=0))
    assert looked == [0, 1]


def test_stale_rows_are_discarded():
    ask = LeaseRequest(9, version=5)
    chosen = choose(rows({"version": 3}, {"version": 4}, {"version": 5}, {"version": 2}), {"fresh": {"bound": 1}}, ask)
    assert ids(chosen) == [[1], [2]]
    assert [row.id for row in ask.discarded] == [0, 3]
    with pytest.raises(DockError, match="version of the consumer"):
        choose(rows({}), {"fresh": {"bound": 1}}, LeaseRequest(1))


def test_whole_groups_only_and_never_split():
    mixed = rows({"group": 1}, {"group": 2}, {"group": 1}, {"group": 3}, {"group": 2}, {"group": -1})
    assert ids(choose(mixed, {"whole_groups": {"size": 2}}, LeaseRequest(9))) == [[0, 2], [1, 4], [5]]
    assert ids(choose(mixed, {"whole_groups": {"size": 2}}, LeaseRequest(3))) == [[0, 2]]


def test_a_group_goes_stale_as_a_whole():
    ask = LeaseRequest(9, version=2)
    mixed = rows({"group": 1, "version": 0}, {"group": 1, "version": 2}, {"group": 2, "version": 2},
                 {"group": 2, "version": 2})
    assert ids(choose(mixed, {"whole_groups": {"size": 2}, "fresh": {"bound": 1}}, ask)) == [[2, 3]]
    assert [row.id for row in ask.discarded] == [0, 1]


def test_priority_goes_first_and_equals_stay_in_order():
    assert ids(choose(rows({}, {"priority": 2}, {}, {"priority": 2}), {"by_priority": {}}, LeaseRequest(3))) == [[1],
                                                                                                                 [3],
                                                                                                                 [0]]


def test_dealt_by_tokens_or_in_turn():
    groups = [[row] for row in rows({"tokens": 9}, {"tokens": 5}, {"tokens": 4}, {"tokens": 1})]
    assert [sum(row.tokens for row in share) for share in DEALS["balanced"](groups, 2)] == [10, 9]
    assert ids(DEALS["in_turn"](groups, 2)) == [[0, 2], [1, 3]]


def test_a_rule_of_ones_own():
    @selection
    def shortest_first(groups, ask):
        return sorted(groups, key=lambda group: group[0].tokens)

    try:
        assert ids(choose(rows({"tokens": 3}, {"tokens": 1}), {"shortest_first": {}}, LeaseRequest(1))) == [[1]]
    finally:
        del RULES["shortest_first"]


def test_an_unknown_rule_is_named():
    with pytest.raises(DockError, match="Did you mean `whole_groups`"):
        Consumer("update", ("x",), rules={"whole_group": {}})
