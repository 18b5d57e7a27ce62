"""What cannot learn is refused; what probably cannot is noted, with what to write instead."""

from pathlib import Path

import pytest
from planning import refused

from distflow.config.load import load
from distflow.errors import InvalidInput
from planners import plan

ROOT = Path(__file__).resolve().parents[2]
GREEDY = "roles.actor.generation.temperature=0"
FIRST = "roles.actor.generation.top_k=1"


@pytest.mark.parametrize(("dag", "change", "says"), [
    ("grpo", "nodes.rollout.with.group_size=1",
     ("`group_advantage` compares the answers to a prompt, and node `rollout` gives one",
      "Instead:  rollout: {…, with: {group_size: 8}}")),
    ("rloo", "nodes.rollout.with.group_size=1", ("`leave_one_out_advantage` compares",)),
    ("online_dpo", "nodes.rollout.with.group_size=1", ("`best_and_worst` compares",)),
    ("grpo_tools", "nodes.rollout.with.group_size=1", ("`group_advantage` compares",)),
    ("grpo", GREEDY, ("with `temperature: 0` all that node `rollout` gives are the same",
                      "Instead:  roles: {actor: {…, generation: {temperature: 1.0, top_k: 0}}}")),
    ("rloo", FIRST, ("with `top_k: 1` all that node `rollout` gives are the same",)),
])
def test_answers_that_cannot_differ_are_refused(dag, change, says):
    with refused(f"--set {change}: node ", *says, mistakes=1):
        plan(load(f"{dag}.yaml", None, [change]), 2)


@pytest.mark.parametrize(("rate", "meant"), [("5", "5e-6"), ("1", "1e-6"), ("1e9", "1e-6")])
def test_a_learning_rate_at_which_nothing_is_left_is_refused(rate, meant):
    with refused(f"--set roles.actor.learning_rate={rate}: role `actor`: with a learning rate of ",
                 f"Did you mean {meant}?", mistakes=1):
        plan(load("ppo.yaml", None, [f"roles.actor.learning_rate={rate}"]), 2)


@pytest.mark.parametrize(("dag", "steps", "says"), [
    ("ppo", 10, "node `update` waits 10 steps for the critic, and the run has 10: role `actor` would never be trained"),
    ("grpo", 5, "node `update` waits 5 steps for a critic, and DAG `grpo` trains no other role"),
    ("ppo", -1, "must be at least 0, not -1")])
def test_a_policy_that_waits_in_every_step_or_for_nothing_is_refused(dag, steps, says):
    change = f"nodes.update.with.critic_warmup={steps}"
    with refused(f"--set {change}: node ", says, mistakes=1):
        plan(load(f"{dag}.yaml", None, [change, "steps=10"]), 2)
    assert plan(load("ppo.yaml", None, ["nodes.update.with.critic_warmup=9", "steps=10"]), 2)


def test_a_filter_and_an_advantage_are_both_named():
    with pytest.raises(InvalidInput) as caught:
        plan(load("dapo.yaml", None, ["nodes.rollout.with.group_size=1"]), 2)
    assert [mistake.what.split("`")[1] for mistake in caught.value.mistakes] == ["filter", "advantage"]


@pytest.mark.parametrize(("dag", "changes", "says"), [
    ("reinforce_pp", [FIRST], "node `rollout` samples role `actor`, which is trained, with `top_k: 1`"),
    ("grpo_tools", [GREEDY], "node `rollout` samples role `actor`, which is trained, with `temperature: 0`"),
    ("grpo_tools", [], "validation asks for one answer to each question, without the environment of node `rollout`"),
    ("rloo", ["nodes.update.with.mini_batches=4"], "(mini_batches: 4) with `loss: reinforce`"),
    ("remax", ["nodes.update.with.epochs=2"], "(epochs: 2) with `loss: reinforce`"),
    ("dapo", [], "more than 16,384 tokens (max_length 20,480, margin 0.2), and node `rollout` gives at most 24. "
     "Set  max_length: 24"),
    ("dapo", ["nodes.rollout.with.max_new_tokens=9"], "gives at most 9"),
    ("grpo", ["roles.actor.learning_rate=0.1"], "role `actor` has a learning rate of 0.1, at which AdamW seldom"),
    ("grpo", ["steps=20", "roles.actor.warmup_steps=20"], "warms up for 20 steps, and the run has 20: its"),
    ("grpo", ["validation.reward=format"], "validation pays `format`, and training (node `reward`) `math`"),
    ("grpo", ["nodes.update.reads={reference_logprobs: rollout_logprobs}"],
     "node `reference` writes `reference_logprobs`, which no node reads"),
])
def test_what_probably_does_not_learn_is_noted(dag, changes, says):
    notes = plan(load(f"{dag}.yaml", None, changes), 2).notes
    assert sum(says in note for note in notes) == 1, notes


@pytest.mark.parametrize(("steps", "warmup"), [(20, 19), (10, 100)])
def test_a_warm_up_that_ends_and_one_of_a_trial_are_not_noted(steps, warmup):
    notes = plan(load("grpo.yaml", None, [f"steps={steps}", f"roles.actor.warmup_steps={warmup}"]), 2).notes
    assert not any("warms up" in note for note in notes)


def test_log_probabilities_that_nothing_is_trained_by_are_not_noted():
    assert not any("which no node reads" in note for note in plan(load("evaluate.yaml"), 2).notes)


def test_a_recomputed_policy_that_is_not_read_comes_with_the_line_to_write(tmp_path):
    dag, run = (ROOT / "dags/gspo.yaml").read_text(), (ROOT / "dags/runs/embedded.yaml").read_text()
    (tmp_path / "gspo.yaml").write_text(dag.replace("role: actor,", "role: policy,").replace("  actor:", "  policy:"))
    (tmp_path / "run.yaml").write_text(run.replace("  actor:", "  policy:"))
    reads = "{actor_logprobs: policy_logprobs}"
    says = (f"node `old` writes `policy_logprobs`, which no node reads. To have `update` take it as the old policy:  "
            f"update: {{…, reads: {reads}}}")
    assert says in plan(load(str(tmp_path / "gspo.yaml"), str(tmp_path / "run.yaml")), 2).notes
    mended = load(str(tmp_path / "gspo.yaml"), str(tmp_path / "run.yaml"), [f"nodes.update.reads={reads}"])
    assert not any("policy_logprobs" in note for note in plan(mended, 2).notes)


def test_a_role_of_another_dag_is_noted(tmp_path):
    file = (ROOT / "dags/runs/embedded.yaml").read_text()
    text = file.replace("roles:\n", "roles:\n  critic: {learning_rate: 1e-3}\n")
    (tmp_path / "run.yaml").write_text(text)
    notes = plan(load("grpo.yaml", str(tmp_path / "run.yaml")), 2).notes
    assert any("role `critic` stands in the run file, and DAG `grpo` has none of that name" in note for note in notes)


@pytest.mark.parametrize("dag", sorted(path.stem for path in (ROOT / "dags").glob("*.yaml") if path.stem != "dapo"))
def test_shipped_algorithms_learn(dag):
    known = ("random weights", "rollout_logprobs", "validation asks for one answer")
    assert [note for note in plan(load(f"{dag}.yaml"), 2).notes if not any(word in note for word in known)] == []
