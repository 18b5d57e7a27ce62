"""Context parallelism: the tokens of each row are divided between ranks, which gather keys and values from each other.

As in Llama 3 (Dubey et al. 2024, §3.3.2): keys and values are all-gathered before each attention; grouped queries make
them much smaller than the queries. Of 2·n pieces of the columns rank r has piece r and the r-th from behind, so that
all attend to as much. Prompts are not shared between responses here: each row is read whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from distflow.weights.reshard import all_gather, reduce_scatter

if TYPE_CHECKING:
    from workers.engines.policy import SharedPrompt



@dataclass(frozen=True)
class Context:
    """The ranks that have the columns of the same rows. Stands where a model expects its cache: what a layer adds to it
    comes back with the keys and values of all ranks."""

    group: dist.ProcessGroup

    def pieces(self, width: int) -> Tensor:
        """[n, w] the columns of each rank; the width is a multiple of 2·n."""
        parts = torch.arange(width).chunk(2 * self.group.size())
        return torch.stack([torch.cat(pair) for pair in zip(parts[: len(parts) // 2], parts[::-1])])

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """[B, K, w, D] of this rank's columns → [B, K, W, D] of all, in their order."""
        together = _Gathered.apply(torch.stack([keys, values]), self.group)  # [n, 2, B, K, w, D]
        columns = together.movedim(0, 3).flatten(3, 4)
        back = torch.argsort(self.pieces(columns.shape[3]).flatten()).to(columns.device)
        keys, values = columns.index_select(3, back)
        return keys, values

    def joined(self, mine: Tensor) -> Tensor:
        """[B, w] of this rank's columns → [B, W]. Its gradient is not summed: all ranks compute one loss alike."""
        columns = _Joined.apply(mine, self.group).movedim(0, 1).flatten(1)
        return columns[:, torch.argsort(self.pieces(columns.shape[1]).flatten()).to(columns.device)]


def has_windows(config: PretrainedConfig) -> bool:
    """Whether some layers attend to the last tokens only, of which the mask here knows nothing."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


class _Gathered(torch.autograd.Function):
    """[…] → [n, …]; each rank's gradients of a part are summed where the part is from."""

    @staticmethod
    def forward(ctx, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(mine, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.new_empty(gradient.shape[1:])
        reduce_scatter(summed.flatten(), gradient.contiguous().flatten(), group=ctx.group)
        return summed, None


class _Joined(_Gathered):
    """The same; the gradient of a part is what this rank has for it."""

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.group.rank()], None


def _gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    everyone = mine.new_empty(group.size(), *mine.shape)
    all_gather(everyone.flatten(), mine.contiguous().flatten(), group=group)
    return everyone


def read_rows(policy: SharedPrompt, prompts: Tensor, prompt_lengths: Tensor, prompt_of: Tensor, responses: Tensor,
              response_lengths: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """What `SharedPrompt.forward` returns, on every rank; each computes its columns, those of the head too."""
    context = policy.context
    tokens, begins = torch.cat([prompts[prompt_of], responses], 1), prompts.shape[1] - prompt_lengths[prompt_of]
    ends = prompts.shape[1] + response_lengths
    tokens = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % (2 * context.group.size())))
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    mine = context.pieces(tokens.shape[1])[context.group.rank()].to(tokens.device)
    there = (columns >= begins[:, None]) & (columns < ends[:, None])
    earlier, itself = columns <= mine[:, None], columns == mine[:, None]  # what is nowhere attends to itself
    mask = (earlier & there[:, None]) | itself
    last = prompts.shape[1] - 1
    wanted = (columns >= last) & (columns < ends[:, None] - 1 + policy.beyond)
    here = wanted[:, mine]
    states, _ = policy.run(tokens[:, mine], attention_mask=mask[:, None], past_key_values=context,
                           position_ids=(mine - begins[:, None]).clamp(min=0))
    following = torch.roll(tokens, -1, 1)[:, mine]
    numbers = policy.read(states[here], following[here], temperature)
    empty = torch.zeros(here.shape, device=here.device)
    return tuple(context.joined(empty.masked_scatter(here, part))[wanted] for part in numbers)
