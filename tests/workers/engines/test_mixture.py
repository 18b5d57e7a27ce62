"""A mixture of experts samples and trains like any other model."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from training import (
    SETTINGS,
    Trained,
    built,
    engine_of,
    joined,
    layered,
    named_mesh,
    plain_training,
    share_of,
    trained_by,
    training,
)
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from distflow.config.run import Generation, Model, RoleRun
from distflow.config.sizes import shape_of, shape_of_embedded
from distflow.data.batch import Ragged
from distflow.errors import EngineError
from distflow.plan import Layout
from workers.engines import attention
from workers.engines.embedded import build_model
from workers.engines.fsdp import FSDPEngine
from workers.engines.hf import HFRollout

MIXTURE = {"architecture": "qwen3_moe", "mixture": (4, 2), "kv_heads": 4}


def mixed_training(layout, settings, small) -> Trained:
    return training(layout, MIXTURE, small, settings)


@pytest.mark.parametrize(("layout", "settings", "small"), [
    ({"dp": 1}, {}, 64_000_000), ({"dp": 2}, {}, 64_000_000), ({"dp": 2}, {"recompute": True}, 0),
    ({"dp": 4}, {}, 0), ({"dp": 1, "tp": 2}, {}, 0), ({"dp": 2, "tp": 2}, {"recompute": True}, 0),
    ({"dp": 1, "tp": 4}, {}, 64_000_000), ({"dp": 1, "cp": 2}, {}, 0)], ids=str)
def test_any_layout_equals_the_plain_model(layout, settings, small):
    stride = layout.get("tp", 1) * layout.get("cp", 1)
    results = run_ranks(layout["dp"] * stride, mixed_training, layout, settings, small)
    joined(results, stride).equals(plain_training(MIXTURE))


SIZES = {"vocab_size": 270, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "num_experts_per_tok": 2}
FAMILIES = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=48),
    "qwen3_moe with a dense layer": Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32,
                                                   mlp_only_layers=[0]),
    "glm4_moe": Glm4MoeConfig(**SIZES, n_routed_experts=4, moe_intermediate_size=32, n_group=1, topk_group=1,
                              first_k_dense_replace=1, use_qk_norm=True),
}


def family_training(layout, family, replays) -> Trained:
    mesh = named_mesh(**layout)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).float()
    model.set_attn_implementation(attention.NAME)
    generation = {"generation": {"routing_replay": replays}}
    with layered(0):
        engine = FSDPEngine(model, RoleRun(**SETTINGS, **generation), mesh, 0, 10, trained=True)
    return trained_by(engine, share_of(mesh))


@pytest.mark.parametrize(("family", "replays"), [(family, False) for family in FAMILIES] + [("mixtral", True)])
def test_experts_that_are_cut_over_ranks_compute_what_they_do_on_one(family, replays):
    (expected,) = run_ranks(1, family_training, {}, family, replays)
    joined(run_ranks(2, family_training, {"tp": 2}, family, replays), 2).equals(expected)


def test_experts_that_cannot_be_divided_are_refused():
    (said, _) = run_ranks(2, odd_experts)
    assert said == "tp: 2 does not divide num_experts (3) of this `qwen3_moe` model. tp may be 1"


def odd_experts() -> str:
    with pytest.raises(EngineError) as caught:
        engine_of(named_mesh(tp=2), {**MIXTURE, "mixture": (3, 2)})
    return str(caught.value)


def test_sampling_and_training_agree(mesh):
    model = built(**MIXTURE)
    rollout = HFRollout(built(**MIXTURE), Generation(max_new_tokens=12), 0, [1])
    generator = torch.Generator().manual_seed(0)
    prompts = Ragged.from_rows([torch.randint(5, 260, (length,), generator=generator) for length in (3, 8, 5)])
    samples = rollout.generate(prompts, 2, torch.arange(6), 0)
    engine = FSDPEngine(model, RoleRun(), mesh, 0, 1, trained=False)
    logprobs = engine.logprobs(prompts.select(torch.arange(3).repeat_interleave(2)), samples.tokens, 1.0)
    assert len(logprobs.values) > 20
    assert torch.allclose(logprobs.values, samples.logprobs.values, atol=1e-5)


def test_experts_are_not_divided_by_experts(mesh):
    with pytest.raises(EngineError, match="cannot split a model by ep"):
        FSDPEngine(built(**MIXTURE), RoleRun(), mesh, 0, 1, trained=False, layout=Layout(1, ep=2))


def test_experts_are_weighed():
    described = Model(architecture="qwen3_moe", experts=4)
    made = build_model(512, 0, architecture="qwen3_moe", mixture=described.mixture)
    estimated = shape_of_embedded(described)
    assert shape_of(made.config.to_dict()).parameters == estimated.parameters
    assert estimated.parameters == pytest.approx(sum(weight.numel() for weight in made.parameters()), rel=0.01)
    assert (made.config.num_experts, made.config.num_experts_per_tok, estimated.experts) == (4, 2, 4)


@pytest.mark.parametrize(("sizes", "says"), [
    ({"architecture": "qwen3", "experts": 4}, "are for  architecture: qwen3_moe"),
    ({"architecture": "qwen3_moe", "experts": 2, "experts_per_token": 3}, "cannot have 3 of 2 experts")])
def test_sizes_that_do_not_go_together_are_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        Model(**sizes)
