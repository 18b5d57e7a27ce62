"""Whole runs with adapters: what a user relies on."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest
import torch
from harness import command, environment, metrics_of
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

LORA = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--set", "roles.actor.lora={rank: 4}",
        "--set", "roles.actor.learning_rate=1e-3", "--set", "nodes.update.with.kl=0.1")
ADAPTERS = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))


def test_one_and_two_ranks_draw_the_same_samples_and_losses(launch, workspace):
    """And a reference that is the base under the adapters gives what a model of its own gives."""
    own = "roles.reference={model: {architecture: qwen3, layers: 2, hidden: 64, heads: 2, kv_heads: 1, head_dim: 32}}"
    for ranks, more in ((1, ()), (2, ()), (2, ("--set", own))):
        launch(ranks, *LORA, "--name", f"r{ranks}{len(more)}", "--set", "data.batch=5", *more)
    one, two, two_models = (metrics_of(workspace / f"runs/{name}") for name in ("r10", "r20", "r22"))
    assert set(one) == {1, 2, 3, 4}
    for step in one:
        assert one[step]["response/fingerprint"] == two[step]["response/fingerprint"]
        assert one[step]["loss"] == pytest.approx(two[step]["loss"], abs=1e-5)
        assert one[step]["grad_norm"] == pytest.approx(two[step]["grad_norm"], rel=1e-3, abs=1e-5)
        assert two[step]["loss"] == two_models[step]["loss"]
        assert two[step]["mismatch/logprob_max"] < 5e-6
        assert two[step].get("weights/bytes") == (ADAPTERS * 4 if step > 1 else None)  # none before an update
    assert any(two[step]["policy/kl_reference"] > 1e-5 for step in two)


def test_killed_and_resumed_equals_never_killed(launch, workspace):
    launch(2, *LORA, "--name", "whole", "--set", "steps=6")
    line = command(2, *LORA, "--name", "killed", "--set", "steps=6")
    process = subprocess.Popen(line, cwd=workspace, env=environment(), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)
    assert any("step 5/" in text for text in process.stdout)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    launch(2, "--resume", "runs/killed")
    whole, killed = (metrics_of(workspace / f"runs/{name}") for name in ("whole", "killed"))
    assert [whole[step]["loss"] for step in range(1, 7)] == [killed[step]["loss"] for step in range(1, 7)]
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        first, second = ((workspace / f"runs/{name}" / file).read_bytes() for name in ("whole", "killed"))
        assert first == second
    newest = max((workspace / "runs/whole/checkpoints").iterdir())
    held = FileSystemReader(newest).read_metadata().state_dict_metadata
    sizes = [item.size.numel() for item in held.values() if isinstance(item, TensorStorageMetadata)]
    assert sum(sizes) == 3 * ADAPTERS + 28, "weights, two moments and a count of steps, of 28 adapters"
    launch(1, "--resume", "runs/killed", "--set", "steps=8")
    assert set(metrics_of(workspace / "runs/killed")) == set(range(1, 9))


def test_a_run_leaves_a_merged_model_and_an_adapter(launch, workspace):
    """Trained on from a model folder, which stays the base: without a rollout its weights are sharded."""
    sft = ("--dag", "sft.yaml", "--run-file", "tiny.yaml", "--set", "steps=2")
    launch(1, *sft, "--name", "base")
    launch(2, *sft, "--name", "tuned", "--set", "roles.actor.model=runs/base/model", "--set",
           "roles.actor.lora={rank: 4, targets: [q_proj, v_proj], rslora: true}")
    folder, tokens = workspace / "runs/tuned", torch.arange(5, 25).reshape(2, 10)
    said = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert said["base_model_name_or_path"].endswith("runs/base/model")
    assert (said["r"], sorted(said["target_modules"]), said["use_rslora"]) == (4, ["q_proj", "v_proj"], True)
    assert len(load_file(folder / "adapter/adapter_model.safetensors")) == 2 * 2 * 2
    base, merged = (AutoModelForCausalLM.from_pretrained(workspace / "runs" / name / "model")
                    for name in ("base", "tuned"))
    with torch.no_grad():
        before, expected = base(tokens).logits, merged(tokens).logits
        assert (before - expected).abs().max() > 1e-3
        assert torch.allclose(PeftModel.from_pretrained(base, folder / "adapter")(tokens).logits, expected, atol=1e-5)
