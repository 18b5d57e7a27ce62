"""Whole runs with adapters: what a user relies on."""

import json

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

LORA = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml", "roles.actor.lora={rank: 4}",
        "roles.actor.learning_rate=1e-3", "nodes.update.with.kl=0.1")
ADAPTERS = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))


def test_a_run_leaves_a_merged_model_and_an_adapter(launch, workspace):
    """Trained on from a model folder, which stays the base: without a rollout its weights are sharded."""
    sft = ("--dag", "sft.yaml", "--run-file", "tiny.yaml", "steps=2")
    launch(1, *sft, "--name", "base")
    launch(2, *sft, "--name", "tuned", "roles.actor.model=runs/base/model",
           "roles.actor.lora={rank: 4, targets: [q_proj, v_proj]}")
    folder, tokens = workspace / "runs/tuned", torch.arange(5, 25).reshape(2, 10)
    said = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert said["base_model_name_or_path"].endswith("runs/base/model")
    assert (said["r"], sorted(said["target_modules"]), said["lora_alpha"]) == (4, ["q_proj", "v_proj"], 32)
    assert len(load_file(folder / "adapter/adapter_model.safetensors")) == 2 * 2 * 2
    base, merged = (AutoModelForCausalLM.from_pretrained(workspace / "runs" / name / "model")
                    for name in ("base", "tuned"))
    with torch.no_grad():
        before, expected = base(tokens).logits, merged(tokens).logits
        assert (before - expected).abs().max() > 1e-3
        assert torch.allclose(PeftModel.from_pretrained(base, folder / "adapter")(tokens).logits, expected, atol=1e-5)
    weights = workspace / "runs/base/model/model.safetensors"
    save_file({name: 0.5 * tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    refused = launch(1, "--resume", "runs/tuned", "steps=3", code=1).stderr
    assert "the frozen weights of role actor are not those that the run began with" in refused
