"""Group advantages against loops in plain Python, with the groups that have no baseline or no spread."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.functions.advantages import (
    baseline_advantage,
    discounted_returns,
    generalized_advantage,
    group_advantage,
    leave_one_out_advantage,
)

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


def test_the_default_epsilon_is_added_to_the_deviation():
    assert call(group_advantage, [0.0, 2e-6], [0, 0]) == pytest.approx(
        [sign * 1e-6 / (math.sqrt(2) * 1e-6 + 1e-6) for sign in (-1, 1)]
    )


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


NUMBERS = st.floats(-5, 5, allow_subnormal=False)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), max_size=9)
"""A row: (reward, value, trained) of each token."""
SHARES = st.floats(0, 1, allow_subnormal=False)


def plain(row, gamma, lam):
    """(advantage, return) of each token, from the definition: only trained tokens are steps."""
    steps = []
    for reward, value, trained in row:
        if trained:
            steps.append([reward, value])
        elif steps:
            steps[-1][0] += reward
    results, advantage, following = [], 0.0, 0.0
    for reward, value in reversed(steps):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        results.append((advantage, advantage + value))
    return [results.pop() if trained else (0.0, 0.0) for _, _, trained in row]


def columns(rows):
    tokens = [token for row in rows for token in row]
    rewards, values, trained = (list(column) for column in zip(*tokens)) if tokens else ([], [], [])
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return (torch.tensor(rewards, dtype=torch.float64), torch.tensor(values, dtype=torch.float64), lengths,
            torch.tensor(trained, dtype=torch.bool))


@given(rows=st.lists(TOKENS, max_size=5), gamma=SHARES, lam=SHARES)
def test_generalized_advantage_and_returns_match_plain_python(rows, gamma, lam):
    rewards, values, lengths, mask = columns(rows)
    advantages, returns = generalized_advantage(rewards, values, lengths, gamma, lam, mask)
    expected = [pair for row in rows for pair in plain(row, gamma, lam)]
    assert advantages.tolist() == pytest.approx([pair[0] for pair in expected], rel=1e-6, abs=1e-9)
    assert returns.tolist() == pytest.approx([pair[1] for pair in expected], rel=1e-6, abs=1e-9)
    without = [pair for row in rows for pair in plain([(reward, 0.0, t) for reward, _, t in row], gamma, 1.0)]
    assert discounted_returns(rewards, lengths, gamma, mask).tolist() == pytest.approx(
        [pair[0] for pair in without], rel=1e-6, abs=1e-9)


def test_a_thousand_tokens_see_to_the_end():
    rewards = torch.zeros(1000)
    rewards[-1] = 1.0
    assert discounted_returns(rewards, torch.tensor([1000]), 1.0).tolist() == [1.0] * 1000
    assert discounted_returns(rewards, torch.tensor([1000]), 0.99)[0] == pytest.approx(0.99**999, rel=1e-6)


def test_values_are_constants():
    values = torch.ones(2, requires_grad=True)
    advantages, returns = generalized_advantage(torch.ones(2), values, torch.tensor([2]), 1.0, 1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize(("arguments", "said"), [
    ((torch.ones(2), torch.ones(2), torch.tensor([3]), 1.0, 1.0), "add up to 3"),
    ((torch.ones(3), torch.ones(2), torch.tensor([3]), 1.0, 1.0), "one per token"),
    ((torch.ones(1), torch.ones(1), torch.tensor([1]), 1.1, 1.0), "gamma must be from 0 to 1"),
    ((torch.ones(1), torch.ones(1), torch.tensor([1]), 1.0, float("nan")), "lam must be from 0 to 1"),
    ((torch.ones(1), torch.ones(1), torch.tensor([1]), 1.0, 1.0, torch.ones(1)), "bool"),
])
def test_generalized_advantage_refuses_what_does_not_fit(arguments, said):
    with pytest.raises(ValueError, match=said):
        generalized_advantage(*arguments)
