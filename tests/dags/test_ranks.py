"""Algorithms that combine more than GRPO does: one and two ranks have the same losses."""

from __future__ import annotations

import pytest
from harness import ROOT, metrics_of

CORRECTED = """
name: corrected
imports: [brevity]
roles:
  actor: {trained: true}
nodes:
  rollout:   {role: actor,  type: MODEL_INFERENCE, function: generate, with: {group_size: 4}}
  old:       {role: actor,  type: MODEL_INFERENCE, function: logprobs,             dependencies: [rollout]}
  weigh:     {role: actor,  type: COMPUTE,         function: truncated_importance, dependencies: [old],
              with: {level: token, cap: 5.0}}
  reject:    {role: actor,  type: COMPUTE,         function: reject_mismatch,      dependencies: [weigh]}
  reward:    {role: reward, type: COMPUTE,         function: score,                dependencies: [rollout],
              with: {reward: brevity}}
  advantage: {role: actor,  type: COMPUTE,         function: group_advantage,      dependencies: [reward]}
  update:    {role: actor,  type: MODEL_TRAIN,     function: policy_update,        dependencies: [advantage, reject],
              with: {mini_batches: 2}}
"""


def shipped(name: str) -> str:
    """With several answers to a prompt, and a reward that a model with random weights earns."""
    text = (ROOT / f"dags/{name}.yaml").read_text().replace("group_size: 1}", "group_size: 4}")
    return text.replace("function: score,", "function: score, with: {reward: brevity},") + "imports: [brevity]\n"


@pytest.mark.parametrize("name", ["corrected", "remax"])
def test_one_and_two_ranks_have_the_same_losses(launch, workspace, name):
    (workspace / "dag.yaml").write_text(CORRECTED if name == "corrected" else shipped(name))
    for ranks in (1, 2):
        launch(ranks, "--dag", "dag.yaml", "--run-file", "tiny.yaml", "--name", f"r{ranks}", "--set", "steps=2",
               "--set", "data.batch=5")
    one, two = (metrics_of(workspace / f"runs/r{ranks}") for ranks in (1, 2))
    for step in (1, 2):
        assert one[step]["grad_norm"] > 0
        for metric in ("loss", "grad_norm", "mismatch/effective_samples", "mismatch/perplexity_ratio"):
            assert two[step][metric] == pytest.approx(one[step][metric], rel=1e-3, abs=1e-5), metric
        assert one[step]["mismatch/perplexity_ratio"] == pytest.approx(1.0, abs=1e-4)
    if name == "corrected":
        assert one[1]["importance/mean"] == pytest.approx(1.0, abs=1e-4)
        assert one[1]["importance/rejected"] == one[1]["importance/truncated"] == 0.0
    if name == "remax":
        assert one[1]["reward/mean/baseline"] == pytest.approx(two[1]["reward/mean/baseline"])
        assert one[1]["reward/mean/baseline"] > 0
