"""Models that the Megatron engine computes, by their configurations: planning and the engine refuse the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Those whose weights have a place in `workers/engines/megatron/weights.py`. One that is built like these needs its
type here alone; another one, entries there and settings in `model.config_of`."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only scaling of rotary embeddings that Megatron supports."""


def why_unmapped(config: Mapping[str, Any]) -> str:
    """Return why the Megatron engine cannot compute a model, "" if it can. `config`: its config.json, or as
    transformers has completed it."""
    kind = config.get("model_type", "")
    if kind not in FAMILIES:
        return f"it knows the types {', '.join(FAMILIES)}, and this one has  model_type: {kind}"
    if (activation := config.get("hidden_act", "silu")) != "silu":
        return f"it knows  hidden_act: silu  and this model has  hidden_act: {activation}"
    if config.get("use_sliding_window"):
        return "it has no sliding-window attention, which this model uses"
    biased = [key for key in ("attention_bias", "mlp_bias") if kind != "qwen2" and config.get(key)]
    if biased:
        return f"its layers have no place for the biases of this model ({biased[0]}: true)"
    if kind == "qwen3_moe" and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        return "it wants experts in all layers or in none, and this model mixes them (mlp_only_layers: " \
               f"{config.get('mlp_only_layers')}, decoder_sparse_step: {config.get('decoder_sparse_step', 1)})"
    return _why_not_turned(config)


def _why_not_turned(config: Mapping[str, Any]) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        return f"it turns whole heads, and this model has  partial_rotary_factor: {partial}"
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    if scaling == "default" or (scaling == "llama3" and all(rope.get(key) == value for key, value in LLAMA3.items())):
        return ""
    return f"it knows rotary embeddings without scaling and those of Llama 3, and this model has {rope}"
