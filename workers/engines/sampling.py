"""Samples tokens with randomness that depends on (seed, step, row id, position) alone.

Without generator state the same rows draw the same tokens on any number of ranks, in any order and after any restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from workers.engines.vocabulary import kernels_for


class TokenLimits(NamedTuple):
    """Which tokens may be drawn, as in `generation`."""

    top_k: int
    top_p: float
    min_p: float


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_POSITION = _signed(0xD1B54A32D192ED03)
_BLOCK = 128
_WIDE = 8192


def uniform(key: int | Tensor, ids: Tensor, position: int | Tensor) -> Tensor:
    """Return float64 in [0, 1) for rows `ids` [B] at `position` under `key`, by SplitMix64 (Steele et al. 2014)."""
    state = _mix(ids * _GOLDEN + _mix(torch.as_tensor(key)).to(ids.device))
    bits = _mix(state + torch.as_tensor(position, device=ids.device) * _POSITION)
    return _shift(bits, 11).double() * 2.0**-53


def key_of(*parts: int) -> int:
    """Combine several numbers into one signed 64-bit key."""
    key = torch.zeros((), dtype=torch.int64)
    for part in parts:
        key = _mix(key + part + 1)
    return int(key)


def sample_tokens(logits: Tensor, noise: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0,
                  min_p: float = 0.0) -> tuple[Tensor, Tensor]:
    """Choose a token for each row of `logits` [B, V] by `noise` [B] in [0, 1); temperature 0 takes the likeliest.
    Returns tokens [B] and log-probabilities [B] at this temperature (greedy: 1), before top-k, top-p and min-p."""
    if temperature and not top_k and top_p == 1.0 and not min_p and (kernels := kernels_for(logits.device)):
        return _sample_by_blocks(logits, noise, temperature, kernels)
    scaled = logits if temperature in (0.0, 1.0) else logits.float() / temperature
    logprobs = torch.log_softmax(scaled, -1, dtype=torch.float32)
    tokens = logprobs.argmax(-1) if temperature == 0 else \
        _draw(_mask_improbable(logprobs, top_k, top_p, min_p).exp(), noise)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _sample_by_blocks(logits: Tensor, noise: Tensor, temperature: float,
                      kernels: ModuleType) -> tuple[Tensor, Tensor]:
    """Compute `sample_tokens` from all tokens, with one pass over `logits` and another over one block of each row."""
    tops, totals, _ = kernels.block_moments(logits, temperature, _BLOCK)
    top, width = tops.amax(1, keepdim=True), logits.shape[1]
    sums = totals.double().mul_((tops - top).exp())

    def weights_of(block: Tensor) -> Tensor:
        columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=block.device)
        values = logits.gather(1, columns.clamp(max=width - 1)).float() / temperature
        return (values - top).exp().where(columns < width, 0.0)

    tokens = _draw_by_blocks(sums, weights_of, noise).clamp(max=width - 1)
    chosen = logits.gather(1, tokens[:, None]).float() / temperature
    return tokens, (chosen - top - sums.sum(1, keepdim=True).log().float()).squeeze(1)


def _draw(weights: Tensor, noise: Tensor) -> Tensor:
    """Return the place [B] in each row of `weights` [B, V] where they exceed `noise` [B] of their sum. Wide rows are
    added up in blocks, and token by token in one of these alone: a running sum over all is slow on a GPU."""
    rows, width = weights.shape
    if width <= _WIDE:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative, noise[:, None] * cumulative[:, -1:])
    padded = torch.nn.functional.pad(weights, (0, -width % _BLOCK)) if width % _BLOCK else weights
    blocks = padded.unflatten(1, (-1, _BLOCK))
    every = torch.arange(rows, device=weights.device)
    places = _draw_by_blocks(blocks.sum(-1, dtype=torch.float64), lambda block: blocks[every, block], noise)
    return places.clamp(max=width - 1)


def _draw_by_blocks(sums: Tensor, weights_of: Callable[[Tensor], Tensor], noise: Tensor) -> Tensor:
    """Draw as `_draw` from rows of blocks with these `sums` [B, blocks]; `weights_of` returns the weights [B, width]
    of one block [B] of each row."""
    cumulative = sums.cumsum(-1)
    threshold = noise[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, threshold)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1), 0.0)
    inside = weights_of(block).cumsum(-1, dtype=torch.float64)
    return block * _BLOCK + _first_above(inside, threshold - before[:, None])


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Return where `cumulative` [B, N] first exceeds `threshold` [B, 1]; where rounding lets it nowhere, at its last
    increase, and where it is not a number, at its end."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).clamp(max=cumulative.shape[1] - 1)
    return torch.minimum(torch.searchsorted(cumulative, threshold, right=True), last).squeeze(1)


def _mask_improbable(logprobs: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    if top_k:
        limit = logprobs.topk(min(top_k, logprobs.shape[1])).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < limit, -torch.inf)
    if top_p < 1.0:
        ordered, index = logprobs.sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        ordered = ordered.masked_fill(before >= top_p * ordered.exp().sum(-1, keepdim=True), -torch.inf)
        logprobs = torch.empty_like(logprobs).scatter_(1, index, ordered)
    if min_p:
        limit = logprobs.amax(-1, keepdim=True) + math.log(min_p)
        logprobs = logprobs.masked_fill(logprobs < limit, -torch.inf)
    return logprobs


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right logically; int64's own shift is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _MIX[0]
    value = (value ^ _shift(value, 27)) * _MIX[1]
    return value ^ _shift(value, 31)
