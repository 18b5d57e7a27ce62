"""Shares of equal work: never far from the best there is, and the same on every rank."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.balance import assign, imbalance

QUIET = settings(derandomize=True, deadline=None, max_examples=80)


def loads_of(weights: list[int], shares_of: list[int], shares: int) -> list[int]:
    return [sum(weight for weight, share in zip(weights, shares_of) if share == one) for one in range(shares)]


def optimum(weights: list[int], shares: int) -> int:
    ways = itertools.product(range(shares), repeat=len(weights))
    return min(max(loads_of(weights, chosen, shares)) for chosen in ways)


@QUIET
@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_heaviest_share_is_within_four_thirds_of_the_optimum(weights, shares):
    chosen = assign(torch.tensor(weights), shares).tolist()
    assert all(0 <= share < shares for share in chosen)
    assert 3 * max(loads_of(weights, chosen, shares)) <= (4 - 1 / shares) * optimum(weights, shares) + 1e-9


@QUIET
@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 6))
def test_no_share_is_left_without_units_if_there_are_enough(weights, shares):
    """Units without weight as well: they are shared by number."""
    chosen = assign(torch.tensor(weights), shares).tolist()
    assert len(set(chosen)) == min(shares, len(weights)) or 0 in weights
    if set(weights) == {0}:
        counts = [chosen.count(share) for share in range(shares)]
        assert max(counts) - min(counts) <= 1


def test_equal_units_are_dealt_out_in_order():
    assert assign(torch.tensor([5, 5, 5, 5]), 2).tolist() == [0, 1, 0, 1]


@QUIET
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(-1, 2)), min_size=1, max_size=12))
def test_what_is_settled_stays_and_counts(units):
    weights, settled = (torch.tensor(part) for part in zip(*units))
    chosen = assign(weights, 3, settled)
    assert torch.equal(chosen[settled >= 0], settled[settled >= 0])
    assert bool((chosen >= 0).all())


def test_free_units_go_where_settled_ones_are_light():
    assert assign(torch.tensor([10, 3, 3, 3]), 2, torch.tensor([0, -1, -1, -1])).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(("weights", "shares_of", "expected"), [([3, 1], [0, 0], 2.0), ([2, 2], [0, 1], 1.0),
                                                                ([0, 0], [0, 0], 1.0), ([], [], 1.0)])
def test_imbalance_is_the_heaviest_over_the_mean(weights, shares_of, expected):
    whole = torch.tensor(weights, dtype=torch.int64), torch.tensor(shares_of, dtype=torch.int64)
    assert imbalance(*whole, 2) == pytest.approx(expected)
