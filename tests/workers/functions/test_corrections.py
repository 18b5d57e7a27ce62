"""Importance ratios, truncation and rejection against their definitions in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reported import reported

from distflow.data.batch import Ragged
from workers.functions.corrections import reject_mismatch, truncated_importance

LOGPROBS = st.floats(-4, 0, allow_subnormal=False)
ROWS = st.lists(st.lists(st.tuples(LOGPROBS, LOGPROBS, st.booleans()), max_size=5), max_size=4)
"""By token: rollout's and trainer's log-probability, trained."""
LEVELS = st.sampled_from(["token", "sequence", "geometric"])


def ratios(row, level):
    """The ratio of each token; None where it is not trained."""
    logs = [new - old for old, new, trained in row if trained]
    whole = sum(logs) / (len(logs) if level == "geometric" else 1) if logs else 0.0
    return [math.exp(max(-20.0, min(20.0, new - old if level == "token" else whole))) if trained else None
            for old, new, trained in row]


def columns(rows):
    return [Ragged.from_rows([torch.tensor([token[i] for token in row], dtype=dtype) for row in rows], dtype)
            for i, dtype in enumerate((torch.float64, torch.float64, torch.bool))]


@given(rows=ROWS, level=LEVELS, cap=st.floats(1, 4))
def test_truncated_importance(rows, level, cap):
    weights = truncated_importance(*columns(rows), level=level, cap=cap)
    expected = [1.0 if ratio is None else min(ratio, cap) for row in rows for ratio in ratios(row, level)]
    assert weights.values.tolist() == pytest.approx(expected, rel=1e-6)
    assert weights.values.dtype == torch.float32


def test_icepop_weighs_tokens_outside_its_band_with_zero_and_masks_none():
    rollout, actor, mask = columns([[(-2.0, -2.0 + math.log(ratio), True) for ratio in (0.4, 0.6, 4.0, 6.0)]])
    settings = {"low": 0.5, "cap": 5.0}
    for above, last in (("zero", 0.0), ("cap", 5.0)):
        weights = truncated_importance(rollout, actor, mask, above=above, **settings)
        assert weights.values.tolist() == pytest.approx([0.0, 0.6, 4.0, last])


@given(rows=ROWS, level=LEVELS, low=st.floats(0, 1), high=st.floats(1, 4))
def test_reject_mismatch(rows, level, low, high):
    mask = reject_mismatch(*columns(rows), level=level, low=low, high=high)
    flat = [ratio for row in rows for ratio in ratios(row, level)]
    for kept, ratio in zip(mask.values.tolist(), flat, strict=True):
        if ratio is None or min(abs(ratio - low), abs(ratio - high)) > 1e-9:
            assert kept == (ratio is not None and low <= ratio <= high)


def test_what_they_report():
    reported()
    rollout, actor, mask = columns([[(-3.0, -1.0, True), (-1.0, -1.0, True), (-9.0, 0.0, False)]])
    truncated_importance(rollout, actor, mask, cap=2.0)
    reject_mismatch(rollout, actor, mask)
    assert reported() == {"importance/mean": 1.5, "importance/truncated": 0.5,
                                                      "importance/rejected": 0.5}


def test_an_impossible_untrained_token_spoils_no_row():
    rollout, actor, mask = columns([[(-math.inf, -math.inf, False), (-1.0, -1.0, True)]])
    for level in ("token", "sequence", "geometric"):
        assert truncated_importance(rollout, actor, mask, level=level).values.tolist() == [1.0, 1.0]
        assert reject_mismatch(rollout, actor, mask, level=level).values.tolist() == [False, True]
