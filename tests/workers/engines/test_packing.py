"""Packed rows give what padded ones give, and fill no memory with padding."""

import pytest
import torch
from columns import random_rows
from training import kept_for_backward

from distflow.config.run import Lora, Model
from distflow.config.sizes import shape_of_embedded
from distflow.errors import EngineError
from planners.memory import activation_bytes
from workers.engines import attention
from workers.engines.adapters import attach
from workers.engines.embedded import build_model
from workers.engines.packing import Packing
from workers.engines.policy import Policy, inputs_of


@pytest.mark.parametrize("lengths", [[1], [3] * 40, [4000] * 8 + [256] * 120, [*range(1, 400)]], ids=len)
def test_attention_pads_at_most_twice_what_is_needed(lengths):
    packing = Packing(lengths, [], [], torch.device("cpu"))
    padded = sum(len(block.queries) * block.queries.shape[1] * block.keys.shape[1] for block in packing._blocks)
    needed = sum(length**2 for length in lengths)
    assert needed <= padded <= max(2 * needed, len(packing._blocks) * 2**16)
    assert max(block.queries.numel() * block.keys.shape[1] for block in packing._blocks) <= max(2**24, 4000**2)
    assert packing._back.unique().numel() == sum(lengths)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_the_memory_plan_counts_what_layers_keep(architecture, adapted):
    sizes = {"architecture": architecture, "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2}
    built = build_model(512, 0, **sizes)
    built.set_attn_implementation(attention.NAME)
    if adapted:
        attach(built, Lora(rank=2), seed=0)
    inputs = inputs_of(random_rows(32, 32, 32, 32), random_rows(224, 224, 224, 224), 0, torch.device("cpu"))
    with kept_for_backward() as kept:
        outputs = Policy(built)(*inputs)
    planned = 4 * 255 * 4 * activation_bytes(shape_of_embedded(Model(**sizes)), 4, adapted, True)
    assert sum(kept.values()) == pytest.approx(planned, rel=0.15)
    outputs[0].sum().backward()


def test_a_model_that_does_not_pass_on_its_attention_pattern_is_refused(model, monkeypatch):
    model.set_attn_implementation(attention.NAME)
    policy = Policy(model, chunks=1)
    forward = model.model.layers[0].forward
    monkeypatch.setattr(model.model.layers[0], "forward",
                        lambda *inputs, attention_pattern, **more: forward(*inputs, **more))
    with pytest.raises(EngineError, match="Qwen3Attention gets no `attention_pattern`"):
        policy(*inputs_of(random_rows(5), random_rows(4), 0, torch.device("cpu")))
