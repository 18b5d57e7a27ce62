"""Log-probabilities that are compared are of one temperature."""

import pytest
from harness import ROOT
from planning import refused

from distflow.config.load import load
from distflow.errors import InvalidInput
from planners import plan

COOL = "roles.actor.generation.temperature=0.6"


@pytest.mark.parametrize(("dag", "role", "more", "says"), [
    ("distill", "teacher", [], "Instead:  roles: {teacher: {…, generation: {temperature: 0.6}}}"),
    ("grpo", "reference", ["roles.reference.micro_batch_tokens=64"], "It copies `actor`, but has none of its settings"),
])
def test_another_temperature_than_the_samplers_is_refused(dag, role, more, says):
    with refused(f"role `{role}` judges responses at temperature 1, but role `actor`, which gives them, at 0.6", says,
                 mistakes=1):
        plan(load(f"{dag}.yaml", None, [COOL, *more]), 2)
    assert plan(load(f"{dag}.yaml", None, [COOL, *more, f"roles.{role}.generation.temperature=0.6"]), 2).tasks


@pytest.mark.parametrize(("dag", "changes"), [
    ("grpo", [COOL]),  # a copy has the settings of what it copies
    ("grpo", [COOL, "roles.actor.lora={rank: 4}", "roles.reference.micro_batch_tokens=64"]),  # the base is the actor's
    ("distill", ["roles.actor.generation.temperature=0"]),  # the likeliest tokens are judged at 1
    ("ppo", [COOL, "roles.critic.micro_batch_tokens=64"]),  # a value has no temperature
    ("dpo", [COOL, "roles.reference.micro_batch_tokens=64"]),  # whose nodes have one of their own
])
def test_what_is_not_compared_may_differ(dag, changes):
    assert plan(load(f"{dag}.yaml", None, changes), 2).tasks


def test_preferences_are_learned_at_temperature_one_unless_both_nodes_say_otherwise(tmp_path):
    text = (ROOT / "dags/dpo.yaml").read_text()
    own = "with: {temperature: 1.0}}"
    assert text.count(own) == 1
    without, cooler = tmp_path / "without.yaml", tmp_path / "cooler.yaml"
    without.write_text(text.replace(f",\n              {own}", "}"))
    cooler.write_text(text.replace("{temperature: 1.0}", "{temperature: 0.6}").replace("{beta: 0.1}",
                                                                                       "{beta: 0.1, temperature: 0.6}"))
    assert plan(load(str(without), "embedded_dpo.yaml"), 2).tasks
    with refused("node `reference` writes log-probabilities at temperature 0.6, but node `update`, which reads them, "
                 "has 1", "Instead:  reference: {…, with: {temperature: 1}}"):
        plan(load(str(without), "embedded_dpo.yaml", [COOL]), 2)
    assert plan(load(str(cooler), "embedded_dpo.yaml"), 2).tasks


@pytest.mark.parametrize(("dag", "node", "reader"), [
    ("grpo", "reference", "update"), ("reinforce_pp", "reference", "tokens"), ("rloo", "reference", "penalty"),
])
def test_a_temperature_of_a_nodes_own_is_held_against_those_that_read_it(dag, node, reader):
    with refused(f"node `{node}` writes log-probabilities at temperature 0.5, but node `{reader}`, which reads them, "
                 "has 1", mistakes=1):
        plan(load(f"{dag}.yaml", None, [f"nodes.{node}.with.temperature=0.5"]), 2)
    assert plan(load(f"{dag}.yaml", None, [COOL, f"nodes.{node}.with.temperature=0.6"]), 2).tasks


def test_a_recomputed_old_policy_has_the_temperature_of_what_is_trained(tmp_path):
    text = (ROOT / "dags/grpo.yaml").read_text()
    old = "  old: {role: actor, type: MODEL_INFERENCE, function: logprobs, dependencies: [rollout], with: " \
          "{temperature: 0.3}}\n"
    head, update, tail = text.partition("  update:")
    (tmp_path / "own.yaml").write_text(head + old + update + tail.replace("dependencies: [", "dependencies: [old, "))
    with pytest.raises(InvalidInput, match="node `old` writes log-probabilities at temperature 0.3, but node `update`"):
        plan(load(str(tmp_path / "own.yaml"), "embedded.yaml"), 2)
