"""Rewards made of other rewards, against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distflow.data.batch import Ragged
from workers.functions.advantages import discounted_advantage
from workers.functions.rewards import kl_in_reward, overlong_penalty, token_rewards

NUMBERS = st.floats(-4, 4, allow_subnormal=False, width=32)
ROWS = st.lists(st.tuples(NUMBERS, st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), max_size=5)), min_size=1,
                max_size=4)
"""(reward, [(rollout's log-probability, reference's, trained) of each token]) of each row."""


ESTIMATES = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
KINDS = st.sampled_from(list(ESTIMATES))


def columns(rows):
    def column(i, dtype):
        return Ragged.from_rows([torch.tensor([token[i] for token in tokens], dtype=dtype) for _, tokens in rows])

    rewards = torch.tensor([reward for reward, _ in rows], dtype=torch.float64)
    return rewards, column(0, torch.float64), column(1, torch.float64), column(2, torch.bool)


@given(rows=ROWS, kl=st.floats(0, 1), kind=KINDS)
def test_each_row_pays_for_its_own_trained_tokens(rows, kl, kind):
    expected = [reward - kl * sum(ESTIMATES[kind](old - ref) for old, ref, trained in tokens if trained)
                for reward, tokens in rows]
    assert kl_in_reward(*columns(rows), kl=kl, kl_kind=kind).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(rows=ROWS, kl=st.floats(0, 1), kind=KINDS)
def test_token_rewards_and_their_returns(rows, kl, kind):
    """REINFORCE++: a token's advantage is the reward minus the KL penalty from that token on."""
    rewards, rollout, reference, mask = columns(rows)
    shaped = token_rewards(rewards, rollout, reference, mask, kl=kl, kl_kind=kind)
    expected, returns = [], []
    for reward, tokens in rows:
        last = max((i for i, token in enumerate(tokens) if token[2]), default=None)
        row = [(reward if i == last else 0.0) - kl * ESTIMATES[kind](old - ref) if trained else 0.0
               for i, (old, ref, trained) in enumerate(tokens)]
        expected += row
        returns += [sum(row[i:]) if token[2] else 0.0 for i, token in enumerate(tokens)]
    assert shaped.values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert discounted_advantage(shaped, mask).values.tolist() == pytest.approx(returns, rel=1e-5, abs=1e-4)


def test_token_rewards_without_a_reference_and_a_mask():
    rollout = Ragged.from_rows([torch.zeros(2), torch.zeros(0), torch.zeros(3)])
    assert token_rewards(torch.tensor([1.0, 9.0, 2.0]), rollout).values.tolist() == [0.0, 1.0, 0.0, 0.0, 2.0]


def test_the_overlong_penalty_is_that_of_the_paper():
    lengths = [0, 80, 81, 90, 99, 100, 130]
    responses = Ragged.from_rows([torch.zeros(length, dtype=torch.int64) for length in lengths])
    rewards = overlong_penalty(torch.ones(7), responses, max_length=100, margin=0.2)
    assert rewards.tolist() == pytest.approx([1.0, 1.0, 0.95, 0.5, 0.05, 0.0, 0.0])
    halved = overlong_penalty(torch.ones(7), responses, max_length=100, penalty=0.5)
    assert halved.tolist() == pytest.approx([1.0, 1.0, 0.975, 0.75, 0.525, 0.5, 0.5])


def test_penalties_of_whole_numbers_are_not_rounded_away():
    logprobs = Ragged.from_rows([torch.full((2,), -0.25), torch.full((4,), -0.25)])
    reference = logprobs.with_values(torch.full((6,), -0.5))
    for rewards in (torch.tensor([1, 0]), torch.tensor([True, False])):
        assert kl_in_reward(rewards, logprobs, reference, kl=0.5).tolist() == [0.75, -0.5]
        assert overlong_penalty(rewards, logprobs, max_length=4, margin=0.5).tolist() == [1.0, -1.0]
