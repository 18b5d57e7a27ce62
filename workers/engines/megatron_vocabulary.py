"""Log-probabilities and entropies over a vocabulary that is split between ranks: no rank ever sees all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_BYTES = 256 * 1024 * 1024
"""Of float32 logits that exist at a time; more tokens are computed in chunks, again in the backward pass."""


class _Score(torch.autograd.Function):
    """`logits` [N, V / tp] float32, `targets` [N] counted from the first of them → log-probabilities, entropies [N]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        top = logits.max(-1).values
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = logits - top[:, None]
        powers = shifted.exp()
        mine = (targets >= 0) & (targets < logits.shape[1])
        places = targets.clamp(0, logits.shape[1] - 1)
        target = shifted.gather(1, places[:, None])[:, 0] * mine
        weighted = (powers * shifted.clamp(min=torch.finfo(shifted.dtype).min)).sum(-1)
        sums = torch.stack([powers.sum(-1), target, weighted])
        dist.all_reduce(sums, group=group)
        logprobs = sums[1] - sums[0].log()
        entropies = sums[0].log() - sums[2] / sums[0]
        ctx.save_for_backward(powers / sums[0][:, None], places, mine)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        probabilities, places, mine = ctx.saved_tensors
        result = probabilities * -gradient[:, None]
        result[torch.arange(len(places), device=places.device), places] += gradient * mine
        return result, None, None


def score(model: GPTModel, hidden: Tensor, targets: Tensor, temperature: float, vocabulary: int,
          group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of `targets` [N] and entropies [N] (detached), from what the last layer says, [N, D].

    Args:
        vocabulary: how many tokens there are; what pads the weights beyond them counts for nothing.
    """
    width = model.output_layer.output_size_per_partition
    first = group.rank() * width
    real = max(0, min(width, vocabulary - first))
    shared = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None

    def some(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.output_layer(hidden, weight=shared)[0].float() / (temperature or 1.0)
        if real < width:
            logits = torch.cat([logits[:, :real], logits.new_full((len(logits), width - real), -torch.inf)], 1)
        return _Score.apply(logits, targets - first, group)

    rows = max(1, _CHUNK_BYTES // (4 * width))
    if len(targets) <= rows:
        return some(hidden, targets)
    pieces = [checkpoint(some, *chunk, use_reentrant=False) for chunk in zip(hidden.split(rows), targets.split(rows))]
    logprobs, entropies = zip(*pieces)
    return torch.cat(logprobs), torch.cat(entropies)
