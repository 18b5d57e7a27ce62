"""Grouped-query attention on the CPU without copying keys and values for each query head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "distflow_cpu"


def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
           scaling: float | None = None, **settings) -> tuple[Tensor, None]:
    """Attend with a mask and grouped queries, at less cost than transformers' `sdpa`, which repeats keys and values.
    query [B, H, Q, D]; key, value [B, K, L, D], H a multiple of K; attention_mask [B, 1, Q, L] bool."""
    plain = not settings.get("dropout") and settings.get("position_bias") is None
    if not plain or attention_mask is None or attention_mask.dtype != torch.bool:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    if query.shape[2] > 1:
        output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling,
                                              enable_gqa=query.shape[1] != key.shape[1])
        return output.transpose(1, 2).contiguous(), None
    rows, heads, _, size = query.shape
    # Heads that share keys are treated as positions: one matrix product serves them all.
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    scores = (grouped * (size**-0.5 if scaling is None else scaling)) @ key.transpose(2, 3)
    weights = scores.masked_fill_(~attention_mask, -torch.inf).softmax(-1)
    return (weights @ value).reshape(rows, 1, heads, size), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
