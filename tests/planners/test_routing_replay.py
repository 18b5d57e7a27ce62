"""Routing replay in the plan: who reads the experts, what they take, and who cannot."""

from __future__ import annotations

import pytest

from distflow.config.load import load
from distflow.errors import InvalidInput
from planners import plan
from planners.transfers import row_bytes

MIXTURE = "roles.actor.model={architecture: qwen3_moe, layers: 2}"
REPLAY = "roles.actor.generation.routing_replay=true"


def planned(*settings: str, dag: str = "grpo", ranks: int = 2):
    spec = load(dag, None, [MIXTURE, *settings])
    if spec.mistakes:
        raise InvalidInput(spec.mistakes)
    return spec, plan(spec, ranks)


def readers(found) -> list[str]:
    return [task.node for task in found.tasks if any(read.name == "routed_experts" for read in task.reads)]


def test_the_model_that_is_trained_reads_the_experts_and_its_reference_does_not():
    _, found = planned(REPLAY)
    assert [task.node for task in found.tasks if "routed_experts" in task.writes] == ["rollout"]
    assert readers(found) == ["update"]
    _, without = planned()
    assert readers(without) == []
    assert not any("routed_experts" in task.writes for task in without.tasks)


def test_the_experts_are_counted_where_they_lie_and_where_they_move():
    spec, found = planned(REPLAY, "roles.actor.generation.max_new_tokens=100", "data.max_prompt_tokens=60",
                          "roles.actor.generation.batch_rows=7")
    assert row_bytes(spec, "routed_experts", "Ragged") == 160 * 2 * 2  # layers, experts of a token; a byte each
    assert {item.name: item.bytes for item in found.memory}["actor: rollout choices"] == 7 * 100 * 2 * 2
    assert "actor: rollout choices" not in {item.name for item in planned()[1].memory}


@pytest.mark.parametrize(("settings", "says"), [
    (["roles.actor.model={architecture: qwen3}"], "of a model which has no experts to choose"),
    (["layouts={update: {cp: 2}}"], "fsdp replays experts for whole rows")])
def test_what_cannot_replay_is_refused(settings, says):
    with pytest.raises(InvalidInput, match=says):
        planned(REPLAY, *settings)
