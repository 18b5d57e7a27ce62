"""Rows that a missing rank is to send: known without it, and equal to what the rank would have had."""

from __future__ import annotations

import numpy as np
import pytest
from walk import Builder

from distflow.data.assignment import ShardAssignment
from distflow.data.missing_rows import expected_rows, missing_rows
from distflow.plan import SOURCE, Layout, RowLineage

TWO, THREE = Layout(2), Layout(3)


def lineage(together: bool = False) -> RowLineage:
    plan = (Builder(4, THREE).node("rollout", "r_prompt", "r_reply", THREE, repeats=2)
            .node("reward", "r_reply", "d_reward", TWO, together=together)
            .node("end", "d_reward", "", THREE)).plan()
    return RowLineage(plan.tasks, plan.source)


def test_shares_of_the_dataset_are_those_of_the_loader():
    """Eight rows over three shares, as `Dataloader` cuts them; each is repeated twice by `rollout`."""
    every = [expected_rows(lineage(), SOURCE, THREE, None, range(40, 48), rank).tolist() for rank in range(3)]
    assert every == [[40, 41], [42, 43, 44], [45, 46, 47]]
    assert expected_rows(lineage(), "rollout", THREE, None, range(40, 48), 0).tolist() == [80, 81, 82, 83]
    assert expected_rows(lineage(), "rollout", THREE, None, None, 0) is None
    assert expected_rows(lineage(), "rollout", THREE, None, range(8), 3).tolist() == []


@pytest.mark.parametrize(("together", "units", "expected"), [(False, [80, 83, 84, 87], [80, 84]),
                                                             (True, [40, 41, 42, 43], [80, 81, 84, 85])])
def test_shares_of_a_layout_are_those_of_its_homes(together, units, expected):
    assignment = ShardAssignment(np.array(units), np.array([0, 1, 0, 1]))
    assert expected_rows(lineage(together), "reward", TWO, assignment, range(40, 48), 0).tolist() == expected


def test_rows_coarser_than_units_are_named_once():
    assignment = ShardAssignment(np.array([80, 81, 84]), np.array([0, 0, 0]))
    assert expected_rows(lineage(), SOURCE, TWO, assignment, range(40, 48), 0).tolist() == [40, 42]


def test_without_a_named_rank_all_are_named_and_without_known_rows_the_share_is():
    text = missing_rows(lineage(), "rollout", THREE, None, range(30), 1, ())
    assert text == ("rank 0 is to send 20 of them by its share: 0, 1, 2, 3, 4, …; "
                    "rank 2 is to send 20 of them by its share: 40, 41, 42, 43, 44, …")
    assert missing_rows(lineage(), "rollout", THREE, None, None, 1, [2]) == "rank 2 is to send share 2 of 3 of them"
    assert missing_rows(lineage(), "rollout", THREE, None, range(3), 1,
                        [3]) == "rank 3 is to send none of them, but must join in"
    wide = Layout(9)
    plan = Builder(9, wide).node("a", "r_prompt", "", wide).plan()
    assert missing_rows(RowLineage(plan.tasks, wide), SOURCE, wide, None, None, 0, ()).endswith(
        "share 4 of 9 of them, and 4 more ranks theirs")
