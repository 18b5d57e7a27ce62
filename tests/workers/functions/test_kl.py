"""Estimators against closed forms, and their table of biases against exact expectations over a small vocabulary."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.functions.kl import KINDS, kl_estimate

NUMBERS = st.floats(-60, 0)


def plain(logprob, reference, kind):
    if kind == "k1":
        return logprob - reference
    if kind == "k2":
        return (logprob - reference) ** 2 / 2
    log_ratio = min(reference - logprob, 20.0)
    return math.exp(log_ratio) - 1 - log_ratio


def plain_slope(logprob, reference, kind):
    if kind == "k1":
        return 1.0
    if kind == "k2":
        return logprob - reference
    return 0.0 if reference - logprob > 20.0 else 1 - math.exp(reference - logprob)


@given(pairs=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=8), kind=st.sampled_from(KINDS))
def test_value_and_gradient_match_closed_forms(pairs, kind):
    logprobs_T, reference_T = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
    logprobs_T = logprobs_T.clone().requires_grad_()
    kl_T = kl_estimate(logprobs_T, reference_T, kind)
    kl_T.sum().backward()
    assert kl_T.tolist() == pytest.approx([plain(*pair, kind) for pair in pairs], rel=1e-6, abs=1e-9)
    assert logprobs_T.grad.tolist() == pytest.approx([plain_slope(*pair, kind) for pair in pairs], rel=1e-6, abs=1e-9)


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


def test_unknown_kind_and_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="differ"):
        kl_estimate(torch.zeros(3), torch.zeros(1), "k1")
