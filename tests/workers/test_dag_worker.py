"""Whose chat template makes the prompts."""

from __future__ import annotations

import pytest
from harness import ROOT

from distflow.schema.spec import load
from planners import plan
from workers.dag_worker import prompted_role


@pytest.mark.parametrize("name", ["grpo", "ppo", "dpo", "solver_reviser", "distill"])
def test_prompts_are_those_of_the_policy(name):
    spec = load(f"{name}.yaml")
    assert prompted_role(spec, plan(spec, 1).chain(0)) == "actor"


def test_prompts_are_those_of_the_trained_role_whatever_the_roles_are_called(tmp_path):
    text = (ROOT / "dags/distill.yaml").read_text().replace("actor", "student").replace("teacher:", "expert:")
    (tmp_path / "mine.yaml").write_text(text.replace("role: teacher", "role: expert").replace(
        "function: distillation_advantage, ", "function: distillation_advantage, reads: {teacher_logprobs: "
        "expert_logprobs}, ").replace("[teacher]", "[expert]"))
    model = "{model: {architecture: qwen3}}"
    spec = load(str(tmp_path / "mine.yaml"), "embedded_distill",
                [f"roles={{student: {model}, expert: {model}}}", "validation=null"])
    assert prompted_role(spec, plan(spec, 1).chain(0)) == "student"


def test_a_dag_that_trains_no_vocabulary_has_the_prompts_of_its_first_model():
    spec = load("reward_model.yaml")
    assert prompted_role(spec, plan(spec, 1).chain(0)) == "reward"
