"""Whole runs with more than one trained role, and with a model that has no vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import ROOT, lines_of, metrics_of
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

PPO = ("--dag", "ppo.yaml", "--run-file", "tiny.yaml", "nodes.reward.with.reward=brevity", "imports=[brevity]",
       "nodes.rollout.with.group_size=3", "data.batch=5")
PAIRS = ("--run-file", "tiny.yaml", "data.train=pairs.jsonl", "data.columns=[chosen, rejected]")
REWARD_MODEL = ("--dag", "reward_model.yaml", *PAIRS,
                "roles={reward: {model: {architecture: qwen3, layers: 2, hidden: 64, heads: 2, kv_heads: 1}, "
                "learning_rate: 1e-3}}")
ONLINE = ("--dag", "online_dpo.yaml", *PPO[2:])


def write_pairs(folder: Path) -> None:
    lines = (ROOT / "dags/data/arithmetic/preferences.jsonl").read_text().splitlines()[:10]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def pairs(workspace):
    write_pairs(workspace)
    return workspace


def test_a_trained_reward_model_is_one_for_others_too(launch, pairs):
    """It loads as Hugging Face's classifier, gives rewards to a policy, and can be trained further."""
    launch(2, *REWARD_MODEL, "--name", "rewards", "steps=3")
    folder = pairs / "runs/rewards/model"
    assert AutoConfig.from_pretrained(folder).num_labels == 1
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.score.weight.abs().max() > 1e-4
    launch(1, *REWARD_MODEL, "--name", "more", "steps=1", f"roles.reward.model={folder}",
           "roles.reward.learning_rate=1e-9")
    again = AutoModelForSequenceClassification.from_pretrained(pairs / "runs/more/model")
    assert torch.allclose(again.score.weight, model.score.weight, atol=1e-6)
    (pairs / "judged.yaml").write_text((ROOT / "dags/grpo.yaml").read_text().replace(
        "copy_of: actor}", "copy_of: actor}\n  reward: {head: value}").replace(
        "type: COMPUTE,         function: score,  ", "type: MODEL_INFERENCE, function: model_score,"))
    launch(2, "--dag", "judged.yaml", *PAIRS, "--name", "judged", "steps=1", "samples=2",
           f"roles.reward.model={folder}", f"roles.actor.model={actor_like(pairs, folder)}")
    (metrics,) = metrics_of(pairs / "runs/judged").values()
    assert abs(metrics["reward/mean"]) > 1e-6
    assert metrics["grad_norm"] > 0  # the samples of a prompt have different scores


def actor_like(workspace: Path, reward_model: Path) -> Path:
    """A language model with the tokenizer of the reward model."""
    from workers.engines.embedded import build_model

    tokenizer, folder = AutoTokenizer.from_pretrained(reward_model), workspace / "actor"
    build_model(len(tokenizer), 0, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_critic_learns_alone_before_the_policy_does(launch, workspace, mode):
    """In mode async too, where weights that have not changed are not published again."""
    launch(2, *PPO, "--name", "warm", "steps=4", "nodes.update.with.critic_warmup=2", f"mode={mode}", "staleness=0",
           "nodes.advantage.with.kl=0.02")
    lines = lines_of(workspace / "runs/warm/metrics.jsonl")
    steps = {line["step"]: line for line in lines if "value/loss" in line}
    assert [step for step in steps if "value/grad_norm" in steps[step]] == [1, 2, 3, 4]
    assert [step for step in steps if "grad_norm" in steps[step]] == [3, 4]
    assert all(abs(steps[step]["reward/kl"]) < 1e-5 for step in (1, 2, 3)), "the policy is still the reference"
    assert abs(steps[4]["reward/kl"]) > 1e-5
