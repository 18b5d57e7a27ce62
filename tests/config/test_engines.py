"""The table of engines: what it names exists, and the list that users see is the one that is enforced."""

import sys
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import pytest
from harness import model_folder

from distflow.cli import main
from distflow.config.extras import pip_line
from distflow.config.megatron_models import LLAMA3, why_unmapped
from distflow.config.models import ROLLOUTS, TRAINERS, TRANSPORTS
from distflow.config.run import Generation

TINY = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 512}


def test_everything_that_is_refused_is_listed(capsys):
    assert main(["engines"]) == 0
    said = capsys.readouterr().out
    for key, table in (("engine", TRAINERS), ("rollout", ROLLOUTS), ("transport", TRANSPORTS)):
        for name, engine in table.items():
            part = said.partition(f"{key}: {name}\n")[2].partition("\n\n")[0]
            assert all(reason in part for reason in engine.cannot.values())
            assert all(package in part for package in engine.packages)


def test_a_transport_without_its_package_is_refused_with_the_line_that_installs_it(capsys, monkeypatch):
    monkeypatch.setattr("distflow.config.models.version", Mock(side_effect=PackageNotFoundError))
    assert main(["validate", "grpo", "--set", "transport=ucx"]) == 2
    said = capsys.readouterr().err
    assert "`transport: ucx` needs ucxx-cu12, which is not installed" in said
    assert pip_line("ucx") in said


@pytest.mark.parametrize(("setting", "refused"), [
    ("stop=</answer>", "`generation.stop`, which it cannot do: its server is given tokens"),
    ("min_p=0.1", "`min_p`, which it cannot do")])
def test_generation_settings_are_for_engines_that_have_them(capsys, monkeypatch, setting, refused):
    monkeypatch.setenv(ROLLOUTS["sglang"].elsewhere, sys.executable)  # as if it were installed
    words = ["validate", "grpo", "--set", f"roles.actor.generation.{setting}", "--set"]
    assert main([*words, "roles.actor.rollout=sglang"]) == 2
    assert f"wants `rollout: sglang` and {refused}" in capsys.readouterr().err
    assert main([*words, "roles.actor.rollout=hf"]) == 0


@pytest.mark.parametrize("role", ["actor", "teacher"])
def test_distillation_from_other_tokens_is_for_the_engine_that_has_it(capsys, role):
    assert main(["validate", "gkd", "--set", f"roles.{role}.engine=megatron"]) == 2
    assert f"role `{role}` wants `engine: megatron` and runs `top_logprobs` or `distillation_update`, which it cannot" \
        in " ".join(capsys.readouterr().err.split())


def test_vllm_is_asked_for_what_is_set():
    from workers.engines.vllm.start import on_gpu

    assert on_gpu(Generation(memory_share=0.4))["gpu_memory_utilization"] == 0.4


@pytest.mark.parametrize(("config", "says"), [
    ({"model_type": "gemma"}, "the types llama, qwen2, qwen3, qwen3_moe, and this one has  model_type: gemma"),
    ({"model_type": "qwen2", "hidden_act": "gelu"}, "hidden_act: gelu"),
    ({"model_type": "qwen2", "use_sliding_window": True}, "sliding-window"),
    ({"model_type": "llama", "mlp_bias": True}, "mlp_bias: true"),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "mixes them"),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    ({"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ({"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, ""),
    ({"model_type": "llama", "rope_scaling": {"type": "llama3", "factor": 8.0, **LLAMA3}}, ""),
    ({"model_type": "llama", "rope_scaling": {"type": "llama3", "factor": 8.0, **LLAMA3, "low_freq_factor": 2.0}},
     "rotary embeddings"),
])
def test_models_that_megatron_does_not_compute_are_known_by_their_configurations(config, says):
    said = why_unmapped(config)
    assert says in said
    assert bool(said) == bool(says)


def test_a_model_that_megatron_does_not_compute_is_refused_before_the_start(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: "0.16.1")
    folder = model_folder(tmp_path / "tiny", {**TINY, "hidden_act": "gelu"})
    command = ["sft", "--ranks", "1", "--set", f"roles.actor.model={folder}", "--set", "roles.actor.engine=megatron"]
    assert main(["validate", *command]) == 2
    assert "wants `engine: megatron`, which cannot compute its model: it knows  hidden_act: silu" \
        in " ".join(capsys.readouterr().err.replace("  ", "\0").split()).replace("\0", "  ")
    assert main(["plan", *command]) == 0
    assert "a run on this machine would be refused" in " ".join(capsys.readouterr().out.split())
