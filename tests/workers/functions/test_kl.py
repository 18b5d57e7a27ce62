"""Estimators against closed forms, and their table of biases against exact expectations over a small vocabulary."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.functions.kl import KINDS, LOG_RATIO_LIMIT, kl_estimate

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


def exact_means(kind):
    """Mean value and mean gradient under the policy, with the gradients of both divergences, all over 5 tokens."""
    logits_V = torch.tensor([0.3, -1.2, 0.8, 0.0, 1.1], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([1.0, 0.2, -0.7, 0.4, 0.1], dtype=torch.float64).log_softmax(0)
    logprobs_V = logits_V.log_softmax(0)
    probs_V = logprobs_V.exp()
    reverse = (probs_V * (logprobs_V - reference_V)).sum()
    forward = (reference_V.exp() * (reference_V - logprobs_V)).sum()
    mean = (probs_V.detach() * kl_estimate(logprobs_V, reference_V, kind)).sum()
    grads = [torch.autograd.grad(x, logits_V, retain_graph=True)[0] for x in (mean, reverse, forward)]
    return mean.item(), reverse.item(), *grads


@pytest.mark.parametrize(("kind", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_which_values_are_unbiased(kind, unbiased):
    mean, reverse, *_ = exact_means(kind)
    assert (abs(mean - reverse) < 1e-12) is unbiased


def test_which_gradients_are_unbiased():
    _, _, k1_V, reverse_V, forward_V = exact_means("k1")
    torch.testing.assert_close(k1_V, torch.zeros_like(k1_V))
    torch.testing.assert_close(exact_means("k2")[2], reverse_V)
    torch.testing.assert_close(exact_means("k3")[2], forward_V)
    assert not torch.allclose(forward_V, reverse_V, atol=1e-2)


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


def test_k3_is_clamped_at_the_documented_bound():
    assert LOG_RATIO_LIMIT == 20
    below, at, above = kl_estimate(
        torch.tensor([-19.0, -20.0, -30.0], dtype=torch.float64), torch.zeros(3), "k3"
    ).tolist()
    assert below == pytest.approx(math.exp(19) - 20, rel=1e-9)
    assert at == pytest.approx(math.exp(20) - 21, rel=1e-9)
    assert above == at


def test_k3_keeps_its_digits_in_float32_where_policy_and_reference_almost_agree():
    logprobs_T = torch.tensor([-1e-3])
    exact = math.expm1(float(-logprobs_T)) + float(logprobs_T)
    assert kl_estimate(logprobs_T, torch.zeros(1), "k3").item() == pytest.approx(exact, rel=1e-3)


def test_the_reference_is_a_constant():
    logprobs_T, reference_T = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    for kind in KINDS:
        kl_estimate(logprobs_T, reference_T, kind).sum().backward()
    assert reference_T.grad is None
    assert logprobs_T.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind):
    assert kl_estimate(torch.zeros(0), torch.zeros(0), kind).shape == (0,)


def test_unknown_kind_and_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="differ"):
        kl_estimate(torch.zeros(3), torch.zeros(1), "k1")
