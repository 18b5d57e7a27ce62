import math

import pytest
import torch

from distflow.data.batch import Ragged
from workers.functions.shaping import kl_in_reward

POLICY = [[-1.0, -2.0], [], [-0.5]]
REFERENCE = [[-1.5, -1.0], [], [-0.25]]
ESTIMATES = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}


def ragged(rows):
    return Ragged.from_rows([torch.tensor(row) for row in rows])


@pytest.mark.parametrize("kind", ESTIMATES)
def test_each_row_pays_for_its_own_tokens(kind):
    rewards = torch.tensor([1.0, 0.5, 0.0])
    shaped = kl_in_reward(rewards, ragged(POLICY), ragged(REFERENCE), kl=0.1, kl_kind=kind)
    expected = [reward - 0.1 * sum(ESTIMATES[kind](p - q) for p, q in zip(policy, reference))
                for reward, policy, reference in zip(rewards.tolist(), POLICY, REFERENCE)]
    assert shaped.tolist() == pytest.approx(expected, abs=1e-6)
    assert shaped[1] == 0.5
