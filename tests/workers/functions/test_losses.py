"""Bounds of the policy losses, and extreme ratios. Values and gradients: `test_policy_update.py`."""

import math

import pytest
import torch

from workers.functions.losses import USUAL_BOUNDS, surrogate


@pytest.mark.parametrize("kind", USUAL_BOUNDS)
@pytest.mark.parametrize("log_ratio", [-1e4, -89.0, 89.0, 1e4])
def test_no_kind_overflows_in_float32(kind, log_ratio):
    logprobs_T = torch.tensor([-1.0 + log_ratio, -1.0], requires_grad=True)
    loss_T, ratio_T, _ = surrogate(kind, None, None, None)(logprobs_T, torch.full((2,), -1.0), torch.full((2,), -1e3),
                                                           torch.tensor([2]))
    loss_T.sum().backward()
    assert torch.cat([loss_T, ratio_T, logprobs_T.grad]).isfinite().all()


@pytest.mark.parametrize(("kind", "given_bounds", "ratio", "clipped"), [
    ("ppo", (None, None), 1.21, True), ("ppo", (None, None), 1.19, False), ("ppo", (None, 0.28), 1.27, False),
    ("ppo", (0.3, None), 1.29, False), ("gspo", (None, None), 1.0005, True), ("gspo", (None, None), 1.0003, False),
    ("cispo", (None, None), 4.9, False), ("cispo", (None, None), 5.1, True), ("cispo", (None, 1.0), 2.1, True),
])
def test_bounds_that_are_not_given_are_the_usual_ones(kind, given_bounds, ratio, clipped):
    loss = surrogate(kind, *given_bounds, None)
    _, _, clipped_T = loss(torch.tensor([math.log(ratio)], dtype=torch.float64), torch.zeros(1, dtype=torch.float64),
                           torch.ones(1, dtype=torch.float64), torch.tensor([1]))
    assert clipped_T.tolist() == [clipped]
