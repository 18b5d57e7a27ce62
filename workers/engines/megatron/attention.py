"""Attention of packed sequences for Megatron's layers, by PyTorch's kernels, with context parallelism.

Megatron's own attention without TransformerEngine knows neither packing nor context parallelism. With the latter each
sequence is cut into 2·cp chunks, of which rank `r` holds the chunks `r` and `2·cp - 1 - r`, so that causal attention
costs all ranks alike; keys and values are gathered (Llama 3, §3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class Sequences(PackedSeqParams):
    """Packed sequences, as rotary embeddings and attention take them."""

    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(first query, end of queries, first key, end of keys) of each piece that attends on its own: queries among this
    rank's tokens, keys among all; the last query sees the last key."""
    order: Tensor | None = None
    """[T] index of each token in the gathered tokens of all context-parallel ranks; None without them."""


class PackedAttention(MegatronModule):
    """Causal attention within each sequence; replaces Megatron's `DotProductAttention`."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection,
                 softmax_scale: float | None = None, **_: Any):
        super().__init__(config=config)
        self.cp: dist.ProcessGroup = pg_collection.cp
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
                packed_seq_params: Sequences, **_: Any) -> Tensor:
        """Attend: `query` [T, heads, D], `key` and `value` [T, kv heads, D] of this rank's tokens → [T, heads · D]."""
        if packed_seq_params.order is not None:
            key, value = (gather_from_sequence_parallel_region(part.contiguous(), group=self.cp)
                          [packed_seq_params.order] for part in (key, value))
        outputs = [self._attend(query[first:end], key[start:stop], value[start:stop])
                   for first, end, start, stop in packed_seq_params.pieces]
        return torch.cat(outputs).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        whole = len(query) == len(key)
        mask = None if whole else causal_lower_right(len(query), len(key))
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole, scale=self.scale,
                                              enable_gqa=query.shape[1] != key.shape[1])
        return output[0].transpose(0, 1)
