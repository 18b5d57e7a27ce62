"""The role whose chat template makes the prompts, and the random streams of sampling nodes."""

from harness import ROOT, metrics_of

from distflow.config.load import load
from planners import plan
from planners.check import prompted_role
from workers.execution import random_streams


def test_prompts_are_those_of_the_trained_role_whatever_the_roles_are_called(tmp_path):
    text = (ROOT / "dags/distill.yaml").read_text().replace("actor", "student").replace("teacher:", "expert:")
    (tmp_path / "mine.yaml").write_text(text.replace("role: teacher", "role: expert").replace(
        "function: distillation_advantage, ", "function: distillation_advantage, reads: {teacher_logprobs: "
        "expert_logprobs}, ").replace("[teacher]", "[expert]"))
    model = "{model: {architecture: qwen3}}"
    spec = load(str(tmp_path / "mine.yaml"), "embedded_distill",
                [f"roles={{student: {model}, expert: {model}}}", "validation=null"])
    assert prompted_role(spec, plan(spec, 1).chain(0)) == "student"


def test_each_role_has_a_stream_of_random_numbers():
    chain = plan(load("solver_reviser.yaml"), 1).chain(0)
    assert random_streams(chain, {"actor": 0, "reviser": 1}) == {"solve": 0, "revise": 1}


AGAIN = """
  again:     {role: actor, type: MODEL_INFERENCE, function: generate, with: {group_size: 8}, dependencies: [reward],
              writes: {responses: others, rollout_logprobs: other_logprobs, versions: other_versions,
                       completions: other_texts}}
"""


def test_two_nodes_of_one_role_do_not_draw_the_same_samples(launch, workspace):
    """Both sample each prompt equally often, so that their rows have the same ids."""
    text = (workspace / "grpo.yaml").read_text()
    (workspace / "again.yaml").write_text(text.replace("  advantage:", f"{AGAIN.strip(chr(10))}\n  advantage:"))
    launch(1, "--dag", "again.yaml", "--run-file", "tiny.yaml", "--set", "steps=1", "--name", "run")
    values = metrics_of(workspace / "runs/run")[1]
    assert values["response/fingerprint/rollout"] != values["response/fingerprint/again"]
