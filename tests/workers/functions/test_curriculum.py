"""Weights of training sets by how hard they are."""

import pytest
import torch
from reported import reported

from distflow.data.dataloader import SOURCE_WEIGHT
from distflow.telemetry.metrics import current
from workers.functions.curriculum import weigh_by_difficulty


def test_sets_weigh_by_the_variance_of_rewards_among_answers_to_a_prompt():
    reported()
    rewards = torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1])
    group = torch.arange(3).repeat_interleave(4)
    weigh_by_difficulty(rewards, group, ["half"] * 4 + ["solved"] * 4 + ["half"] * 4, least=0.05)
    values = reported()
    (rank,) = current().of_ranks
    found = {name.removeprefix(SOURCE_WEIGHT): total / count for name, (total, count) in rank.items()}
    assert found == pytest.approx({"half": (0.25 + 0.1875) / 2 + 0.05, "solved": 0.05})
    assert values["data/variance/solved"] == 0
