"""Advantages of distillation from a teacher."""

from __future__ import annotations

import pytest
import torch

from distflow.data.batch import Ragged
from distflow.telemetry.metrics import current
from workers.functions.inference import distillation_advantage


def ragged(rows, dtype=torch.float64):
    return Ragged.from_rows([torch.tensor(row, dtype=dtype) for row in rows], dtype)


def test_each_token_gains_what_the_teacher_gives_it_more():
    student, teacher = ragged([[-1.0, -2.0], [], [-0.5]]), ragged([[-1.5, -0.25], [], [-0.5]])
    current().collect(lambda part: [part])
    advantages = distillation_advantage(student, teacher)
    assert advantages.values.tolist() == pytest.approx([-0.5, 1.75, 0.0], abs=1e-6)
    assert advantages.lengths.tolist() == [2, 0, 1]
    assert current().collect(lambda part: [part])["distillation/reverse_kl"] == pytest.approx(-1.25 / 3, abs=1e-6)


def test_the_metric_counts_trained_tokens_alone():
    student, teacher = ragged([[-1.0, -2.0], [-3.0]]), ragged([[-1.5, -0.25], [-4.0]])
    current().collect(lambda part: [part])
    distillation_advantage(student, teacher, ragged([[True, False], [True]], torch.bool))
    assert current().collect(lambda part: [part])["distillation/reverse_kl"] == pytest.approx(0.75, abs=1e-6)


def test_in_expectation_it_is_minus_the_reverse_divergence():
    logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    student, teacher = torch.log_softmax(logits, -1)
    rows = [Ragged(each, torch.tensor([7])) for each in (student, teacher)]
    advantages = distillation_advantage(*rows).values
    divergence = torch.nn.functional.kl_div(teacher, student, log_target=True, reduction="sum")
    assert (student.exp() * advantages).sum().item() == pytest.approx(-divergence.item(), abs=1e-6)
