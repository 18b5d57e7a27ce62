"""Tensor parallelism by DTensor plans: each rank has some heads and feed-forward units of every layer.

As in Megatron-LM (Shoeybi et al. 2019, §3): the first matrices of attention and feed-forward are split by columns, the
second by rows, which costs one all-reduce forward and one backward each. Replicated vectors get equal gradients, since
the inputs and outputs of each part are replicated. Of a mixture each rank has some experts, whole: it computes them for
all tokens that chose them, and the sum over ranks is that of a token's experts. Routers are replicated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from distflow.errors import EngineError
from workers.engines.capabilities import decoder_layers

Plan = dict[str, ParallelStyle]  # by name of the module within the layer; layers may lack some


class ExpertsParallel(ParallelStyle):
    """Style of a module of stacked experts: each rank has as many of them. It is called with the tokens [N, D], the
    experts that they chose [N, K] and the weights of these [N, K]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not hasattr(module, "_is_expert_parallel"):
            raise EngineError(f"{type(module).__name__} does not compute a part of its experts alone. Set  tp: 1")
        for name, weight in module.named_parameters(recurse=False):
            cut = distribute_tensor(weight.detach(), device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut, weight.requires_grad))
        own = cast(int, module.num_experts) // device_mesh.size()
        # transformers' code skips experts from `own` on.
        vars(module).update(num_experts=own, _is_expert_parallel=True)
        first = own * device_mesh.get_local_rank()
        module.forward = functools.partial(_own_experts, module, module.forward, device_mesh, range(first, first + own))
        return module


def _own_experts(module: nn.Module, forward: Callable[..., Tensor], mesh: DeviceMesh, own: range, tokens: Tensor,
                 chosen: Tensor, weights: Tensor) -> Tensor:
    tokens, weights = (DTensor.from_local(whole, mesh, [Replicate()], run_check=False).to_local(
        grad_placements=[Partial()]) for whole in (tokens, weights))  # each rank has a part of their gradients
    here = (chosen >= own.start) & (chosen < own.stop)
    chosen = (chosen - own.start).masked_fill(~here, len(own))
    cut: dict[str, Any] = dict(module._parameters)
    try:
        module._parameters.update({name: part.to_local() for name, part in cut.items()})
        output = forward(tokens, chosen, weights.masked_fill(~here, 0.0))
    finally:
        module._parameters.update(cut)
    return DTensor.from_local(output, mesh, [Partial()], run_check=False).full_tensor()


_ATTENTION: Plan = {"self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
                    "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
_EXPERTS: Plan = {"mlp.experts": ExpertsParallel()}


def _feed_forward_of(part: str) -> Plan:
    return {f"{part}.gate_proj": ColwiseParallel(), f"{part}.up_proj": ColwiseParallel(),
            f"{part}.down_proj": RowwiseParallel()}


_FEED_FORWARD = _feed_forward_of("mlp")
# A per-head norm sees only this rank's heads [B, L, heads, D]; this style sums its gradient over the ranks.
_PER_HEAD: Plan = {"self_attn.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
                   "self_attn.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True)}

PLANS: dict[str, Plan] = {
    "llama": {**_ATTENTION, **_FEED_FORWARD},
    "mistral": {**_ATTENTION, **_FEED_FORWARD},
    "qwen2": {**_ATTENTION, **_FEED_FORWARD},
    "qwen3": {**_ATTENTION, **_FEED_FORWARD, **_PER_HEAD},
    "mixtral": {**_ATTENTION, **_EXPERTS},
    "qwen2_moe": {**_ATTENTION, **_FEED_FORWARD, **_EXPERTS, **_feed_forward_of("mlp.shared_expert")},
    "qwen3_moe": {**_ATTENTION, **_FEED_FORWARD, **_EXPERTS, **_PER_HEAD},
    "glm4_moe": {**_ATTENTION, **_FEED_FORWARD, **_EXPERTS, **_feed_forward_of("mlp.shared_experts"), **_PER_HEAD},
}
"""Plan by `model_type` of the text configuration. A family with the same layer names may reuse one:
PLANS["my_family"] = PLANS["llama"]"""
ROW_PARALLEL = tuple({f".{module}.weight" for plan in PLANS.values() for module, style in plan.items()
                      if isinstance(style, RowwiseParallel)})
"""Ends of the names of weights that are split along their last dimension."""


def split(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the model, equal on every rank, over the 1-D `mesh`. Embeddings and head are split too if it divides the
    vocabulary; the head must then be called through `workers.engines.vocabulary`."""
    config = model.config.get_text_config()
    if type(model.config) is not type(config) or config.model_type not in PLANS:
        family = model.config.model_type
        raise EngineError(
            f"tp: {mesh.size()} needs a plan of how the layers of `{family}` are cut, and there are plans for "
            f"{', '.join(sorted(PLANS))}. Set  tp: 1 , or add one:  from workers.engines.tensor_parallel import PLANS; "
            f"PLANS[{family!r}] = PLANS['llama']   if its layers are named and divide alike")
    plan = PLANS[config.model_type]
    _require_divisible(model, plan, mesh.size())
    for layer in decoder_layers(model):
        present = dict(layer.named_modules())
        for name, style in plan.items():
            if name in present:
                parallelize_module(layer, mesh, {name: style}, src_data_rank=None)
    if config.vocab_size % mesh.size() == 0:
        _split_vocabulary(model, mesh)


def _require_divisible(model: PreTrainedModel, plan: Plan, tp: int) -> None:
    config = model.config.get_text_config()
    counts = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    for layer in decoder_layers(model):
        for name, module in layer.named_modules():
            if isinstance(plan.get(name), ExpertsParallel):
                counts["num_experts"] = cast(int, module.num_experts)
            elif name.startswith("mlp.") and isinstance(plan.get(name), ColwiseParallel):
                counts["units of " + name.rpartition(".")[0]] = cast(nn.Linear, module).out_features
    odd = [f"{name} ({count})" for name, count in counts.items() if count % tp]
    if odd:
        most = math.gcd(*counts.values())
        fits = ", ".join(str(parts) for parts in range(1, most + 1) if most % parts == 0)
        raise EngineError(f"tp: {tp} does not divide {' and '.join(odd)} of this `{config.model_type}` model. "
                          f"tp may be {fits}")


def _split_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    parallelize_module(embeddings, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
    if head is not None and tied:
        head.weight = embeddings.weight
    elif head is not None:
        whole = head.weight
        head.weight = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None),
                                   whole.requires_grad)
