"""A mixture of experts samples and trains like any other model."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from training import Trained, built, joined, plain_training, training

from distflow.config.models import shape_of, shape_of_embedded
from distflow.config.run import Generation, Model, RoleRun
from distflow.data.batch import Ragged
from distflow.errors import EngineError
from distflow.plan import Layout
from workers.engines.embedded import build_model
from workers.engines.fsdp import FSDPEngine
from workers.engines.hf import HFRollout

MIXTURE = {"architecture": "qwen3_moe", "mixture": (4, 2)}


def mixed_training(layout, settings, small) -> Trained:
    return training(layout, MIXTURE, small, settings)


@pytest.mark.parametrize(("layout", "settings", "small"), [
    ({"dp": 1}, {}, 64_000_000), ({"dp": 2}, {}, 64_000_000), ({"dp": 2}, {"recompute": True}, 0),
    ({"dp": 4}, {}, 0), ({"dp": 1, "tp": 2}, {}, 0), ({"dp": 1, "cp": 2}, {}, 0)], ids=str)
def test_any_layout_equals_the_plain_model(layout, settings, small):
    stride = layout.get("tp", 1) * layout.get("cp", 1)
    results = run_ranks(layout["dp"] * stride, mixed_training, layout, settings, small)
    joined(results, stride).equals(plain_training(MIXTURE))


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
