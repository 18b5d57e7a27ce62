"""Evaluation metrics against counting by hand."""

from __future__ import annotations

import pytest
import torch
from reported import reported

from distflow.telemetry import metrics as module
from distflow.telemetry.metrics import Metrics
from workers.functions.evaluation import tally


@pytest.fixture
def metrics(monkeypatch):
    monkeypatch.setattr(module, "_of_rank", Metrics())
    return module.current()


def figures(metrics: Metrics) -> dict[str, float]:
    return {name.removeprefix("evaluation/"): value for name, value in reported(metrics).items()}


def run(rewards: list[float], group: list[int], **settings) -> None:
    text = [""] * len(rewards)
    tally(torch.tensor(rewards), torch.tensor(group), text, text, text, **settings)


def test_each_problem_counts_once(metrics):
    """Rows of a problem need not stand together. Problem 7 has three of four right, problem 2 one."""
    run([1, 0, 1, 1, 0, 0, 0, 1], [7, 2, 7, 2, 7, 2, 2, 7], samples=4)
    found = figures(metrics)
    assert found["mean@4"] == pytest.approx((3 / 4 + 1 / 4) / 2)
    assert found["mean@4/squared"] == pytest.approx((9 / 16 + 1 / 16) / 2)
    assert found["pass@1"] == pytest.approx((3 / 4 + 1 / 4) / 2)
    assert found["pass@2"] == pytest.approx((1 + 1 / 2) / 2)
    assert found["pass@4"] == 1.0
    assert found["pass@4/problems"] == 2


@pytest.mark.parametrize("threshold", [0.9, 0.7, 0.3])
def test_an_answer_that_earns_the_threshold_is_right(metrics, threshold):
    run([threshold, 0.2], [0, 1], threshold=threshold)
    assert figures(metrics)["pass@1"] == 0.5


def test_a_problem_with_lost_answers_has_no_pass_at_more_than_are_left(metrics):
    run([0.5, 1.0, 1.0], [0, 0, 1], samples=3, threshold=0.5)
    found = figures(metrics)
    assert (found["pass@1/problems"], found["pass@2/problems"], found.get("pass@3/problems")) == (2, 1, None)
    assert found["mean@3"] == pytest.approx((0.75 + 1.0) / 2)
    assert found["pass@1"] == 1.0
