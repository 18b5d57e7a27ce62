"""What a step's rows have in common, on rows whose numbers are known."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from distflow import Ragged
from distflow.data.batch import encode_text
from distflow.telemetry.metrics import Metrics, recording
from workers.functions.row_metrics import report_rows


class Rows:
    """The rows of a step, as a databuffer gives them."""

    def __init__(self, **columns: Any):
        self.columns = columns

    def all_rows(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        return {"rollout": {name: column for name, column in self.columns.items() if name in names}}


def reported(**columns: Any) -> dict[str, float]:
    metrics = Metrics()
    with recording(metrics):
        report_rows(Rows(**columns))
    return metrics.collect(lambda mine: [mine])


def tokens(*rows: list[int]) -> Ragged:
    return Ragged.from_rows([torch.tensor(row) for row in rows])


GROUP = torch.tensor([0, 0, 0, 7, 7, 7])
REWARDS = torch.tensor([0.0, 1.0, 2.0, 5.0, 3.0, 4.0])


def test_advantages_are_compared_with_rewards_within_their_prompt():
    assert reported(group=GROUP, rewards=REWARDS, advantages=REWARDS - 9)["advantages/reward_correlation"] == \
        pytest.approx(1)
    turned = Ragged.from_rows([torch.full((2,), -float(reward)) for reward in REWARDS])
    assert reported(group=GROUP, rewards=REWARDS, advantages=turned)["advantages/reward_correlation"] == \
        pytest.approx(-1)
    assert "advantages/reward_correlation" not in reported(group=GROUP, rewards=REWARDS, advantages=torch.ones(6))


def test_answers_that_are_right_are_compared_with_rewards_and_preferences():
    columns = {"group": GROUP, "answers": encode_text(["1 + 1 = 2 #### 2"] * 3 + ["#### 5"] * 3),
               "completions": encode_text(["#### 2", "#### 3", "2", "so #### 5", r"\boxed{5}", "#### 6"])}
    found = reported(**columns, rewards=torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0]),
                     preference=torch.tensor([-1, 1, 0, 1, 0, -1]))
    assert found["response/has_answer"] == 0.5
    assert found["reward/answer_correlation"] == pytest.approx(-1)
    assert found["preference/worse_has_answer"] == 0.5
    assert (found["earned/right"], found["earned/wrong"], found["earned/wrong_max"]) == (pytest.approx(0), 1, 1)
    unmarked = columns | {"answers": encode_text(["2"] * 6)}
    assert "response/has_answer" not in reported(**unmarked, rewards=REWARDS)


def test_records_without_a_marked_answer_are_counted_where_others_have_one_and_all_their_samples_earn_the_same():
    columns = {"group": GROUP, "answers": encode_text(["#### 2"] * 3 + ["1 + 1 = 2"] * 3),
               "completions": encode_text(["#### 2", "#### 3", "2", "#### 5", "#### 2", "#### 6"])}
    found = reported(**columns, rewards=torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    assert (found["reward/unanswerable"], found["response/has_answer"]) == (0.5, pytest.approx(1 / 3))
    assert reported(**columns, rewards=torch.tensor([0.0, 0, 0, 1, 1, 1]))["reward/unanswerable"] == 0.5  # all are paid
    assert reported(**columns, rewards=torch.tensor([0.0, 0, 0, 0.1, 0.5, 1]))["reward/unanswerable"] == 0  # judged
    alone = columns | {"group": torch.arange(6), "rewards": torch.tensor([1.0, 0, 0, 0, 1, 1])}
    assert reported(**alone)["reward/unanswerable"] == pytest.approx(1 / 6)


def test_answers_without_a_mark_are_counted():
    found = reported(group=GROUP, questions=encode_text(["What is 1 + 1?"] * 3 + ["What is 2 + 2?"] * 3),
                     answers=encode_text(["1 + 1 = 2 #### 2"] * 3 + ["4"] * 3))
    assert found["prompt/unmarked"] == 0.5


def test_parts_of_a_reward_are_compared_with_the_whole():
    parts = [json.dumps({"math": float(reward % 2), "length": -reward, "format": 1.0}) for reward in range(6)]
    found = reported(group=GROUP, rewards=-torch.arange(6.0), reward_parts=encode_text(parts))
    assert found["reward/correlation/length"] == pytest.approx(1)
    assert abs(found["reward/correlation/math"]) < 0.1
    assert "reward/correlation/format" not in found
    one = [json.dumps({"math": float(reward)}) for reward in range(6)]
    assert not any("correlation/" in name for name in reported(group=GROUP, rewards=REWARDS,
                                                               reward_parts=encode_text(one)))


def test_lengths_are_compared_with_rewards_within_their_prompt():
    rows = tokens([1], [1, 2], [1, 2, 3], [1] * 9, [1] * 7, [1] * 8)
    assert reported(group=GROUP, rewards=REWARDS, responses=rows)["reward/length_correlation"] == pytest.approx(1)


def test_runs_of_tokens_that_come_again_in_their_row():
    found = reported(group=torch.tensor([0, 0]), responses=tokens([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 1, 2, 3, 4]))
    assert found["response/repetition"] == pytest.approx(1 / 9)
    assert found["response/alike"] == 0
    assert reported(group=torch.tensor([0]), responses=tokens([1]))["response/alike"] == 0


def test_equal_answers_that_earn_different_rewards():
    rows = tokens([1, 2], [1, 2], [2, 1], [4], [4], [5])
    found = reported(group=GROUP, rewards=torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0]), responses=rows)
    assert found["response/alike"] == pytest.approx(2 / 6)
    assert found["reward/inconsistent"] == pytest.approx(0.5)


def test_prompts_that_are_twice_in_a_step_or_hold_their_answer():
    questions = encode_text(["What is 2 + 2?"] * 2 + ["What is 2 + 2?", "Say 12345.", "Say 7.", "Say so."])
    answers = encode_text(["#### 4"] * 3 + ["#### 12345", "#### 7", "#### no"])
    found = reported(group=torch.tensor([0, 0, 1, 2, 3, 4]), questions=questions, answers=answers)
    assert found["prompt/repeated"] == pytest.approx(1 / 5)
    assert found["prompt/has_answer"] == pytest.approx(1 / 5), "a digit may be in a question by accident"
    assert found["prompt/same_answer"] == pytest.approx(1 / 4), "of the other prompts"
    answers = encode_text(["1 #### 4"] * 3 + ["#### 4"] * 3)
    assert reported(group=GROUP, questions=encode_text(["q"] * 6), answers=answers)["prompt/same_answer"] == 1
    alone = reported(group=GROUP[:1], questions=encode_text(["q"]), answers=encode_text(["4"]))
    assert "prompt/same_answer" not in alone, "one prompt is like no other"


def test_correlations_do_not_depend_on_the_number_of_ranks():
    """Groups of unlike spread, so that means of ranks would differ."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(6).repeat_interleave(4)
    rewards = torch.randn(24, generator=generator) * (1 + 9 * group)
    columns = {"group": group, "rewards": rewards, "advantages": rewards + torch.randn(24, generator=generator) + group}
    rows = [torch.ones(int(count), dtype=torch.int64) for count in torch.randint(1, 9, (24,), generator=generator)]
    found = []
    for ranks in (1, 2, 3, 6):
        metrics, parts = Metrics(), []
        for rank in range(ranks):
            mine = group % ranks == rank
            own = Metrics()
            with recording(own):
                report_rows(Rows(**{name: column[mine] for name, column in columns.items()}, responses=Ragged.from_rows(
                    [row for row, here in zip(rows, mine) if here])))
            parts.append(own.take())
        found.append(metrics.collect(lambda _, parts=parts: parts))
    for name in ("reward/place_correlation", "reward/length_correlation", "advantages/reward_correlation",
                 "advantages/of_prompts"):
        assert [each[name] for each in found] == pytest.approx([found[0][name]] * 4, abs=1e-9), name


def test_rows_without_groups_report_nothing():
    assert reported(rewards=REWARDS) == {}


def test_what_a_reward_follows_beside_answers():
    columns = {"group": GROUP, "responses": tokens([1], [1, 2], [1, 2, 3], [1, 2], [1], [1, 2, 3])}
    rewards = torch.tensor([0.0, 1, 2, 0, 1, 2])
    assert reported(**columns, rewards=rewards)["reward/place_correlation"] == pytest.approx(1)
    assert reported(**columns, preference=torch.tensor([-1, 0, 1, 0, -1, 1]))["preference/length_correlation"] == \
        pytest.approx(1)
    turned = {"group": GROUP, "questions": encode_text(["#### 2"] * 3 + ["1 + 1"] * 3)}
    assert reported(**turned)["prompt/marked"] == 0.5
