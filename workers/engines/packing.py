"""Attention of rows without padding: prompts lie one after the other, then what follows each of them.

A GPU computes all of them in one call of torch's `varlen_attn`, in half precision; else they are padded for attention
alone, a few of nearly one length at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from workers.engines.devices import on_device

_ASKS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 takes grouped queries unasked
_WASTE = 2  # padded scores of a block, as a multiple of those that are needed
_FEW, _MANY = 2**16, 2**24  # scores of a block: up to which waste does not count, and at most
Sequences = list[tuple[range, range]]


@dataclass(frozen=True)
class _Block:
    """Sequences that are padded to one length: their queries and keys [N, Q], [N, K] by place, and what is seen."""

    queries: Tensor
    keys: Tensor
    mask: Tensor | None  # [N, 1, Q, K]; None where all is seen up to the query itself


class Packing:
    """Attention pattern of sequences among packed tokens [T]. Each has tokens of its own, and may see those of a prompt
    before them; none sees what comes after it."""

    def __init__(self, prompts: Sequence[int], prompt_of: Sequence[int], rest: Sequence[int], device: torch.device):
        """`rest`: tokens after the prompt, of each row."""
        ends = [*accumulate([*prompts, *rest], initial=0)]
        places = [range(*pair) for pair in zip(ends, ends[1:])]
        self.prompts, self.rest, self.device = places[: len(prompts)], places[len(prompts) :], device
        self.sequences: Sequences = [(range(0), own) for own in self.prompts]
        self.sequences += [(self.prompts[prompt], own) for prompt, own in zip(prompt_of, self.rest) if own]

    def positions(self) -> Tensor:
        """Return [T]: the position of each token in its row."""
        return torch.cat([torch.arange(len(before), len(before) + len(own)) for before, own in self.sequences])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return [1, T, H, D]. query [1, H, T, D]; key, value [1, K, T, D]."""
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        if query.is_cuda and query.dtype != torch.float32:
            queries, keys, longest, places = self._cumulated
            groups: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _ASKS else {}
            output = varlen_attn(query, key.index_select(0, places), value.index_select(0, places), queries, keys,
                                 *longest, scale=scale, window_size=(-1, 0), **groups)
            return cast(Tensor, output)[None]
        return torch.cat([_attend(block, query, key, value, scale) for block in self._blocks]).index_select(
            0, self._back)[None]

    @cached_property
    def _cumulated(self) -> tuple[Tensor, Tensor, tuple[int, int], Tensor]:
        own = [len(own) for _, own in self.sequences]
        seen = [len(before) + len(own) for before, own in self.sequences]
        cumulated = [on_device(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), self.device)
                     for sizes in (own, seen)]
        places = torch.cat([torch.arange(part.start, part.stop) for parts in self.sequences for part in parts])
        return cumulated[0], cumulated[1], (max(own), max(seen)), on_device(places, self.device)

    @cached_property
    def _cuts(self) -> list[Sequences]:
        return list(_cut(sorted(self.sequences, key=lambda each: (len(each[0]) + len(each[1]), len(each[1])))))

    @cached_property
    def _blocks(self) -> list[_Block]:
        return [_block(together, self.device) for together in self._cuts]

    @cached_property
    def _back(self) -> Tensor:
        """Return [T]: where each token is among the outputs of all blocks."""
        back, start = torch.empty(sum(len(own) for _, own in self.sequences), dtype=torch.int64), 0
        for together in self._cuts:
            width = max(len(own) for _, own in together)
            for index, (_, own) in enumerate(together):
                first = start + index * width
                back[own.start : own.stop] = torch.arange(first, first + len(own))
            start += len(together) * width
        return back.to(self.device)


def _cut(ordered: Sequences) -> Iterator[Sequences]:
    """Cut sequences, ordered by length, into blocks."""
    block, needed, widest = [], 0, 0
    for before, own in ordered:
        seen = len(before) + len(own)
        padded = (len(block) + 1) * max(widest, len(own)) * seen
        if block and (padded > _MANY or padded > max(_FEW, _WASTE * (needed + len(own) * seen))):
            yield block
            block, needed, widest = [], 0, 0
        block.append((before, own))
        needed, widest = needed + len(own) * seen, max(widest, len(own))
    yield block


def _block(together: Sequences, device: torch.device) -> _Block:
    queries = _padded([torch.arange(own.start, own.stop) for _, own in together]).to(device)
    keys = _padded([torch.tensor([*before, *own]) for before, own in together]).to(device)
    own, seen = (torch.tensor(sizes, device=device)[:, None, None] for sizes in (
        [len(own) for _, own in together], [len(before) + len(own) for before, own in together]))
    if queries.shape == keys.shape and bool((own == keys.shape[1]).all()):
        return _Block(queries, keys, None)
    columns = torch.arange(keys.shape[1], device=device)
    last = seen - own + torch.arange(queries.shape[1], device=device)[:, None]
    return _Block(queries, keys, ((columns <= last) & (columns < seen))[:, None])


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _attend(block: _Block, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return [N · Q, H, D]."""
    queries, keys, values = (part.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)
                             for part, places in ((query, block.queries), (key, block.keys), (value, block.keys)))
    if queries.is_cuda:  # with a mask only kernels that know no groups
        keys, values = (part.repeat_interleave(queries.shape[1] // keys.shape[1], 1) for part in (keys, values))
    output = scaled_dot_product_attention(queries, keys, values, attn_mask=block.mask, is_causal=block.mask is None,
                                          scale=scale, enable_gqa=queries.shape[1] != keys.shape[1])
    return output.transpose(1, 2).flatten(0, 1)
