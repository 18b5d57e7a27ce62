"""Fused norms compute what transformers' own do."""

from __future__ import annotations

import copy

import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from workers.engines.devices import fuse_norms, is_rms_norm


def test_a_model_with_fused_norms_gives_the_same_logits_and_gradients(model):
    tokens = torch.arange(5, 25)[None]
    fused = copy.deepcopy(model)
    for norm in (module for name, module in [*model.named_modules(), *fused.named_modules()] if name.endswith("norm")):
        norm.weight.data.copy_(torch.linspace(0.5, 2, len(norm.weight)))
    assert fuse_norms(fused) == 4 * len(model.base_model.layers) + 1
    found = []
    for each in (model, copy.deepcopy(fused)):  # a copy, as a rollout has one
        logits = each(tokens).logits
        logits.square().sum().backward()
        found.append((logits, *(parameter.grad for parameter in each.parameters())))
    for one, other in zip(*found):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    assert list(fused.state_dict()) == list(model.state_dict())


def test_only_norms_that_scale_by_their_weight_are_fused():
    assert is_rms_norm(Qwen3RMSNorm)
    assert not is_rms_norm(GemmaRMSNorm)  # scales by 1 + weight
    assert not is_rms_norm(torch.nn.LayerNorm)
