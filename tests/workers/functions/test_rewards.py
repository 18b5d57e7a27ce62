"""The `score` node: its columns, metrics, output and events. See also tests/workers/isolation."""

from __future__ import annotations

import json

import pytest
import torch
from reported import reported

from distflow.telemetry.metrics import Metrics
from workers.functions.rewards import score


@pytest.fixture(autouse=True)
def _metrics_of_this_test(monkeypatch):
    monkeypatch.setattr("distflow.telemetry.metrics._of_rank", Metrics())


def rows(count: int, first: int = 40) -> torch.Tensor:
    return torch.arange(first, first + count)


def test_it_keeps_the_order_of_rows():
    rewards, keep, _ = score(["#### 1", "#### 2", ""], rows(3), ["#### 1", "#### 3", "#### 0"])
    assert (rewards.tolist(), keep.tolist()) == ([1.0, 0.0, 0.0], [True] * 3)
    assert (rewards.dtype, keep.dtype) == (torch.float32, torch.bool)
    values = reported()
    assert values["reward/mean"] == values["reward/math"] == pytest.approx(1 / 3)
    assert (values["reward/failed"], values["reward/retried"], values["reward/timeouts"]) == (0.0, 0.0, 0.0)


def test_the_spread_of_rewards_and_groups_that_are_all_alike():
    completions = ["#### 1", "#### 1", "#### 1", "#### 2", "#### 2", "#### 2"]
    _, _, parts = score(completions, rows(6), ["#### 1"] * 6, torch.tensor([9, 3, 9, 3, 4, 4]),
                        reward={"math": 2.0, "format": {"weight": 0.5, "pattern": "#### 2"}})
    values = reported()
    assert values["reward/mean"] == pytest.approx(1.25)
    assert values["reward/std"] == pytest.approx(torch.tensor([2.0, 2, 2, 0.5, 0.5, 0.5]).std().item())
    assert (values["reward/min"], values["reward/max"]) == (0.5, 2.0)
    assert values["reward/zero_std_groups"] == pytest.approx(2 / 3)
    assert json.loads(parts[0]) == {"math": 1.0, "format": 0.0}


def test_failures_are_left_out_counted_said_and_recorded(recorded, capfd):
    recipe = {"math": 1.0, "format": {"pattern": "#+ (\\d+)+", "timeout": 2.0, "retries": 1}}
    completions = ["#### 1", "#### " + "1" * 60 + "x", "#### 2"]
    rewards, keep, _ = score(completions, rows(3), ["#### 1"] * 3, reward=recipe)
    assert (rewards.tolist(), keep.tolist()) == ([2.0, 0.0, 1.0], [True, False, True])
    values = reported()
    assert (values["reward/mean"], values["reward/format"]) == (1.5, 1.0)
    assert values["reward/math"] == pytest.approx(1 / 3)
    assert (values["reward/failed"], values["reward/retried"], values["reward/timeouts"]) == (1.0, 1.0, 2.0)
    printed = capfd.readouterr().err.splitlines()
    assert printed == ["[rank 3] 1 of 3 samples left out: reward `format` took longer than 2 s (sample 41)"]
    event, = recorded("reward_failed")
    assert event.pop("time") > 0
    assert event == {"step": 7, "rank": 3, "event": "reward_failed", "reward": "format", "count": 1, "rows": [41],
                     "reason": "took longer than 2 s", "trace": ""}
