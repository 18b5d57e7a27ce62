"""Group advantages against loops in plain Python, with the groups that have no baseline or no spread."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.functions.advantages import baseline_advantage, group_advantage, leave_one_out_advantage

FUNCTIONS = [group_advantage, leave_one_out_advantage]


def others_of(rewards, groups, row):
    return [r for i, (r, g) in enumerate(zip(rewards, groups)) if g == groups[row] and i != row]


def plain_normalized(rewards, groups, epsilon=1e-6, scale=True):
    result = []
    for row, reward in enumerate(rewards):
        members = [reward, *others_of(rewards, groups, row)]
        if len(set(members)) == 1:
            result.append(0.0)
            continue
        advantage = reward - statistics.fmean(members)
        result.append(advantage / (statistics.stdev(members) + epsilon) if scale else advantage)
    return result


def plain_leave_one_out(rewards, groups):
    result = []
    for row, reward in enumerate(rewards):
        others = others_of(rewards, groups, row)
        result.append(reward - statistics.fmean(others) if others else 0.0)
    return result


def call(function, rewards, groups, **settings_of_it):
    rewards_B = torch.tensor(rewards, dtype=torch.float64)
    return function(rewards_B, torch.tensor(groups, dtype=torch.int64), **settings_of_it).tolist()


# Quarters: distances between unequal rewards stay far above rounding error, as rewards do, and shrink well.
REWARDS = st.integers(-40, 40).map(lambda n: n / 4)
BATCHES = st.lists(st.tuples(REWARDS, st.sampled_from([-5, 0, 3, 2**40])), max_size=12)


@settings(max_examples=200)
@given(batch=BATCHES, epsilon=st.sampled_from([0.0, 1e-6, 1e-4, 0.5]), scale=st.booleans())
def test_normalized_matches_plain_python(batch, epsilon, scale):
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    expected = plain_normalized(rewards, groups, epsilon, scale)
    assert call(group_advantage, rewards, groups, epsilon=epsilon, scale=scale) == pytest.approx(
        expected, rel=1e-6, abs=1e-9
    )


@settings(max_examples=200)
@given(batch=BATCHES)
def test_leave_one_out_matches_plain_python(batch):
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    assert call(leave_one_out_advantage, rewards, groups) == pytest.approx(
        plain_leave_one_out(rewards, groups), rel=1e-6, abs=1e-9
    )


def test_a_case_by_hand():
    rewards, groups = [1.0, 5.0, 0.0, 7.0, 2.0], [9, 4, 9, 4, 9]
    # Group 9: 1, 0, 2 with mean 1 and deviation 1. Group 4: 5, 7 with mean 6 and deviation sqrt(2).
    root = math.sqrt(2)
    assert call(group_advantage, rewards, groups, epsilon=0.0) == pytest.approx([0, -1 / root, -1, 1 / root, 1])
    assert call(group_advantage, rewards, groups, scale=False) == pytest.approx([0, -1, -1, 1, 1])
    assert call(leave_one_out_advantage, rewards, groups) == pytest.approx([0, -2, -1.5, 2, 1.5])


def test_the_default_epsilon_is_added_to_the_deviation():
    assert call(group_advantage, [0.0, 2e-6], [0, 0]) == pytest.approx(
        [sign * 1e-6 / (math.sqrt(2) * 1e-6 + 1e-6) for sign in (-1, 1)]
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_group_of_one_gets_exactly_zero(function):
    assert call(function, [3.5, 1.0, 2.0, -1e30], [7, 1, 1, 2])[0] == 0
    assert call(function, [3.5, 1.0, 2.0, -1e30], [7, 1, 1, 2])[3] == 0


@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("reward", [0.0, 0.1, -1e8 / 3, 1e15 / 7])
def test_equal_rewards_get_exactly_zero(reward, epsilon):
    """The floating-point mean of three equal numbers need not be that number; dividing by epsilon would show it."""
    assert call(group_advantage, [reward] * 3, [0, 0, 0], epsilon=epsilon) == [0, 0, 0]
    assert call(leave_one_out_advantage, [reward] * 3, [0, 0, 0]) == [0, 0, 0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_large_common_mean_does_not_cost_digits_in_float64(function):
    shifted = call(function, [1e9, 1e9 + 1, 1e9 + 3], [0, 0, 0])
    assert shifted == pytest.approx(call(function, [0.0, 1.0, 3.0], [0, 0, 0]), rel=1e-9)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_float32_rewards_are_computed_in_float64(function):
    rewards = [100.0, 100.25, 100.5, 100.125]
    answer_B = function(torch.tensor(rewards), torch.zeros(4, dtype=torch.int64))
    assert answer_B.dtype == torch.float32
    assert torch.equal(answer_B, torch.tensor(call(function, rewards, [0] * 4)).to(torch.float32))


@pytest.mark.parametrize("function", FUNCTIONS)
@given(batch=BATCHES, data=st.data())
def test_the_order_of_rows_and_the_names_of_groups_do_not_matter(function, batch, data):
    order = data.draw(st.permutations(range(len(batch))))
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    moved = call(function, [rewards[i] for i in order], [100 - groups[i] for i in order])
    straight = call(function, rewards, groups)
    assert moved == pytest.approx([straight[i] for i in order], rel=1e-9, abs=1e-12)


@given(rewards=st.lists(st.floats(-1e100, 1e100), max_size=8), data=st.data(), scale=st.booleans())
def test_never_nan(rewards, data, scale):
    groups = [data.draw(st.integers(0, 2)) for _ in rewards]
    for epsilon in (0.0, 1e-6):
        assert all(map(math.isfinite, call(group_advantage, rewards, groups, epsilon=epsilon, scale=scale)))
    assert all(map(math.isfinite, call(leave_one_out_advantage, rewards, groups)))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integer_and_bool_rewards_give_floating_advantages(function, dtype):
    answer_B = function(torch.tensor([1, 0, 1, 1], dtype=dtype), torch.tensor([0, 0, 1, 1]))
    assert answer_B.dtype == torch.get_default_dtype()
    assert answer_B[0] > 0 > answer_B[1]
    assert answer_B[2:].tolist() == [0, 0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_input_is_refused(function):
    with pytest.raises(ValueError, match=r"2 of 3 rewards are not finite \(rows 0, 2\)"):
        function(torch.tensor([math.nan, 1.0, math.inf]), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="one number per row"):
        function(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="integers"):
        function(torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize("epsilon", [-1e-6, math.nan])
def test_an_epsilon_below_zero_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon"):
        group_advantage(torch.zeros(2), torch.zeros(2, dtype=torch.int64), epsilon=epsilon)


def test_a_baseline_is_taken_from_each_reward():
    assert baseline_advantage(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0])).tolist() == [1.0, 0.0, 0.0]


def test_a_lone_answer_has_no_others_to_be_compared_with():
    rewards, group = torch.tensor([1.0, 0.0, 0.5, 1.0]), torch.tensor([2, 2, 2, 9])
    assert leave_one_out_advantage(rewards, group).tolist() == [0.75, -0.75, 0.0, 0.0]
