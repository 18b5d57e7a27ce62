"""The clipped surrogate against its definition in plain Python, for every sign of advantage and side of the bounds."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from workers.functions.losses import (
    USUAL_BOUNDS,
    capped_policy_gradient,
    clipped_policy_loss,
    policy_gradient,
    sequence_policy_loss,
    surrogate,
)

BOUNDS = [(0.2, 0.2, None), (0.2, 0.28, None), (0.2, 0.2, 3.0), (0.1, 0.5, 1.2), (0.0, 0.0, None)]


def plain(log_ratio, advantage, clip_low, clip_high, dual_clip):
    """Loss, its slope in the log-probability, and whether a bound decided; the surrogate is maximised."""
    ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
    surrogate, slope = ratio * advantage, ratio * advantage
    bounded = max(1 - clip_low, min(1 + clip_high, ratio)) * advantage
    clipped = bounded < surrogate
    if clipped:
        surrogate, slope = bounded, 0.0
    if dual_clip is not None and advantage < 0 and surrogate < dual_clip * advantage:
        surrogate, slope, clipped = dual_clip * advantage, 0.0, True
    if abs(log_ratio) > 20:
        slope = 0.0
    return -surrogate, -slope, clipped


def run(log_ratios, advantages, bounds, dtype=torch.float64):
    old_T = torch.full((len(log_ratios),), -1.25, dtype=dtype)
    logprobs_T = (old_T + torch.tensor(log_ratios, dtype=dtype)).requires_grad_()
    advantages_T = torch.tensor(advantages, dtype=dtype)
    loss_T, ratio_T, clipped_T = clipped_policy_loss(logprobs_T, old_T, advantages_T, *bounds)
    loss_T.sum().backward()
    return loss_T, ratio_T, clipped_T, logprobs_T.grad


def check(log_ratios, advantages, bounds):
    loss_T, ratio_T, clipped_T, grad_T = run(log_ratios, advantages, bounds)
    expected = [plain(x, a, *bounds) for x, a in zip(log_ratios, advantages)]
    assert loss_T.tolist() == pytest.approx([loss for loss, _, _ in expected], rel=1e-6, abs=1e-9)
    assert grad_T.tolist() == pytest.approx([slope for _, slope, _ in expected], rel=1e-6, abs=1e-9)
    assert clipped_T.tolist() == [clipped for _, _, clipped in expected]
    assert ratio_T.tolist() == pytest.approx([math.exp(max(-20, min(20, x))) for x in log_ratios], rel=1e-6)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("advantage", [1.5, -0.7, 0.0])
def test_each_side_of_each_bound(advantage, bounds):
    ratios = [0.05, 0.79, 0.81, 0.95, 1.05, 1.19, 1.21, 1.27, 1.29, 2.9, 3.1, 50.0]
    check([math.log(ratio) for ratio in ratios], [advantage] * len(ratios), bounds)


@given(
    tokens=st.lists(st.tuples(st.floats(-30, 30), st.floats(-5, 5)), max_size=8),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 2), st.none() | st.floats(1.01, 10)),
)
def test_any_ratio_and_advantage(tokens, bounds):
    clip_low, clip_high, dual_clip = bounds
    edges = [1 - clip_low, 1 + clip_high, dual_clip or 1, math.exp(20), math.exp(-20)]
    for log_ratio, advantage in tokens:
        # On an edge both branches are equal and the last bit decides which gradient applies.
        assume(all(abs(math.exp(log_ratio) - edge) > 1e-9 for edge in edges))
        assume(advantage == 0 or abs(advantage) > 1e-6)
    check([x for x, _ in tokens], [a for _, a in tokens], bounds)


def test_before_the_first_update_it_is_the_policy_gradient():
    loss_T, ratio_T, clipped_T, grad_T = run([0.0, 0.0], [2.0, -3.0], (0.2, 0.2))
    assert loss_T.tolist() == [-2.0, 3.0]
    assert grad_T.tolist() == [-2.0, 3.0]
    assert ratio_T.tolist() == [1.0, 1.0]
    assert not clipped_T.any()


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("log_ratio", [-1e4, -89.0, 89.0, 1e4])
@pytest.mark.parametrize("advantage", [-1e3, 0.0, 1e3])
def test_float32_never_overflows(log_ratio, advantage, dual_clip):
    loss_T, ratio_T, _, grad_T = run([log_ratio], [advantage], (0.2, 0.2, dual_clip), torch.float32)
    assert torch.cat([loss_T, ratio_T, grad_T]).isfinite().all()


def test_an_impossible_untrained_token_sends_no_nan_back():
    """Both policies give it probability 0: its own loss is undefined, but weight 0 must leave every gradient whole."""
    logprobs_T = torch.tensor([-math.inf, -1.0], requires_grad=True)
    old_T = torch.tensor([-math.inf, -1.0])
    loss_T, _, _ = clipped_policy_loss(logprobs_T, old_T, torch.ones(2), 0.2, 0.2, 3.0)
    torch.where(torch.tensor([False, True]), loss_T, 0.0).sum().backward()
    assert logprobs_T.grad.tolist() == [0.0, -1.0]


def test_gradients_reach_the_new_log_probabilities_only():
    logprobs_T, old_T, advantages_T = (torch.ones(3, requires_grad=True) for _ in range(3))
    loss_T, ratio_T, _ = clipped_policy_loss(logprobs_T, old_T, advantages_T, 0.2, 0.2)
    loss_T.sum().backward()
    assert logprobs_T.grad is not None
    assert old_T.grad is None
    assert advantages_T.grad is None
    assert not ratio_T.requires_grad


def test_no_tokens():
    loss_T, ratio_T, clipped_T = clipped_policy_loss(torch.zeros(0), torch.zeros(0), torch.zeros(0), 0.2, 0.2, 3.0)
    assert loss_T.shape == ratio_T.shape == clipped_T.shape == (0,)


def test_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match="shape"):
        clipped_policy_loss(torch.zeros(3), torch.zeros(3), torch.zeros(1), 0.2, 0.2)


ROWS = st.lists(st.tuples(st.floats(-2, 2), st.lists(st.floats(-2, 2), max_size=5)), min_size=1, max_size=4)
"""(advantage, log-ratio of each token) of each row."""


def tensors(rows):
    lengths_B = torch.tensor([len(logs) for _, logs in rows], dtype=torch.int64)
    old_T = torch.full((int(lengths_B.sum()),), -1.25, dtype=torch.float64)
    log_ratios_T = torch.tensor([x for _, logs in rows for x in logs], dtype=torch.float64)
    advantages_T = torch.tensor([gain for gain, logs in rows for _ in logs], dtype=torch.float64)
    return (old_T + log_ratios_T).requires_grad_(), old_T, advantages_T, lengths_B


@given(rows=ROWS, low=st.floats(0.01, 0.5), high=st.floats(0.01, 0.5))
def test_the_mean_over_tokens_of_a_row_is_the_objective_of_gspo(rows, low, high):
    """Eq. 5 of the paper, and the gradient that follows from it, against the mean of the token losses."""
    logprobs_T, old_T, advantages_T, lengths_B = tensors(rows)
    loss_T, ratio_T, clipped_T = sequence_policy_loss(logprobs_T, old_T, advantages_T, lengths_B, low, high)
    per_token_T = 1.0 / torch.repeat_interleave(lengths_B, lengths_B).double()
    (loss_T * per_token_T).sum().backward()
    value, slopes, clipped = 0.0, [], []
    for gain, logs in rows:
        ratio = math.exp(sum(logs) / len(logs)) if logs else 1.0
        assume(all(abs(ratio - edge) > 1e-9 for edge in (1 - low, 1 + high)))
        assume(gain == 0 or abs(gain) > 1e-6)
        bounded = max(1 - low, min(1 + high, ratio)) * gain
        value -= min(ratio * gain, bounded) if logs else 0.0
        clipped += [bounded < ratio * gain] * len(logs)
        slopes += [0.0 if bounded < ratio * gain else -ratio * gain / max(len(logs), 1)] * len(logs)
    assert (loss_T * per_token_T).sum().item() == pytest.approx(value, rel=1e-6, abs=1e-9)
    assert logprobs_T.grad.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-9)
    assert clipped_T.tolist() == clipped
    assert not ratio_T.requires_grad


@given(rows=ROWS, high=st.floats(0, 3))
def test_a_capped_weight_keeps_the_gradient(rows, high):
    logprobs_T, old_T, advantages_T, _ = tensors(rows)
    loss_T, ratio_T, capped_T = capped_policy_gradient(logprobs_T, old_T, advantages_T, high)
    loss_T.sum().backward()
    ratios = [math.exp(x) for _, logs in rows for x in logs]
    slopes = [-min(ratio, 1 + high) * gain for ratio, gain in zip(ratios, advantages_T.tolist())]
    assert logprobs_T.grad.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-9)
    assert loss_T.tolist() == pytest.approx([slope * x for slope, x in zip(slopes, logprobs_T.tolist())], rel=1e-6,
                                            abs=1e-9)
    assert ratio_T.tolist() == pytest.approx(ratios, rel=1e-6)
    assert capped_T.tolist() == [ratio > 1 + high for ratio in ratio_T.tolist()]


def test_the_plain_policy_gradient_looks_at_no_ratio():
    logprobs_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss_T, ratio_T, clipped_T = policy_gradient(logprobs_T, torch.tensor([-1.0, -3.0]), torch.tensor([2.0, -1.0]))
    loss_T.sum().backward()
    assert loss_T.tolist() == [2.0, -2.0]
    assert logprobs_T.grad.tolist() == [-2.0, 1.0]
    assert ratio_T.tolist() == pytest.approx([1.0, math.e])
    assert not clipped_T.any()


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
