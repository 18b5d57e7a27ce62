"""Grouped-query attention without copying keys and values for each query head, where torch's kernels allow it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distflow.errors import EngineError

NAME = "distflow"
_HALVES = (torch.bfloat16, torch.float16)
KNOWN = frozenset({
    "attention_mask", "scaling", "dropout", "is_causal", "position_bias",
    "sliding_window",  # the mask has it
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "logits_to_keep",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",  # FlashAttention's own
})
"""Keywords that `attend` respects, and those that say nothing to it."""
NO_MASK = (1, 1, 0, 0)
"""Shape of a mask that says nothing; of four dimensions, so that transformers makes none in its place."""


def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
           scaling: float | None = None, attention_pattern: Any = None, **settings) -> tuple[Tensor, None]:
    """Attend with a mask and grouped queries, at less cost than transformers' `sdpa`, which repeats keys and values.
    query [B, H, Q, D]; key, value [B, K, L, D], H a multiple of K; attention_mask [B, 1, Q, L] bool. In its place an
    `attention_pattern` may say which keys each query sees: `LastColumns`, or `packing.Packing`, where B is 1. Raises
    EngineError: it is given what it does not know."""
    if unknown := [name for name, value in settings.items() if value is not None and name not in KNOWN]:
        raise EngineError(f"{type(module).__name__} hands `{unknown[0]}` to attention, which distflow's does not know. "
                          "Give the role another model")
    if attention_pattern is not None:
        return attention_pattern.attend(query, key, value, scaling), None
    if attention_mask is not None and attention_mask.shape == NO_MASK:
        raise EngineError(f"{type(module).__name__} gets no `attention_pattern`: transformers' code of this model "
                          "does not hand on what attention is given. Give the role another model")
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


def has_flash(model: PreTrainedModel) -> bool:
    """Return whether torch's FlashAttention reads this model's cache where it is: on NVIDIA GPUs from Ampere on, in
    half precision."""
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return model.device.type == "cuda" and torch.version.cuda is not None and model.dtype in _HALVES and \
        size % 8 == 0 and size <= 256 and torch.cuda.get_device_capability(model.device) >= (8, 0)


class LastColumns:
    """Attention pattern of one new token of each row, which sees in a cache the columns up to `column` [1], its own, as
    many as the row has tokens before it (`lengths` [B, 1]) and that one. FlashAttention reads these columns alone; with
    a mask all are read, at half the speed (H200)."""

    def __init__(self, column: Tensor, lengths: Tensor):
        # A row that has ended may have been longer than the window is now.
        self.before, self.column = lengths.flatten().clamp(max=column), column
        self._places: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return [B, 1, H, D]. query [B, H, 1, D]; key, value [B, K, L, D]. Heads that share keys are treated as
        positions, and keys of each head as a sequence of its own."""
        rows, heads, _, size = query.shape
        groups, room = key.shape[1], key.shape[2]
        together, count = heads // groups, rows * groups
        sizes = groups, room, together  # of all layers, in most models
        queries, keys, used = self._places[sizes] = self._places.get(sizes) or self._sequences(*sizes)
        output = _flash(query.reshape(count * together, 1, size), key.view(count * room, 1, size),
                        value.view(count * room, 1, -1), queries, keys, together, room, 0.0, False, False,
                        scale=scale, seqused_k=used)[0]
        return output.view(rows, 1, heads, -1)

    def _sequences(self, groups: int, room: int, together: int) -> tuple[Tensor, ...]:
        """Return where queries [N + 1] and keys [N + 1] of each sequence begin, and how many keys it has [N]."""
        before = self.before.repeat_interleave(groups)
        index = torch.arange(len(before) + 1, device=before.device)
        first = index[:-1] * room + self.column - before
        keys = torch.cat([first, index[-1:] * room])
        return (index * together).int(), keys.int(), (before + 1).int()


_flash = torch.ops.aten._flash_attention_forward  # torch 2.13 has `seqused_k` in `varlen_attn` too; 2.11 runs as well
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
