"""The k3 estimator stays finite, and keeps its digits. Values and gradients: `test_policy_update.py`."""

import math

import pytest
import torch

from workers.functions.kl import kl_estimate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("gap", [-1e4, -100.0, -21.0, 21.0, 100.0, 1e4])
def test_k3_stays_finite_in_value_and_gradient(gap, dtype):
    logprobs_T = torch.tensor([gap], dtype=dtype, requires_grad=True)
    kl_T = kl_estimate(logprobs_T, torch.zeros(1, dtype=dtype), "k3")
    kl_T.sum().backward()
    assert kl_T.dtype == dtype
    assert kl_T.isfinite().all()
    assert kl_T >= 0
    # A token that ran away upwards is pulled back; one beyond the bound in the other direction is left alone.
    assert logprobs_T.grad.item() == pytest.approx(1.0 if gap > 0 else 0.0, abs=1e-6)


def test_k3_keeps_its_digits_in_float32_where_policy_and_reference_almost_agree():
    logprobs_T = torch.tensor([-1e-3])
    exact = math.expm1(float(-logprobs_T)) + float(logprobs_T)
    assert kl_estimate(logprobs_T, torch.zeros(1), "k3").item() == pytest.approx(exact, rel=1e-3)
