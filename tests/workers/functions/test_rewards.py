"""The `score` node: its columns, metrics, output and events. See also tests/workers/isolation."""

from __future__ import annotations

import json

import pytest
import torch

from distflow.data.batch import Ragged, encode_text
from distflow.errors import InvalidInput, RewardsFailed
from distflow.telemetry import events
from distflow.telemetry.metrics import current
from workers.functions.rewards import as_list, score


@pytest.fixture(autouse=True)
def numbers(tmp_path, monkeypatch):
    """Metrics of this test alone, and a file for its events."""
    monkeypatch.setattr("distflow.telemetry.metrics._of_rank", type(current())())
    monkeypatch.setattr("distflow.telemetry.events._current", events.Events())
    events.current().open(tmp_path / "events.jsonl", 3)
    events.current().step = 7
    return lambda: current().collect(lambda part: [part])


def rows(count: int, first: int = 40) -> torch.Tensor:
    return torch.arange(first, first + count)


def test_it_keeps_the_order_of_rows(numbers):
    rewards, keep, _ = score(["#### 1", "#### 2", ""], rows(3), ["#### 1", "#### 3", "#### 0"])
    assert (rewards.tolist(), keep.tolist()) == ([1.0, 0.0, 0.0], [True] * 3)
    assert (rewards.dtype, keep.dtype) == (torch.float32, torch.bool)
    values = numbers()
    assert values["reward/mean"] == values["reward/math"] == pytest.approx(1 / 3)
    assert (values["reward/failed"], values["reward/retried"], values["reward/timeouts"]) == (0.0, 0.0, 0.0)


def test_the_spread_of_rewards_and_groups_that_are_all_alike(numbers):
    completions = ["#### 1", "#### 1", "#### 1", "#### 2", "#### 2", "#### 2"]
    _, _, parts = score(completions, rows(6), ["#### 1"] * 6, torch.tensor([9, 3, 9, 3, 4, 4]),
                        reward={"math": 2.0, "format": {"weight": 0.5, "pattern": "#### 2"}})
    values = numbers()
    assert values["reward/mean"] == pytest.approx(1.25)
    assert values["reward/std"] == pytest.approx(torch.tensor([2.0, 2, 2, 0.5, 0.5, 0.5]).std().item())
    assert (values["reward/min"], values["reward/max"]) == (0.5, 2.0)
    assert values["reward/zero_std_groups"] == pytest.approx(2 / 3)
    assert json.loads(parts[0]) == {"math": 1.0, "format": 0.0}


def test_failures_are_left_out_counted_said_and_recorded(numbers, tmp_path, capfd):
    recipe = {"math": 1.0, "format": {"pattern": "#+ (\\d+)+", "timeout": 4.0, "retries": 1}}
    completions = ["#### 1", "#### " + "1" * 60 + "x", "#### 2"]
    rewards, keep, _ = score(completions, rows(3), ["#### 1"] * 3, reward=recipe)
    assert (rewards.tolist(), keep.tolist()) == ([2.0, 0.0, 1.0], [True, False, True])
    values = numbers()
    assert (values["reward/mean"], values["reward/format"]) == (1.5, 1.0)
    assert values["reward/math"] == pytest.approx(1 / 3)
    assert (values["reward/failed"], values["reward/retried"], values["reward/timeouts"]) == (1.0, 1.0, 2.0)
    printed = capfd.readouterr().err.splitlines()
    assert printed == ["[rank 3] 1 of 3 samples left out: reward `format` took longer than 4 s (sample 41)"]
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert event.pop("time") > 0
    assert event == {"step": 7, "rank": 3, "event": "reward_failed", "reward": "format", "count": 1, "rows": [41],
                     "reason": "took longer than 4 s", "trace": ""}


def test_steps_without_any_reward_end_the_run():
    recipe = {"code": {"retries": 0}}
    for step in range(2):
        current().step = step
        rewards, keep, _ = score(["x"], rows(1), ["x"], reward=recipe, patience=3, tests=encode_text(["[]"]))
        assert not keep.any()
    current().step = 2
    with pytest.raises(RewardsFailed, match="ValueError: tests in JSON"):
        score(["x"], rows(1), ["x"], reward=recipe, patience=3, tests=encode_text(["[]"]))


def test_rewards_by_source():
    recipe = {"by": "source", "rewards": {"sums": "math", "forms": {"format": {"tags": ["a"]}}}}
    rewards, *_ = score(["#### 1", "<a></a>", "<a></a>"], rows(3), ["#### 1"] * 3, reward=recipe,
                        source=["sums", "forms", "sums"])
    assert rewards.tolist() == [1.0, 1.0, 0.0]
    with pytest.raises(InvalidInput, match="`source` of row 41 is 'sum'"):
        score(["", ""], rows(2), ["", ""], reward=recipe, source=["sums", "sum"])


def test_columns_as_reward_functions_get_them():
    assert as_list(["a"]) == ["a"]
    assert as_list(torch.tensor([1.5, 2.0])) == [1.5, 2.0]
    assert as_list(encode_text(["a", "é"])) == ["a", "é"]
    ragged = Ragged.from_rows([torch.tensor([1, 2]), torch.tensor([3])])
    assert as_list(ragged) == [[1, 2], [3]]
    assert as_list(Ragged(ragged, torch.tensor([2]))) == [[[1, 2], [3]]]
