"""Weights against loops in plain Python, and the promise that no split of the rows changes loss or gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.functions.aggregation import local_totals, token_weights, weighted_sum

MODES = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "fixed_length_sum")

FIXED = 7


def fixed_for(mode):
    return FIXED if mode == "fixed_length_sum" else None


def expected_weights(rows, mode):
    """`rows` is a list of lists of bool: the mask of each row. A flat list of weights comes back."""
    tokens = sum(sum(row) for row in rows)
    trained_rows = sum(any(row) for row in rows)
    weights = []
    for row in rows:
        for trained in row:
            if not trained:
                weights.append(0.0)
            elif mode == "token_mean":
                weights.append(1.0 / tokens)
            elif mode == "seq_mean_token_sum":
                weights.append(1.0 / trained_rows)
            elif mode == "seq_mean_token_mean":
                weights.append(1.0 / trained_rows / sum(row))
            else:
                weights.append(1.0 / trained_rows / FIXED)
    return weights


def tensors(rows):
    flat = [trained for row in rows for trained in row]
    return torch.tensor(flat, dtype=torch.bool), torch.tensor([len(row) for row in rows], dtype=torch.int64)


def weights_of(rows, mode, totals=None):
    mask_T, lengths_B = tensors(rows)
    totals = local_totals(mask_T, lengths_B) if totals is None else totals
    return token_weights(mask_T, lengths_B, mode, totals, fixed_for(mode))


T, F = True, False
CASES = {
    "all_trained": [[T, T, T], [T], [T, T]],
    "partly_masked": [[F, T, T], [T, F], [T, T, F, T]],
    "masked_row": [[T, T], [F, F, F], [T]],
    "zero_length_rows": [[], [T, F], [], [T], []],
    "one_token": [[T]],
    "all_masked": [[F, F], [F]],
    "only_empty_rows": [[], []],
    "no_rows": [],
}
ROWS = st.lists(st.lists(st.booleans(), max_size=6), max_size=8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_weights_match_plain_python(case, mode):
    weights_T = weights_of(CASES[case], mode)
    assert weights_T.dtype == torch.float32
    assert weights_T.tolist() == pytest.approx(expected_weights(CASES[case], mode), rel=1e-6, abs=0)


@given(rows=ROWS, mode=st.sampled_from(MODES))
def test_any_mask_matches_plain_python(rows, mode):
    weights = weights_of(rows, mode).tolist()
    assert all(map(math.isfinite, weights))
    assert weights == pytest.approx(expected_weights(rows, mode), rel=1e-6, abs=0)


def test_totals_count_trained_tokens_and_rows_that_have_one():
    totals = local_totals(*tensors([[T, F, T], [F, F], [], [T]]))
    assert totals.dtype == torch.float64
    assert totals.tolist() == [3, 2]


def test_no_mask_trains_every_token():
    lengths_B = torch.tensor([2, 0, 3])
    mask_T = torch.ones(5, dtype=torch.bool)
    totals = local_totals(None, lengths_B)
    assert torch.equal(totals, local_totals(mask_T, lengths_B))
    for mode in MODES:
        without = token_weights(None, lengths_B, mode, totals, fixed_for(mode))
        assert torch.equal(without, token_weights(mask_T, lengths_B, mode, totals, fixed_for(mode)))


@pytest.mark.parametrize("mode", MODES)
def test_zero_totals_give_zero_weights_even_to_trained_tokens(mode):
    assert weights_of([[T, T], [F]], mode, totals=torch.zeros(2, dtype=torch.float64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_masked_row_changes_nothing_for_the_others(mode):
    assert torch.equal(weights_of([[T, T], [T]], mode), weights_of([[T, T], [F, F, F], [T]], mode)[[0, 1, 5]])


def per_token_loss(theta, features_T_D):
    """Any smooth function of parameters and token will do; this one is not linear in theta."""
    return torch.sin(features_T_D @ theta) + (features_T_D @ theta).square()


def plain_loss(theta, features, rows, mode):
    """The definition of each mode, in Python floats: average what is to be averaged, sum what is to be summed."""
    start, sums, counts = 0, [], []
    for row in rows:
        dots = [sum(x * p for x, p in zip(token, theta)) for token in features[start : start + len(row)]]
        losses = [math.sin(dot) + dot * dot for dot, trained in zip(dots, row) if trained]
        start += len(row)
        if losses:
            sums.append(math.fsum(losses))
            counts.append(len(losses))
    if not sums:
        return 0.0
    return {
        "token_mean": math.fsum(sums) / sum(counts),
        "seq_mean_token_sum": math.fsum(sums) / len(sums),
        "seq_mean_token_mean": math.fsum(s / n for s, n in zip(sums, counts)) / len(sums),
        "fixed_length_sum": math.fsum(sums) / FIXED / len(sums),
    }[mode]


def plain_gradient(theta, features, rows, mode, step=1e-5):
    """Central differences: independent of autograd as well as of the weights."""
    gradient = []
    for axis in range(len(theta)):
        up, down = list(theta), list(theta)
        up[axis] += step
        down[axis] -= step
        gradient.append((plain_loss(up, features, rows, mode) - plain_loss(down, features, rows, mode)) / (2 * step))
    return gradient


def split_loss(theta_values, features_T_D, rows, mode, place):
    """Value and gradient with row i on rank and micro-batch `place[i]`, as a distributed run would compute them."""
    starts = [sum(len(row) for row in rows[:i]) for i in range(len(rows))]
    ranks = sorted({rank for rank, _ in place})
    held = {rank: [i for i in range(len(rows)) if place[i][0] == rank] for rank in ranks}
    totals = torch.zeros(2, dtype=torch.float64)
    for rank in ranks:
        totals += local_totals(*tensors([rows[i] for i in held[rank]]))
    theta = torch.tensor(theta_values, dtype=torch.float64, requires_grad=True)
    value = 0.0
    for rank in ranks:
        weights_T = weights_of([rows[i] for i in held[rank]], mode, totals)
        per_row = dict(zip(held[rank], weights_T.split([len(rows[i]) for i in held[rank]])))
        for micro in sorted({place[i][1] for i in held[rank]}):
            inside = [i for i in held[rank] if place[i][1] == micro]
            tokens = torch.cat([torch.arange(starts[i], starts[i] + len(rows[i])) for i in inside])
            loss = weighted_sum(per_token_loss(theta, features_T_D[tokens]), torch.cat([per_row[i] for i in inside]))
            loss.backward()
            value += loss.item()
    return value, [0.0] * len(theta_values) if theta.grad is None else theta.grad.tolist()


@st.composite
def split_problems(draw):
    rows = draw(ROWS)
    places = st.tuples(st.integers(0, 2), st.integers(0, 2))
    place = draw(st.lists(places, min_size=len(rows), max_size=len(rows)))
    number = st.floats(-1.5, 1.5, width=32)
    tokens = sum(map(len, rows))
    features = draw(st.lists(st.tuples(number, number), min_size=tokens, max_size=tokens))
    return rows, place, features, draw(st.tuples(number, number))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=150)
@given(problem=split_problems())
def test_no_split_changes_value_or_gradient(mode, problem):
    rows, place, features, theta = problem
    features_T_D = torch.tensor(features, dtype=torch.float64).reshape(-1, 2)
    whole, whole_gradient = split_loss(theta, features_T_D, rows, mode, [(0, 0)] * len(rows))
    value, gradient = split_loss(theta, features_T_D, rows, mode, place)
    assert value == pytest.approx(whole, rel=1e-12, abs=1e-12)
    assert gradient == pytest.approx(whole_gradient, rel=1e-12, abs=1e-12)
    assert value == pytest.approx(plain_loss(theta, features, rows, mode), rel=1e-6, abs=1e-6)
    assert gradient == pytest.approx(plain_gradient(theta, features, rows, mode), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_an_undefined_loss_of_an_untrained_token_stays_out(broken):
    loss_T = torch.tensor([1.0, broken, 3.0], requires_grad=True)
    total = weighted_sum(loss_T, torch.tensor([0.5, 0.0, 0.25]))
    total.backward()
    assert total.item() == 1.25
    assert loss_T.grad.tolist() == [0.5, 0.0, 0.25]


def test_an_undefined_loss_of_a_trained_token_is_not_hidden():
    assert weighted_sum(torch.tensor([1.0, math.nan]), torch.tensor([0.5, 0.5])).isnan()


def test_an_empty_piece_is_zero_and_still_runs_backward():
    loss_T = torch.zeros(0, requires_grad=True)
    total = weighted_sum(loss_T, torch.zeros(0))
    total.backward()
    assert total.item() == 0
    assert loss_T.grad.shape == (0,)


def test_a_mask_that_is_not_bool_or_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="bool"):
        local_totals(torch.ones(2), torch.tensor([2]))
    with pytest.raises(ValueError, match="add up to 3"):
        local_totals(torch.ones(2, dtype=torch.bool), torch.tensor([3]))


def test_loss_and_weights_must_have_one_shape():
    with pytest.raises(ValueError, match="differ"):
        weighted_sum(torch.ones(1), torch.ones(3))
