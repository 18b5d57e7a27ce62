"""Size of a paged KV cache on the CPU."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from distflow.config.run import Generation

_MAX_BYTES = 4 << 30


def cache_on_cpu(config: PretrainedConfig, generation: Generation, dtype: torch.dtype,
                 block: int = 1) -> tuple[int, int]:
    """Return (tokens, bytes per token): enough for all rows at full length, at most 4 GiB, at least two rows.

    A row takes a multiple of `block` tokens.
    """
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * size * dtype.itemsize
    row = -(-text.max_position_embeddings // block) * block
    return max(2 * row, min(row * generation.batch_rows, _MAX_BYTES // token)), token
