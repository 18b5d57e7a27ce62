"""Tensor parallelism by DTensor plans: each rank has some heads and feed-forward units of every layer.

As in Megatron-LM (Shoeybi et al. 2019, §3): the first matrices of attention and feed-forward are split by columns, the
second by rows, which costs one all-reduce forward and one backward each. Replicated vectors get equal gradients, since
the inputs and outputs of each part are replicated.
"""

from __future__ import annotations

import math

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PretrainedConfig, PreTrainedModel

from distflow.errors import EngineError
from workers.engines.capabilities import decoder_layers

Plan = dict[str, ParallelStyle]  # by name of the module within the layer

_ATTENTION: Plan = {"self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
                    "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
_FEED_FORWARD: Plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
                       "mlp.down_proj": RowwiseParallel()}
# A per-head norm sees only this rank's heads [B, L, heads, D]; this style sums its gradient over the ranks.
_PER_HEAD: Plan = {"self_attn.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
                   "self_attn.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True)}

PLANS: dict[str, Plan] = {
    "llama": {**_ATTENTION, **_FEED_FORWARD},
    "mistral": {**_ATTENTION, **_FEED_FORWARD},
    "qwen2": {**_ATTENTION, **_FEED_FORWARD},
    "qwen3": {**_ATTENTION, **_FEED_FORWARD, **_PER_HEAD},
    "qwen3_moe": {**_ATTENTION, **_PER_HEAD},  # the experts stay whole on each rank
}
"""Plan by `model_type` of the text configuration. A family with the same layer names may reuse one:
PLANS["my_family"] = PLANS["llama"]"""


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
    _require_divisible(config, plan, mesh.size())
    for layer in decoder_layers(model):
        for name, style in plan.items():
            parallelize_module(layer, mesh, {name: style}, src_data_rank=None)
    if config.vocab_size % mesh.size() == 0:
        _split_vocabulary(model, mesh)


def _require_divisible(config: PretrainedConfig, plan: Plan, tp: int) -> None:
    counts = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    if any(name.startswith("mlp.") for name in plan):
        counts["intermediate_size"] = config.intermediate_size
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
