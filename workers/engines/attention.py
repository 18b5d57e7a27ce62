"""Grouped-query attention without copying keys and values for each query head, where torch's kernels allow it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distflow.errors import EngineError
from workers.engines.context_parallel import has_windows

NAME = "distflow"
NO_MASK = (1, 1, 0, 0)
"""Shape of a mask that says nothing; of four dimensions, so that transformers makes none in its place."""


def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
           scaling: float | None = None, **settings) -> tuple[Tensor, None]:
    """Attend with a mask and grouped queries, at less cost than transformers' `sdpa`, which repeats keys and values.
    query [B, H, Q, D]; key, value [B, K, L, D], H a multiple of K; attention_mask [B, 1, Q, L] bool. With a `packing`
    (`workers.engines.packing`) that says what each token sees, B is 1."""
    if packing := settings.pop("packing", None):
        return packing.attend(query, key, value, scaling), None
    if attention_mask is not None and attention_mask.shape == NO_MASK:
        raise EngineError(f"{type(module).__name__} is not told how its rows are packed: transformers' code of this "
                          "model does not hand on what attention is given. Give the role another model")
    plain = not settings.get("dropout") and settings.get("position_bias") is None
    if not plain or attention_mask is None or attention_mask.dtype != torch.bool:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    rows, heads, count, size = query.shape
    if count == 1 and query.is_cuda:  # heads that share keys are treated as positions: none of the kernels copies
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return output.reshape(rows, 1, heads, size), None
    if query.is_cuda:  # with a mask only kernels that know no groups
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    if count > 1:
        output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling,
                                              enable_gqa=query.shape[1] != key.shape[1])
        return output.transpose(1, 2).contiguous(), None
    # Heads that share keys are treated as positions here too: one matrix product serves them all.
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    scores = (grouped * (size**-0.5 if scaling is None else scaling)) @ key.transpose(2, 3)
    weights = scores.masked_fill_(~attention_mask, -torch.inf).softmax(-1)
    return (weights @ value).reshape(rows, 1, heads, size), None


def sees_all_before(model: PreTrainedModel) -> bool:
    """Return whether every layer attends to all tokens before, through `attend`, and to no image."""
    config = model.config.get_text_config()
    full = {*(getattr(config, "layer_types", None) or ["full_attention"])} == {"full_attention"}
    return full and not has_windows(config) and config._attn_implementation == NAME and \
        model._supports_attention_backend and not getattr(model, "image_processor", None)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
