"""Packed rows give what padded ones give, and fill no memory with padding."""

from __future__ import annotations

import pytest
import torch

from distflow.config.run import Lora, Model
from distflow.config.sizes import shape_of_embedded
from distflow.data.batch import Ragged
from distflow.errors import EngineError
from planners.memory import activation_bytes
from workers.engines import attention, devices
from workers.engines.adapters import attach
from workers.engines.embedded import build_model
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
    padded.packs = False
    expected, gradients = outputs_and_gradients(padded, inputs)
    packed = head(model, chunks=1)
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


class NormKernel(torch.autograd.Function):
    """Keeps the input alone. On a CPU torch's `rms_norm` is several operations, which keep what each is given."""

    @staticmethod
    def forward(ctx, states, shape, weight, epsilon):
        ctx.save_for_backward(states, weight)
        ctx.rest = shape, epsilon
        return torch.nn.functional.rms_norm(states, shape, weight, epsilon)

    @staticmethod
    def backward(ctx, gradient):
        shape, epsilon = ctx.rest
        wanted = [each for each, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[::2]) if needed]
        with torch.enable_grad():
            states, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            found = torch.autograd.grad(torch.nn.functional.rms_norm(states, shape, weight, epsilon),
                                        [states, weight][: len(wanted)], gradient)
        return found[0], None, found[1] if len(wanted) > 1 else None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_the_memory_plan_counts_what_layers_keep(architecture, adapted, dtype, monkeypatch):
    """Half precision is counted as on GPUs, whose kernel of norms keeps what this one keeps."""
    monkeypatch.setattr(devices, "rms_norm", NormKernel.apply)
    sizes = {"architecture": architecture, "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64}
    built = build_model(512, 0, **sizes).to(dtype)
    built.set_attn_implementation(attention.NAME)
    if dtype == torch.bfloat16:
        devices.fuse_norms(built)
    if adapted:
        attach(built, Lora(rank=2), seed=0)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = inputs_of(rows(32, 32, 32, 32), rows(224, 224, 224, 224), 0, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = Policy(built)(*inputs)
    planned = 4 * 255 * 4 * activation_bytes(shape_of_embedded(Model(**sizes)), dtype.itemsize, adapted, True)
    assert sum(kept.values()) == pytest.approx(planned, rel=0.15)
    outputs[0].sum().backward()


def test_a_model_that_does_not_pass_on_its_attention_pattern_is_refused(model, monkeypatch):
    model.set_attn_implementation(attention.NAME)
    policy = Policy(model, chunks=1)
    forward = model.model.layers[0].forward
    monkeypatch.setattr(model.model.layers[0], "forward",
                        lambda *inputs, attention_pattern, **more: forward(*inputs, **more))
    with pytest.raises(EngineError, match="Qwen3Attention gets no `attention_pattern`"):
        policy(*inputs_of(rows(5), rows(4), 0, torch.device("cpu")))
