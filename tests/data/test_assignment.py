"""Assignment of rows to shares: never far from the optimum, and the same on every rank."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.assignment import assign, assign_near, imbalance

QUIET = settings(max_examples=80)


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
    """Units without weight too: they are balanced by number."""
    chosen = assign(torch.tensor(weights), shares).tolist()
    assert len(set(chosen)) == min(shares, len(weights)) or 0 in weights
    if set(weights) == {0}:
        counts = [chosen.count(share) for share in range(shares)]
        assert max(counts) - min(counts) <= 1


def one_by_one(weights: list[int], shares: int, fixed: list[int]) -> list[int]:
    """Longest processing time first as it is written down: each unit to the share with the least tokens, then units."""
    chosen = list(fixed)
    for sizes in (weights, [1] * len(weights)):  # units without weight at last, by number
        loads = {share: [sum(size for size, one in zip(sizes, chosen) if one == share), chosen.count(share), share]
                 for share in range(shares)}
        for unit in sorted((unit for unit, one in enumerate(chosen) if one < 0 and sizes[unit]),
                           key=lambda unit: (-sizes[unit], unit)):
            lightest = min(loads.values())
            chosen[unit] = lightest[2]
            lightest[:2] = lightest[0] + sizes[unit], lightest[1] + 1
    return chosen


SPREADS = {"even": lambda made: made.randint(1, 2000), "long tail": lambda made: int(10 * made.random() ** -1.2),
           "few": lambda made: made.randint(0, 2), "giants": lambda made: 10**6 if made.random() < 0.02 else 1,
           "too large for 64 bits": lambda made: made.randint(1, 2**40) << 8}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("settled", [False, True])
def test_units_go_to_the_lightest_share_one_by_one(spread, settled):
    made, shares = random.Random(1), 64
    weights = [SPREADS[spread](made) for _ in range(9 * shares + 5)]
    fixed = [made.randrange(shares // 4) if settled and made.random() < 0.2 else -1 for _ in weights]
    assert assign(torch.tensor(weights), shares, torch.tensor(fixed)).tolist() == one_by_one(weights, shares, fixed)


def near_one_by_one(weights: list[int], machines: list[int], at: list[int], fixed: list[int]) -> list[int]:
    """Each machine's units to its lightest share, if that stays within 1% of the heaviest share without machines."""
    shares, chosen, anywhere = range(len(machines)), list(fixed), one_by_one(weights, len(machines), fixed)
    bound = int(1.01 * max(loads_of(weights, anywhere, len(machines))))
    loads = [[load, chosen.count(share)] for share, load in zip(shares, loads_of(weights, chosen, len(machines)))]
    for unit in sorted((unit for unit, one in enumerate(chosen) if one < 0), key=lambda unit: (-weights[unit], unit)):
        there = [(*loads[share], share) for share in shares if machines[share] == at[unit]]
        if there and min(there)[0] + weights[unit] <= bound:
            chosen[unit] = share = min(there)[2]
            loads[share][0], loads[share][1] = loads[share][0] + weights[unit], loads[share][1] + 1
    chosen = one_by_one(weights, len(machines), chosen)
    return chosen if max(loads_of(weights, chosen, len(machines))) <= bound else anywhere


@pytest.mark.parametrize("spread", ["even", "few", "giants"])
@pytest.mark.parametrize("settled", [False, True])
def test_units_stay_on_their_machine_while_its_shares_have_room(spread, settled):
    """150 machines of 2 shares, one of them without units, and units of no machine."""
    made = random.Random(1)
    machines = [share // 2 * 2 for share in range(300)]
    made.shuffle(machines)
    weights = [SPREADS[spread](made) for _ in range(3000)]
    at = [made.choice([-1, *range(0, 298, 2)]) for _ in weights]
    fixed = [made.randrange(80) if settled and made.random() < 0.2 else -1 for _ in weights]
    near = assign_near(torch.tensor(weights), machines, torch.tensor(at), torch.tensor(fixed)).tolist()
    assert near == near_one_by_one(weights, machines, at, fixed)


def most_rows(chosen: torch.Tensor, shares: int) -> float:
    """Rows of the fullest share over the mean."""
    return int(chosen.bincount(minlength=shares).max()) * shares / len(chosen)


@pytest.mark.parametrize("shares", [2, 8])
@pytest.mark.parametrize("weights", [torch.arange(4000) * 7919 % 2000 + 1, torch.full((4000,), 3),
                                     torch.arange(4000) * 7919 % 2000 + torch.arange(4000) // 40])
def test_many_units_stay_together(weights, shares):
    """All but the last of each share, which even the loads out."""
    chosen = assign(weights, shares)
    assert set(chosen.tolist()) == set(range(shares))
    assert int((chosen.diff() != 0).sum()) < 40 * shares
    assert imbalance(weights, chosen, shares) < 1.01


@pytest.mark.parametrize("weights", [
    (torch.randn(256, generator=torch.Generator().manual_seed(1)).exp() * 300).long(), torch.arange(4000),
    torch.tensor([10, 1000]).repeat_interleave(2000), (torch.arange(4400) >= 4000).long()],
    ids=["long tail", "sorted", "short, then long", "without weight, then with"])
def test_shares_have_as_many_rows_where_weights_are_unlike(weights):
    chosen = assign(weights, 8)
    assert most_rows(chosen, 8) < 1.06
    assert imbalance(weights, chosen, 8) < 1.01


@QUIET
@given(st.integers(2, 8), st.integers(17, 80), st.sampled_from([(1, 9), (0, 9), (0, 1), (0, 2000)]), st.booleans(),
       st.integers(0, 99))
def test_many_units_are_even_in_rows_too(shares, times, between, ordered, seed):
    """In tokens within a unit of the mean, in rows within those that are placed one by one."""
    low, high = between
    weights = torch.randint(low, high + 1, (shares * times + seed % shares,),
                            generator=torch.Generator().manual_seed(seed))
    weights = weights.sort().values if ordered else weights
    chosen = assign(weights, shares)
    assert imbalance(weights, chosen, shares) * weights.sum() <= 1.01 * weights.sum() + high * shares
    assert int(chosen.bincount().max()) <= 1.05 * len(weights) / shares + 5


@QUIET
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1), st.sampled_from([-1, -1, 0, 3])), min_size=1,
                max_size=30))
def test_staying_near_costs_no_balance(units):
    weights, at, fixed = (torch.tensor(part) for part in zip(*units))
    near = assign_near(weights, [0, 0, 1, 1], at, fixed)
    far = assign(weights, 4, fixed)
    assert torch.equal(near[fixed >= 0], fixed[fixed >= 0])
    assert imbalance(weights, near, 4) <= 1.01 * imbalance(weights, far, 4)


def test_rows_stay_on_their_machine_unless_it_has_too_many():
    """Four machines of four shares; even rows need not cross, and of a machine with half of all rows, half must."""
    weights = torch.randint(100, 1000, (2000,), generator=torch.Generator().manual_seed(1))
    machines = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    for at, expected in ((torch.arange(2000) % 4, 0.02), (torch.arange(2000).clamp(max=1999) // 333 % 6 % 4, 0.18)):
        here = torch.tensor(machines)[assign_near(weights, machines, at)]
        assert float(weights[here != at].sum() / weights.sum()) < expected
        assert float(weights[torch.tensor(machines)[assign(weights, 16)] != at].sum() / weights.sum()) > 0.7


@QUIET
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(-1, 2), st.sampled_from([-1, -1, 0, 2])), min_size=1,
                max_size=40),
       st.sampled_from([(2, 1, 1), (5, 0, 3), (1, 9, 4)]), st.sampled_from([[0, 0, 0], [0, 1, 1]]))
def test_unlike_shares_are_done_at_about_the_same_time(units, parts, machines):
    """At most the heaviest unit above the mean; fixed units stay, and a share without a part gets nothing more."""
    weights, at, fixed = (torch.tensor(part) for part in zip(*units))
    fixed = torch.where(torch.tensor(parts)[fixed] == 0, -1, fixed)
    chosen = assign_near(weights, machines, at, fixed, parts)
    assert torch.equal(chosen[fixed >= 0], fixed[fixed >= 0])
    assert all(parts[share] for share in chosen.tolist())
    if (fixed < 0).all():
        loads, mean = loads_of(weights.tolist(), chosen.tolist(), 3), int(weights.sum()) / sum(parts)
        latest = max(load / part for load, part in zip(loads, parts) if part)
        assert latest <= 1.01 * (mean + int(weights.max()) / min(filter(None, parts)))


def test_many_rows_have_the_parts_that_were_planned_and_mostly_stay():
    weights = torch.randint(100, 1000, (2000,), generator=torch.Generator().manual_seed(1))
    parts, at = [4, 4, 1, 1], torch.arange(2000) % 2
    chosen = assign_near(weights, [0, 0, 1, 1], at, parts=parts)
    assert imbalance(weights, chosen, 4, parts) < 1.015
    assert imbalance(weights, chosen, 4) == pytest.approx(1.6, rel=0.01)
    stays = torch.tensor([0, 0, 1, 1])[chosen] == at
    assert float(weights[stays].sum() / weights.sum()) > 0.68, "of the second machine's half, a fifth of all fits"


@pytest.mark.parametrize(("weights", "shares_of", "expected"), [([3, 1], [0, 0], 2.0), ([2, 2], [0, 1], 1.0),
                                                                ([0, 0], [0, 0], 1.0), ([], [], 1.0)])
def test_imbalance_is_the_heaviest_over_the_mean(weights, shares_of, expected):
    whole = torch.tensor(weights, dtype=torch.int64), torch.tensor(shares_of, dtype=torch.int64)
    assert imbalance(*whole, 2) == pytest.approx(expected)
