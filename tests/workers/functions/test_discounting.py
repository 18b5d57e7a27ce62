"""Returns and generalised advantages against the recursion written out in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.functions.advantages import discounted_returns, generalized_advantage

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
def test_any_rows(rows, gamma, lam):
    rewards, values, lengths, mask = columns(rows)
    advantages, returns = generalized_advantage(rewards, values, lengths, gamma, lam, mask)
    expected = [pair for row in rows for pair in plain(row, gamma, lam)]
    assert advantages.tolist() == pytest.approx([pair[0] for pair in expected], rel=1e-6, abs=1e-9)
    assert returns.tolist() == pytest.approx([pair[1] for pair in expected], rel=1e-6, abs=1e-9)
    without = [pair for row in rows for pair in plain([(reward, 0.0, t) for reward, _, t in row], gamma, 1.0)]
    assert discounted_returns(rewards, lengths, gamma, mask).tolist() == pytest.approx(
        [pair[0] for pair in without], rel=1e-6, abs=1e-9)


def test_by_hand():
    rewards, values = torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([0.5, 0.25, 0.75, 1.0])
    advantages, returns = generalized_advantage(rewards, values, torch.tensor([3, 1]), 1.0, 0.5)
    # deltas: 0.25 - 0.5, 0.75 - 0.25, 1 - 0.75; the second row's only one: 2 - 1
    assert advantages.tolist() == pytest.approx([-0.25 + 0.25 + 0.0625, 0.5 + 0.125, 0.25, 1.0])
    assert returns.tolist() == pytest.approx([0.5625, 0.875, 1.0, 2.0])


def test_the_reward_of_an_environments_token_counts_for_the_action_that_it_answers():
    mask = torch.tensor([False, True, False, True])
    rewards = torch.tensor([8.0, 0.0, 1.0, 2.0])
    assert discounted_returns(rewards, torch.tensor([4]), 0.5, mask).tolist() == [0.0, 2.0, 0.0, 2.0]


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
def test_what_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        generalized_advantage(*arguments)
