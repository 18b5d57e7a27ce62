"""With a calculator: the reward of conversations rises."""

from harness import ROOT, metrics_of

FEW = """
seed: 0
steps: 18
roles:
  actor: {model: runs/start/model, learning_rate: 1e-3, warmup_steps: 4, generation: {max_new_tokens: 10}}
data: {train: few.jsonl, batch: 24, max_prompt_tokens: 64, max_target_tokens: 64}
checkpoint: {every: 0}
"""


def test_learns_to_use_a_tool(launch, workspace):
    launch(1, "--dag", "sft.yaml", "--run-file", "embedded_sft.yaml", "--name", "start", "--set", "validation=null",
           "--set", "data.train=arithmetic/tool_demonstrations.jsonl", "--set", "steps=90", "--set", "data.batch=48")
    problems = (ROOT / "dags/data/arithmetic/train.jsonl").read_text().splitlines()[:24]
    (workspace / "few.jsonl").write_text("\n".join(problems) + "\n")
    (workspace / "few.yaml").write_text(FEW)
    launch(1, "--dag", "grpo_tools.yaml", "--run-file", "few.yaml", "--name", "run")
    steps = list(metrics_of(workspace / "runs/run").values())
    rewards = [step["environment/reward"] for step in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
    assert all(step["environment/turns"] > 1.5 for step in steps)  # the calculator is asked
    assert not any(step["environment/failed"] for step in steps)
    assert max(step["mismatch/logprob_mean"] for step in steps) < 5e-6
