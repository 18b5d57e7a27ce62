"""Elastic machines must not divide a model that samples, and leave their ranks to others when all have ended."""

import pytest

from distflow.config.load import load
from distflow.errors import InvalidInput
from planners import plan
from workers.elastic import _check_rollouts


@pytest.mark.parametrize(("local", "divided"), [(2, ""), (4, ""), (3, "ranks 2 to 3"), (1, "ranks 0 to 1")])
def test_ranks_that_share_a_model_are_on_one_machine(monkeypatch, local, divided):
    """Four of them train, by twos; four more are two rollouts."""
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: "0.32.0")  # it is not started
    given = ["mode=semi_sync", "groups.rollout=4", "layouts.rollout.tp=2", "roles.actor.rollout=vllm"]
    made = plan(load("grpo.yaml", None, given, None), 8)
    if divided:
        with pytest.raises(InvalidInput, match=divided):
            _check_rollouts(made, "8", local)
    else:
        _check_rollouts(made, "8", local)
