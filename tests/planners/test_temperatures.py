"""Log-probabilities that are compared are of one temperature."""

from __future__ import annotations

import pytest

from distflow.schema.errors import InvalidInput
from distflow.schema.spec import load
from planners import plan

COOL = "roles.actor.generation.temperature=0.6"


@pytest.mark.parametrize(("dag", "role", "more", "says"), [
    ("distill", "teacher", [], "Instead:  roles: {teacher: {…, generation: {temperature: 0.6}}}"),
    ("dpo", "reference", ["roles.reference.micro_batch_tokens=64"], "It copies `actor`"),
    ("grpo", "reference", ["roles.reference.micro_batch_tokens=64"], "It copies `actor`, but has none of its settings"),
])
def test_another_temperature_than_the_samplers_is_refused(dag, role, more, says):
    with pytest.raises(InvalidInput) as caught:
        plan(load(f"{dag}.yaml", None, [COOL, *more]), 2)
    what = f"role `{role}` judges responses at temperature 1, but role `actor`, which gives them, at 0.6"
    assert what in str(caught.value)
    assert says in str(caught.value)
    assert len(caught.value.mistakes) == 1
    assert plan(load(f"{dag}.yaml", None, [COOL, *more, f"roles.{role}.generation.temperature=0.6"]), 2).tasks


@pytest.mark.parametrize(("dag", "changes"), [
    ("grpo", [COOL]),  # a copy has the settings of what it copies
    ("grpo", [COOL, "roles.actor.lora={rank: 4}", "roles.reference.micro_batch_tokens=64"]),  # the base is the actor's
    ("distill", ["roles.actor.generation.temperature=0"]),  # the likeliest tokens are judged at 1
    ("ppo", [COOL, "roles.critic.micro_batch_tokens=64"]),  # a value has no temperature
])
def test_what_is_not_compared_may_differ(dag, changes):
    assert plan(load(f"{dag}.yaml", None, changes), 2).tasks
