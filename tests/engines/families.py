"""Tiny models of every causal family that transformers registers: configurations and random weights.

Sizes of a family's default configuration are replaced by small ones, by their names; `_OVERRIDES` has what this leaves
wrong. Thresholds (windows, chunks, original rotary lengths) are below the length of the longest row.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig

ARCHITECTURES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
FAMILIES = tuple(ARCHITECTURES)
KINDS = {
    "encoder": "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert "
               "roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod",
    "decoder of an encoder": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart "
                             "prophetnet trocr whisper",
    "speech, music or pictures": "emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 llama4 mllama moshi "
                                 "musicgen musicgen_melody phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp",
    "part of a model": "gemma4_assistant gemma4_unified_assistant",
    "bytes": "blt",
}
"""Families that are no decoder-only language models: what they are instead."""
VOCABULARY, HIDDEN = 320, 64
_SIZES: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
    256: "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions model_max_length",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff ffn_hidden_size intermediate_size_mlp "
        "dense_intermediate_size d_inner feed_forward_size",
    HIDDEN: "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size hidden_size_global "
            "output_embedding_size word_embed_proj_dim lru_width backbone_hidden_size mamba_d_ssm",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size floor_scale original_max_position_embeddings",
    24: "qk_head_dim",
    16: "head_dim attention_head_size kv_channels d_head dim_head swa_head_dim global_head_dim linear_head_dim "
        "linear_key_head_dim linear_value_head_dim q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim state_size "
        "ssm_state_size mamba_d_state mamba_head_dim mamba_d_head index_head_dim index_n_heads "
        "router_hidden_size o_lora_rank",
    8: "sliding_window attention_window_size window_size local_attention sliding_window_size attention_chunk_size "
       "chunk_size mamba_chunk_size block_size index_topk index_block_size qk_rope_head_dim rotary_dim "
       "laurel_rank adapter_rank hidden_size_per_layer_input",
    4: "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads attention_heads num_heads "
       "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads linear_num_heads "
       "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads mamba_n_heads mamba_num_heads "
       "zero_expert_num",
    2: "num_hidden_layers num_layers n_layer n_layers depth decoder_layers encoder_layers num_decoder_layers "
       "num_blocks num_encoder_layers num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k "
       "linear_num_key_heads n_group num_expert_group swa_num_key_value_heads index_topk_blocks hc_count hc_mult "
       "n_mamba_heads mamba_dt_rank time_step_rank num_key_value_heads num_kv_heads kv_n_heads",
    1: "n_groups mamba_n_groups mamba_ngroups first_k_dense_replace topk_group num_dense_layers",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_WIDTHS = {*f"{_SIZES[HIDDEN]} {_SIZES[24]} {_SIZES[16]} qk_rope_head_dim rotary_dim mrope_section conv_dim "
           "block_dim".split()}
"""Sizes that grow with the width of a head."""
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "qk_head_dim": 128, "v_head_dim": 64}
"""Sizes of wider latent attention: vLLM's kernels have no others."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SSM = {"mamba_n_heads": 8, "mamba_d_head": 16}
_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_OVERRIDES: dict[str, dict[str, Any]] = {  # also what files have that vLLM and SGLang read, and transformers does not
    "bamba": {**_SSM, "attn_layer_indices": [1]},
    "cohere": {"logit_scale": 0.25}, "cohere2": {"logit_scale": 0.25}, "cohere2_moe": {"logit_scale": 0.25},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
        "full_attention": None}},
    "dbrx": {"attn_config": DbrxAttentionConfig(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0)},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
                    "first_k_dense_replace": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # as in its files
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
              "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5_moe": {"moe_layer_end_index": 1},
    "falcon_h1": {"mamba_d_head": 16, "lm_head_multiplier": 0.5, "key_multiplier": 0.7},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
                     "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": 96,
                     "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma2": {"attn_logit_softcapping": 3.0, "hidden_act": "gelu_pytorch_tanh"},
    "glm4_moe": {"head_dim": 16}, "glm4_moe_lite": {"first_k_dense_replace": 1},
    "granite": {"attention_multiplier": 0.05, "logits_scaling": 4.0, "residual_multiplier": 0.3,
                "embedding_multiplier": 6.0},
    "granitemoehybrid": {**_SSM, "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16}, "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "full_attn_idxs": None, "layer_types": ["conv", "full_attention"],
             "block_auto_adjust_ff_dim": False, "conv_dim": HIDDEN, "block_dim": HIDDEN},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"layer_types": None, "moe_layers": None, "no_rope_layers": [1, 0], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
    "ministral": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                       "indexer_compress_ratio": 4, "output_gate_type": "sigmoid", "hc_lowrank": 16},
    "qwen2_vl_text": {"rope_parameters": _TURNED}, "qwen2_5_vl_text": {"rope_parameters": _TURNED},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "roc_bert": {"pronunciation_vocab_size": 9, "shape_vocab_size": 9},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "n_mamba_heads": 8},
}


def kind_of(family: str) -> str:
    """Return what a family is, "language model" if it is nothing but that."""
    return next((kind for kind, names in KINDS.items() if family in names.split()), "language model")


def tiny(family: str, wider: int = 1) -> PreTrainedConfig:
    """Return a configuration with a layer of each kind, two at least. `wider`: times as wide; with 2 a head has 32
    numbers, the least that vLLM has kernels for."""
    kind = CONFIG_MAPPING[family]
    overrides = {name: value * wider if name in _WIDTHS else value
                 for name, value in _OVERRIDES.get(family, {}).items()}
    return kind(**{**shrunk(kind, wider), **_TOKENS, **overrides})


def shrunk(kind: type[PreTrainedConfig], wider: int = 1) -> dict[str, Any]:
    """Return small values in place of a configuration's default ones."""
    default = vars(kind())
    small: dict[str, Any] = {}
    for name, value in default.items():
        if isinstance(value, PreTrainedConfig):
            inner = value.model_type
            small[name] = tiny(inner, wider) if inner in CONFIG_MAPPING else \
                type(value)(**shrunk(type(value), wider))
        elif name in _SMALL and isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, _SMALL[name] * (wider if name in _WIDTHS else 1))
    heads = next((default[name] for name in ("num_attention_heads", "n_heads", "n_head") if name in default), None)
    for name in ("num_key_value_heads", "num_kv_heads"):
        if name in small and default[name] == heads:
            small[name] = 4
    if wider > 1 and "kv_lora_rank" in small:
        small |= {name: size for name, size in _LATENT.items() if name in small}
    if "qk_rope_head_dim" in small and default.get("head_dim") == default["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    many = next((default[name] for name in _LAYERS if isinstance(default.get(name), int)), 0)
    lists = {name: list(value) for name, value in default.items()
             if isinstance(value, (list, tuple)) and len(value) == many > 2}
    kinds = {name: list(dict.fromkeys(value)) for name, value in lists.items()}
    count = max([2, *map(len, kinds.values())])
    small |= {name: (each * count)[:count] for name, each in kinds.items()}
    small |= {name: count for name in _LAYERS if name in small}
    if isinstance(scaled := default.get("rope_parameters"), dict) and scaled.get("original_max_position_embeddings"):
        small["rope_parameters"] = {**scaled, "original_max_position_embeddings": 32}
    return small


def build(family: str, seed: int = 0, wider: int = 1) -> PreTrainedModel:
    """Return a model with random weights, large enough for attention to be peaked: what is left out of it shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny(family, wider), attn_implementation="eager",
                                                 dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    persistent = model.state_dict()
    tables = {name for name, buffer in model.named_buffers() if buffer.any()}  # made of the configuration
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name not in persistent or not weight.is_floating_point() or name in tables:
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise * 0.25 / wider)
            else:  # norms, biases, decays
                weight.add_(noise * 0.2)
    return model
