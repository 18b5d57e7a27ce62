"""Whole runs with more than one trained role, and with a model that has no vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import ROOT, kill_after, metrics_of
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

PPO = ("--dag", "ppo.yaml", "--run-file", "tiny.yaml", "--set", "nodes.reward.with.reward=brevity", "--set",
       "imports=[brevity]", "--set", "nodes.rollout.with.group_size=3", "--set", "data.batch=5")
PAIRS = ("--run-file", "tiny.yaml", "--set", "data.train=pairs.jsonl", "--set", "data.columns=[chosen, rejected]")
REWARD_MODEL = ("--dag", "reward_model.yaml", *PAIRS, "--set",
                "roles={reward: {model: {architecture: qwen3, layers: 2, hidden: 64, heads: 2, kv_heads: 1}, "
                "learning_rate: 1e-3}}")
ONLINE = ("--dag", "online_dpo.yaml", *PPO[2:])
TOGETHER = ("loss", "value/loss", "value/mean", "preference/margin", "preference/pairs", "response/fingerprint")


@pytest.fixture
def pairs(workspace: Path) -> Path:
    lines = (ROOT / "dags/data/arithmetic/preferences.jsonl").read_text().splitlines()[:10]
    (workspace / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return workspace


@pytest.mark.parametrize("dag", [PPO, ("--dag", "dpo.yaml", *PAIRS), REWARD_MODEL, ONLINE], ids=lambda dag: dag[1])
def test_one_and_two_ranks_have_the_same_metrics(launch, pairs, dag):
    for ranks in (1, 2):
        launch(ranks, *dag, "--name", f"r{ranks}", "--set", "steps=3", "--set", "data.batch=5")
    one, two = (metrics_of(pairs / f"runs/r{ranks}") for ranks in (1, 2))
    assert set(one) == {1, 2, 3}
    for step, metrics in one.items():
        for name in set(TOGETHER) & set(metrics):
            assert two[step][name] == pytest.approx(metrics[name], abs=1e-5), name
        for name in {"grad_norm", "value/grad_norm"} & set(metrics):
            assert two[step][name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-5), name


def test_two_trained_roles_go_on_where_they_were_killed(launch, workspace):
    """Both sets of weights and both optimizers, bit for bit; and the actor is the one that is validated."""
    settings = (*PPO, "--set", "steps=6", "--set", "validation={data: {heldout: train.jsonl}, every: 2}")
    launch(2, *settings, "--name", "whole")
    kill_after(workspace, 5, *settings, "--name", "killed")
    launch(2, "--resume", "runs/killed")
    whole, killed = (workspace / f"runs/{name}" for name in ("whole", "killed"))
    for metric in ("loss", "value/loss", "response/fingerprint"):
        assert [step[metric] for step in metrics_of(whole).values()] == [
            step[metric] for step in metrics_of(killed).values()]
    for model in ("model-actor", "model-critic"):
        assert (whole / model / "model.safetensors").read_bytes() == (killed / model / "model.safetensors").read_bytes()
    assert "accuracy_after" in json.loads((whole / "summary.json").read_text())
    launch(1, "--resume", "runs/killed", "--set", "steps=7")  # on another number of ranks
    assert set(metrics_of(killed)) == set(range(1, 8))


def test_a_trained_reward_model_is_one_for_others_too(launch, pairs):
    """It loads as Hugging Face's classifier, gives rewards to a policy, and can be trained further."""
    launch(2, *REWARD_MODEL, "--name", "rewards", "--set", "steps=3")
    folder = pairs / "runs/rewards/model"
    assert AutoConfig.from_pretrained(folder).num_labels == 1
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.score.weight.abs().max() > 1e-4
    launch(1, *REWARD_MODEL, "--name", "more", "--set", "steps=1", "--set", f"roles.reward.model={folder}",
           "--set", "roles.reward.learning_rate=1e-9")
    again = AutoModelForSequenceClassification.from_pretrained(pairs / "runs/more/model")
    assert torch.allclose(again.score.weight, model.score.weight, atol=1e-6)
    (pairs / "judged.yaml").write_text((ROOT / "dags/grpo.yaml").read_text().replace(
        "copy_of: actor}", "copy_of: actor}\n  reward: {head: value}").replace(
        "type: COMPUTE,         function: score,  ", "type: MODEL_INFERENCE, function: model_score,"))
    launch(2, "--dag", "judged.yaml", *PAIRS, "--name", "judged", "--set", "steps=1", "--set", "samples=2",
           "--set", f"roles.reward.model={folder}", "--set", f"roles.actor.model={actor_like(pairs, folder)}")
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


def test_no_pair_anywhere_leaves_the_weights(launch, workspace):
    """Every reward is the same: each step is a tie."""
    (workspace / "same.py").write_text("from distflow import reward\n@reward\ndef same(completion, answer):\n"
                                       "    return 1.0\n")
    launch(2, *ONLINE, "--name", "ties", "--set", "imports=[same]", "--set", "nodes.reward.with.reward=same",
           "--set", "steps=2", "--set", "checkpoint.every=0")
    lines = [json.loads(line) for line in (workspace / "runs/ties/metrics.jsonl").read_text().splitlines()]
    assert [line["preference/tied"] for line in lines] == [1.0, 1.0]
    assert all(line["preference/pairs"] == 0 and "loss" not in line for line in lines)


def test_tokenizers_that_disagree_are_refused(launch, pairs, tmp_path_factory):
    from workers.engines.embedded import build_model, build_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("other"), build_tokenizer(["quite other words"] * 5)
    build_model(len(tokenizer), 0, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    done = launch(1, "--dag", "distill.yaml", "--run-file", "tiny.yaml", "--set", f"roles.teacher.model={folder}",
                  code=None)
    assert done.returncode == 1
    assert "roles `actor` and `teacher` have different tokenizers" in done.stderr
    assert not (pairs / "runs").exists() or not any((pairs / "runs").iterdir())
