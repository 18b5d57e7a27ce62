"""Weights against loops in plain Python, and the promise that no split of the rows changes loss or gradient."""

import math

import pytest
import torch
from hypothesis import given
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
ROWS = st.lists(st.lists(st.booleans(), max_size=6), max_size=8)


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
