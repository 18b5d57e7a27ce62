"""Builds a Megatron model with the shape of a transformers model: settings, layers, slices of the weights."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from distflow.plan import Layout
from workers.engines.megatron.packing import PackedAttention

if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 asks whether it is None and, without TransformerEngine, lacks it
    moe_utils.te_general_gemm = None


class Stage(GPTModel):
    """Layers of one pipeline stage. The last returns hidden states: logits are made piece by piece (`score_cut`)."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    @property
    def head(self) -> Tensor:
        """Return [V / tp, D], this rank's rows of the output weights, on the last stage."""
        tied = self.share_embeddings_and_output_weights and self.pre_process
        return self.embedding.word_embeddings.weight if tied else self.output_layer.weight


class Experts(MoELayer):
    """Experts of a layer whose tokens are whole on each tensor-parallel rank: routers choose for all of them, and
    each rank sends its part of the tokens to the experts."""

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules, pg_collection: ProcessGroupCollection):
        super().__init__(config, submodules, pg_collection=pg_collection)
        self.attn_tp_group = pg_collection.expt_tp  # Megatron refuses to send tokens that other ranks send, too
        self.count = 0

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        self.count, ways = len(probs), self.tp_group.size()
        places = torch.arange(-(-self.count // ways) * ways, device=probs.device).clamp(max=self.count - 1)
        return super().preprocess(*(scatter_to_sequence_parallel_region(whole[places], self.tp_group)
                                    for whole in (hidden_states, probs, routing_map)))

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        part = super().postprocess(output, shared_expert_output)
        return gather_from_sequence_parallel_region(part, False, self.tp_group)[: self.count]


def config_of(theirs: PretrainedConfig, layout: Layout, biased: bool, normed: bool, dtype: torch.dtype,
              ) -> TransformerConfig:
    """Return the settings; `biased` queries, keys and values have biases, `normed` queries and keys are normalised."""
    return TransformerConfig(
        num_layers=theirs.num_hidden_layers, hidden_size=theirs.hidden_size,
        num_attention_heads=theirs.num_attention_heads, num_query_groups=theirs.num_key_value_heads,
        kv_channels=_head(theirs), ffn_hidden_size=theirs.intermediate_size, normalization="RMSNorm",
        layernorm_epsilon=theirs.rms_norm_eps, gated_linear_unit=True, activation_func=functional.silu,
        add_bias_linear=False, add_qkv_bias=biased, qk_layernorm=normed, attention_dropout=0.0, hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=1,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16, variable_seq_lengths=True,
        calculate_per_token_loss=True,  # losses are sums: no dividing by micro-batches, no average over ranks
        use_cpu_initialization=True, perform_initialization=False, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        persist_layer_norm=False, moe_token_dispatcher_type="alltoall", **_experts(theirs))


def _head(theirs: PretrainedConfig) -> int:
    return getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads


def _experts(theirs: PretrainedConfig) -> dict[str, Any]:
    if not getattr(theirs, "num_experts", None):
        return {}
    return {"num_moe_experts": theirs.num_experts, "moe_router_topk": theirs.num_experts_per_tok,
            "moe_ffn_hidden_size": theirs.moe_intermediate_size, "moe_router_dtype": "fp32",
            # the softmax of the chosen alone is that of all, made to add up to one
            "moe_router_pre_softmax": not theirs.norm_topk_prob,
            "moe_router_load_balancing_type": "none"}


def _rotation(theirs: PretrainedConfig) -> dict[str, Any]:
    rope = theirs.rope_parameters
    scaled = {"rope_scaling": True, "rope_scaling_factor": rope["factor"]} if rope["rope_type"] == "llama3" else {}
    return {"rotary_base": rope["rope_theta"], **scaled}


def build_stage(theirs: PretrainedConfig, config: TransformerConfig, groups: ProcessGroupCollection,
                layout: Layout) -> Stage:
    """Return this rank's stage. Its layers are given one by one, as Megatron's own unequal stages ask its global state
    for the rank."""
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm,
                                    normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=PackedAttention)
    if config.num_moe_experts:
        mixture = spec.submodules.mlp
        # no ModuleSpec, as layers give process groups only to Megatron's own class
        spec.submodules.mlp = SimpleNamespace(module=Experts, submodules=mixture.submodules,
                                              params={"pg_collection": groups})
    ways = config.tensor_model_parallel_size
    layers = len(layout.stages(theirs.num_hidden_layers)[groups.pp.rank()])
    block = TransformerBlockSubmodules([spec] * layers, LayerNormImpl)
    stage = Stage(config, block, vocab_size=-(-theirs.vocab_size // ways) * ways,
                  max_sequence_length=theirs.max_position_embeddings, pre_process=groups.pp.rank() == 0,
                  post_process=groups.pp.rank() == groups.pp.size() - 1, parallel_output=True,
                  share_embeddings_and_output_weights=theirs.tie_word_embeddings, position_embedding_type="rope",
                  pg_collection=groups, **_rotation(theirs))
    if stage.pre_process and theirs.pad_token_id is not None:
        stage.embedding.word_embeddings.register_forward_hook(functools.partial(_detach_padding, theirs.pad_token_id))
    return stage


def _detach_padding(pad_token: int, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Stop the gradient of the padding token's embedding, which transformers never trains."""
    return torch.where((inputs[0] == pad_token)[..., None], output.detach(), output)
