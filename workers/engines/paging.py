"""How large a paged cache of keys and values is where no GPU sets the bound."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from distflow.config.run import Generation

_MOST = 4 << 30


def cache_on_cpu(config: PretrainedConfig, generation: Generation, dtype: torch.dtype,
                 block: int = 1) -> tuple[int, int]:
    """Tokens, and bytes of each: as many as all rows at the model's longest need, up to 4 GiB, but those of two rows.

    `block`: a row takes a multiple of so many tokens.
    """
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * size * dtype.itemsize
    row = -(-text.max_position_embeddings // block) * block
    return max(2 * row, min(row * generation.batch_rows, _MOST // token)), token
