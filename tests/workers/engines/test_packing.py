"""Packed rows give what padded ones give, and fill no memory with padding."""

from __future__ import annotations

import pytest
import torch

from distflow.data.batch import Ragged
from distflow.errors import EngineError
from workers.engines import attention
from workers.engines.packing import Packing
from workers.engines.policy import Policy, inputs_of
from workers.engines.value import ValueModel, with_value_head


def rows(*lengths: int, seed: int = 0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_rows([torch.randint(5, 260, (length,), generator=generator) for length in lengths])


def outputs_and_gradients(policy, inputs) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    policy.zero_grad()
    outputs = policy(*inputs, temperature=0.8)
    sum((part * torch.linspace(-1, 1, len(part))).sum() for part in outputs if part.requires_grad).backward()
    return [part.detach() for part in outputs], {name: each.grad.clone() for name, each in policy.named_parameters()}


@pytest.mark.parametrize("head", [Policy, ValueModel])
@pytest.mark.parametrize("lengths", [(4, 1, 7, 3, 0, 6), (0, 0, 0, 0, 0, 0), (150, 1, 1, 2, 1, 90)], ids=str)
def test_packed_rows_give_the_outputs_and_gradients_of_padded_ones(model, head, lengths):
    model = with_value_head(model) if head is ValueModel else model
    inputs = inputs_of(rows(5, 90, 2).select(torch.tensor([0, 0, 0, 1, 2, 2])), rows(*lengths, seed=1), 0,
                       torch.device("cpu"))
    padded = head(model)
    assert not padded.packs
    expected, gradients = outputs_and_gradients(padded, inputs)
    model.set_attn_implementation(attention.NAME)
    packed = head(model)
    assert packed.packs
    found, own = outputs_and_gradients(packed, inputs)
    assert [len(part) for part in found] == [len(part) for part in expected]
    for one, other in zip(found, expected):
        assert torch.allclose(one, other, atol=1e-5)
    for name, gradient in gradients.items():
        assert torch.allclose(own[name], gradient, atol=1e-5), name


@pytest.mark.parametrize("lengths", [[1], [3] * 40, [4000] * 8 + [256] * 120, [*range(1, 400)]], ids=len)
def test_attention_pads_at_most_twice_what_is_needed(lengths):
    packing = Packing(lengths, [], [], torch.device("cpu"))
    padded = sum(len(block.queries) * block.queries.shape[1] * block.keys.shape[1] for block in packing._blocks)
    needed = sum(length**2 for length in lengths)
    assert needed <= padded <= max(2 * needed, len(packing._blocks) * 2**16)
    assert max(block.queries.numel() * block.keys.shape[1] for block in packing._blocks) <= max(2**24, 4000**2)
    assert packing._back.unique().numel() == sum(lengths)


def test_a_model_that_does_not_pass_on_its_packing_is_refused(model, monkeypatch):
    model.set_attn_implementation(attention.NAME)
    policy = Policy(model)
    forward = model.model.layers[0].forward
    monkeypatch.setattr(model.model.layers[0], "forward", lambda *inputs, packing, **more: forward(*inputs, **more))
    with pytest.raises(EngineError, match="Qwen3Attention is not told how its rows are packed"):
        policy(*inputs_of(rows(5), rows(4), 0, torch.device("cpu")))
