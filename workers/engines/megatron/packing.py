"""Packed sequences for Megatron's layers: prompts and responses in one row, and the attention within each.

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

from distflow.data.batch import Ragged


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


@dataclass
class Packed:
    tokens: Tensor  # [1, T / cp]
    sequences: Sequences
    places: Tensor  # [n] index, among this rank's tokens, of each token before a response token
    targets: Tensor  # [n] that response token
    indices: Tensor  # [n] its index among all N response tokens
    response_count: int  # number of all response tokens, N
    starts: Tensor  # [B] index of each sequence's first token among all tokens, padded
    local: Tensor  # [T] index, among this rank's tokens, of each of all tokens; -1: another rank has it

    def lay_out(self, rows: Ragged, fill: int) -> Tensor:
        """Return [T / cp, …] this rank's part of `rows`, values of the first tokens of each sequence; `fill` for the
        other tokens."""
        places, count = self.local[_places(self.starts, rows)], self.tokens.shape[1]
        is_local = places >= 0
        laid_out = rows.values.new_full((count, *rows.values.shape[1:]), fill)
        laid_out[places[is_local]] = rows.values[is_local]
        return laid_out


def pack(prompts: Ragged, responses: Ragged, pad_token: int, cp: int, rank: int, device: torch.device) -> Packed:
    """Pack each prompt with its response; with context parallelism pad to a multiple of 2·cp tokens."""
    unit, _ = _chunks(cp, rank)
    lengths = prompts.lengths + responses.lengths
    padded = -(-lengths // unit) * unit
    starts = padded.cumsum(0) - padded
    tokens = torch.full((int(padded.sum()),), pad_token)
    tokens[_places(starts, prompts)] = prompts.values
    response_places = _places(starts + prompts.lengths, responses)
    tokens[response_places] = responses.values
    held = torch.cat([_tokens_of_rank(length, start, cp, rank)
                      for length, start in zip(padded.tolist(), starts.tolist())])
    local = torch.full((len(tokens),), -1)
    local[held] = torch.arange(len(held))
    before = local[response_places - 1]  # each prompt has a token at least
    own_responses = (before >= 0).nonzero()[:, 0]
    ends = torch.nn.functional.pad(padded.cumsum(0), (1, 0)).to(torch.int32).to(device)
    longest = int(padded.max())
    sequences = Sequences(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest,
                          max_seqlen_kv=longest, pieces=_pieces(padded.tolist(), cp, rank),
                          order=_order(padded.tolist(), starts.tolist(), cp, device) if cp > 1 else None)
    return Packed(tokens[held][None].to(device), sequences, before[own_responses].to(device),
                  responses.values[own_responses].to(device), own_responses.to(device), len(responses.values), starts,
                  local)


def _places(starts: Tensor, rows: Ragged) -> Tensor:
    return torch.arange(len(rows.values)) + (starts - rows.offsets[:-1])[rows.row_of]


def _chunks(cp: int, rank: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of chunks and those of a rank, an early and a late one: later tokens cost more attention."""
    return (1, (0,)) if cp == 1 else (2 * cp, (rank, 2 * cp - 1 - rank))


def _tokens_of_rank(length: int, start: int, cp: int, rank: int) -> Tensor:
    count, held = _chunks(cp, rank)
    chunks = torch.arange(start, start + length).unflatten(0, (count, -1))
    return chunks[list(held)].flatten()


def _pieces(lengths: list[int], cp: int, rank: int) -> list[tuple[int, int, int, int]]:
    pieces, first, start = [], 0, 0
    count, held = _chunks(cp, rank)
    for length in lengths:
        width = length // count
        for chunk in held:
            pieces.append((first, first + width, start, start + (chunk + 1) * width))
            first += width
        start += length
    return pieces


def _order(lengths: list[int], starts: list[int], cp: int, device: torch.device) -> Tensor:
    gathered = torch.cat([_tokens_of_rank(length, start, cp, rank) for rank in range(cp)
                          for length, start in zip(lengths, starts)])
    return torch.argsort(gathered).to(device)


class _Sum(torch.autograd.Function):
    """Sum over ranks that all compute the same loss from it, so that each gradient is that of the rank's own part."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def gather_response_tokens(values: Tensor, packed: Packed, group: dist.ProcessGroup) -> Tensor:
    """Gather this rank's values [n] into those of all N response tokens."""
    if packed.sequences.order is None:
        return values
    return _Sum.apply(values.new_zeros(packed.response_count).index_put((packed.indices,), values), group)
